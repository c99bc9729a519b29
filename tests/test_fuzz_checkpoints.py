"""The fuzzer of checkpoints: what is right passes, and mistakes that are planted are found and shrunk."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from jaxpage.models.config.fields import REQUIRED, Fields
from tests.support.checkpoint_cases import Case, bases, class_fields, random_cases
from tests.support.model_configs import MODELS, config_json

pytest.importorskip("torch", reason="the oracle is transformers on torch")

from tests.support.checkpoint_fuzzing import failure, fuzz

CASE = Case("llama-tied-bias", {"rms_norm_eps": 1e-3}, ("head_dim",), ("shards", "auto_map"))


def test_equal_checkpoints_pass_and_another_activation_is_found(tmp_path, monkeypatch):
    assert failure(CASE, tmp_path) == ""
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    monkeypatch.setattr(Fields, "activation", lambda *_: "gelu")
    assert "logits differ by" in failure(CASE, tmp_path)


def test_a_default_that_is_read_wrongly_is_found_and_shrunk(monkeypatch):
    integer = Fields.integer

    def wrong(self: Fields, name: str, default: Any = REQUIRED, **more: Any) -> int:
        return integer(self, name, 64 if name == "head_dim" else default, **more)

    monkeypatch.setattr(Fields, "integer", wrong)
    told: list[str] = []
    assert fuzz(1, 1, family="qwen3", report=told.append) == 1
    assert "changed={}, dropped=('head_dim',), files=()" in told[-1]


def test_a_case_of_each_architecture_is_drawn():
    """Of some models the class names no text model (`mistral3`): its text may be of several families."""
    cases = [*itertools.islice(random_cases(random.Random(2), None), len(bases(None)))]
    assert {case.config["architectures"][0] for case in cases} == bases(None).keys()
    for name in MODELS:
        assert len(class_fields(config_json(name)["model_type"])) > 12


@pytest.mark.parametrize("name", ["mistral3-latents", "exaone4-5-images"])
def test_a_head_that_config_leaves_open_is_tied_as_the_files_say(name, tmp_path):
    assert failure(Case(name, {}, ("tie_word_embeddings",)), tmp_path) == ""


def test_every_field_but_the_sizes_is_left_out_now_and_then():
    cases = [*itertools.islice(random_cases(random.Random(1), "llama"), 300)]
    dropped = {name for case in cases for name in case.dropped}
    assert dropped >= {"num_key_value_heads", "rope_scaling", "tie_word_embeddings"}
    assert any(case.files and case.changed for case in cases)
