"""Keeps how long steps take, for the controller of speculation.

Steps of every shape are timed before the first request (`assembly/step_costs.py`), those without a
device drafter at a short and at a long context: with long contexts a step takes longer, and drafts
cost less of it. Every step since then corrects its own shape, and a pace that all shapes have in
common.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

GAIN = 0.1  # the weight of a measurement in a moving average of costs

Shape = tuple[int, int]  # rows, query tokens in all; as many as rows where there are no drafts


class Costs:
    """Keeps the seconds that steps take, by shape and by draft depth (`StepPlan.draft_depth`).

    Attributes:
        context: The tokens of a sequence before the step, in the mean of its rows.
        prompt_token: The seconds that a device drafter adds for each token of a prompt.
        pace: Of all shapes together, how many times as long steps take as at the start.
    """

    def __init__(self) -> None:
        self.context = 0.0
        self.prompt_token = 0.0
        self._at_start: dict[Shape, tuple[float, ...]] = {}
        # The seconds for each token of context, and the context at which the shape was measured.
        self._of_context: dict[Shape, tuple[float, int]] = {}
        self._factor: dict[Shape, float] = {}  # times as long as at the start
        self.pace = 1.0
        self._num_measured: dict[Shape, int] = defaultdict(int)

    def at_start(
        self,
        shape: Shape,
        alone: float,
        by_depth: Sequence[float] = (),
        of_context: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Sets the costs of a shape, as measured before the first request.

        Args:
            shape: The shape.
            alone: The seconds without a device drafter.
            by_depth: The seconds with it at depth 0, 1, and so on; the last holds for all larger
                depths.
            of_context: The seconds for each token of context, and the context of the others.
        """
        self._of_context[shape] = of_context
        self._at_start[shape] = (max(alone, 1e-9), *by_depth)
        self._factor[shape] = 1.0

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._at_start

    def of(self, shape: Shape, depth: int | None = None) -> float:
        """Returns the seconds of a step at a draft depth; None is without a device drafter."""
        known = self._at_start[shape]
        seconds = known[0 if depth is None else min(1 + depth, len(known) - 1)]
        per_token, context = self._of_context[shape]
        # A shorter context saves at most half: a step has other work, too.
        seconds = max(seconds / 2, seconds + per_token * (self.context - context))
        return self.pace * self._factor[shape] * seconds

    def add(self, shape: Shape, depth: int | None, seconds: float) -> None:
        """Corrects the costs by the seconds of a step.

        A shape that was seldom measured learns more of it. A pause of the host counts as twice the
        expected time.
        """
        surprise = math.log(min(max(seconds / self.of(shape, depth), 0.5), 2.0))
        self._num_measured[shape] += 1
        self._factor[shape] *= math.exp(
            surprise * max(GAIN / 2, 1 / (1 + self._num_measured[shape]))
        )
        self.pace *= math.exp(surprise * GAIN)
