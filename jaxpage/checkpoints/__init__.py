"""Checks all of a checkpoint from headers alone, loads it, and converts it.

Nothing here unpickles, runs code that comes with a model, or touches a device before all of the
checkpoint fits. The inner rooms are `finding` (the directory of a model), `tokenizers` (which takes
seconds to import: a model is read without it), `gguf`, `quantization` (formats of quantised
weights), `in_memory` (models that are no files) and `drafters` (what comes next to a model).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.checkpoints.config_file import (
        read_config,  # reads config.json
        read_dtype,  # gives the dtype that config.json says the weights have
        read_generation_config,  # reads generation_config.json
    )
    from jaxpage.checkpoints.conversion import convert  # writes a model in the other layout
    from jaxpage.checkpoints.embedding_files import (
        EmbeddingFiles,  # says how a model embeds texts
        read_embedding_files,  # reads it
    )
    from jaxpage.checkpoints.fitting import (
        LoadPlan,  # says which tensors of a checkpoint fill which parameters
    )
    from jaxpage.checkpoints.loading import (
        aliased_bytes,  # counts what needs no memory of its own
        insert,  # puts a value into a nested dict of weights
        load_shards,  # loads the weights of a model that is divided among devices
        load_weights,  # loads all weights
    )
    from jaxpage.checkpoints.lora_files import (
        Adapter,  # holds the matrices of a LoRA adapter
        adapter_version,  # changes when the files of an adapter are written again
        read_adapter,  # reads a LoRA adapter
    )
    from jaxpage.checkpoints.opening import (
        ModelDescription,  # holds what config.json says
        ModelFiles,  # holds a checkpoint that fits
        describe_model,  # reads what config.json says
        open_model,  # reads all of a local model but its weights
        with_weights_of,  # gives the same model with the weights of another directory
    )
    from jaxpage.checkpoints.problems import (
        list_names,  # makes a list of names from a file safe to print
    )

__getattr__, __dir__ = open_door(__name__)

# At import transformers says that models need PyTorch. Here it only reads tokenizers, which do not.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in str(record.msg)
)
