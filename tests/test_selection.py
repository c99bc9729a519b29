"""Kernels that select in rows of logits, interpreted: a draw keeps the same as without kernels, and
log probabilities are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device import sampler
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.selection_kernels import selection_kernels
from jaxpage.device.token_logprobs import log_probabilities
from jaxpage.device.truncation import truncate
from jaxpage.shapes import NOT_FINITE, NOTHING_ALLOWED
from pallas_kernels import selection
from pallas_kernels.triton import select
from tests.support.distributions import kept
from tests.support.sweeps import few
from tests.test_sampler import NEUTRAL, NUM_ROWS, VOCAB, flags_of, inputs_for, run_draw

KERNELS = Backend("triton", interpret=True)
V = 300  # of three tiles, the last of which is not full


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "TILE", 128)
        jax.clear_caches()
        yield
    jax.clear_caches()


def rows_of_logits() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal(V).astype(np.float32)
    masked = np.where(rng.random(V) < 0.9, -np.inf, plain * 4).astype(np.float32)
    dyadic = np.full(V, -np.inf, np.float32)
    dyadic[[7, 3, 200]] = np.log(np.float32([0.5, 0.25, 0.25]))
    return {
        "flat": plain * np.float32(0.01),
        "plain": plain,
        "peaked": plain * np.float32(8.0),
        "far": plain * np.float32(3.0) - np.float32(1000.0),
        "tiny": plain * np.float32(1e-30),
        "ties": np.round(plain * 2),
        "level": np.zeros(V, np.float32),
        "masked": masked,
        "one": np.where(np.arange(V) == 299, plain, -np.inf).astype(np.float32),
        "dyadic": dyadic,
    }


CUTS = [  # top_k, top_p, min_p
    *((0, 1.0, 0.0), (1, 1.0, 0.0), (50, 1.0, 0.0), (V - 1, 1.0, 0.0), (V, 1.0, 0.0)),
    *((0, 0.5, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (0, 1e-30, 0.0)),
    *((3, 0.5, 0.0), (40, 0.8, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0), (7, 0.95, 0.3), (0, 0.7, 0.02)),
]


def all_rows() -> tuple[list[str], tuple[np.ndarray, ...]]:
    """Returns every kind of row with every cut."""
    names, logits, cuts = [], [], []
    for name, row in rows_of_logits().items():
        for cut in CUTS:
            names.append(f"{name} {cut}")
            logits.append(row)
            cuts.append(cut)
    top_k, top_p, min_p = zip(*cuts, strict=True)
    arrays = np.stack(logits), np.int32(top_k), np.float32(top_p), np.float32(min_p)
    return names, arrays


def keep_by_kernel(
    logits_RV: np.ndarray, temperature_R: np.ndarray, *cuts: np.ndarray
) -> np.ndarray:
    min_R = select.cutoffs(logits_RV, logits_RV.max(axis=1), temperature_R, *cuts, interpret=True)
    return np.asarray(logits_RV >= np.asarray(min_R)[:, None])


@functools.partial(jax.jit, static_argnames="by_row")
def keep_without(
    logits_RV: jax.Array, temperature_R: jax.Array, *cuts: jax.Array, by_row: bool
) -> jax.Array:
    def row(logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array) -> jax.Array:
        return truncate(logits_V / temperature, *cuts, by_row=by_row) > -jnp.inf

    rows = logits_RV, temperature_R, *cuts
    return jax.lax.map(lambda each: row(*each), rows) if by_row else jax.vmap(row)(*rows)


@pytest.mark.parametrize("temperature", few([1.0, 0.7], [1.0]))
def test_the_kernel_keeps_what_is_kept_without_it(temperature: float) -> None:
    """The oracles are rows one by one, as a CPU draws from them, rows at once, whose sums are
    exact, and a sort in float64.
    """
    names, (logits_RV, *cuts) = all_rows()
    temperature_R = np.full(len(names), temperature, np.float32)
    actual = keep_by_kernel(logits_RV, temperature_R, *cuts) & (logits_RV > -np.inf)
    for by_row in (True, False):
        expected = np.asarray(keep_without(logits_RV, temperature_R, *cuts, by_row=by_row))
        assert [
            name
            for name, mask, other in zip(names, actual, expected, strict=True)
            if (mask != other).any()
        ] == []
    if temperature != 1.0:
        return
    for name, row, logits_V, cut in zip(
        names, actual, logits_RV, zip(*cuts, strict=True), strict=True
    ):
        # whose likelihoods are equal in float32, and not in float64
        if not name.startswith(("tiny", "far")):
            expected = kept(logits_V, int(cut[0]), *map(float, cut[1:])) & (logits_V > -np.inf)
            np.testing.assert_array_equal(row, expected, err_msg=name)


@pytest.mark.parametrize("processed", few([False, True], [True]))
def test_draws_are_those_without_kernels(processed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bit for bit; with a mask in every row too, where some rows are processed at a time,
    and a few of them twice.
    """
    monkeypatch.setattr(sampler, "PROCESSED_AT_ONCE", 24)
    assert NUM_ROWS % sampler.PROCESSED_AT_ONCE
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((NUM_ROWS, VOCAB)).astype(np.float32) * 3
    logits[0, 3], logits[1] = np.nan, -np.inf
    logits[2] = np.where(np.arange(VOCAB) == 1, 1.0, -np.inf)
    packed = inputs_for(
        flags=flags_of(RANDOM=1, MASKED=int(processed)),
        temperature_R=rng.choice([0.0, 0.7, 1.0, 2.5], NUM_ROWS),
        top_k_R=rng.integers(0, VOCAB + 1, NUM_ROWS),
        top_p_R=rng.choice([0.3, 0.9, 1.0], NUM_ROWS),
        min_p_R=rng.choice([0.0, 0.2], NUM_ROWS),
        seed_R2=rng.integers(0, 2**32, (NUM_ROWS, 2), dtype=np.uint32),
        drawn_position_R=np.arange(NUM_ROWS),
    )
    masks = NEUTRAL._replace(mask_RU=np.full_like(NEUTRAL.mask_RU, ~np.uint32(1 << 1)))
    expected = np.asarray(run_draw(logits, packed, masks, by_row=True))
    with selection_kernels(KERNELS):
        actual = np.asarray(
            jax.jit(functools.partial(run_draw.__wrapped__, by_row=False))(logits, packed, masks)
        )
    np.testing.assert_array_equal(actual, expected)
    assert actual[:3].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED if processed else 1]
    assert len(set(actual[3:].tolist())) == VOCAB - processed


def as_bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.int32)


@pytest.mark.parametrize("num_tokens", few([V, 40], [V]))  # more than are kept, and fewer
def test_log_probabilities_are_those_without_kernels(num_tokens: int) -> None:
    """They are so bit for bit, and equal ones are in the order of their ids."""
    logits = np.stack(list(rows_of_logits().values()))[:, :num_tokens]
    logits[logits.max(axis=1) == -np.inf] = 0.0
    token_ids = np.arange(len(logits), dtype=np.int32)
    expected = jax.jit(functools.partial(log_probabilities, by_row=False))(logits, token_ids)
    with selection_kernels(KERNELS):
        actual = jax.jit(functools.partial(log_probabilities, by_row=False))(logits, token_ids)
    for array, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(as_bits(array), as_bits(other))


def test_rows_of_nan_end() -> None:
    logits = np.full((2, V), np.nan, np.float32)
    logits[1, 5] = 1.0
    ones = np.ones(2, np.float32)
    select.cutoffs(
        logits, logits.max(axis=1), ones, np.int32([5, 5]), 0.5 * ones, 0.0 * ones, interpret=True
    )
    values, ids = select.top_candidates(logits, ones, ones, 8, interpret=True)
    assert ids[1, 0] == 5 and np.isneginf(values[1, 1:]).all() and (np.asarray(ids) < V).all()


def test_sums_are_exact() -> None:
    """Weights of 44 bits are compared with integers of Python; and a float of a sum does not depend
    on how it was divided.
    """
    rng = np.random.default_rng(1)
    for scale in (1.0, 1e-3, 1e-9, 1e-14):
        likelihood = (rng.random(5000) * scale).astype(np.float32)
        likelihood[:3] = 0.0, 1e-42, scale
        high, low = (
            np.asarray(half).astype(object) for half in selection.weights(jnp.asarray(likelihood))
        )
        expected = [int(float(value) * 2**44) for value in likelihood]
        assert list(high * 2**22 + low) == expected
        assert float(selection.mass_of(jnp.asarray(likelihood))) == pytest.approx(
            sum(expected), rel=2**-22
        )
    with pytest.raises(ValueError, match="1048576 tokens"):
        jax.eval_shape(selection.mass_of, jax.ShapeDtypeStruct((2**20,), jnp.float32))


def _more_than_enough(narrowed: Callable[..., select.Bracket]) -> Callable[..., select.Bracket]:
    """Lets one number too many stay in."""
    return lambda *arguments: narrowed(*arguments)._replace(
        low=narrowed(*arguments).low - (1 << 20)
    )


MISTAKES: dict[str, tuple[str, object]] = {
    "the search ends early": ("_narrow", _more_than_enough),
    "low halves are lost": (
        "weights",
        lambda weights: lambda x: (weights(x)[0], 0 * weights(x)[1]),
    ),
    "the last tile is lost": (
        "pl",
        lambda pl: type("Planted", (), {**vars(pl), "cdiv": staticmethod(lambda a, b: a // b)}),
    ),
    "keys are bits": (
        "value_of",
        lambda _: lambda key: jax.lax.bitcast_convert_type(key, jnp.float32),
    ),
}


@pytest.mark.parametrize("mistake", few(MISTAKES, ["low halves are lost"]))
def test_planted_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = MISTAKES[mistake]
    _, (logits_RV, *cuts) = all_rows()
    ones_R = np.ones(len(logits_RV), np.float32)
    expected = np.asarray(keep_without(logits_RV, ones_R, *cuts, by_row=False))
    jax.clear_caches()
    monkeypatch.setattr(select, name, plant(getattr(select, name)))  # type: ignore[operator]
    actual = keep_by_kernel(logits_RV, ones_R, *cuts) & (logits_RV > -np.inf)
    jax.clear_caches()
    assert (actual != expected).any()
