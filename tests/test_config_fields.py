"""Every field of a config class that moves transformers' logits is read, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytest.importorskip("torch", reason="the oracle is transformers on torch")

from jaxpage.models.config.fields import Fields
from tests.support.checkpoint_cases import KEPT, Config, class_fields, random_value
from tests.support.config_defaults import read
from tests.support.hf_models import (
    MODELS,
    config_json,
    make_model,
    stated_time_steps,
    torch,
)
from tests.support.model_configs import no_special_tokens
from tests.support.model_forms import FORMS
from tests.support.sweeps import few

MOVED = 1e-5
IDS = torch.arange(2, 42)[None] * 7 % 61
ROPE = {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0}
CASES = [name for name in MODELS if "text_config" not in config_json(name)]
# A form of every third family whose entries are made from the registry: a case has no other code
# than its neighbours, and `-k` and the sweep run all of them.
FIRST = [f"{module.replace('_', '-')}-{next(iter(forms))}" for module, forms in FORMS.items()][::3]


def other_values(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields every field of the class that is no size, with a value that it does not have."""
    rng = random.Random(1)
    for field, default in class_fields(config["model_type"]).items():
        stated = config.get(field, default)
        drawn = (random_value(rng, field, stated, config) for _ in range(20))
        value = (
            ROPE if field == "rope_parameters" else next((v for v in drawn if v != stated), None)
        )
        if field not in KEPT and value is not None:
            yield field, value


@torch.no_grad()
def logits_with(config: Config, state: dict[str, Any]) -> torch.Tensor | None:
    """Returns the logits with these weights; None where the class refuses, or needs others."""
    fields = {name: value for name, value in config.items() if name not in KEPT[:2]}
    model_class = getattr(transformers, config["architectures"][0])
    try:
        model = stated_time_steps(model_class(model_class.config_class(**fields)).eval())
        model.load_state_dict(state)
        return model(IDS % config["vocab_size"]).logits[0]
    except Exception:
        return None


def find_idle(name: str) -> tuple[list[str], list[str]]:
    """Returns the fields that move logits, and those of them that change nothing here."""
    state = make_model(name).state_dict()
    expected = logits_with(config_json(name), state)
    assert expected is not None
    spec = read(config_json(name))
    moving, idle = [], []
    for field, value in other_values(config_json(name)):
        logits = logits_with({**config_json(name), field: value}, state)
        if logits is not None and float((logits - expected).abs().max()) > MOVED:
            moving.append(field)
            if read({**config_json(name), field: value}) == spec:
                idle.append(f"{field} = {value!r}")
    return moving, idle


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs all cases that `-k` selects, which the recipe for a family asks for."""
    if "name" in metafunc.fixturenames:
        always = CASES if metafunc.config.getoption("keyword") else FIRST
        metafunc.parametrize("name", few(CASES, always))


def test_a_field_that_moves_logits_is_read_or_refused(name):
    moving, idle = find_idle(name)
    assert moving and idle == []


def test_a_field_that_is_passed_over_is_found(monkeypatch):
    monkeypatch.setattr(Fields, "activation", lambda *_: "silu")
    assert [each.split()[0] for each in find_idle("seed-oss-grouped")[1]] == ["hidden_act"]


@pytest.mark.parametrize(
    "case", ["apertus-plain", "gpt-oss-windows", "ministral3-growth", "mistral4-plain"]
)
def test_a_rotation_without_parameters_is_the_one_of_transformers(case):
    """The classes have a scaled rotation in the place of null, and not of an empty object."""
    config = {name: x for name, x in config_json(case).items() if not name.startswith("rope")}
    config_class = getattr(transformers, config["architectures"][0]).config_class
    for stated in ({}, {"rope_parameters": None}, {"rope_scaling": {}}, {"rope_parameters": {}}):
        spec = read({**config, **stated})
        expected = config_class(
            **config, **stated
        ).rope_parameters  # it fills in the object it gets
        assert spec == read({**config, "rope_parameters": expected})


@pytest.mark.parametrize("keyword", ["", "seed_oss"])
def test_the_name_of_a_family_selects_its_cases(keyword, request):
    """Underscores of a module's name are dashes in those of cases; conftest.py takes both."""
    drawn: list[Any] = []
    metafunc: Any = SimpleNamespace(
        fixturenames=["name"],
        config=SimpleNamespace(getoption=lambda _: keyword),
        parametrize=lambda _, cases: drawn.extend(cases),
    )
    pytest_generate_tests(metafunc)
    always = [case for case in drawn if isinstance(case, str)]
    assert always == (CASES if keyword else [case for case in CASES if case in FIRST])
    assert request.node.name.replace("-", "_") in request.node.listextrakeywords()


def test_special_tokens_are_null_where_the_class_takes_null():
    """CWM's class takes no null for the first token."""
    for model_type in ("cwm", "modernbert-decoder", "llama"):
        tokens = no_special_tokens(model_type)
        CONFIG_MAPPING[model_type](**tokens, vocab_size=131)  # It raises where one is not allowed.
        assert tokens["eos_token_id"] is None
    assert no_special_tokens("cwm")["bos_token_id"] == 0
    assert set(no_special_tokens("llama").values()) == {None}
