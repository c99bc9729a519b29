"""Fields that config.json leaves out, read with the defaults of transformers' config classes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxpage.errors import JaxpageError
from jaxpage.models.multimodal import leaves_tying_open
from jaxpage.models.registry import load_family

Config = dict[str, Any]
KEPT = ("architectures", "model_type")


def completed(config: Mapping[str, Any]) -> Config | None:
    """Returns the config with all defaults of transformers' class; None if that refuses it."""
    # The class changes the objects that it is given.
    values = copy.deepcopy({name: value for name, value in config.items() if name not in KEPT})
    try:
        whole = CONFIG_MAPPING[config["model_type"]](**values).to_dict()
    except Exception:  # of what is left out other fields may make no sense
        return None
    # This counts draft layers in the files, and without it there are none.
    if not config.keys() & {"num_nextn_predict_layers", "num_mtp_layers"}:
        whole.pop("num_nextn_predict_layers", None)
    return {**whole, **{name: config[name] for name in KEPT}}


def read(config: Config) -> Any:
    """Returns the spec, or the text of what is wrong first."""
    try:
        return load_family(config).Spec.from_config(config)
    except JaxpageError as error:
        return str(error)
    except ExceptionGroup as group:
        return str(group.exceptions[0])


def difference(config: Config) -> str | None:
    """Returns what jaxpage makes of a config and of the completed one, or None if it is the same.

    A field that jaxpage says is missing is put back.
    """
    whole = completed(config)
    if whole is None:
        return None
    if leaves_tying_open(config):  # The files decide, of which there are none here.
        tied = whole["tie_word_embeddings"]
        config = {**config, "tie_word_embeddings": tied}
    values, expected = read(config), read(whole)
    while isinstance(values, str) and values.endswith(" is missing"):
        name = values.split()[1]
        if isinstance(text := config.get("text_config"), dict):
            config = {**config, "text_config": {**text, name: whole["text_config"][name]}}
        else:
            attribute = CONFIG_MAPPING[config["model_type"]].attribute_map.get(name, name)
            config = {**config, attribute: whole[attribute]}
        values = read(config)
    # Two statements of one thing that differ are refused here on purpose. So are a field that the
    # class drops, because whoever wrote it expects something of it, and a width of heads that the
    # class rounds down.
    is_refused = isinstance(values, str) and (
        isinstance(expected, str)
        or "contradict each other" in values
        or " does not divide " in values
        or any(name in values and whole.get(name) != value for name, value in config.items())
    )
    return None if is_refused or values == expected else f"{config}\n{_separate(values, expected)}"


def _separate(actual: Any, expected: Any) -> str:
    """Returns what is read of a config and of the completed one: of specs what differs."""
    if type(actual) is not type(expected) or isinstance(actual, str):
        return f"{actual}\nwith all defaults: {expected}"
    pairs = [(name, value, getattr(expected, name)) for name, value in vars(actual).items()]
    return "\n".join(
        f"{name}: {ours}\nwith all defaults: {other}"
        for name, ours, other in pairs
        if ours != other
    )
