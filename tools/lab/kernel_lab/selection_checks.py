"""Checks selection in rows of logits against a sort in float64, and times 256 rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.sets import SETS
from tools.lab.kernel_lab.findings import FAILED, PASSED, Finding, LeftOut, Table, judge
from tools.lab.kernel_lab.machine_ceilings import measure
from tools.lab.kernel_lab.timing import median_of_rounds

CUTS = [  # top_k, top_p, min_p
    *(
        (1, 1.0, 0.0),
        (50, 1.0, 0.0),
        (1000, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.95, 0.0),
        (0, 0.999, 0.0),
    ),
    *((50, 0.9, 0.0), (0, 1.0, 0.1), (0, 0.9, 0.02), (3, 0.5, 0.0)),
]
SCALES = (0.1, 1.0, 4.0)  # scales of random logits: from flat to peaked
NUM_TOP = 64
MASS_ERROR = 1e-5  # the error that a device's exponentials may add up to
TIMED_ROWS, VOCAB_SIZE, NUM_CALLS = 256, 128256, 20


def findings(*, interpret: bool, small: bool) -> Iterator[Finding]:
    """Yields the findings of the first kernel set that selects."""
    selection = next((each.selection for each in SETS.values() if each.selection), None)
    if selection is None:
        raise LeftOut("no kernel set selects in rows of logits")
    cutoffs = functools.partial(selection.cutoffs, interpret=interpret)
    top_candidates = functools.partial(selection.top_candidates, interpret=interpret)
    vocab_size = 1000 if small else VOCAB_SIZE
    yield judge("sampler: cut-offs", functools.partial(_cutoffs, cutoffs, vocab_size))
    yield judge(
        "sampler: most likely", functools.partial(_top_candidates, top_candidates, vocab_size)
    )
    yield judge("sampler: timings", functools.partial(_timings, cutoffs, top_candidates, small))


def _rows(vocab_size: int) -> tuple[npt.NDArray[np.float32], list[tuple[int, float, float]]]:
    """Returns every cut with every kind of row; the last kind has ties and masked tokens."""
    rng = np.random.default_rng(0)
    kinds = [rng.standard_normal(vocab_size) * scale for scale in SCALES]
    kinds.append(
        np.where(
            rng.random(vocab_size) < 0.5, -np.inf, np.round(rng.standard_normal(vocab_size) * 3)
        )
    )
    logits = np.stack([kind for kind in kinds for _ in CUTS]).astype(np.float32)
    return logits, CUTS * len(kinds)


def _cutoffs(cutoffs: Callable[..., jax.Array], vocab_size: int) -> Finding:
    logits_RV, cuts = _rows(vocab_size)
    top_k, top_p, min_p = (np.array(each) for each in zip(*cuts, strict=True))
    requested = top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32)
    min_R = np.asarray(
        jax.jit(cutoffs)(
            logits_RV, logits_RV.max(axis=1), np.ones(len(cuts), np.float32), *requested
        )
    )
    wrong = [
        f"row {row}, {cut}"
        for row, (logits_V, minimum, cut) in enumerate(zip(logits_RV, min_R, cuts, strict=True))
        if not _is_right(logits_V.astype(np.float64), float(minimum), *cut)
    ]
    summary = f"{len(cuts) - len(wrong)} of {len(cuts)} rows keep what a sort in float64 keeps"
    return Finding("sampler: cut-offs", FAILED if wrong else PASSED, summary, data={"wrong": wrong})


def _is_right(
    logits_V: npt.NDArray[np.float64], minimum: float, top_k: int, top_p: float, min_p: float
) -> bool:
    """Returns whether all is kept that must be, and nothing that must not.

    Between the two lies what depends on the error of exponentials and their sums.
    """
    allowed_V = logits_V >= (np.sort(logits_V)[-top_k] if top_k else -np.inf)
    likelihood_V = np.where(allowed_V, np.exp(logits_V - logits_V.max()), 0.0)
    sorted_V = np.sort(likelihood_V)
    up_to_V = np.append(0.0, np.cumsum(sorted_V)) / sorted_V.sum()
    # The share of the mass of more likely tokens.
    above_V = 1.0 - up_to_V[np.searchsorted(sorted_V, likelihood_V, side="right")]

    def mask_of(error: float) -> npt.NDArray[np.bool_]:
        reaches_V = likelihood_V >= min_p * (1.0 - error)
        return allowed_V & reaches_V & ((above_V < top_p + error) | (top_p == 1.0)) | (
            likelihood_V == 1.0
        )

    is_kept_V = logits_V >= minimum
    return bool(
        (is_kept_V >= mask_of(-MASS_ERROR)).all() and (is_kept_V <= mask_of(MASS_ERROR)).all()
    )


def _top_candidates(top_candidates: Callable[..., Any], vocab_size: int) -> Finding:
    logits_RV = _rows(vocab_size)[0][:: len(CUTS)]
    largest_R, nothing_R = logits_RV.max(axis=1), np.zeros(len(logits_RV), np.float32)
    select = jax.jit(top_candidates, static_argnums=3)
    values_RW, ids_RW = map(np.asarray, select(logits_RV, largest_R, nothing_R, NUM_TOP))
    logits_RV = logits_RV - largest_R[:, None]
    order_RW = np.argsort(-values_RW, axis=1, kind="stable")
    got_RW = np.take_along_axis(ids_RW, order_RW, axis=1)
    want_RW = np.argsort(-logits_RV, axis=1, kind="stable")[:, :NUM_TOP]
    same = bool(
        (got_RW == want_RW).all() and (np.take_along_axis(logits_RV, ids_RW, 1) == values_RW).all()
    )
    summary = (
        "the tokens of a stable sort"
        if same
        else f"{int((got_RW != want_RW).sum())} tokens differ from a sort"
    )
    return Finding("sampler: most likely", PASSED if same else FAILED, summary)


def _timings(
    cutoffs: Callable[..., jax.Array], top_candidates: Callable[..., Any], small: bool
) -> Finding:
    """Times each operation, as one call among many.

    The ceiling is one reading of the logits at the speed of a copy.
    """
    num_rows, vocab_size, num_calls = (2, 300, 1) if small else (TIMED_ROWS, VOCAB_SIZE, NUM_CALLS)
    copied = None if small else measure().copied
    table = Table(
        f"Selection in {num_rows} rows of {vocab_size} logits",
        ["operation", "logits", "us", "readings"],
    )
    data: list[dict[str, Any]] = []
    for scale in SCALES[:1] if small else SCALES:
        logits_RV = (
            jax.random.normal(jax.random.key(0), (num_rows, vocab_size), jnp.float32) * scale
        )
        for name, run in _works(cutoffs, top_candidates, num_rows).items():
            seconds = _seconds(run, logits_RV, num_calls)
            readings = "-" if copied is None else f"{seconds * copied / logits_RV.nbytes:.1f}"
            table.rows.append([name, f"x {scale:g}", f"{seconds * 1e6:.1f}", readings])
            data.append({"operation": name, "scale": scale, "seconds": seconds})
    return Finding(
        "sampler: timings", PASSED, f"{len(data)} timed", tables=[table], data={"rows": data}
    )


def _works(
    cutoffs: Callable[..., jax.Array], top_candidates: Callable[..., Any], num_rows: int
) -> dict[str, Any]:
    """Returns functions of the logits that return a number for each row."""

    def cut(top_k: int, top_p: float) -> Callable[[jax.Array], jax.Array]:
        def run(logits_RV: jax.Array) -> jax.Array:
            cuts = jnp.full(num_rows, top_k), jnp.full(num_rows, top_p), jnp.zeros(num_rows)
            return cutoffs(logits_RV, logits_RV.max(axis=1), jnp.ones(num_rows), *cuts)

        return run

    def log_probabilities(logits_RV: jax.Array) -> jax.Array:
        nothing_R = jnp.zeros(num_rows)
        values_RW: jax.Array = top_candidates(logits_RV, logits_RV.max(axis=1), nothing_R, NUM_TOP)[
            0
        ]
        return values_RW[:, 0]

    return {
        "top-k 50": cut(50, 1.0),
        "top-p 0.95": cut(0, 0.95),
        "top-k 50, top-p 0.95": cut(50, 0.95),
        f"most likely {NUM_TOP}": log_probabilities,
        "largest (one reading)": lambda logits_RV: logits_RV.max(axis=1),
    }


def _seconds(run: Callable[[jax.Array], jax.Array], logits_RV: jax.Array, num_calls: int) -> float:
    """Times one call among many, each of which waits for the one before it."""

    def program(logits_RV: jax.Array) -> jax.Array:
        def turn(_: jax.Array, previous_R: jax.Array) -> jax.Array:
            _, now_RV = jax.lax.optimization_barrier((previous_R, logits_RV))
            return run(now_RV)

        return jax.lax.fori_loop(0, num_calls, turn, jnp.zeros(logits_RV.shape[0]))

    compiled = jax.jit(program).lower(logits_RV).compile()
    return median_of_rounds(lambda: compiled(logits_RV), num_calls).seconds
