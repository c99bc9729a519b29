"""How long a call takes on the device.

A kernel here takes ten microseconds and its dispatch from Python takes as long or longer, so single calls are not timed. One jitted
program makes many: a `fori_loop` with a trip count that the compiler knows (so the host never waits between turns), each turn a step of
a model of L layers. Layer l attends over its own pages, under the block table of the step, with the output of layer l - 1 as its
queries: the calls depend on each other, so none is left out or overlaps, and no other operation comes between them. The pages of the L
layers together are larger than the last-level cache (`num_layers`), so a call finds nothing of its keys and values in it. An
optimisation barrier ties the block tables to the queries once per turn, so what a backend prepares per step is prepared anew each turn
and shared by the layers, as in the engine; the XLA backends get a barrier per call, else XLA gathers all layers' pages at once.

What a time includes: everything that a call launches, the gaps between those kernels, 1/L of a step's preparation, and one dispatch per
program, which its many calls make small. What it leaves out: Python and the dispatch of a lone call.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.sets import XLA_BACKENDS
from pallas_kernels.tiles import Tiles
from tools.kernel_lab.bounds import work
from tools.kernel_lab.kernel_cases import Case, Pages, Step
from tools.kernel_lab.specs import Spec

# twice and a half the L2 of an H100 or H200, 50 MiB; of a B200 the whole, 126 MiB
CACHE_BYTES = 128 * 2**20
POOL_BYTES = 12 * 2**30  # of all layers' pages together


@dataclass(frozen=True)
class Timing:
    """seconds: of one call, the median over the rounds. spread: (slowest - fastest) / median of the rounds."""

    seconds: float
    spread: float
    calls: int  # of a round
    rounds: int
    compile_seconds: float = 0.0


def num_layers(spec: Spec, fewest: int = 4, most: int = 16) -> int:
    """How many sets of pages make the cache useless, and still fit."""
    kv_bytes = max(1, work(spec).kv_bytes)
    return max(1, min(max(fewest, -(-CACHE_BYTES // kv_bytes)), most, POOL_BYTES // kv_bytes))


def stays_in_cache(spec: Spec, layers: int) -> bool:
    """Whether all layers' keys and values are too few to leave the cache."""
    return work(spec).kv_bytes * layers < CACHE_BYTES


def steps(
    case: Case, num_steps: int, *, backend: str, tiles: Tiles | None = None, interpret: bool = False
) -> Callable[[jax.Array, Step, tuple[Pages, ...]], jax.Array]:
    """A function of (q_TNH, step, layers) that makes `num_steps` turns; jit it."""
    # Jitted by itself, so that it is traced and lowered once and not per layer; XLA inlines it.
    attend = jax.jit(
        functools.partial(case.attend, backend=backend, tiles=tiles, interpret=interpret)
    )
    barrier_per_call = backend in XLA_BACKENDS

    def program(q_TNH: jax.Array, step: Step, layers: tuple[Pages, ...]) -> jax.Array:
        def turn(_: jax.Array, x_TNH: jax.Array) -> jax.Array:
            for layer, pages in enumerate(layers):
                if layer == 0 or barrier_per_call:
                    x_TNH, now = jax.lax.optimization_barrier((x_TNH, step))
                x_TNH = attend(x_TNH, now, pages)
            return x_TNH

        return jax.lax.fori_loop(0, num_steps, turn, q_TNH)

    return program


def median_of_rounds(
    run: Callable[[], Any],
    calls: int,
    *,
    rounds: int = 7,
    limit_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Runs once to warm up, then `rounds` times, each waited for; fewer where the limit would be passed, but one at least."""
    began = clock()
    jax.block_until_ready(run())
    first = clock() - began
    rounds = max(1, min(rounds, int(limit_s / max(first, 1e-9))))
    taken = []
    for _ in range(rounds):
        began = clock()
        jax.block_until_ready(run())
        taken.append(clock() - began)
    median = statistics.median(taken)
    return Timing(median / calls, (max(taken) - min(taken)) / max(median, 1e-12), calls, rounds)


@dataclass(frozen=True)
class Program:
    """Compiled turns over a case's layers."""

    run: Callable[..., jax.Array]
    calls: int
    compile_seconds: float


def compiled(
    case: Case,
    *,
    backend: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
    least_seconds: float | None = None,
    round_s: float = 0.02,
) -> Program:
    """least_seconds: what a call takes at the ceiling, which fixes how many calls fill a round of `round_s`; None for one step a round.

    Raises what compiling raises: NotImplementedError for a refusal, others for memory or the compiler.
    """
    layers = len(case.layers)
    num_steps = 1
    if least_seconds is not None:
        expected = least_seconds * (20 if backend in XLA_BACKENDS else 2) * layers
        num_steps = max(1, min(500, round(round_s / expected)))
    began = time.perf_counter()
    program = jax.jit(steps(case, num_steps, backend=backend, tiles=tiles, interpret=interpret))
    run = program.lower(case.q_TNH, case.step, case.layers).compile()
    return Program(run, num_steps * layers, time.perf_counter() - began)


def time_program(program: Program, case: Case, *, rounds: int = 7, limit_s: float = 2.0) -> Timing:
    timing = median_of_rounds(
        lambda: program.run(case.q_TNH, case.step, case.layers),
        program.calls,
        rounds=rounds,
        limit_s=limit_s,
    )
    return dataclasses.replace(timing, compile_seconds=program.compile_seconds)


def time_case(case: Case, *, limit_s: float = 2.0, rounds: int = 7, **options: Any) -> Timing:
    """options: of `compiled`."""
    return time_program(compiled(case, **options), case, rounds=rounds, limit_s=limit_s)
