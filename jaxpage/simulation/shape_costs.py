"""What the steps of an engine cost on this machine, by their shapes: measured, or read from a file."""

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

SHORT, LONG = 16, 512  # tokens before those that are decoded
STEPS = 12  # of each kind, after as many that are not measured; the median counts
CHUNKS = 3  # of each kind, after one that is not measured


@dataclass(frozen=True)
class ShapeCost:
    """A step costs what the smallest shape that holds it costs, padding included, and the reading of its context. Seconds.

    Steps are measured as the engine makes them, so planning, batch and commit are part of them; HTTP and texts are not. Swapping is not
    measured: what is planned with these costs recomputes.
    """

    decode: tuple[tuple[int, float], ...]  # rows, from few to many; seconds
    chunk: tuple[tuple[int, int, float], ...]  # query tokens, from few to many; rows; seconds
    context_token: float  # for each token of context of a decoding row

    def compute_seconds(self, plan: StepPlan) -> float:
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
        return 0.0


def measure(built: Built) -> ShapeCost:
    """Steps of full shapes, of an engine that does nothing else and has no prefix cache."""
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
    """Of a file: what `jaxpage plan --slo --json` wrote, or the fields of `AnalyticCost`. Raises ValueError for anything else."""
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
    assert isinstance(cost, (ShapeCost, AnalyticCost))
    return asdict(cost)
