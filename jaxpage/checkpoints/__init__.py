"""Finds a model, checks all of its checkpoint from headers alone, loads it, and converts it.

Nothing here unpickles, runs code that comes with a model, or touches a device before all of the
checkpoint fits. Other rooms take, to find a model:

    resolve_model           gives the directory or GGUF file of a model
    resolve_model_config    gives the directory of a model of which only config.json is wanted
    resolve_tokenizer       gives the directory of a model of which only the tokenizer is wanted
    local_model             looks for a model on this machine only
    HUB_FILES               names the files that are fetched from the hub
    is_own_name             says whether a model is packaged or can be fetched
    FETCHABLE, Fetchable    describe the models that `jaxpage fetch` brings
    path_of_fetched         says where such a model is put
    is_gguf                 says whether a path is a GGUF file

To read and load it:

    describe_model          reads what config.json says
    ModelDescription        holds it
    open_model              reads all of a local model but its weights
    ModelFiles              holds a checkpoint that fits
    with_weights_of         gives the same model with the weights of another directory
    LoadPlan                says which tensors of a checkpoint fill which parameters
    load_weights            loads all weights
    load_shards             loads the weights of a model that is divided among devices
    insert                  puts a value into a nested dict of weights
    check_all_finite        refuses weights that are no numbers
    read_embedding_files    reads how a model embeds texts
    EmbeddingFiles          says it
    read_config             reads config.json
    read_generation_config  reads generation_config.json
    read_dtype              gives the dtype that config.json says the weights have
    load_tokenizer          loads the tokenizer of a directory or GGUF file
    tokenizer_of            loads the tokenizer of a configuration's model
    ends_of_text            gives the ids that end a text
    list_names              makes a list of names from a file safe to print
    convert                 writes a model in the other layout

For models that are no files, and for what comes next to a model:

    ModelConfig, Parameters  say what a caller may give
    open_parameters         opens a model whose weights are arrays in memory
    with_parameters         gives the same model with other weights
    name_parameters         gives the arrays of a loaded model by their names in its checkpoint
    read_adapter            reads a LoRA adapter
    Adapter                 holds its matrices
    adapter_version         changes when the files of an adapter are written again
    AdapterVersion          is the type of it
    open_medusa             opens Medusa's heads
    MedusaFiles             holds them
    load_medusa             loads them
    MEDUSA_FILES            names their files
    open_mtp                opens the MTP head inside a checkpoint
    load_mtp                loads it
    open_eagle              opens an EAGLE head
    EagleMethod             is the kind of head
    load_eagle              loads it
    EAGLE_FILES             names its files
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from jaxpage.checkpoints.config_file import read_config, read_dtype, read_generation_config
from jaxpage.checkpoints.conversion import convert
from jaxpage.checkpoints.eagle_files import EAGLE_FILES, EagleMethod, load_eagle, open_eagle
from jaxpage.checkpoints.embedding_files import EmbeddingFiles, read_embedding_files
from jaxpage.checkpoints.fetched import FETCHABLE, Fetchable, path_of_fetched
from jaxpage.checkpoints.fitting import LoadPlan
from jaxpage.checkpoints.gguf_header import is_gguf
from jaxpage.checkpoints.in_memory import (
    ModelConfig,
    Parameters,
    check_all_finite,
    name_parameters,
    open_parameters,
    with_parameters,
)
from jaxpage.checkpoints.loading import insert, load_shards, load_weights
from jaxpage.checkpoints.lora_files import Adapter, AdapterVersion, adapter_version, read_adapter
from jaxpage.checkpoints.medusa_files import MEDUSA_FILES, MedusaFiles, load_medusa, open_medusa
from jaxpage.checkpoints.mtp_files import load_mtp, open_mtp
from jaxpage.checkpoints.opening import (
    ModelDescription,
    ModelFiles,
    describe_model,
    open_model,
    with_weights_of,
)
from jaxpage.checkpoints.problems import list_names
from jaxpage.checkpoints.resolve import (
    HUB_FILES,
    is_own_name,
    local_model,
    resolve_model,
    resolve_model_config,
    resolve_tokenizer,
)

if TYPE_CHECKING:
    from jaxpage.checkpoints.tokenizer_files import ends_of_text, load_tokenizer, tokenizer_of

__all__ = [
    "EAGLE_FILES",
    "FETCHABLE",
    "HUB_FILES",
    "MEDUSA_FILES",
    "Adapter",
    "AdapterVersion",
    "EagleMethod",
    "EmbeddingFiles",
    "Fetchable",
    "LoadPlan",
    "MedusaFiles",
    "ModelConfig",
    "ModelDescription",
    "ModelFiles",
    "Parameters",
    "adapter_version",
    "check_all_finite",
    "convert",
    "describe_model",
    "ends_of_text",
    "insert",
    "is_gguf",
    "is_own_name",
    "list_names",
    "load_eagle",
    "load_medusa",
    "load_mtp",
    "load_shards",
    "load_tokenizer",
    "load_weights",
    "local_model",
    "name_parameters",
    "open_eagle",
    "open_medusa",
    "open_model",
    "open_mtp",
    "open_parameters",
    "path_of_fetched",
    "read_adapter",
    "read_config",
    "read_dtype",
    "read_embedding_files",
    "read_generation_config",
    "resolve_model",
    "resolve_model_config",
    "resolve_tokenizer",
    "tokenizer_of",
    "with_parameters",
    "with_weights_of",
]

# At import transformers says that models need PyTorch. Here it only reads tokenizers, which do not.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in str(record.msg)
)

# These names are loaded at first use: transformers takes seconds to import, and a model is read and
# converted without it.
_HOMES = dict.fromkeys(
    ("ends_of_text", "load_tokenizer", "tokenizer_of"), "jaxpage.checkpoints.tokenizer_files"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpage.checkpoints' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
