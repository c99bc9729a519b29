"""Weights that are replaced while requests run: what each token is computed with, and pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.driver import Handle
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.step.update import Mode
from tests.support.engines import ENGINES, LLAMA, MISTRAL, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors

PROMPTS = [[1, 2, 3, 4] * 9, [7, 8, 9], [5] * 20]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def fresh(checkpoint: Path) -> Iterator[Callable[..., CompletionOutput]]:
    """What a request gives that begins with a prompt and tokens, on an engine that has done nothing else with these weights."""
    with make_llm(checkpoint, enable_prefix_caching=False) as llm:

        def continued(version: int, token_ids: list[int], **params: Any) -> CompletionOutput:
            llm.update_parameters(random_tensors(LLAMA, seed=version))
            params = {"ignore_eos": True, "logprobs": 2, **params}
            output = llm.generate([token_ids], SamplingParams(**params), use_tqdm=False)
            return output[0].outputs[0]

        yield continued


def run_by_hand(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Begins requests on an engine that is stepped by hand; returns lists that get their outputs."""
    handles = []
    for request in llm._prepare(prompts, params):
        updates: list[Any] = []
        handle = Handle(request, updates.extend)
        handles.append((handle, updates))
    llm._driver.add([handle for handle, _ in handles])
    return handles


def finish(llm: LLM, handles: list[Any]) -> list[RequestOutput]:
    while llm._driver.step():
        llm._engine.scheduler.check()
    outputs = []
    for _, updates in handles:
        [(_, output)] = updates
        assert isinstance(output, RequestOutput), output
        outputs.append(output)
    return outputs


def bits(output: CompletionOutput, start: int = 0) -> list[Any]:
    """The tokens from a place on, with the bits of their log probabilities."""
    assert output.logprobs is not None
    entries = output.logprobs[start:]
    return [
        (token, {each: entry.logprob for each, entry in (known or {}).items()})
        for token, known in zip(output.token_ids[start:], entries, strict=True)
    ]


WAYS: dict[str, Any] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "samples": {"temperature": 1.1, "seed": 9, "n": 2},
}
SETTINGS: dict[str, Any] = {
    "recompute": ENGINES["recompute"],
    "swap": ENGINES["swap"],
    "mixed": ENGINES["fair and mixed"],
    "n-gram": {"speculative_config": NGRAM},
    "suffix": {**ENGINES["recompute"], "speculative_config": SUFFIX},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_requests_go_on_as_fresh_ones(
    checkpoint: Path, fresh: Callable[..., CompletionOutput], name: str, way: str
) -> None:
    """Of several samples, each goes on with its own tokens; the noise of the first is a fresh request's."""
    params = SamplingParams(**WAYS[way], max_tokens=24, ignore_eos=True, logprobs=2)
    with make_llm(checkpoint, start=False, **SETTINGS[name]) as llm:
        handles = run_by_hand(llm, PROMPTS, params)
        for seed, num_steps in ((1, 9), (2, 6)):
            for _ in range(num_steps):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode="recompute")
        outputs = finish(llm, handles)
        assert all(output.weights_version == 2 for output in outputs)
        num_continued = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sample = output.outputs[0]
            versions = sample.weights_versions
            assert versions == sorted(versions) and len(versions) == len(sample.token_ids) == 24
            for version in set(versions):
                start, stop = versions.index(version), 24 - versions[::-1].index(version)
                more = {**WAYS[way], "n": 1, "max_tokens": stop - start}
                expected = fresh(version, prompt + sample.token_ids[:start], **more)
                assert bits(sample)[start:stop] == bits(expected)
                num_continued += start > 0
        assert num_continued >= 2
        invariants(llm)


@pytest.mark.parametrize("name", ["swap", "mixed", "n-gram"])
@pytest.mark.parametrize("way", WAYS)
def test_kept_requests_go_on_as_they_do_alone(
    checkpoint: Path, plain: LLM, name: str, way: str
) -> None:
    """Alone with the same keys and values, that is with the updates at the same tokens."""
    params = SamplingParams(**WAYS[way], max_tokens=24, ignore_eos=True, logprobs=2)
    with make_llm(checkpoint, start=False, **SETTINGS[name]) as llm:
        handles = run_by_hand(llm, PROMPTS, params)
        for seed, num_steps in ((1, 9), (2, 6)):
            for _ in range(num_steps):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode="keep")
        outputs = finish(llm, handles)
        num_compared = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sample = output.outputs[0]
            versions = sample.weights_versions
            if versions.count(0) and versions.count(1):
                alone_ = kept_alone(plain, prompt, params, versions)
                assert alone_.weights_versions == versions or alone_.weights_versions == [
                    version + alone_.weights_versions[0] for version in versions
                ]
                assert bits(sample) == bits(alone_)
                num_compared += 1
        assert num_compared
        invariants(llm)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint, start=False, enable_prefix_caching=False) as llm:
        yield llm


def kept_alone(llm: LLM, prompt: list[int], params: Any, versions: list[int]) -> CompletionOutput:
    """What a request gives alone, when weights are replaced at the same tokens."""
    llm.update_parameters(random_tensors(LLAMA, seed=versions[0]))
    [(handle, updates)] = run_by_hand(llm, [prompt], params)
    for version in (1, 2):
        while handle.reporter is None or min(
            sequence.num_output_tokens for sequence in handle.reporter._group.sequences
        ) < versions.index(version):
            llm._driver.step()
        llm.update_parameters(random_tensors(LLAMA, seed=version), mode="keep")
    [output] = finish(llm, [(handle, updates)])
    return output.outputs[0]
