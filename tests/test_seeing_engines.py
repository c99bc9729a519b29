"""Engines whose prompts have pictures: logits of transformers, and the same bits in every path."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxpage import SamplingParams
from tests.support.engines import BLOCKS_OF_4, SMALL_POOL, invariants, make_llm, tokens_of

seeing = pytest.importorskip("tests.support.seeing_models")

PARAMS = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=16, ignore_eos=True, logprobs=3
)
GREEDY = dataclasses.replace(PARAMS, temperature=0.0, top_p=1.0)
MODELS = list(seeing.SEEING)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def directory(name):
        if name not in made:
            made[name] = seeing.save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory


def prompts_of(name):
    draw = np.random.default_rng(3)
    texts = [draw.integers(1, 250, length).tolist() for length in (7, 20, 33, 5, 12)]
    first, second = seeing.picture(name, 1, 2), seeing.picture(name, 2, 5)
    other = seeing.picture(name, 3, 2)
    return [
        seeing.prompt(name, parts)
        for parts in (
            (texts[0], first, texts[3]),
            (texts[1], second, texts[4], first, texts[0]),
            (texts[1], first, texts[2]),
            (texts[1], other, texts[2]),
            (first, texts[0]),
            (texts[2], second),
        )
    ] + [(texts[2], None)]


def run(llm, requests, params=PARAMS):
    """Generates for prompts together, by hand."""
    engine = llm._engine
    reporters = [
        engine.add(f"{number}", engine.prepare(None, ids, params, embedded))
        for number, (ids, embedded) in enumerate(requests)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    return [reporter.whole() for reporter in reporters]


@pytest.fixture(scope="module")
def alone(directories):
    known = {}

    def of(name, params=PARAMS):
        key = name, params.temperature
        if key not in known:
            with make_llm(directories(name), enable_prefix_caching=False) as llm:
                outputs = [run(llm, [prompt], params)[0] for prompt in prompts_of(name)]
            known[key] = tokens_of(outputs)
        return known[key]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same(name, directories):
    first = dataclasses.replace(GREEDY, max_tokens=1, logprobs=8)
    with make_llm(directories(name)) as llm:
        for ids, embedded in prompts_of(name):
            pictures = [embedded.sources[span.key] for span in embedded.spans] if embedded else []
            want = seeing.their_logprobs(name, ids, pictures)
            (output,) = run(llm, [(ids, embedded)], first)
            for token_id, entry in output.outputs[0].logprobs[0].items():
                assert abs(entry.logprob - want[token_id]) < 1e-4


ENGINES = {
    "batch": {},
    "recompute": SMALL_POOL,
    "swap": {**SMALL_POOL, "preemption_mode": "swap", "enable_prefix_caching": False},
    "mixed": {**SMALL_POOL, "enable_mixed_steps": True},
    "blocks of 4": BLOCKS_OF_4,
    "no cache": {"encoder_cache_bytes": 1000},
    "several steps": {"num_scheduler_steps": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize(("name", "engine"), [*itertools.product(MODELS, ENGINES)])
def test_every_path(name, engine, directories, alone):
    params = GREEDY if engine == "drafts" else PARAMS
    want = alone(name, params)
    with make_llm(directories(name), **ENGINES[engine]) as llm:
        prompts = prompts_of(name)
        for order in (1, -1):  # the second time prefixes are found
            outputs = run(llm, prompts[::order], params)
            assert tokens_of(outputs)[::order] == want
        counts = llm._engine.sources.encoder.counts
        if engine == "no cache":
            assert counts.num_found == 0 == counts.num_bytes
        elif engine == "swap":
            assert counts.num_found > counts.num_encoded == 3
        invariants(llm)
