"""Decides how many drafts a step verifies: as many as give the most tokens per second.

*Costs* (`costs.py`). Before the first request, steps of every shape are timed: rows by tokens in
all and, with a device drafter, by draft depth. Every step since then corrects them.

*Acceptance.* Moving averages say how often drafts are accepted, by place in the draft: those of all
sequences, and those of each sequence, which start from those of all.

*Choice.* Possible drafts are sorted by the chance to be accepted. Each shape is filled from the
front, and the expected tokens are divided by its cost: this is goodput, as in SmartSpec (Liu et al.
2024, arXiv:2406.14066). The best shape is taken. Speculation is switched on where that promises a
few percent more than no drafts, and off where it promises less.

*Probes.* Now and then one step takes another shape: the one that is most overdue for what it is
expected to lose. It waits until that loss is a small share of the time since the last probe. While
speculation is off, a probe that gained time is repeated at once.

There is no clock here: all follows from the calls. `drafter_sync.py` switches a device drafter,
which has to run before its drafts are verified, on and off.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxpage.speculation.costs import GAIN, Costs, Shape
from jaxpage.step.draft import Draft
from jaxpage.step.limits import StepLimits

HYSTERESIS = (
    # Speculation is switched on above this multiple of the goodput without drafts, and off where
    # it is not above that goodput itself.
    1.04
)
PROBE_SHARE = 0.006  # the share of the time that probes may lose
# The least number of steps from one probe to the next, unless a probe is repeated, and the greatest
# from one decision to the next while speculation is off.
PROBE_INTERVAL = 16
MEMORY = 64  # drafts that an average of acceptance remembers
PRIOR = 16  # drafts of its own with which the average of a sequence weighs as much as that of all
# An assumed rate weighs as much as so many drafts. It is `first_rate` for the first draft, and
# for a later place the rate of the place before.
FIRST_WEIGHT = 4.0


class Acceptance:
    """Keeps how often drafts are accepted, by place; of a unit of drafts, how many of them.

    Place 0 says whether any draft was found. Place 1 + i is draft i, where those before it were
    accepted.
    """

    def __init__(self, first_rate: float) -> None:
        # By place: [accepted, seen].
        self._all = [[FIRST_WEIGHT, FIRST_WEIGHT], [FIRST_WEIGHT * first_rate, FIRST_WEIGHT]]
        self._by_sequence: dict[int, list[list[float]]] = {}

    def add(self, sequence_id: int, place: int, accepted: float) -> None:
        """Counts what came of one place of a sequence's drafts."""
        for counts in (self._all, self._by_sequence.setdefault(sequence_id, [])):
            counts += [[0.0, 0.0] for _ in range(len(counts), 1 + place)]
            counts[place][0] += accepted - counts[place][0] / MEMORY
            counts[place][1] += 1.0 - counts[place][1] / MEMORY

    def average(self, num_places: int) -> list[float]:
        """Returns the rates of all sequences together, by place."""
        rates: list[float] = []
        for index in range(num_places):
            accepted, seen = self._all[index] if index < len(self._all) else (0.0, 0.0)
            rates.append(
                accepted / seen
                if index < 2
                else (accepted + FIRST_WEIGHT * rates[-1]) / (seen + FIRST_WEIGHT)
            )
        return rates

    def rates(self, sequence_id: int, average: Sequence[float]) -> list[float]:
        """Returns the rates of one sequence, by place; it starts from the average of all."""
        counts_of_sequence = self._by_sequence.get(sequence_id, [])
        rates = [
            (counts[0] + PRIOR * rate) / (counts[1] + PRIOR)
            for counts, rate in zip(counts_of_sequence, average, strict=False)
        ]
        return [*rates, *average[len(rates) :]]

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences that have ended."""
        for sequence_id in sequence_ids:
            self._by_sequence.pop(sequence_id, None)


class _Node(NamedTuple):
    """A draft that could be verified, or a unit of drafts that are verified all or not at all."""

    sequence_id: int
    depth: int
    probability: float  # that it and all before it are accepted; of a unit, the number of them
    minimum: float  # the least chance from the first to this one, since drafts are cut from the end
    weight: float  # the chance that a proposer finds it; 1 once it is there


class _Option(NamedTuple):
    goodput: float  # tokens per second
    tokens: float  # expected from the step
    shape: Shape
    depth: int | None  # the draft depth
    nodes: Sequence[_Node]


class Controller:
    """Decides twice in a step how many drafts there are.

    `ask` says how many drafts of each sequence to ask for, and `cut` how many of those that came to
    verify.
    """

    def __init__(
        self, limits: StepLimits, *, unit: int = 1, warm_up: int = 1, depths: Sequence[int] = ()
    ) -> None:
        """Begins with speculation off.

        Args:
            limits: The shapes of steps.
            unit: The drafts of a sequence that are verified all or not at all.
            warm_up: The steps in a row that a method needs to show what its drafts are worth.
            depths: The depths to which a device drafter may draft; empty if there is none.
        """
        self.costs = Costs()
        # A unit counts accepted drafts; its first rate is that of one.
        self.acceptance = Acceptance(0.5 if unit == 1 else 1.0)
        self.is_on = False
        self.depth = 0  # the draft depth of this step, whose drafts are for the next
        self.num_probes = 0
        self.depths = depths
        self._limits = limits
        self._unit = unit
        self._warm_up = warm_up
        self._shapes_by_rows: dict[int, list[Shape]] = {}
        self._step = self._next_decision = 0
        self._last_probe = -math.inf  # the first may come at once
        self._last_run: dict[Shape, int] = {}  # the step in which each shape ran last
        self._probe: Shape | None = None  # the shape of this step, if it is a probe
        self._next_probe: Shape | None = None  # a device drafter makes its drafts in this step
        self._repeats = False  # the next step probes too
        self._asking = 0.0  # seconds of the host for each node that it is asked for
        self._requested: Mapping[int, int] = {}
        # The last draft's; the next draft is expected to have the same.
        self._parents: tuple[int, ...] = ()

    def break_even(self, num_rows: int) -> float | None:
        """Returns the accepted drafts of a sequence and step above which drafts pay.

        It is that of the shape which needs the fewest, by the costs known now. None means that no
        shape has so many drafts.

        Args:
            num_rows: The rows of a step.
        """
        plain, *shapes = self._shapes(num_rows)
        seconds = self.costs.of(plain)
        needed = []
        for shape in shapes:
            num_drafts = (shape[1] - num_rows) / num_rows
            for depth in self.depths or (None,):
                accepted = max(0.0, self.costs.of(shape, depth) / seconds - 1.0)
                if accepted < num_drafts:
                    needed.append(accepted)
        return min(needed, default=None)

    def skips(self) -> bool:
        """Begins a step, and returns whether it has no drafts and there is nothing to decide."""
        self._step += 1
        self._probe = None
        self._requested = {}
        return self._step < self._next_decision

    def ask(
        self, num_rows: int, sequence_ids: Sequence[int], ready: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """Returns how many drafts to ask for, by sequence id; nothing if the step has no drafts.

        Args:
            num_rows: The rows of the step.
            sequence_ids: The sequences of the step that can have drafts.
            ready: The sequences for which a device drafter has made drafts; None if there is no
                such drafter.
        """
        planned = self._next_probe
        self._next_probe = None
        self.depth = 0
        shapes = self._shapes(num_rows)
        if len(shapes) < 2 or not sequence_ids:
            return {}
        nodes = self._expect_nodes(num_rows, sequence_ids)
        options = self._options(num_rows, nodes, self.depths or (None,), self._asking)
        none = options[shapes[0]]
        chosen = max(options.values(), key=_goodput)
        self.is_on = chosen.goodput > none.goodput * (1.0 if self.is_on else HYSTERESIS)
        chosen = chosen if self.is_on else none
        self.depth = chosen.depth or 0
        wait, probe = self._due(options, chosen)
        if planned in options and ready:
            chosen = self._begin_probe(options[planned])
        # A probe without drafts needs nothing from the step before it.
        elif wait <= 0 and (ready is None or probe is none):
            chosen = self._begin_probe(probe)
        elif wait <= 0:
            self._next_probe = probe.shape
            self.depth = probe.depth or 0
        elif not self.is_on:
            self._next_decision = self._step + int(min(PROBE_INTERVAL, wait))
        requested = self._counts(chosen.nodes)
        self._requested = (
            requested
            if ready is None
            else {key: count for key, count in requested.items() if key in ready}
        )
        return self._requested

    def cut(self, num_rows: int, drafts: Mapping[int, Draft]) -> dict[int, int]:
        """Returns how many of each sequence's drafts, which came of `ask`, the step verifies."""
        for sequence_id in self._requested:
            self.acceptance.add(sequence_id, 0, sequence_id in drafts)
        average = self.acceptance.average(
            1 + max((len(draft.parents) for draft in drafts.values()), default=1)
        )
        nodes: list[_Node] = []
        for sequence_id, draft in drafts.items():
            self._parents = draft.parents
            rates = self.acceptance.rates(sequence_id, average)
            # These drafts are there, so the chance to find them is 1.
            nodes += _nodes(
                sequence_id, draft.parents if self._unit == 1 else (-1,), [1.0, *rates[1:]]
            )
        # A probe runs its shape even if it loses time, and a unit is not divided.
        if self._probe is None and self._unit == 1:
            # The draft depth of the step does not depend on how many drafts it verifies.
            depth = self.depth if self.depths else None
            options = self._options(num_rows, nodes, (depth,), 0.0, depth)
            nodes = [*max(options.values(), key=_goodput).nodes]
        return self._counts(nodes)

    def learn_verified(
        self, sequence_id: int, parents: Sequence[int], path: Collection[int]
    ) -> None:
        """Learns that of a sequence's drafts (`Draft.parents`) those in `path` were accepted."""
        if self._unit > 1:
            self.acceptance.add(sequence_id, 1, len(path))
            return
        for index, parent in enumerate(parents):
            if parent < 0 or parent in path:
                self.acceptance.add(sequence_id, 1 + index, index in path)

    def learn_time(
        self,
        num_rows: int,
        num_drafts: int,
        num_tokens: int,
        seconds: float,
        asking: float,
        depth: int | None,
    ) -> None:
        """Learns from the time of a step.

        Args:
            num_rows: The rows of the step.
            num_drafts: The drafts that it verified.
            num_tokens: The tokens that it gave.
            seconds: The time of the step.
            asking: The seconds before it in which drafts were asked for.
            depth: Its draft depth.
        """
        shape = self._limits.shape(num_rows, num_drafts)
        plain = self._limits.shape(num_rows, 0)
        if shape not in self.costs:
            return
        if self._probe is not None and not self.is_on and num_drafts:
            self._repeats |= num_tokens / num_rows * self.costs.of(plain) > seconds + asking
        self.costs.add(shape, depth, seconds)
        self._last_run[shape] = self._step
        if num_requested := sum(self._requested.values()):
            unit_seconds = asking * self._unit / num_requested
            # A pause of the host while drafts are asked for says nothing of their cost.
            self._asking += (
                GAIN * (min(unit_seconds, 4 * self._asking) - self._asking)
                if self._asking
                else unit_seconds
            )

    def _shapes(self, num_rows: int) -> list[Shape]:
        """Returns the shapes that steps of `num_rows` rows can have, as far as they were timed.

        The first one is without drafts.
        """
        if num_rows not in self._shapes_by_rows:
            maximum = min(
                self._limits.draft_budget(num_rows), num_rows * self._limits.max_drafts(num_rows)
            )
            shapes = [self._limits.shape(num_rows, 0)]
            num_drafts = 1
            while num_drafts <= maximum:
                shapes.append(self._limits.shape(num_rows, num_drafts))
                # This is the first number of drafts that the last shape does not hold.
                num_drafts = shapes[-1][1] - num_rows + 1
            self._shapes_by_rows[num_rows] = [shape for shape in shapes if shape in self.costs]
        return self._shapes_by_rows[num_rows]

    def _expect_nodes(self, num_rows: int, sequence_ids: Iterable[int]) -> list[_Node]:
        """Returns what could be asked for: the form of the last draft, and after it a chain."""
        maximum = (
            min(self._limits.max_drafts(num_rows), self._limits.draft_budget(num_rows))
            // self._unit
        )
        known = self._parents[:maximum] if self._unit == 1 else ()
        parents = (*known, *range(len(known) - 1, maximum - 1))
        average = self.acceptance.average(1 + maximum)
        rates = {each: self.acceptance.rates(each, average) for each in sequence_ids}
        return [node for each in sequence_ids for node in _nodes(each, parents, rates[each])]

    def _options(
        self,
        num_rows: int,
        nodes: Sequence[_Node],
        depths: Iterable[int | None],
        asking: float,
        plain_depth: int | None = None,
    ) -> dict[Shape, _Option]:
        """Returns the best option of each shape.

        `asking` is the seconds of the host for each node, and `plain_depth` the draft depth of a
        step without drafts.
        """
        plain, *shapes = self._shapes(num_rows)
        seconds = self.costs.of(plain, plain_depth)
        options = {plain: _Option(num_rows / seconds, num_rows, plain, plain_depth, ())}
        nodes = sorted(nodes, key=lambda node: -node.minimum)
        for depth in depths:
            reached = nodes if depth is None else [node for node in nodes if node.depth <= depth]
            weights = list(accumulate([node.weight for node in reached]))
            tokens = list(
                accumulate(
                    [node.weight * node.probability for node in reached], initial=float(num_rows)
                )
            )
            # A step for which no draft is found has the shape without drafts.
            probability = 1.0 - math.prod(
                [1.0 - node.weight for node in reached if node.depth == 1]
            )
            for shape in shapes:
                # A sum of weights that should be a whole number may be a little above it.
                count = bisect_right(weights, (shape[1] - num_rows) / self._unit + 1e-9)
                cost = (
                    seconds + probability * (self.costs.of(shape, depth) - seconds) + asking * count
                )
                option = _Option(tokens[count] / cost, tokens[count], shape, depth, reached[:count])
                options[shape] = max(options.get(shape, option), option, key=_goodput)
        return options

    def _due(self, options: Mapping[Shape, _Option], chosen: _Option) -> tuple[float, _Option]:
        """Returns in how many steps to probe, and what."""
        others = [option for option in options.values() if option.shape != chosen.shape]
        if self._repeats:
            return 0, max(others, key=_goodput)
        waits = []
        for other in others:
            # The expected loss is in steps.
            lost = (other.tokens / other.goodput * chosen.goodput - other.tokens) / chosen.tokens
            waits.append(max(PROBE_INTERVAL, math.ceil(self._warm_up * lost / PROBE_SHARE)))
        overdue = [
            (self._step - self._last_run.get(each.shape, 0)) / wait
            for each, wait in zip(others, waits, strict=True)
        ]
        probe = overdue.index(max(overdue))
        return self._last_probe + waits[probe] - self._step, others[probe]

    def _begin_probe(self, option: _Option) -> _Option:
        self.num_probes += 1
        self._probe = option.shape
        self._last_probe = self._step
        self._repeats = self.num_probes % self._warm_up > 0
        return option

    def _counts(self, nodes: Iterable[_Node]) -> dict[int, int]:
        """Returns the number of drafts by sequence id."""
        counts: dict[int, int] = defaultdict(int)
        for node in nodes:
            counts[node.sequence_id] += self._unit
        return counts


def _nodes(sequence_id: int, parents: Iterable[int], rates: Sequence[float]) -> list[_Node]:
    """Returns the nodes of a sequence's drafts; `rates` are those of `Acceptance`."""
    nodes: list[_Node] = []
    minimum = math.inf
    for parent, rate in zip(parents, rates[1:], strict=False):
        depth, probability = (
            (1, rate) if parent < 0 else (1 + nodes[parent].depth, rate * nodes[parent].probability)
        )
        minimum = min(minimum, probability)
        nodes.append(_Node(sequence_id, depth, probability, minimum, rates[0]))
    return nodes


def _goodput(option: _Option) -> float:
    return option.goodput
