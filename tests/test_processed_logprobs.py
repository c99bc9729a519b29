"""logprobs_mode="processed": the numbers are those of the distribution that a token is drawn from,
however an engine draws it.

The oracle computes this distribution in float64 from the raw logits of each draw.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.device import drawn as drawn_module
from jaxpage.device import sampler
from jaxpage.device import steps as steps_module
from jaxpage.device.inputs.step_inputs import unpack
from jaxpage.errors import UnsupportedError
from jaxpage.step.token_masks import ids_of
from tests.support.distributions import kept
from tests.support.engines import (
    LLAMA,
    LogitsWitness,
    invariants,
    make_kind,
    make_llm,
    run_giving_way,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.reference_sampling import processed
from tests.support.sweeps import few
from tests.test_sampler import BUCKET, NEUTRAL, NUM_ROWS, TABLES, flags_of, inputs_for, run_draw
from tests.test_sampler import VOCAB as WIDTH

pytestmark = pytest.mark.usefixtures("decode_as_chunks")

VOCAB = LLAMA["vocab_size"]
PROMPT = np.random.default_rng(0).integers(1, VOCAB, 21).tolist()
PROCESSED = SamplingParams(
    temperature=0.0, seed=5, max_tokens=10, ignore_eos=True, logprobs=6, logprobs_mode="processed"
)
CLOSE = 2e-5
SAMPLERS = {
    "greedy": {},
    "greedy with penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.3, "top_k": 2},
    "temperature": {"temperature": 0.6},
    "top-k": {"temperature": 0.8, "top_k": 4},
    "top-p": {"temperature": 0.9, "top_p": 0.4},
    "min-p": {"temperature": 1.2, "min_p": 0.5},
    "all cuts": {"temperature": 1.1, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    "few tokens": {"temperature": 0.5, "allowed_token_ids": [3, 7, 200], "top_p": 0.9},
    "penalties and bias": {
        **{"temperature": 0.7, "top_p": 0.6, "frequency_penalty": 0.9, "repetition_penalty": 1.5},
        "logit_bias": {9: 4.0, 11: -5.0},
    },
}
REQUESTS = {name: dataclasses.replace(PROCESSED, **sampler) for name, sampler in SAMPLERS.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    # Wide logits, so that cuts leave few tokens.
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA, seed=3)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, enable_return_sampling_mask=True) as llm:
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def alone(llm):
    """Returns the output of each request without others."""
    return {name: generate(llm, params) for name, params in REQUESTS.items()}


def generate(llm, *params):
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def with_mask(params):
    return dataclasses.replace(params, return_sampling_mask=True, top_k=params.top_k or VOCAB)


def distribution(logits, params, output):
    """Returns the logarithms of what is drawn from, -inf for what cannot be.

    A greedy request has no temperature and no cuts.
    """
    wide = processed(logits, params, PROMPT, output)
    if not params.greedy:
        wide /= params.temperature
        wide = np.where(kept(wide, params.top_k, params.top_p, params.min_p), wide, -np.inf)
    shifted = wide - wide.max()
    return shifted - np.log(np.exp(shifted).sum())


def check_oracle(llm, params):
    """Compares a request of one sample with the oracle."""
    witness = LogitsWitness(llm)
    first_id = llm._engine._num_sequences
    try:
        (output,) = generate(llm, params)
    finally:
        llm._engine.runner.executables = witness._real
        del llm._engine.builder.build
    total = 0.0
    for index, token_id in enumerate(output.token_ids):
        raw = witness.logits[first_id, len(PROMPT) + index]
        expected = distribution(raw, params, output.token_ids[:index])
        entries = output.logprobs[index]
        assert entries[token_id].logprob == pytest.approx(expected[token_id], abs=CLOSE)
        assert output.num_kept[index] == np.isfinite(expected).sum()
        top = np.argsort(-expected, kind="stable")[: min(6, output.num_kept[index])]
        assert set(entries) == {token_id, *top.tolist()}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[other], abs=CLOSE)
            assert entry.rank == 1 + (expected > expected[other]).sum()
        if output.sampling_mask is not None:
            assert (
                output.sampling_mask.token_ids[index]
                == np.flatnonzero(np.isfinite(expected)).tolist()
            )
        total += entries[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(total)


FEW_CUTS = ["greedy with penalties", "min-p", "all cuts", "few tokens", "penalties and bias"]


@pytest.mark.parametrize("name", few(REQUESTS, FEW_CUTS))
def test_the_numbers_are_those_of_the_distribution_drawn_from(name, llm):
    params = REQUESTS[name]
    check_oracle(llm, params if params.greedy else with_mask(params))


_scale_logits = steps_module.scale_logits


def raw_logits(logits_RV, *_, **__):
    return logits_RV


def without_temperature(logits_RV, inputs, *others, **options):
    draws = inputs.draws
    warm = draws._replace(temperature_R=jnp.minimum(jnp.ceil(draws.temperature_R), 1.0))
    return _scale_logits(logits_RV, inputs._replace(draws=warm), *others, **options)


def without_masks(logits_RV, inputs, *others, **options):
    return _scale_logits(logits_RV, inputs._replace(flags=inputs.flags * 0), *others, **options)


MISTAKES = {
    "raw": (raw_logits, "top-k"),
    "without temperature": (without_temperature, "temperature"),
    "without masks": (without_masks, "few tokens"),
}


@pytest.mark.parametrize("mistake", few(MISTAKES, ["without masks"]))
def test_the_oracle_sees_planted_mistakes(mistake, directory, monkeypatch):
    function, name = MISTAKES[mistake]
    monkeypatch.setattr(steps_module, "scale_logits", function)
    with make_llm(directory) as llm, pytest.raises(AssertionError):
        check_oracle(llm, REQUESTS[name])


def test_rows_at_once_have_what_rows_have_one_by_one(monkeypatch):
    """Some rows are processed at a time, as on a GPU, and a few of them twice."""
    monkeypatch.setattr(sampler, "PROCESSED_AT_ONCE", 24)
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32) * 3
    temperatures = rng.choice([0.0, 0.7, 1.0, 2.5], NUM_ROWS)
    is_processed = rng.integers(0, 2, NUM_ROWS)
    packed = inputs_for(
        flags=flags_of(RANDOM=1, MASKED=1, LOGPROBS=1, PROCESSED=1),
        temperature_R=temperatures,
        top_k_R=rng.integers(0, WIDTH + 1, NUM_ROWS),
        top_p_R=rng.choice([0.3, 0.9, 1.0], NUM_ROWS),
        min_p_R=rng.choice([0.0, 0.2], NUM_ROWS),
        is_processed_R=is_processed,
    )
    masks = NEUTRAL._replace(mask_RU=np.full_like(NEUTRAL.mask_RU, ~np.uint32(1 << 1)))

    def pack(by_row):
        inputs = unpack(packed, BUCKET, TABLES)
        scaled = sampler.scale_logits(logits, inputs, masks, by_row=True) if by_row else None
        packs = functools.partial(drawn_module.pack_draws, num_words=1)
        tokens = np.asarray(run_draw(logits, packed, masks))
        rows, kept_RU = jax.jit(packs)(logits, tokens, inputs, masks, scaled_RV=scaled)
        return drawn_module.unpack_drawn(np.asarray(rows), NUM_ROWS), np.asarray(kept_RU)

    (first, kept_one), (other, kept_other) = pack(True), pack(False)
    np.testing.assert_array_equal(kept_one, kept_other)
    np.testing.assert_array_equal(first.num_kept, other.num_kept)
    for row in range(NUM_ROWS):
        num_kept = len(ids_of(kept_one[row]))
        assert first.num_kept[row] == (num_kept if is_processed[row] else 0)
        assert 1 not in ids_of(kept_one[row]), "its logits are masked"
    np.testing.assert_allclose(first.logprobs, other.logprobs, atol=CLOSE)
    np.testing.assert_allclose(first.top_logprobs, other.top_logprobs, atol=CLOSE)


def content(outputs):
    """Returns all that must agree to the last bit."""
    return [dataclasses.replace(output, index=0) for output in outputs]


def test_the_mode_changes_no_token_and_raw_numbers_stay(llm, alone):
    """Requests of the other mode beside it change nothing."""
    raw = [dataclasses.replace(params, logprobs_mode="raw") for params in REQUESTS.values()]
    separate = [generate(llm, params) for params in raw]
    for (output,), (other,) in zip(alone.values(), separate, strict=True):
        assert output.token_ids == other.token_ids
        assert other.num_kept is None and other.sampling_mask is None
    mixed = generate(
        llm, *[params for pair in zip(raw, REQUESTS.values(), strict=True) for params in pair]
    )
    assert content(mixed[::2]) == content(output for (output,) in separate)
    assert content(mixed[1::2]) == content(output for (output,) in alone.values())


def test_a_cut_and_a_temperature_are_in_the_numbers(llm):
    """verl #6240: they were not, so that every ratio of the trainer was wrong."""
    params = with_mask(REQUESTS["all cuts"])
    (output,) = generate(llm, params)
    (raw,) = generate(llm, dataclasses.replace(params, logprobs_mode="raw", logprobs=20))
    for index, ids in enumerate(output.sampling_mask.token_ids):
        logprob_of = {t: entry.logprob for t, entry in raw.logprobs[index].items()}
        if not set(ids) <= logprob_of.keys():
            continue
        scaled = np.array([logprob_of[t] for t in ids]) / params.temperature
        expected = logprob_of[output.token_ids[index]] / params.temperature - np.log(
            np.exp(scaled).sum()
        )
        assert output.logprobs[index][output.token_ids[index]].logprob == pytest.approx(
            expected, abs=CLOSE
        )
    assert min(map(len, output.sampling_mask.token_ids)) < 20, "no place was compared"


ENGINES = {
    "several steps": {"num_scheduler_steps": 4},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
        }
    },
    "chunks of 16": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("name", few(ENGINES, ["several steps"]))
def test_an_engine_changes_no_number(name, directory, alone):
    with make_llm(directory, enable_return_sampling_mask=True, **ENGINES[name]) as llm:
        outputs = generate(llm, *REQUESTS.values())
        assert content(outputs) == content(output for (output,) in alone.values())
        params = with_mask(REQUESTS["all cuts"])
        (masked,) = generate(llm, params)
        assert masked.num_kept == masked.sampling_mask.num_kept.tolist()
        assert masked.num_kept == [len(ids) for ids in masked.sampling_mask.token_ids]


def test_preemption_changes_no_number(llm, alone):
    engine = llm._engine
    reporters = [
        engine.add(name, engine.prepare(None, PROMPT, params)) for name, params in REQUESTS.items()
    ]
    run_giving_way(engine, 6)
    outputs = [reporter.whole().outputs[0] for reporter in reporters]
    assert content(outputs) == content(output for (output,) in alone.values())


def test_samples_are_ranked_by_the_numbers_of_the_mode(llm):
    params = dataclasses.replace(REQUESTS["top-k"], n=2, best_of=4)
    best = generate(llm, params)
    samples = generate(llm, dataclasses.replace(params, n=4, best_of=None))
    ranked = sorted(samples, key=lambda output: -output.cumulative_logprob)
    assert content(best) == content(ranked[:2])


def test_a_stream_has_the_mask_of_what_is_new(directory, llm):
    params = with_mask(REQUESTS["top-k"])
    (whole,) = generate(llm, params)

    async def stream():
        async with make_kind(AsyncLLM, directory, enable_return_sampling_mask=True) as engine:
            return [part.outputs[0] async for part in engine.stream(PROMPT, params)]

    parts = asyncio.run(stream())
    assert [number for part in parts for number in part.num_kept] == whole.num_kept
    masks = [part.sampling_mask for part in parts]
    assert sum(masks[1:], masks[0]) == whole.sampling_mask
    assert all(len(part.sampling_mask.num_kept) == len(part.token_ids) for part in parts)


def test_refusals(llm, directory):
    for field in ({"temperature": 0.0, "top_k": 3}, {"temperature": 1.0, "top_k": 0}):
        params = SamplingParams(return_sampling_mask=True, **field)
        with pytest.raises(
            UnsupportedError, match="needs a temperature above 0 and a top_k above 0"
        ):
            generate(llm, params)
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw, processed"):
        SamplingParams(logprobs_mode="raw_logprobs")
    with pytest.raises(TypeError, match="logprobs_mode"):
        BeamSearchParams(2, logprobs_mode="raw")
    with (
        make_llm(directory) as plain,
        pytest.raises(UnsupportedError, match="needs enable_return_sampling_mask=True"),
    ):
        generate(plain, SamplingParams(return_sampling_mask=True, top_k=3))
