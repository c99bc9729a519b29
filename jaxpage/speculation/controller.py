"""How many drafts a step is worth: those that give the most tokens per second, by what steps cost and how often drafts were right.

Goodput as in SmartSpec (Liu et al. 2024, arXiv:2406.14066). Both are measured while the engine runs. A step is chosen by its shape, which
is what it costs; drafts fill the shape in order of their chance, so one sequence may get seven and another none. Now and then a step is
spent on looking elsewhere, on credit: never more than a set share of the time. Everything follows from what the controller is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxpage.shapes import MOST_DRAFTS
from jaxpage.speculation.costs import MOST_SURPRISING, Costs, Shape
from jaxpage.speculation.estimates import FIRST_GUESS, FIRST_GUESS_TOGETHER, Acceptance
from jaxpage.step.draft import Draft
from jaxpage.step.limits import StepLimits

SHARE = 0.006  # of the time that may be lost by looking elsewhere
CREDIT_STEPS = 8.0  # steps' worth of time that can be saved up for it
FIRST_CREDIT_STEPS = 1.0  # that there is at the start
LOOK_EVERY = 16  # steps from one look to the next, unless the last one paid
SEEK_EVERY = 64  # the same while nothing is drafted, where that costs nothing: a drafter on the device follows at a cost, and soon rests
PLAIN_EVERY = 64  # steps with drafts to one without, which tells what all gains are against
DOUBTED = 1.5  # times as good as none: what promises more is better, whatever a step without drafts may take
STALEST_EVERY = 4  # looks go to the shape that promises most, and every so often to that which was measured longest ago, if it can be
BEGINS, ENDS = 1.04, 1.0  # how much better than none drafting promises to be, when it begins and when it ends
DWELL = 16  # steps from its end to its next beginning; it ends at once
LONGER = 16  # steps without drafts for each step of a nap: who has not drafted for long is asked less
LEAST_NAP, MOST_NAP = 7, 31  # steps in which nothing is asked nor measured, so that they cost the host little
LEAST_CHANCE = 0.02  # of a draft: one that is hardly ever right costs the host more than it gains


class _Node(NamedTuple):
    """A draft that could be made, or one that was; of drafts that come together, all of them."""

    chance: float  # that it will be right, and all before it; of several, how many
    rank: float  # never above that of the draft before it, so that the first in rank are the first in the draft
    weight: float  # chance that it will be there at all
    depth: int
    sequence_id: int


class _Promise(NamedTuple):
    """What a shape gives."""

    goodput: float  # tokens per second
    levels: int  # how many tokens ahead the drafts are with which it gives so much


class Controller:
    """Decides twice in a step: `ask`, whom to draft for, before anything is spent; and `cut`, how many of the drafts are verified."""

    def __init__(self, limits: StepLimits, *, together: int = 1, steps_to_show: int = 1) -> None:
        """
        Args:
            together: drafts of a sequence that are asked for and verified all or not at all. What counts is how many of them are right.
            steps_to_show: how many steps one behind the other drafts take to show what they are worth.
        """
        self.costs = Costs()
        self.acceptance = Acceptance(FIRST_GUESS if together == 1 else FIRST_GUESS_TOGETHER)
        self._limits = limits
        self._together = together
        self._steps_to_show = steps_to_show
        self._shapes_by_rows: dict[int, list[Shape]] = {}
        self._asking: dict[Shape, float] = {}  # seconds per draft that the host is asked for, by the shape without
        self._step = 0
        self._drafts = False
        self._since = DWELL  # steps since that changed
        self._unasked = 0  # steps in which nobody could be drafted for
        # Rows of the shape, and the step, of the last decision without drafts.
        self._reviewed: tuple[int, int] | None = None
        self._credit = 0.0  # seconds
        self._needed = 0.0  # seconds of credit: what the last look that was too dear would have cost
        self._look: Shape | None = None  # that this step takes, whatever is best
        self._plainly = 0  # the last step without drafts while there are some
        self._planned: Shape | None = None  # that the next step takes likewise
        self._looked = 0  # the step of the last look
        self.num_looks = 0  # so far
        self._paid = False  # whether the last look was better than not to look
        self._plain = 0.0  # seconds of a step without drafts, when it was asked last
        self._best = 0.0  # tokens per second of the best that is known, at the last decision
        self._asked: Mapping[int, int] = {}
        self._parents: tuple[int, ...] = ()  # of the last draft: the next is taken to have its form
        self._most_asked = MOST_DRAFTS  # of one sequence, when any were asked for

    def ask(
        self, num_rows: int, sequence_ids: Sequence[int], ready: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """How many drafts each of the sequences is to have, before they are cut. Empty: none is worth anything in this step.

        Args:
            num_rows: of the step.
            sequence_ids: of those of its sequences that can be drafted for.
            ready: those of them whose drafts are made already, if that has to be before they are asked for.
        """
        self._step += 1
        self._since += 1
        self._look, self._asked = None, {}
        shapes = self._shapes(num_rows)
        if len(shapes) == 1 or not sequence_ids:
            self._unasked += 1
            if self._unasked >= DWELL:  # not between two requests
                self._decide(0.0)
                self._planned = None
            return {}
        self._unasked = 0
        plain = self._plain = self.costs.of(shapes[0])
        if not self._best:  # nothing was decided yet
            self._credit = FIRST_CREDIT_STEPS * plain
        if self._planned is not None and self._planned not in shapes:  # there are more rows now, or fewer
            self._planned, self._looked = None, self._step - LOOK_EVERY
        goes_on = self._paid or (not self._drafts and self.num_looks % self._steps_to_show)
        wait = 1 if goes_on else SEEK_EVERY if not self._drafts and self.costs.ahead is None else LOOK_EVERY
        may_look = self._step - self._looked >= wait or self._is_unseen
        if (
            not self._drafts
            and self._planned is None
            and not (may_look and self._affords(max(self._needed, self._loss(shapes[1], num_rows, num_rows / plain))))
        ):
            rows, step = self._reviewed or (0, 0)
            if rows == shapes[0][0] and self._step - step < DWELL:
                return {}
        nodes = self._nodes_to_ask(num_rows, sequence_ids)
        promised = {shape: self._promise(num_rows, nodes, shape) for shape in shapes[1:]}
        goodput = {shape: promise.goodput for shape, promise in promised.items()}
        best = max(goodput, key=goodput.__getitem__)
        ratio = goodput[best] * plain / num_rows
        self._decide(ratio if nodes[0].rank >= LEAST_CHANCE else 0.0)
        self._reviewed = None if self._drafts else (shapes[0][0], self._step)
        self._best = goodput[best] if self._drafts else num_rows / plain
        chosen, levels = (best, promised[best].levels) if self._drafts else (shapes[0], 0)
        if self._drafts and ratio < DOUBTED and self._is_long_ago(shapes[0]):
            self._plainly = self._step
            return {}
        if self._planned in shapes and ready and not set(sequence_ids).isdisjoint(ready):
            self._look, self._planned = self._planned, None
        elif may_look:
            self._look = self._elsewhere(goodput | {shapes[0]: num_rows / plain}, chosen, num_rows)
            if self.costs.ahead is not None:  # what it is to look at is yet to be drafted
                self._look, self._planned = None, self._look
        if self._look is not None:
            self.num_looks += 1
            chosen, levels = self._look, self._most_levels(self._look, num_rows)
            nodes = sorted(nodes, key=lambda node: (node.depth, -node.rank))
        asked = self._fill((node for node in nodes if node.depth <= levels), self._room(chosen, num_rows))
        self._most_asked = max(asked.values(), default=self._most_asked)
        self._asked = asked if ready is None else {key: count for key, count in asked.items() if key in ready}
        return self._asked

    @property
    def nap(self) -> int:
        """For how many steps it need not be asked."""
        is_awake = self._drafts or self._look or self._planned or self._asked
        longest = 0 if is_awake else min(MOST_NAP, max(LEAST_NAP, self._since // LONGER))
        if not longest or not self.num_looks % self._steps_to_show:
            return longest
        missing = max(0.0, self._needed - self._credit)  # for the next look of those that belong together
        return min(longest, int(-(-missing // (SHARE * self._plain))))

    def slept(self, num_steps: int) -> None:
        """In which it was not asked, and of which it was told nothing."""
        self._step += num_steps
        self._since += num_steps
        self._earn(num_steps, self._plain)

    def pass_over(self) -> None:
        """A step for which nobody can ask."""
        self._look, self._asked = None, {}

    @property
    def drafts(self) -> bool:
        """Whether steps ask for drafts, but for looks."""
        return self._drafts

    @property
    def levels_ahead(self) -> int:
        """How many drafts the next step may want of a sequence, for who has to make them before they are asked for."""
        planned = 0 if self._planned is None else -(-self._planned[1] // self._planned[0]) - 1
        return max(planned, self._most_asked if self._drafts else 0)

    def cut(self, num_rows: int, drafts: Mapping[int, Draft]) -> dict[int, int]:
        """How many of each sequence's drafts, which came of asking, the step verifies."""
        for sequence_id in self._asked:
            self.acceptance.came(sequence_id, sequence_id in drafts, self._step)
        average = self.acceptance.average()
        nodes: list[_Node] = []
        for sequence_id, draft in drafts.items():
            self._parents = draft.parents
            parents = draft.parents if self._together == 1 else (-1,)
            rates = self.acceptance.rates(sequence_id, average, 1 + len(parents), self._step)
            nodes += _nodes(sequence_id, parents, rates[1:], 1.0)
        if self._look is not None:
            nodes.sort(key=lambda node: (node.depth, -node.rank))
            return self._fill(nodes, self._room(self._look, num_rows))
        nodes = _in_order(nodes)
        if self._together > 1:
            return self._fill(nodes, len(nodes))  # nothing is known of them that was not when they were asked for
        gains = [0.0]
        for node in nodes:
            gains.append(gains[-1] + node.chance)
        # What is drafted ahead in the step hardly depends on how many it verifies, and makes a longer one less bad.
        best, most, levels = 0, 0.0, None if self.costs.ahead is None else self.levels_ahead
        for shape in self._shapes(num_rows):
            count = min(self._room(shape, num_rows), len(nodes))
            goodput = (num_rows + gains[count]) / self.costs.of(shape, levels)
            if goodput > most:
                best, most = count, goodput
        return self._fill(nodes, best)

    def verified(self, sequence_id: int, parents: Sequence[int], path: Collection[int]) -> None:
        """Of a sequence's drafts those of `path` were right."""
        if self._together == 1:
            self.acceptance.add(sequence_id, parents, path, self._step)
        else:
            self.acceptance.add_together(sequence_id, len(path), self._step)

    def measured(
        self,
        num_rows: int,
        num_drafts: int,
        num_tokens: int,
        seconds: float,
        asking: float = 0.0,
        levels: int | None = None,
    ) -> None:
        """A step of so many rows and drafts gave so many tokens.

        Args:
            seconds: that it took.
            asking: seconds that it took before to ask for drafts.
            levels: how many tokens ahead a drafter on the device drafted in it; None: it had no part in it.
        """
        shape = self._limits.shape(num_rows, num_drafts)
        self.costs.add(shape, seconds if self.costs.ahead is None else seconds + asking, levels)
        if self.costs.ahead is None and (num_asked := sum(self._asked.values())):
            each, plain = asking / num_asked, self._shapes(num_rows)[0]
            known = self._asking.get(plain)
            self._asking[plain] = each if known is None else known + 0.1 * (min(each, 4 * known) - known)
        if self._look is not None:
            lost = min(seconds, MOST_SURPRISING * self.costs.of(shape, levels)) + asking - num_tokens / self._best
            self._paid = lost < 0.0 and num_tokens > num_rows and not self._drafts
            self._credit -= lost
        elif self._planned is not None:
            self._credit -= self.costs.of_drafting(shape, levels)
        self._earn(1, seconds)

    def _earn(self, num_steps: int, seconds: float) -> None:
        """seconds: of a step."""
        self._credit = min(self._credit + SHARE * num_steps * seconds, CREDIT_STEPS * seconds)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self.acceptance.forget(sequence_ids)

    def _shapes(self, num_rows: int) -> list[Shape]:
        """That a step of so many rows can have; the first has no drafts."""
        shapes = self._shapes_by_rows.get(num_rows)
        if shapes is None:
            most = min(self._limits.draft_budget(num_rows), num_rows * self._limits.most_drafts(num_rows))
            shapes, num_drafts = [self._limits.shape(num_rows, 0)], 1
            while num_drafts <= most:
                shapes.append(self._limits.shape(num_rows, num_drafts))
                num_drafts = shapes[-1][1] - num_rows + 1
            self._shapes_by_rows[num_rows] = shapes
        return shapes

    def _decide(self, ratio: float) -> None:
        """ratio: how much better drafting promises to be. It ends at once, so that a mistake costs little, and begins with more care."""
        if self._drafts and ratio < ENDS:
            self._drafts, self._since = False, 0
        elif not self._drafts and ratio > BEGINS and self._since >= DWELL:
            self._drafts, self._since = True, 0

    def _is_long_ago(self, plain: Shape) -> bool:
        """That a step without drafts was measured. What slows those with drafts is in part put down to the pace of all meanwhile."""
        return min(self._step - self._plainly, self.costs.age(plain)) >= PLAIN_EVERY

    def _elsewhere(self, goodput: Mapping[Shape, float], chosen: Shape, num_rows: int) -> Shape | None:
        """Another shape to look at, if there is credit for it."""
        others = [shape for shape in goodput if shape != chosen]
        needed = {shape: self._needed_for(shape, num_rows, goodput[shape]) for shape in others}
        affordable = [shape for shape in others if self._affords(needed[shape])]
        if self._is_unseen:
            other = max(others, key=lambda shape: shape[1])  # the farthest drafts tell of all nearer ones, too
        elif affordable and self.num_looks % STALEST_EVERY == STALEST_EVERY - 1:
            other = min(affordable, key=self.costs.last)
        else:
            other = max(others, key=goodput.__getitem__)
            if other not in affordable:
                self._needed = needed[other]
                return None
        self._looked, self._needed = self._step, 0.0
        return other

    def _needed_for(self, shape: Shape, num_rows: int, goodput: float) -> float:
        """Seconds of credit for the looks that belong together, as far as one can save up. While drafting they need what one is
        expected to lose: it is known how often drafts are right."""
        if self._drafts:
            return self._full(shape, num_rows) * max(0.0, 1.0 - goodput / self._best)
        to_come = self._steps_to_show - self.num_looks % self._steps_to_show
        loss, most = self._loss(shape, num_rows, self._best), CREDIT_STEPS / 2 * num_rows / self._best
        return max(loss, min(to_come * loss, most))

    @property
    def _is_unseen(self) -> bool:
        """A drafter on the device takes time until it was looked at: the first look does not wait, and is on credit."""
        return self.costs.ahead is not None and not self.num_looks

    def _affords(self, seconds: float) -> bool:
        """To lose so many."""
        return seconds <= self._credit or self._is_unseen

    def _loss(self, shape: Shape, num_rows: int, best: float) -> float:
        """Seconds that a step of this shape loses if no draft is right."""
        return self._full(shape, num_rows) - num_rows / best

    def _full(self, shape: Shape, num_rows: int) -> float:
        """Seconds of a step of this shape and of asking for as many drafts as it holds."""
        asking = self._to_ask(shape, num_rows, self._room(shape, num_rows), self._most_levels(shape, num_rows))
        return self.costs.of(shape) + asking

    def _to_ask(self, shape: Shape, num_rows: int, num_nodes: int, levels: int) -> float:
        """Seconds that asking for so many drafts takes, of which the last is so many tokens ahead."""
        if self.costs.ahead is not None:
            return self.costs.of_drafting(shape, levels) if levels else 0.0
        return self._asking.get(self._shapes(num_rows)[0], 0.0) * num_nodes * self._together

    def _nodes_to_ask(self, num_rows: int, sequence_ids: Iterable[int]) -> list[_Node]:
        """As many as may be, in the order in which they are worth it: of the form of the last draft, and behind that a chain."""
        most = min(self._limits.most_drafts(num_rows), self._limits.draft_budget(num_rows)) // self._together
        known = self._parents if self._together == 1 else ()
        average, parents = self.acceptance.average(), (*known[:most], *range(len(known) - 1, most - 1))
        nodes: list[_Node] = []
        for sequence_id in sequence_ids:
            found, *rates = self.acceptance.rates(sequence_id, average, 1 + most, self._step)
            nodes += _nodes(sequence_id, parents, rates, found)
        return _in_order(nodes)

    def _most_levels(self, shape: Shape, num_rows: int) -> int:
        """How many tokens ahead its drafts may be. To a drafter on the device the farthest costs: no sequence gets more than its share."""
        if self.costs.ahead is None:
            return self._limits.most_drafts(num_rows)
        return -(-self._room(shape, num_rows) // num_rows)

    def _promise(self, num_rows: int, nodes: Iterable[_Node], shape: Shape) -> _Promise:
        """If drafts fill the shape in the order of the nodes, as far as pays. A step for which none is found is one without drafts."""
        left, none, num_asked = float(self._room(shape, num_rows)), 1.0, 0
        most = self._most_levels(shape, num_rows)
        gains = [0.0] * most
        for node in nodes:
            if node.depth > most:
                continue
            left -= node.weight
            if left < -1e-9 or node.rank < LEAST_CHANCE:
                break
            num_asked += 1
            gains[node.depth - 1] += node.weight * node.chance
            if node.depth == 1:
                none *= 1.0 - node.weight
        plain = self.costs.of(self._shapes(num_rows)[0])
        seconds = plain + (1.0 - none) * (self.costs.of(shape) - plain)
        tokens = list(accumulate(gains, initial=float(num_rows)))
        each = range(1, 1 + most) if self.costs.ahead is not None else (most,)
        asking = {levels: self._to_ask(shape, num_rows, num_asked, levels) for levels in each}
        return max(_Promise(tokens[levels] / (seconds + asking[levels]), levels) for levels in each)

    def _fill(self, nodes: Iterable[_Node], most: int) -> dict[int, int]:
        """How many of each sequence's nodes there is room for; where some may not come, others are asked in their place."""
        counts: dict[int, int] = {}
        left = float(most)
        for node in nodes:
            left -= node.weight
            if left < -1e-9:
                break
            if node.rank >= LEAST_CHANCE or self._look is not None:
                counts[node.sequence_id] = counts.get(node.sequence_id, 0) + self._together
        return counts

    def _room(self, shape: Shape, num_rows: int) -> int:
        """For nodes."""
        rows, num_tokens = shape
        return (num_tokens - num_rows) // self._together if num_tokens > rows else 0


def _nodes(sequence_id: int, parents: Iterable[int], rates: Sequence[float], weight: float) -> list[_Node]:
    """rates: by place, of drafts behind right ones."""
    nodes: list[_Node] = []
    least = 1.0
    for index, parent in enumerate(parents):
        chance, depth = (nodes[parent].chance, nodes[parent].depth) if parent >= 0 else (1.0, 0)
        chance *= rates[index]
        least = min(least, chance)
        nodes.append(_Node(chance, least, weight, depth + 1, sequence_id))
    return nodes


def _in_order(nodes: Iterable[_Node]) -> list[_Node]:
    """By rank; where ranks are equal as they are: sorting keeps the drafts of a sequence in their order."""
    return sorted(nodes, key=lambda node: -node.rank)
