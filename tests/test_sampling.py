"""Draws through the whole engine follow the distribution that was asked for, and only the request
decides them.

The model has so few tokens that its log probabilities, asked for by the public interface, are the
whole distribution; in float64 the draws follow from them. Each test of a distribution is also run
against wrong ones, which it must tell apart.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import SamplingParams
from jaxpage.scheduling import plan_builder
from tests.support.distributions import probabilities, z_score
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import examples, few

pytestmark = pytest.mark.usefixtures("largest_shapes")

VOCAB, WIDTH, NUM_REQUESTS = 8, 16, 128
PROMPT = [3, 1, 4, 1, 5]
SAMPLERS = {
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.93, "min_p": 0.15},
}
WRONG = {  # nearly the same sampler: what a test of the distribution must not mistake for it
    "temperature": {"temperature": 1.2},
    "cold": {"temperature": 0.67},
    "hot": {"temperature": 1.5},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "top-p": {"temperature": 1.3, "top_p": 0.95},
    "min-p": {"temperature": 1.3, "min_p": 0.02},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.93, "min_p": 0.0},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    config = {**LLAMA, "vocab_size": VOCAB}
    with make_llm(
        random_checkpoint(tmp_path_factory.mktemp("few-tokens"), config, seed=2), max_num_seqs=WIDTH
    ) as llm:
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def log_probabilities(llm):
    """Returns those of the first token, and of the second after each first one: [V] and [V, V]."""
    prompts = [PROMPT, *([*PROMPT, token_id] for token_id in range(VOCAB))]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB), use_tqdm=False
    )
    tables = [
        [output.outputs[0].logprobs[0][v].logprob for v in range(VOCAB)] for output in outputs
    ]
    return np.array(tables[0]), np.array(tables[1:])


def pairs_drawn(llm, **sampler):
    """Returns how often each pair of first and second token was drawn: by many seeds, and by the
    samples of each.
    """
    params = SamplingParams(n=WIDTH, max_tokens=2, ignore_eos=True, **sampler)
    seeds = [dataclasses.replace(params, seed=seed) for seed in range(NUM_REQUESTS)]
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for output in llm.generate([PROMPT] * NUM_REQUESTS, seeds, use_tqdm=False):
        for completion in output.outputs:
            counts[tuple(completion.token_ids)] += 1
    return counts


def pairs_expected(log_probabilities, **sampler):
    first_V, second_VV = log_probabilities
    return probabilities(first_V, **sampler)[:, None] * np.array(
        [probabilities(row, **sampler) for row in second_VV]
    )


@pytest.mark.parametrize("name", few(SAMPLERS, ["temperature", "all"]))
def test_draws_follow_the_distribution(name, llm, log_probabilities):
    """Two tokens in a row are counted jointly: each is right, and neither depends on the other by
    more than the model's own word.
    """
    counts = pairs_drawn(llm, **SAMPLERS[name])
    assert counts.sum() == WIDTH * NUM_REQUESTS
    assert abs(z_score(counts, pairs_expected(log_probabilities, **SAMPLERS[name]))) < 4
    assert z_score(counts, pairs_expected(log_probabilities, **WRONG[name])) > 8


@pytest.mark.parametrize("forgotten", few(["position", "sample_index"], ["position"]))
def test_noise_that_repeats_is_seen(forgotten, llm, log_probabilities, monkeypatch):
    """A mistake is planted: the noise of a draw is that of another position, or of another
    sample.
    """
    real = plan_builder.sample_of
    monkeypatch.setattr(
        plan_builder, "sample_of", lambda *arguments: real(*arguments)._replace(**{forgotten: 0})
    )
    if forgotten == "sample_index":
        enumerated = plan_builder.PlanBuilder.freeze

        def freeze(self, *arguments):
            plan = enumerated(self, *arguments)
            return dataclasses.replace(
                plan, samples=tuple(s._replace(sample_index=0) for s in plan.samples)
            )

        monkeypatch.setattr(plan_builder.PlanBuilder, "freeze", freeze)
    counts = pairs_drawn(llm, temperature=1.0)
    assert z_score(counts, pairs_expected(log_probabilities, temperature=1.0)) > 8


def test_siblings_are_independent(llm, log_probabilities):
    """The first tokens of samples 0 and 1 of a request are independent."""
    params = SamplingParams(n=2, max_tokens=1, ignore_eos=True)
    seeds = [dataclasses.replace(params, seed=seed) for seed in range(1000)]
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for output in llm.generate([PROMPT] * len(seeds), seeds, use_tqdm=False):
        counts[output.outputs[0].token_ids[0], output.outputs[1].token_ids[0]] += 1
    alone_V = probabilities(log_probabilities[0])
    assert abs(z_score(counts, np.outer(alone_V, alone_V))) < 4
    assert z_score(counts, np.diag(alone_V)) > 8


def sampling_params(max_tokens):
    return st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 3),
        max_tokens=max_tokens,
        ignore_eos=st.just(True),
    )


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@examples(8)
@given(st.lists(st.tuples(prompts, sampling_params(st.integers(1, 12))), min_size=2, max_size=6))
def test_neighbours_change_no_draw(llm, requested):
    """Every request of a batch gives what it gives alone."""
    together = llm.generate(
        [prompt for prompt, _ in requested], [params for _, params in requested], use_tqdm=False
    )
    for (prompt, params), output in zip(requested, together, strict=True):
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs == output.outputs
