"""Finds the directory or file of a model: on this machine, in the package, or on the hub."""

from jaxpage.checkpoints.finding.fetched import (
    FETCHABLE,  # describes the models that `jaxpage fetch` brings, by name
    Fetchable,  # describes one of them
    path_of_fetched,  # says where such a model is put
)
from jaxpage.checkpoints.finding.resolve import (
    HUB_FILES,  # names the files that are fetched from the hub
    is_own_name,  # says whether a model is packaged or can be fetched
    local_model,  # looks for a model on this machine only
    resolve_model,  # gives the directory or GGUF file of a model
    resolve_model_config,  # gives a directory of which only config.json is wanted
    resolve_tokenizer,  # gives a directory of which only the tokenizer is wanted
)
