"""Tensors that carry nothing for a text: those that the classes of transformers ignore, ours do."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
import transformers

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from jaxpage.models import find_ignored_tensors, load_family  # noqa: E402
from tests.support.family_names import FAMILY_OF  # noqa: E402
from tests.support.hf_models import MODELS, config_json, without_timm  # noqa: E402

FIRST_OF = {config_json(name)["architectures"][0]: name for name in reversed(MODELS)}
# These classes say what they ignore when a model is made: it follows from their layers.
BY_LAYERS = ("Gemma3n", "Gemma4")
# The ends of buffers' names; any other name that is ignored is a module's.
BUFFERS = ("bias", "causal_mask", "inv_freq")


def patterns_of(architecture: str) -> set[str]:
    """Returns the expressions of a class of transformers, with those of the model inside it."""
    model_class = getattr(transformers, architecture)
    patterns = set(model_class._keys_to_ignore_on_load_unexpected or ())
    if architecture.startswith(BY_LAYERS):
        config = config_json(FIRST_OF[architecture])
        fields = {name: config[name] for name in config.keys() - {"architectures", "model_type"}}
        with without_timm(), torch.device("meta"):
            model = model_class(model_class.config_class(**fields))
        for module in model.modules():
            patterns.update(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    return patterns


def names_of(pattern: str) -> list[str]:
    """Returns names that files may have and that an expression finds anywhere in them."""
    text = pattern.lstrip("^").replace("\\.", ".").removesuffix(".*").removesuffix(".")
    if pattern == "mtp":
        names = ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.bias"]
    elif text.endswith(BUFFERS):
        names = [f"model.layers.0.self_attn.rotary_emb.{text}", f"transformer.h.0.{text}"]
        names = names[:1] if text == "inv_freq" else names[1:]
    else:
        starts = ("",) if pattern.startswith(("^", "model")) else ("", "model.")
        names = [
            f"{start}{text}{end}" for start in starts for end in (".weight", ".up_proj.weight")
        ]
        names = names if pattern.endswith(("*", ".")) else names[::2]
    assert all(re.search(pattern, name) for name in names)
    return names


def find_missing(architecture: str, names: list[str]) -> list[str]:
    """Returns the names that jaxpage does not ignore."""
    config = config_json(FIRST_OF[architecture])
    family = load_family(config)
    globs = find_ignored_tensors(family, family.Spec.from_config(config))
    return [name for name in names if not any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


CLASSES: dict[str, Any] = {
    architecture: patterns for architecture in FAMILY_OF if (patterns := patterns_of(architecture))
}


def test_what_classes_of_transformers_ignore_is_ignored():
    assert len(CLASSES) >= 22
    expected = {
        architecture: unknown
        for architecture, patterns in CLASSES.items()
        if (
            unknown := find_missing(
                architecture, [name for pattern in patterns for name in names_of(pattern)]
            )
        )
    }
    assert expected == {}


def test_a_tensor_that_no_class_ignores_is_expected():
    for architecture in CLASSES:
        stray = ["model.layers.0.stray.weight", "mtq.weight", "lm_head.weight"]
        assert find_missing(architecture, stray) == stray
