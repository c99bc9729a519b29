"""Fields that config.json leaves out: each family's defaults are those of its config class in transformers."""

from __future__ import annotations

import copy
import datetime
import random
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxpage.errors import JaxpageError
from jaxpage.models.registry import FAMILIES, load_family
from tests.support.model_configs import MODELS, config_json

Config = dict[str, Any]
KEPT = ("architectures", "model_type")
CONFIGS = {name: config for name in MODELS if "text_config" not in (config := config_json(name))}


def completed(config: Mapping[str, Any]) -> Config | None:
    """The config with every default of its class in transformers written out; None: the class refuses it."""
    # The class changes the objects that it is given.
    given = copy.deepcopy({name: value for name, value in config.items() if name not in KEPT})
    try:
        whole = CONFIG_MAPPING[config["model_type"]](**given).to_dict()
    except Exception:  # of what is left out other fields may make no sense
        return None
    if "num_nextn_predict_layers" not in config:
        whole.pop(
            "num_nextn_predict_layers", None
        )  # it counts draft layers in the files, and without it there are none
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
    """What jaxpage makes of the config and of the completed one, where it is not the same; what it says is missing is put back."""
    whole = completed(config)
    if whole is None:
        return None
    found, wanted = read(config), read(whole)
    while isinstance(found, str) and found.endswith(" is missing"):
        name = found.split()[1]
        config = {**config, name: whole[name]}
        found = read(config)
    # Two statements of one thing that differ are refused here on purpose.
    is_refused = isinstance(found, str) and (
        isinstance(wanted, str) or "contradict each other" in found
    )
    return None if is_refused or found == wanted else f"{config}\n{found}\n{wanted}"


def test_all_families_are_tried() -> None:
    assert {config["architectures"][0] for config in CONFIGS.values()} >= {
        name for name in FAMILIES if not name.endswith("ForConditionalGeneration")
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_that_is_left_out_is_the_default_of_transformers(name: str) -> None:
    """Each field alone, and all of them."""
    config = CONFIGS[name]
    fields = [field for field in config if field not in KEPT]
    tried = [{other: config[other] for other in config if other != field} for field in fields]
    tried.append({field: config[field] for field in KEPT})
    tried += [
        {**each, "max_position_embeddings": 131_072} for each in tried if "n_positions" not in each
    ]
    assert [text for text in map(difference, tried) if text] == []


def test_a_field_goes_by_the_other_name_that_its_class_has_for_it() -> None:
    differences = []
    for name, config in CONFIGS.items():
        config = {"num_nextn_predict_layers": 1, **config}
        for other, field in CONFIG_MAPPING[config["model_type"]].attribute_map.items():
            if field in config:
                renamed = {other if key == field else key: config[key] for key in config}
                if read(renamed) != read(config):
                    differences.append(f"{name}: {other} for {field}: {read(renamed)}")
    assert differences == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Fields as some files have them, and the same as most files do.
ALIKE: dict[str, tuple[str, Config, Config]] = {
    "two that agree": (
        "llama-grouped",
        {
            "rope_scaling": {"type": "linear", "factor": 2.5},
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0},
        },
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    "a length that is no integer": (
        "llama-grouped",
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 32.0}},
        {"rope_scaling": YARN},
    ),
    "a length by layer type": (
        "olmo3-windows",
        {"rope_parameters": {"full_attention": {**YARN, "original_max_position_embeddings": 32.0}}},
        {"rope_parameters": {"full_attention": YARN}},
    ),
    "scales that are zero": (
        "llama-grouped",
        {"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0, "beta_fast": 0}},
        {"rope_scaling": YARN},
    ),
    "a flag that is null": ("llama-tied-bias", {"attention_bias": None}, {"attention_bias": False}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_transformers_takes_is_taken(case: str) -> None:
    name, given, plain = ALIKE[case]
    found, wanted = read({**CONFIGS[name], **given}), read({**CONFIGS[name], **plain})
    assert found == wanted and not isinstance(found, str), found
    assert case == "a flag that is null" or completed({**CONFIGS[name], **given}) is not None


@pytest.mark.sweep
def test_random_fields_that_are_left_out_are_the_defaults_of_transformers() -> None:
    """Fields of several configs of a family, some of them left out, also of the rotary embedding's own."""
    seed = datetime.datetime.now(datetime.UTC).toordinal()
    print(f"seed {seed}")
    draw = random.Random(seed)
    differences = []
    for _ in range(6_000):
        first = draw.choice([*CONFIGS.values()])
        alike = [
            config
            for config in CONFIGS.values()
            if config["architectures"] == first["architectures"]
        ]
        mixed = {
            **first,
            **{name: value for name, value in draw.choice(alike).items() if draw.random() < 0.2},
        }
        share = draw.choice([0.2, 0.5, 0.9])
        config = {
            name: value for name, value in mixed.items() if name in KEPT or draw.random() < share
        }
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(config.get(name), dict) and draw.random() < 0.5:
                config[name] = {
                    key: value for key, value in config[name].items() if draw.random() < 0.7
                }
        if "n_positions" not in mixed and draw.random() < 0.5:
            config["max_position_embeddings"] = draw.choice([64, 2048, 131_072])
        differences += [text for text in [difference(config)] if text]
    assert differences == []
