"""Opens models and adapters whose weights are arrays in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.checkpoints.in_memory.adapters import (
        LoRAWeights,  # holds a LoRA adapter that is trained
        layers_of_weights,  # gives its matrices as an engine has them in a slot
        make_adapter_from,  # makes an adapter for an engine of arrays in memory
        read_lora_weights,  # reads such an adapter from its files
    )
    from jaxpage.checkpoints.in_memory.parameters import (
        ModelConfig,  # says what a caller may give as config.json
        Parameters,  # says what a caller may give as weights
        check_all_finite,  # refuses weights that are no numbers
        check_finite_parts,  # does so where a weight is in several parts
        name_parameters,  # gives the arrays of a loaded model by their names in its checkpoint
        open_parameters,  # opens a model whose weights are arrays in memory
        with_parameters,  # gives the same model with other weights
    )

__getattr__, __dir__ = open_door(__name__)
