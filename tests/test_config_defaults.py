"""Fields that config.json leaves out: each family's defaults are those of its config class in
transformers.
"""

from __future__ import annotations

import datetime
import itertools
import random

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.checkpoint_cases import random_cases
from tests.support.config_defaults import KEPT, Config, completed, difference, read
from tests.support.family_names import FAMILY_OF
from tests.support.model_configs import MODELS, config_json
from tests.support.sweeps import few

CONFIGS = {name: config for name in MODELS if "text_config" not in (config := config_json(name))}


def test_all_families_are_tried():
    assert {config["architectures"][0] for config in CONFIGS.values()} >= {
        name for name in FAMILY_OF if not name.endswith("ForConditionalGeneration")
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tries all families that `-k` selects, which the recipe for one asks for."""
    if "name" in metafunc.fixturenames:
        always = list(CONFIGS)
        if not metafunc.config.getoption("keyword"):
            always = always[::3]  # the code is the same for all of them
        metafunc.parametrize("name", few(CONFIGS, always))


def test_a_field_that_is_left_out_is_the_default_of_transformers(name):
    """Each field is left out alone, and all of them together."""
    config = CONFIGS[name]
    fields = [field for field in config if field not in KEPT]
    tried = [{other: config[other] for other in config if other != field} for field in fields]
    tried.append({field: config[field] for field in KEPT})
    tried += [
        {**each, "max_position_embeddings": 131_072} for each in tried if "n_positions" not in each
    ]
    assert [text for text in map(difference, tried) if text] == []


def test_a_field_goes_by_the_other_name_that_its_class_has_for_it():
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
    "a share in the dict and another at the top": (
        "phi3-partial",
        {
            "partial_rotary_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
        {"partial_rotary_factor": 0.5},
    ),
    "a share that the family passes over": (
        "gpt-neox-parallel",
        {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
        {"rotary_pct": 0.5},
    ),
    "a length at the top and another in the dict, which is the family's": (
        "phimoe-longrope",
        {"original_max_position_embeddings": 32},
        {},
    ),
    "a flag that is null": ("llama-tied-bias", {"attention_bias": None}, {"attention_bias": False}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_transformers_takes_is_taken(case):
    name, stated, plain = ALIKE[case]
    spec, expected = read({**CONFIGS[name], **stated}), read({**CONFIGS[name], **plain})
    assert spec == expected and not isinstance(spec, str), spec
    assert case == "a flag that is null" or completed({**CONFIGS[name], **stated}) is not None


@pytest.mark.sweep
def test_random_fields_that_are_left_out_are_the_defaults_of_transformers():
    seed = datetime.datetime.now(datetime.UTC).toordinal()
    print(f"seed {seed}")
    cases = itertools.islice(random_cases(random.Random(seed), None), 6_000)
    differences = [(case, text) for case in cases if (text := difference(case.config))]
    assert differences == []
