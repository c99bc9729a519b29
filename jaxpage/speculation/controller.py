"""How many drafts a step is worth: the number that gives the most tokens per second, by what steps cost and how many drafts were right.

Both are measured while the engine runs. Goodput as in SmartSpec (Liu et al. 2024, arXiv:2406.14066).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

COST_WEIGHT = 0.1  # of a new measurement of a step in the running mean
ACCEPTANCE_WEIGHT = 0.1  # of a newly verified draft in a running rate
PRIOR_DRAFTS = 20  # a sequence is taken for the average until it has had so many drafts
GAIN = 1.03  # how much better another number has to be before it replaces the one in use
DWELL = 16  # steps for which a number is kept, unless none is better than it
PROBE_EVERY = 50  # steps without drafts, after which one step drafts all the same, so that speculation can come back


@dataclass
class _Rate:
    """How many of the drafts that were reached were right, as a running mean."""

    value: float
    num_drafts: int = 0

    def add(self, num_right: int, num_wrong: int) -> None:
        for right in (True,) * num_right + (False,) * num_wrong:
            self.num_drafts += 1
            weight = (
                max(ACCEPTANCE_WEIGHT, 1 / self.num_drafts) if self.num_drafts < PRIOR_DRAFTS else ACCEPTANCE_WEIGHT
            )
            self.value += weight * (right - self.value)


@dataclass
class Controller:
    """Chooses among `choices`, numbers of drafts per sequence, of which 0 is always one."""

    choices: tuple[int, ...]
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # of a step by (rows of its shape, drafts)
    _overall: _Rate = field(default_factory=lambda: _Rate(0.5))
    _rates: dict[int, _Rate] = field(default_factory=dict)  # by sequence id
    _current: int = 0
    _kept: int = DWELL  # steps since the number changed
    _without: int = 0  # steps without drafts, one after the other

    def choose(self, num_rows: int, drafts: Sequence[tuple[int, int]], most: int) -> int:
        """Drafts per sequence for the next step.

        Args:
            num_rows: rows of the step's shape.
            drafts: of each sequence that has any: its id and how many.
            most: that the shapes allow.
        """
        allowed = [choice for choice in (0, *self.choices) if choice <= most]
        if not drafts or len(allowed) == 1:
            return 0
        goodput = {choice: self._goodput(num_rows, drafts, choice) for choice in allowed}
        best = max(goodput, key=goodput.__getitem__)
        current = max(choice for choice in allowed if choice <= self._current)
        if goodput[best] > goodput[current] * GAIN and (self._kept >= DWELL or not current):
            current, self._kept = best, 0
        self._current = current
        self._kept += 1
        self._without = 0 if current else self._without + 1
        if self._without >= PROBE_EVERY:
            self._without = 0
            return allowed[1]
        return current

    def _goodput(self, num_rows: int, drafts: Sequence[tuple[int, int]], choice: int) -> float:
        seconds = self._cost(num_rows, choice)
        gained = sum(_expected(self._rate(sequence_id), min(choice, length)) for sequence_id, length in drafts)
        return (num_rows + gained) / seconds

    def _rate(self, sequence_id: int) -> float:
        own = self._rates.get(sequence_id)
        if own is None:
            return self._overall.value
        weight = min(1.0, own.num_drafts / PRIOR_DRAFTS)
        return weight * own.value + (1 - weight) * self._overall.value

    def _cost(self, num_rows: int, choice: int) -> float:
        """Of a shape that nobody has measured yet: in proportion to its tokens, from the nearest that somebody has."""
        known = self._seconds.get((num_rows, choice))
        if known is not None:
            return known
        if not self._seconds:
            return 1.0 + choice
        tokens = num_rows * (1 + choice)
        rows, drafts = min(self._seconds, key=lambda shape: abs(shape[0] * (1 + shape[1]) - tokens))
        return self._seconds[rows, drafts] * max(1.0, tokens / (rows * (1 + drafts)))

    def measured(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step of this shape took so long."""
        known = self._seconds.get((num_rows, num_drafts))
        # The first run of a shape may pay for what later ones find ready, so it counts until the second.
        self._seconds[num_rows, num_drafts] = seconds if known is None else known + COST_WEIGHT * (seconds - known)

    def verified(self, sequence_id: int, num_drafts: int, num_right: int) -> None:
        """Of a sequence's drafts the first `num_right` were right; the one behind them was wrong, and nobody knows of the others."""
        wrong = int(num_right < num_drafts)
        self._overall.add(num_right, wrong)
        self._rates.setdefault(sequence_id, _Rate(self._overall.value)).add(num_right, wrong)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._rates.pop(sequence_id, None)


def _expected(rate: float, num_drafts: int) -> float:
    """Right drafts of a chain, each of which is reached only behind right ones."""
    return sum(rate**depth for depth in range(1, num_drafts + 1))
