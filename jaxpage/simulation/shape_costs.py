"""Measures or reads what the steps of an engine cost on this machine, by their shapes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpage.assembly import Built
from jaxpage.bench.roofline import start_decoding, start_request
from jaxpage.engine.engine import Engine
from jaxpage.simulation.costs import AnalyticCost, CostModel
from jaxpage.step.plan import StepPlan

SHORT, LONG = 16, 512  # tokens of the prompt of a decoding row
STEPS = 12  # measured decode steps of a kind, after as many for warm-up; their median counts
CHUNKS = 3  # measured prompt chunks of a kind, after one for warm-up


@dataclass(frozen=True)
class ShapeCost:
    """Computes the seconds of a step from the measured times of an engine's shapes.

    A step costs what the smallest shape that holds it costs, padding included, and the reading of
    its context. The engine made the measured steps, so planning, batch and commit are part of them;
    HTTP and texts are not. Swapping is not measured: plans with these costs recompute.

    Attributes:
        decode: Pairs (rows, seconds) in ascending order.
        chunk: Triples (query tokens, rows, seconds) in ascending order.
        context_token: The seconds for each token in the context of a decoding row.
    """

    decode: tuple[tuple[int, float], ...]
    chunk: tuple[tuple[int, int, float], ...]
    context_token: float

    def compute_seconds(self, plan: StepPlan) -> float:
        """Returns the seconds from the plan of a step to its draws."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        context = sum(
            [max(0, row.context_length - SHORT) for row in plan.rows if len(row.token_ids) == 1]
        )
        if num_tokens == num_rows:
            fitting = [seconds for rows, seconds in self.decode if rows >= num_rows]
            step = fitting[0] if fitting else self.decode[-1][1] * num_rows / self.decode[-1][0]
        else:
            fitting = [
                seconds
                for tokens, rows, seconds in self.chunk
                if tokens >= num_tokens and rows >= num_rows
            ]
            step = fitting[0] if fitting else self.chunk[-1][2] * num_tokens / self.chunk[-1][0]
        return step + self.context_token * context

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        """Returns 0, because swapping is not measured."""
        return 0.0


def measure(built: Built) -> ShapeCost:
    """Measures steps of full shapes on an idle engine without a prefix cache."""
    engine, memory, menu = built.engine, built.memory, built.spec.menu
    most = min(
        built.spec.limits.max_rows,
        (memory.num_blocks - 1) // memory.blocks_for(2 * SHORT + 4 * STEPS),
    )
    rows = sorted({min(bucket.num_rows, most) for bucket in menu.decode})
    decode = tuple((num_rows, _decoding(engine, num_rows, SHORT)) for num_rows in rows)
    long = min(LONG, memory.max_model_len - 4 * STEPS - 1)
    num_long = max(
        (r for r in rows if r * memory.blocks_for(long + 4 * STEPS) < memory.num_blocks), default=1
    )
    beyond = _decoding(engine, num_long, long) - dict(decode)[num_long]
    longest = memory.max_model_len - 1
    sizes = {min(bucket.num_tokens, longest): bucket.num_rows for bucket in menu.chunk}
    chunk = tuple(
        (tokens, num_rows, _computing(engine, tokens)) for tokens, num_rows in sorted(sizes.items())
    )
    return ShapeCost(decode, chunk, max(0.0, beyond / (num_long * max(1, long - SHORT))))


def _decoding(engine: Engine, num_rows: int, context: int) -> float:
    start_decoding(engine, num_rows, context)
    seconds = _timed(engine.step, 2 * STEPS)[STEPS:]
    engine.abort_all()
    return statistics.median(seconds)


def _computing(engine: Engine, num_tokens: int) -> float:
    def prompt() -> None:
        reporter = start_request(engine, num_tokens, 1)
        while not reporter.num_output_tokens:
            engine.step()

    return statistics.median(_timed(prompt, 1 + CHUNKS)[1:])


def _timed(call: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def read_costs(path: str) -> CostModel:
    """Returns the costs in a file.

    The file is what `jaxpage plan --slo --json` wrote, or has the fields of `AnalyticCost`.

    Raises:
        ValueError: The file has anything else, or cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found = found.get("costs", found)
        if "decode" not in found:
            return AnalyticCost(**found)
        decode = tuple((int(rows), float(seconds)) for rows, seconds in found["decode"])
        chunk = tuple(
            (int(tokens), int(rows), float(seconds)) for tokens, rows, seconds in found["chunk"]
        )
        return ShapeCost(decode, chunk, float(found["context_token"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fields = ", ".join(AnalyticCost.__dataclass_fields__)
        raise ValueError(
            f"{path}: costs are what `jaxpage plan --slo --json` prints, or {fields}: {type(error).__name__}: {error}"
        ) from None


def as_dict(cost: CostModel) -> dict[str, Any]:
    """Returns the fields of a cost model for JSON."""
    assert isinstance(cost, (ShapeCost, AnalyticCost))
    return asdict(cost)
