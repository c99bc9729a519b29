"""How often drafts are right, as far as was seen. It counts steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

PRIOR_DRAFTS = 20  # a sequence is taken for the average until it has had so many drafts
FIRST_GUESS = 0.5  # of the average: that a draft is right
FIRST_GUESS_TOGETHER = 1.0  # how many of several are: as of a chain of such drafts
GUESS_DRAFTS = 4.0  # what a guess weighs
MEMORY = 64  # steps after which what was seen has lost two thirds of its weight
LEAST_WEIGHT = 32.0  # that the average keeps however long ago it was


@dataclass
class _Counts:
    """By place in what was asked for: 0 is whether anything came at all, i the draft i - 1. Of each those that were reached."""

    right: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    step: int = 0  # of the last look

    def add(self, place: int, right: int) -> None:
        while len(self.reached) <= place:
            self.right.append(0.0)
            self.reached.append(0.0)
        self.right[place] += right
        self.reached[place] += 1.0

    def age(self, step: int, least: float) -> None:
        """What was seen loses weight with every step, down to `least`."""
        kept = (1 - 1 / MEMORY) ** (step - self.step)
        self.step = step
        for place, reached in enumerate(self.reached):
            if reached > least:
                factor = max(kept, least / reached)
                self.right[place] *= factor
                self.reached[place] *= factor


@dataclass
class Acceptance:
    """How often drafts are right, by their place behind right ones: of all sequences, and of each, which is shrunk to that of all."""

    first_guess: float = FIRST_GUESS
    _overall: _Counts = field(init=False)
    _own: dict[int, _Counts] = field(default_factory=dict)  # by sequence id

    def __post_init__(self) -> None:
        self._overall = _Counts([GUESS_DRAFTS * guess for guess in (1.0, self.first_guess)], [GUESS_DRAFTS] * 2)

    def average(self) -> list[float]:
        """By place, as far as any draft came. What is seldom reached is as the place before it."""
        rates: list[float] = []
        for place, (right, reached) in enumerate(zip(self._overall.right, self._overall.reached, strict=True)):
            guess, weight = (rates[place - 1], GUESS_DRAFTS) if place > 1 else (0.0, 0.0)
            rates.append((right + weight * guess) / (reached + weight))
        return rates

    def rates(self, sequence_id: int, average: Sequence[float], num_places: int, step: int) -> list[float]:
        """Of one sequence, by place. With time what was seen of it counts less, and it is the average again."""
        rates = [*average[:num_places], *[average[-1]] * (num_places - len(average))]
        own = self._own.get(sequence_id)
        if own is not None:
            own.age(step, 0.0)
            for place, reached in enumerate(own.reached[:num_places]):
                rates[place] = (own.right[place] + PRIOR_DRAFTS * rates[place]) / (reached + PRIOR_DRAFTS)
        return rates

    def add(self, sequence_id: int, parents: Sequence[int], path: Collection[int], step: int) -> None:
        """Of a sequence's drafts (`Draft.parents`) those of `path` were right."""
        for counts, least in self._counts(sequence_id, step):
            counts.age(step, least)
            for index, parent in enumerate(parents):
                if parent < 0 or parent in path:
                    counts.add(1 + index, index in path)

    def add_together(self, sequence_id: int, num_right: int, step: int) -> None:
        """Of drafts that came together so many were right: that many are what the place of the first has, however deep they stand."""
        for counts, least in self._counts(sequence_id, step):
            counts.age(step, least)
            counts.add(1, num_right)

    def came(self, sequence_id: int, found: bool, step: int) -> None:
        """Whether anything came of asking for drafts."""
        for counts, least in self._counts(sequence_id, step):
            counts.age(step, least)
            counts.add(0, found)

    def _counts(self, sequence_id: int, step: int) -> tuple[tuple[_Counts, float], ...]:
        own = self._own.setdefault(sequence_id, _Counts(step=step))
        return (self._overall, LEAST_WEIGHT), (own, 0.0)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._own.pop(sequence_id, None)
