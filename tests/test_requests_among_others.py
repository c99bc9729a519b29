"""Requests of every kind give to the last bit what they give alone, whatever happens around
them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from tests.support.engines import (
    ENGINES,
    LLAMA,
    MISTRAL,
    SMALL_POOL,
    engines_by_name,
    invariants,
    make_llm,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer

pytestmark = pytest.mark.usefixtures("largest_shapes")

STOPS = tuple(range(80, 136))
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.5}
FEW_WORDS = ["a b", "c", "aa", "ba a", "d"]
# By name: the number of tokens of the prompt, and the parameters. Together they are 16 sequences.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (33, {"temperature": 0.0, "ignore_eos": True, "logprobs": 3}),
    "three samples": (50, {"top_p": 0.9, "top_k": 50, "n": 3, "logprobs": 2}),
    "the best of three": (16, {"n": 2, "best_of": 3, "logprobs": 1}),
    "a scored prompt": (41, {"prompt_logprobs": 3, "logprobs": 2}),
    "penalties and an early end": (
        61,
        {**PENALTIES, "min_tokens": 6, "logit_bias": {0: 4.0}, "ignore_eos": False},
    ),
    "masks and bad words": (
        17,
        {"n": 2, "allowed_token_ids": range(33, 42), "bad_words": FEW_WORDS},
    ),
    "a grammar": (
        9,
        {"n": 2, "structured_outputs": {"regex": "(ab|ba|cat){2,6}( (10|00))+"}, "logprobs": 1},
    ),
    "stop strings": (3, {"stop": ["a", "b", "1", "t"], "min_tokens": 3}),
}
BEAMS = {
    "beams": (20, BeamSearchParams(2, 18, length_penalty=-1.0, n=2, stop_token_ids=STOPS)),
}
SAMPLING = {"seed": 7, "max_tokens": 20, "ignore_eos": True}
ALL: dict[str, tuple[int, Any]] = {
    **{
        name: (length, SamplingParams(**{**SAMPLING, **params}))
        for name, (length, params) in KINDS.items()
    },
    **BEAMS,
}
# Strangers that take the room of a small pool.
CROWD = [
    ([7] * 150, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)),
    ([8] * 140, SamplingParams(seed=3, max_tokens=60, ignore_eos=True)),
]
Requested = list[tuple[list[int], Any]]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 257, length).tolist()


REQUESTED: Requested = [(prompt_of(length), params) for length, params in ALL.values()]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {
        name: write_tokenizer(random_checkpoint(tmp_path_factory.mktemp(name), config))
        for name, config in {"llama": LLAMA, "mistral": MISTRAL}.items()
    }


def contents(outputs: list[Any]) -> list[Any]:
    """Returns all that must agree to the last bit."""
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def generate(llm: LLM, requested: Requested) -> list[Any]:
    prompts, params = ([*column] for column in zip(*requested, strict=True))
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def alone(directories):
    """Returns what each request gives by itself, with nothing cached, by family; the strangers come
    last.

    Engines have the shapes of those below.
    """
    outputs, sizes = {}, {**SMALL_POOL, "num_blocks": 129, "max_num_seqs": 16}
    for family, directory in directories.items():
        with make_llm(directory, enable_prefix_caching=False, **sizes) as llm:
            outputs[family] = [
                contents(generate(llm, [request]))[0] for request in [*REQUESTED, *CROWD]
            ]
            invariants(llm)
    return outputs


@pytest.fixture(scope="module")
def engines(directories):
    """Returns engines of `ENGINES` with room for all requests at once, and engines that preempt."""
    settings = {name: {**each, "max_num_seqs": 16} for name, each in ENGINES.items()}
    for mode in ("swap", "recompute"):
        for family in directories:
            settings[f"{family} {mode}"] = {
                "max_num_seqs": 16,
                "num_blocks": 129,
                "preemption_mode": mode,
            }
    with engines_by_name(
        settings, lambda name: directories["mistral" if is_of_mistral(name) else "llama"]
    ) as engine:
        yield engine


def is_of_mistral(name: str) -> bool:
    return "window" in name or "mistral" in name


def test_the_requests_show_something(alone):
    """They end in every way, and a window gives other texts."""
    outputs = {name: outputs for name, (outputs, _) in zip(ALL, alone["llama"], strict=False)}
    ends = {name: {output.finish_reason for output in each} for name, each in outputs.items()}
    assert ends["greedy"] == {"length"} and "stop" in ends["stop strings"] | ends["a grammar"]
    assert "stop" in ends["penalties and an early end"] and "stop" in ends["beams"]
    assert [len(outputs[name]) for name in ("three samples", "the best of three", "beams")] == [
        3,
        2,
        2,
    ]
    assert len({str(output.token_ids) for output in outputs["three samples"]}) == 3
    greedy = [*ALL].index("greedy")
    assert alone["llama"][greedy] != alone["mistral"][greedy]


@pytest.mark.parametrize("engine", few(ENGINES, ["swap", "fair and mixed", "window"]))
def test_requests_give_among_others_what_they_give_alone(engine, engines, alone):
    """They come in both orders, so that prefixes are found the second time, in a pool that is too
    small for all.
    """
    llm, expected = engines(engine), alone["mistral" if is_of_mistral(engine) else "llama"]
    requested = [*REQUESTED, *CROWD]
    for order in (1, -1):
        outputs = generate(llm, [*CROWD, *requested[::order]])
        assert contents(outputs[2:]) == expected[::order]
        assert contents(outputs[:2]) == expected[-2:]
    if engine in ("recompute", "swap"):
        assert llm.stats()["num_preemptions_total"][engine] >= 2
    invariants(llm)


@pytest.mark.parametrize(
    ("family", "mode"),
    few(
        itertools.product(("llama", "mistral"), ("swap", "recompute")),
        [("llama", "recompute")],
    ),
)
def test_requests_that_give_way_at_any_step_go_on_as_they_were(family, mode, engines, alone):
    """All but the oldest request give way at once: in a prompt, before and after it forks,
    later.
    """
    llm = engines(f"{family} {mode}")
    engine, older = llm._engine, ([3] * 9, CROWD[0][1])
    for step in range(1, 18, 3):
        llm.reset_prefix_cache()
        requested = [older, *REQUESTED]
        reporters = [
            engine.add(str(index), engine.prepare(None, *request))
            for index, request in enumerate(requested)
        ]
        for number in range(200):
            if not engine.has_unfinished:
                break
            if step <= number < step + len(REQUESTED):
                engine.scheduler.give_way()
            engine.step()
            engine.scheduler.check()
        outputs = contents([reporter.whole() for reporter in reporters[1:]])
        assert outputs == alone[family][: len(REQUESTED)]
    assert llm.stats()["num_preemptions_total"][mode] >= 6 * 4
    invariants(llm)
