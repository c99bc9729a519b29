"""Lists parameters of modules with their tensors in a checkpoint, and replaces modules by path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.models.parameters.lora_layers import (
        LoRASpec,  # describes LoRA adapters
        LoRATarget,  # is a layer that takes them
        adapter_weights,  # lists the weights of adapter slots
        lora_targets,  # finds the layers that take adapters
    )
    from jaxpage.models.parameters.replacing import (
        Path,  # is the place of a module or parameter in a model
        Rule,  # gives the modules that replace those of a family
        replace_modules,  # replaces them
    )
    from jaxpage.models.parameters.weights import (
        FLOATS,  # names the types that a model's weights may have
        Weight,  # is a parameter with its tensors in a checkpoint
        num_bytes,  # counts the bytes of weights
        weights_of,  # lists the weights of a module
    )

__getattr__, __dir__ = open_door(__name__)
