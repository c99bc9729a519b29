"""Times a call on the device, as one of many in a single program.

A kernel here takes ten microseconds, and its dispatch from Python takes as long or longer, so
single calls are not timed. One jitted program makes many calls: a `fori_loop` whose trip count the
compiler knows (so the host never waits between turns), each turn a step of a model of L layers:

    step n    layer 0 ──out──▶ layer 1 ──▶ ... ──▶ layer L - 1 ──▶ queries of step n + 1
              pages 0          pages 1             pages L - 1     together larger than the cache

The calls depend on each other, so none is left out or overlaps, and no other operation comes
between them. The pages of the L layers together are larger than the last-level cache
(`num_layers`), so a call finds nothing of its keys and values in it. An optimisation barrier ties
the block tables to the queries once per turn, so what a backend prepares per step is prepared anew
each turn and shared by the layers, as in the engine. The XLA backends get a barrier for each call,
or else XLA gathers all layers' pages at once.

A time includes everything that a call launches, the gaps between those kernels, 1/L of a step's
preparation, and its part of one dispatch per program. It does not include Python and the dispatch
of a lone call.
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
from tools.lab.kernel_lab.bounds import work
from tools.lab.kernel_lab.kernel_cases import Case, Pages, Step
from tools.lab.kernel_lab.specs import Spec

# This is 2.5 times the L2 of an H100 or H200 (50 MiB), and all of a B200's (126 MiB).
CACHE_BYTES = 128 * 2**20
POOL_BYTES = 12 * 2**30  # the most bytes of all layers' pages together


@dataclass(frozen=True)
class Timing:
    """Holds the time of a call.

    Attributes:
        seconds: The median over the rounds, for one call.
        spread: (slowest - fastest) / median of the rounds.
        calls: The calls of a round.
        rounds: The number of rounds.
        compile_seconds: The time that compiling took.
    """

    seconds: float
    spread: float
    calls: int
    rounds: int
    compile_seconds: float = 0.0


def num_layers(spec: Spec, minimum: int = 4, maximum: int = 16) -> int:
    """Returns how many sets of pages make the cache useless and still fit."""
    kv_bytes = max(1, work(spec).kv_bytes)
    return max(1, min(max(minimum, -(-CACHE_BYTES // kv_bytes)), maximum, POOL_BYTES // kv_bytes))


def stays_in_cache(spec: Spec, layers: int) -> bool:
    """Returns whether the keys and values of all layers fit in the cache."""
    return work(spec).kv_bytes * layers < CACHE_BYTES


def steps(
    case: Case, num_steps: int, *, backend: str, tiles: Tiles | None = None, interpret: bool = False
) -> Callable[[jax.Array, Step, tuple[Pages, ...]], jax.Array]:
    """Returns a function of (q_TNH, step, layers) that makes `num_steps` turns; jit it."""
    # The function is jitted by itself, so that it is traced and lowered once and not for each
    # layer; XLA inlines it.
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
    """Runs once to warm up, then `rounds` times, and waits for each.

    Rounds that would pass the limit are left out, but one is always run.
    """
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
    """Holds the compiled turns over a case's layers."""

    run: Callable[..., jax.Array]
    calls: int
    compile_seconds: float


def compile_case(
    case: Case,
    *,
    backend: str,
    tiles: Tiles | None = None,
    interpret: bool = False,
    min_seconds: float | None = None,
    round_s: float = 0.02,
) -> Program:
    """Compiles the program that times a case.

    Args:
        case: The case.
        backend: The kernel set.
        tiles: The tiles; None for the kernel set's choice.
        interpret: Kernels are interpreted.
        min_seconds: The time of a call at the ceiling, which sets how many calls fill a round;
            None for one step in a round.
        round_s: The wanted time of a round.

    Raises:
        NotImplementedError: The backend refuses the call. Compiling may also raise other errors, of
            memory or of the compiler.
    """
    layers = len(case.layers)
    num_steps = 1
    if min_seconds is not None:
        expected = min_seconds * (20 if backend in XLA_BACKENDS else 2) * layers
        num_steps = max(1, min(500, round(round_s / expected)))
    began = time.perf_counter()
    program = jax.jit(steps(case, num_steps, backend=backend, tiles=tiles, interpret=interpret))
    run = program.lower(case.q_TNH, case.step, case.layers).compile()
    return Program(run, num_steps * layers, time.perf_counter() - began)


def time_program(program: Program, case: Case, *, rounds: int = 7, limit_s: float = 2.0) -> Timing:
    """Times the compiled program."""
    timing = median_of_rounds(
        lambda: program.run(case.q_TNH, case.step, case.layers),
        program.calls,
        rounds=rounds,
        limit_s=limit_s,
    )
    return dataclasses.replace(timing, compile_seconds=program.compile_seconds)


def time_case(case: Case, *, limit_s: float = 2.0, rounds: int = 7, **options: Any) -> Timing:
    """Compiles a case and times it; `options` are those of `compiled`."""
    return time_program(compile_case(case, **options), case, rounds=rounds, limit_s=limit_s)
