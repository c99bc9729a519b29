"""Gives the cost of a step from the measured times of an engine's shapes, or from a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpage.bench import SHORT_PROMPT
from jaxpage.simulation.costs import AnalyticCost, CostModel
from jaxpage.step.plan import StepPlan


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
        num_rows = len(plan.rows)
        num_tokens = plan.num_tokens
        # The decode steps were measured with a context of `SHORT_PROMPT`, which their time
        # includes.
        context = sum(
            [
                max(0, row.context_length - SHORT_PROMPT)
                for row in plan.rows
                if len(row.token_ids) == 1
            ]
        )
        if num_tokens == num_rows:
            fitting = [seconds for rows, seconds in self.decode if rows >= num_rows]
            # Beyond the largest shape that was measured, the time grows with the size.
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


def read_costs(path: str) -> CostModel:
    """Returns the costs in a file.

    The file is what `jaxpage plan --slo --json` wrote, or has the fields of `AnalyticCost`.

    Raises:
        ValueError: The file has anything else, or cannot be read.
    """
    try:
        costs = json.loads(Path(path).read_text(encoding="utf-8"))
        costs = costs.get("costs", costs)
        if "decode" not in costs:
            return AnalyticCost(**costs)
        decode = tuple((int(rows), float(seconds)) for rows, seconds in costs["decode"])
        chunk = tuple(
            (int(tokens), int(rows), float(seconds)) for tokens, rows, seconds in costs["chunk"]
        )
        return ShapeCost(decode, chunk, float(costs["context_token"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fields = ", ".join(AnalyticCost.__dataclass_fields__)
        raise ValueError(
            f"{path}: costs are what `jaxpage plan --slo --json` prints, or {fields}: "
            f"{type(error).__name__}: {error}"
        ) from None


def costs_as_dict(cost: CostModel) -> dict[str, Any]:
    """Returns the fields of a cost model for JSON."""
    assert isinstance(cost, (ShapeCost, AnalyticCost))
    return asdict(cost)
