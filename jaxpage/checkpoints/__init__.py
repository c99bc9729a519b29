"""Finds a model, checks all of its checkpoint from headers alone, loads it, and converts it.

Nothing here unpickles, runs code that comes with a model, or touches a device before all of the
checkpoint fits.
"""

import logging

from jaxpage.checkpoints.config_file import (
    eos_token_ids,
    read_config,
    read_generation_config,
    stated_dtype,
)
from jaxpage.checkpoints.conversion import convert
from jaxpage.checkpoints.fitting import LoadPlan, check_weights
from jaxpage.checkpoints.in_memory import (
    ModelConfig,
    Parameters,
    check_all_finite,
    named_parameters,
    open_parameters,
    with_parameters,
)
from jaxpage.checkpoints.loading import load_sharded, load_shards, load_weights
from jaxpage.checkpoints.opening import (
    ModelDescription,
    ModelFiles,
    describe_model,
    open_model,
    weights_bytes,
    with_weights_of,
)
from jaxpage.checkpoints.resolve import (
    local_model,
    resolve_model,
    resolve_model_config,
    resolve_tokenizer,
)

__all__ = [
    "LoadPlan",
    "ModelConfig",
    "ModelDescription",
    "ModelFiles",
    "Parameters",
    "check_all_finite",
    "check_weights",
    "convert",
    "describe_model",
    "eos_token_ids",
    "load_sharded",
    "load_shards",
    "load_weights",
    "local_model",
    "named_parameters",
    "open_model",
    "open_parameters",
    "read_config",
    "read_generation_config",
    "resolve_model",
    "resolve_model_config",
    "resolve_tokenizer",
    "stated_dtype",
    "weights_bytes",
    "with_parameters",
    "with_weights_of",
]

# At import transformers says that models need PyTorch. Here it only reads tokenizers, which do not.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in str(record.msg)
)
