"""Measures the steps of an engine, by their shapes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpage.assembly import Built
from jaxpage.assembly.planning import MemoryPlan
from jaxpage.bench.studies.roofline import start_decoding, start_request
from jaxpage.bench.workloads import SHORT_PROMPT
from jaxpage.engine import Engine

LONG_PROMPT = 512  # tokens of the prompt of a row with a long context
STEPS = 12  # measured decode steps of a kind, after as many for warm-up; their median counts
CHUNKS = 3  # measured prompt chunks of a kind, after one for warm-up


class ShapeTimes(NamedTuple):
    """Holds the seconds of steps of full shapes.

    Attributes:
        decode: Rows, from few to many, and the seconds of a decode step.
        chunk: Query tokens, from few to many, rows, and the seconds of a prompt chunk.
        context_token: The seconds for each token of context of a decoding row.
    """

    decode: tuple[tuple[int, float], ...]
    chunk: tuple[tuple[int, int, float], ...]
    context_token: float


def _max_rows(memory: MemoryPlan, num_tokens: int) -> int:
    """Returns how many sequences of this length the pool holds; one block stays free."""
    return (memory.num_blocks - 1) // memory.blocks_for(num_tokens)


def measure_shapes(built: Built) -> ShapeTimes:
    """Measures steps of full shapes on an idle engine without a prefix cache."""
    engine = built.engine
    fitting = functools.partial(_max_rows, built.memory)
    menu = built.spec.menu
    maximum = min(built.spec.limits.max_rows, fitting(2 * SHORT_PROMPT + 4 * STEPS))
    rows = sorted({min(bucket.num_rows, maximum) for bucket in menu.decode})
    decode = tuple((num_rows, _decoding(engine, num_rows, SHORT_PROMPT)) for num_rows in rows)
    long = min(LONG_PROMPT, built.max_model_len - 4 * STEPS - 1)
    max_long = fitting(long + 4 * STEPS)
    num_long = max((num_rows for num_rows in rows if num_rows <= max_long), default=1)
    beyond = _decoding(engine, num_long, long) - dict(decode)[num_long]
    max_length = built.max_model_len - 1
    sizes = {min(bucket.num_tokens, max_length): bucket.num_rows for bucket in menu.chunk}
    chunk = tuple(
        (tokens, num_rows, _computing(engine, tokens)) for tokens, num_rows in sorted(sizes.items())
    )
    # Noise may make the difference negative.
    return ShapeTimes(decode, chunk, max(0.0, beyond / (num_long * max(1, long - SHORT_PROMPT))))


def _decoding(engine: Engine, num_rows: int, context: int) -> float:
    start_decoding(engine, num_rows, context)
    seconds = _time_calls(engine.step, 2 * STEPS)[STEPS:]
    engine.abort_all()
    return statistics.median(seconds)


def _computing(engine: Engine, num_tokens: int) -> float:
    def prompt() -> None:
        reporter = start_request(engine, num_tokens, 1)
        while not reporter.num_output_tokens:
            engine.step()

    return statistics.median(_time_calls(prompt, 1 + CHUNKS)[1:])


def _time_calls(call: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds
