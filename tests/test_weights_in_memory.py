"""Weights that come from memory and go back there: the same texts as from files, other texts after an update, and nothing in between."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.errors import CheckpointError, UnsupportedError
from tests.support.engines import BLOCKS_OF_16, LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors

SETTINGS: dict[str, Any] = {**BLOCKS_OF_16, "preemption_mode": "recompute"}
PROMPTS = [[1, 2, 3, 4] * 12, [7, 8, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def texts(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The texts of two sets of weights."""
    found = []
    for seed in (0, 1):
        with make_llm(random_checkpoint(tmp_path_factory.mktemp("m") / "m", LLAMA, seed=seed)) as llm:
            found.append(texts(llm))
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM.from_parameters(LLAMA, random_tensors(LLAMA), **SETTINGS) as made:
        yield made


def nested(tensors: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *parents, last = name.split(".")
        place = tree
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return tree


def test_weights_go_in_and_come_back_and_are_replaced(llm: LLM, from_files: list[list[Any]]) -> None:
    assert texts(llm) == from_files[0]
    back = llm.parameters()
    for name, array in random_tensors(LLAMA).items():
        np.testing.assert_array_equal(np.asarray(back.pop(name)), array)
    assert not back
    other = nested({name: jnp.asarray(array) for name, array in random_tensors(LLAMA, seed=1).items()})
    compiled = llm.stats()["compile_total"]
    version = llm.update_parameters(other)
    assert texts(llm) == from_files[1], "neither the old weights nor what was cached of them"
    assert llm.generate([[1]], GREEDY, use_tqdm=False)[0].weights_version == version
    assert llm.update_parameters(random_tensors(LLAMA)) == version + 1 and texts(llm) == from_files[0]
    assert llm.stats()["compile_total"] == compiled


def test_requests_that_run_are_finished_with_the_old_weights(llm: LLM, from_files: list[list[Any]]) -> None:
    llm.update_parameters(random_tensors(LLAMA))
    found: list[Any] = []
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    thread = threading.Thread(target=lambda: found.append(llm.update_parameters(random_tensors(LLAMA, seed=1))))
    thread.start()
    token_ids = list(first.outputs[0].token_ids)
    for chunk in stream:
        token_ids += chunk.outputs[0].token_ids
        assert chunk.weights_version == first.weights_version
    thread.join(60)
    assert token_ids == from_files[0][0][0] and found == [first.weights_version + 1]
    assert texts(llm) == from_files[1]


def test_what_does_not_fit_leaves_the_old_weights_in_use(llm: LLM, from_files: list[list[Any]]) -> None:
    version = llm.update_parameters(random_tensors(LLAMA))
    wrong = random_tensors(LLAMA, seed=1)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:5]
    wrong["model.layers.0.mlp.up_proj.weight"] = wrong["model.layers.0.mlp.up_proj.weight"].astype(np.float64)
    wrong["extra"] = np.zeros(3, np.float32)
    del wrong["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        llm.update_parameters(wrong)
    for text in ("'model.norm.weight' has shape (5,)", "has dtype float64", "'extra' of shape (3,) is unexpected"):
        assert text in str(caught.value)
    assert "tensor 'lm_head.weight' of shape (257, 64) is missing" in str(caught.value)
    infinite = random_tensors(LLAMA, seed=1)
    infinite["model.norm.weight"][3] = np.inf
    with pytest.raises(CheckpointError, match="'model.norm.weight' has numbers that are not finite"):
        llm.update_parameters(infinite, check_finite=True)
    assert texts(llm) == from_files[0] and llm.update_parameters(random_tensors(LLAMA)) == version + 1


def test_a_pinned_prefix_and_a_log_and_quantised_weights_are_refused(llm: LLM, tmp_path: Path) -> None:
    pinned = llm.pin_prefix([5] * 20)
    with pytest.raises(RuntimeError, match="1 prefixes of the old ones are pinned"):
        llm.update_parameters(random_tensors(LLAMA))
    pinned.release()
    with pytest.raises(UnsupportedError, match="event_log is not supported with from_parameters"):
        LLM.from_parameters(LLAMA, random_tensors(LLAMA), event_log=str(tmp_path / "log"))
    with make_llm(random_checkpoint(tmp_path, LLAMA), quantization="int8") as quantized:
        for call in (quantized.parameters, lambda: quantized.update_parameters({})):
            with pytest.raises(
                UnsupportedError, match=r"not supported for quantised weights \(int8 weights and inputs"
            ):
                call()
