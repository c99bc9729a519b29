"""The sampler against transformers' processors, a float64 reference and the distribution that it
should draw from.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import (
    NUM_FLAGS,
    Flags,
    TableShape,
    processor_shapes,
    size_when_packed,
    unpack,
    views,
)
from jaxpage.device.sampler import Draws, draw, perturb_logits
from jaxpage.device.token_logprobs import log_probabilities
from jaxpage.device.truncation import truncate
from jaxpage.shapes import NUM_CANDIDATES
from tests.support.distributions import kept, probabilities, z_score
from tests.support.sweeps import examples

NUM_ROWS, VOCAB = 512, 8
BUCKET = Bucket(NUM_ROWS, NUM_ROWS, 1)


run_truncate = jax.jit(truncate, static_argnames="by_row")


@examples(60)
@given(
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    num_tokens=st.sampled_from([64, 400]),  # more than are looked at first, and fewer
    top_k=st.integers(0, 70) | st.integers(100, 410),
    top_p=st.sampled_from([0.001, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_truncation_matches_a_float64_sort(seed, scale, num_tokens, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).standard_normal(num_tokens).astype(
        np.float32
    ) * np.float32(scale)
    expected = kept(logits, top_k, np.float64(np.float32(top_p)), np.float64(np.float32(min_p)))
    for by_row in (True, False):
        actual = np.isfinite(
            run_truncate(logits, top_k, np.float32(top_p), np.float32(min_p), by_row=by_row)
        )
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("by_row", [True, False])
def test_truncation_matches_transformers(by_row):
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(40):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(400) * rng.choice([0.5, 2.0, 8.0])).astype(np.float32)
        top_k, top_p, min_p = (
            int(rng.integers(1, 300)),
            float(rng.uniform(0.05, 0.99)),
            float(rng.uniform(0.0, 0.3)),
        )
        scores = torch.tensor(logits)[None]
        for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
            scores = warper(None, scores)
        actual = run_truncate(logits, top_k, np.float32(top_p), np.float32(min_p), by_row=by_row)
        np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(scores[0].numpy()))


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(
    "cut", [{"top_p": 1e-50}, {"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}], ids=str
)
def test_the_most_likely_always_stays(cut, by_row):
    logits = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    stays = run_truncate(
        logits, cuts["top_k"], np.float32(cuts["top_p"]), np.float32(cuts["min_p"]), by_row=by_row
    )
    assert np.flatnonzero(np.isfinite(stays)).tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("by_row", [True, False])
def test_ties_at_the_cutoff_stay_in(by_row):
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    for top_k, top_p in ((2, 1.0), (0, 0.5), (2, 0.6)):
        stays = np.isfinite(run_truncate(logits, top_k, np.float32(top_p), 0.0, by_row=by_row))
        assert stays.tolist() == [False, True, True, True, False]
    # more ties than are looked at first
    level = np.where(np.arange(400) < 300, 1.0, 0.0).astype(np.float32)
    for top_k, top_p in ((2, 1.0), (200, 1.0), (0, 0.1), (0, 0.7), (5, 0.99)):
        stays = np.isfinite(run_truncate(level, top_k, np.float32(top_p), 0.0, by_row=by_row))
        np.testing.assert_array_equal(stays, level == 1.0)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("top_k", [0, 2, 3])
def test_a_token_that_has_the_mass_exactly_is_enough(top_k, by_row):
    """The first token has half of the probability.

    Without a top-k of 2, which leaves it two thirds, that is also half of the mass.
    """
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    stays = np.isfinite(
        run_truncate(logits, top_k, np.float32(0.5), np.float32(0.0), by_row=by_row)
    )
    assert stays.tolist() == [False, True, False]


def inputs_for(**fields):
    packed = np.zeros(size_when_packed(BUCKET, TABLES), np.int32)
    held = views(packed, BUCKET, TABLES)
    held["top_p_R"][:] = 1.0
    held["repetition_penalty_R"][:] = 1.0
    held["flags"][0] = 1
    for name, value in fields.items():
        held[name][:] = value
    return packed


def flags_of(**flags):
    values = np.zeros(NUM_FLAGS, np.int32)
    for name, value in flags.items():
        values[getattr(Flags, name)] = value
    return values


TABLES = TableShape(1, 1)
SHAPES = processor_shapes(NUM_ROWS, vocab_size=VOCAB, context=12)
NEUTRAL = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), SHAPES)


@functools.partial(jax.jit, static_argnames="by_row")
def run_draw(logits, packed, processor_inputs=NEUTRAL, by_row=True):
    return draw(logits, unpack(packed, BUCKET, TABLES), processor_inputs, by_row=by_row)


LOGITS = np.array([0.3, -1.0, 2.0, 0.0, 1.5, -3.0, 0.7, 1.9], np.float32)


def draws(num_batches=24, **fields):
    """Draws once for each of many positions."""
    logits = np.broadcast_to(LOGITS, (NUM_ROWS, VOCAB))
    tokens = []
    for batch in range(num_batches):
        positions = batch * NUM_ROWS + np.arange(NUM_ROWS)
        tokens.append(
            np.asarray(
                run_draw(logits, inputs_for(seed_R2=[0, 7], drawn_position_R=positions, **fields))
            )
        )
    return np.concatenate(tokens)


SAMPLERS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_draws_follow_the_distribution(sampler):
    tokens = draws(**{f"{name}_R": value for name, value in sampler.items()})
    counts = np.bincount(tokens, minlength=VOCAB)
    assert abs(z_score(counts, probabilities(LOGITS, **sampler))) < 4
    warmer = probabilities(LOGITS, **{**sampler, "temperature": sampler["temperature"] * 1.25})
    assert z_score(counts, warmer) > 10  # the test would see a wrong temperature


def test_a_draw_is_a_function_of_seed_sample_and_position():
    logits = np.broadcast_to(LOGITS, (NUM_ROWS, VOCAB))
    fields = {"temperature_R": 1.0, "drawn_position_R": np.arange(NUM_ROWS), "sample_index_R": 3}
    seeds = np.random.default_rng(0).integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32)
    plain = np.asarray(run_draw(logits, inputs_for(seed_R2=seeds, **fields)))
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    shuffled = inputs_for(
        seed_R2=seeds[order], **{**fields, "drawn_position_R": np.arange(NUM_ROWS)[order]}
    )
    np.testing.assert_array_equal(run_draw(logits, shuffled), plain[order])
    for name, value in (
        ("sample_index_R", 4),
        ("drawn_position_R", np.arange(NUM_ROWS) + 1),
        ("seed_R2", seeds ^ 1),
    ):
        other = inputs_for(**{"seed_R2": seeds, **fields, name: value})
        assert (np.asarray(run_draw(logits, other)) != plain).mean() > 0.3


def test_rows_one_by_one_and_all_at_once_agree():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((NUM_ROWS, VOCAB)).astype(np.float32) * 3
    packed = inputs_for(
        temperature_R=rng.choice([0.0, 0.7, 1.0], NUM_ROWS),
        top_k_R=rng.integers(0, VOCAB, NUM_ROWS),
        top_p_R=rng.uniform(0.2, 1.0, NUM_ROWS),
        drawn_position_R=np.arange(NUM_ROWS),
    )
    np.testing.assert_array_equal(
        run_draw(logits, packed, by_row=True), run_draw(logits, packed, by_row=False)
    )


def test_a_draw_has_the_same_bits_whatever_the_others_ask_for():
    """Rows that are computed at once are cut off, and have noise."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((8, 400)).astype(np.float32) * 3
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = [plain, {**plain, "top_k": 5}, {**plain, "top_p": 0.7}, {**plain, "min_p": 0.2}]

    @jax.jit
    def run(temperature_R, top_k_R, top_p_R, min_p_R):
        index_R = jnp.arange(8)
        draws = Draws(
            temperature_R,
            top_k_R,
            top_p_R,
            min_p_R,
            jnp.zeros((8, 2), jnp.uint32),
            index_R,
            index_R,
        )
        return perturb_logits(jnp.asarray(logits), draws, jnp.array(True), by_row=False)

    def bits(others, temperature):
        rows = [*settings, *[{**plain, **others}] * 4]
        temperatures = np.array([1.0] * 4 + [temperature] * 4, np.float32)
        values = [
            np.array([row[name] for row in rows], dtype)
            for name, dtype in zip(plain, "iff", strict=True)
        ]
        return np.asarray(run(temperatures, *values))[:4]

    alone = bits({}, 0.0)
    assert np.isfinite(alone).sum(axis=1)[0] == 400 > np.isfinite(alone).sum(axis=1)[1:].max()
    for others in (
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    ):
        for temperature in (0.0, 0.7):
            np.testing.assert_array_equal(bits(others, temperature), alone)


def test_what_no_draw_asks_for_is_not_computed():
    """Rows are computed at once: each bisection is in a branch of its own, inside that of steps
    with any random draw.

    It is there once for processed rows, which have a loop of their own, and once for the others.
    """

    def loops(jaxpr, depth=0):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("while", "scan"):
                yield depth
            inside = depth + (equation.primitive.name == "cond")
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")
            ):
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    yield from loops(getattr(value, "jaxpr", value), inside)

    traced = jax.make_jaxpr(functools.partial(run_draw, by_row=False))(
        np.zeros((NUM_ROWS, VOCAB), np.float32), inputs_for()
    )
    # some rows at a time; top-k; top-p, in "top-p or min-p"
    assert sorted(loops(traced.jaxpr)) == [1, 3, 3, 4, 4]


def test_greedy_takes_the_first_of_the_largest_and_respects_suppression():
    logits = np.zeros((NUM_ROWS, VOCAB), np.float32)
    logits[:, [2, 5]] = 1.0
    for random in (0, 1):
        packed = inputs_for(flags=flags_of(RANDOM=random))
        assert set(np.asarray(run_draw(logits, packed)).tolist()) == {2}
        masked = NEUTRAL._replace(mask_RU=np.full_like(NEUTRAL.mask_RU, ~np.uint32(1 << 2)))
        packed = inputs_for(flags=flags_of(RANDOM=random, MASKED=1))
        assert set(np.asarray(run_draw(logits, packed, masked)).tolist()) == {5}


def test_logits_without_a_number_to_choose_by_give_minus_one():
    logits = np.zeros((NUM_ROWS, VOCAB), np.float32)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    for temperature in (0.0, 1.0):
        tokens = np.asarray(run_draw(logits, inputs_for(temperature_R=temperature)))
        assert tokens[:2].tolist() == [-1, -1] and (tokens[2:] >= 0).all()


@pytest.mark.parametrize("by_row", [True, False])
def test_log_probabilities_and_ranks(by_row):
    logits = np.random.default_rng(3).standard_normal((5, 30)).astype(np.float32) * 4
    token_ids = np.array([0, 5, 29, 7, int(logits[4].argmax())], np.int32)
    chosen, ranks, top_ids, top = jax.jit(functools.partial(log_probabilities, by_row=by_row))(
        jnp.asarray(logits), token_ids
    )
    wide = logits.astype(np.float64)
    expected = (
        wide
        - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - wide.max(-1, keepdims=True)
    )
    rows = np.arange(5)
    np.testing.assert_allclose(chosen, expected[rows, token_ids], atol=1e-5)
    np.testing.assert_array_equal(ranks, 1 + (wide > wide[rows, token_ids][:, None]).sum(-1))
    np.testing.assert_array_equal(top_ids, np.argsort(-wide, axis=-1)[:, :NUM_CANDIDATES])
    np.testing.assert_allclose(
        top, np.take_along_axis(expected, np.asarray(top_ids), -1), atol=1e-5
    )
