"""Speculation on a virtual clock: the engine's scheduler, controller and shapes; drafts that are
right as often as they are told to be.

A closed loop: as many requests as the batch has rows, and whenever one ends another begins.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxpage.device.inputs.buckets import make_menu
from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.scheduling import Scheduler
from jaxpage.shapes import MAX_DRAFTS
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.traces import Arrival
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.costs import Shape
from jaxpage.speculation.drafter_sync import DrafterSync
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.speculator import ProposingSpeculator
from jaxpage.step.draft import Draft, chain
from jaxpage.step.edits import Append
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.report import StepReport
from jaxpage.step.request import Request, Sequence, SequenceGroup

NUM_DRAFTS = (1, 3, 7)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 400
WRONG = 1 << 20

# Of a place in the batch at a step: how often each draft is right behind right ones.
Rates = Callable[[int, int], tuple[float, ...]]


@dataclass(frozen=True)
class ShapedDevice:
    """A step costs what its shape costs, padding included: the same until arithmetic takes longer
    than reading the weights. Seconds.
    """

    fixed: float
    weights: float
    token: float
    draft: float = 0.0  # of the proposer, for each draft that it is asked for
    follow: float = (
        # of a drafter on the device: what it adds to each step in which it follows, as a share of
        # the step
        0.0
    )
    level: float = 0.0  # and for each token of draft depth

    def seconds(self, shape: Shape) -> float:
        return self.fixed + max(self.weights, self.token * shape[1])

    def ahead(self, shape: Shape, depth: int | None) -> float:
        """Returns the seconds that a drafter adds."""
        return 0.0 if depth is None else self.follow * self.seconds(shape) + self.level * depth


class Guesses(Proposer):
    """A proposer whose drafts are right as often as `rates` says. `hit_rate`: how often it has any."""

    def __init__(self, rates: Rates, hit_rate: float = 1.0, seed: int = 0) -> None:
        self.step = 0
        self.num_requested = 0  # drafts
        self.num_ready = MAX_DRAFTS  # drafts that were made before they are asked for
        self.places: dict[int, int] = {}  # in the batch, by sequence id
        self._rates = rates
        self._hit_rate = hit_rate
        self._random = np.random.default_rng(seed)

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        self.num_requested += num_drafts
        if self._random.random() >= self._hit_rate:
            return None
        rates = self._rates(self.places[sequence.sequence_id], self.step)[
            : min(num_drafts, self.num_ready)
        ]
        wrong = np.flatnonzero(self._random.random(len(rates)) >= rates)
        num_right = int(wrong[0]) if len(wrong) else len(rates)
        return chain((sequence.token_ids[-1],) * num_right + (WRONG,) * (len(rates) - num_right))

    def forget(self, group: SequenceGroup) -> None:
        for sequence_id in group.sequence_ids:
            self.places.pop(sequence_id, None)


@dataclass
class Progress:
    """Holds what came of the steps: by the clock of a device that never varies. `shapes`: of each
    step.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def num_switches(self) -> int:
        """Counts changes from steps with drafts to steps without, and back.

        A single step of the other kind is a look, and none.
        """
        drafts = [tokens > rows for rows, tokens in self.shapes]
        triples = zip(drafts, drafts[1:], drafts[2:], strict=False)
        smooth = [sum(triple) > 1 for triple in triples]
        return sum(before != after for before, after in itertools.pairwise(smooth))

    @property
    def num_by_shape(self) -> Counter[Shape]:
        return Counter(self.shapes)


class SpeculativeLoop:
    """A batch of `num_rows` requests that decode, on a device whose times vary as those of a real
    one do.
    """

    def __init__(
        self,
        device: ShapedDevice,
        guesses: Guesses,
        num_rows: int,
        *,
        seed: int = 0,
        num_drafts: int | None = None,
        mistaken: float = 0.0,
    ) -> None:
        """
        Args:
            num_drafts: of each sequence in each step; None: as many as a controller finds worth it.
            mistaken: by how much what it is told at the start of what each shape costs is wrong;
            the deviation of the logarithm.
        """
        menu = make_menu(
            num_rows,
            2048,
            mixed=True,
            num_drafts=NUM_DRAFTS if num_drafts is None else (num_drafts,),
            max_verified_tokens=2048,
        )
        self.limits = StepLimits(
            num_rows,
            2048,
            num_rows,
            mixed=True,
            decoded=tuple(bucket.num_rows for bucket in menu.decode),
            verified=tuple((bucket.num_rows, bucket.max_query_len) for bucket in menu.verify),
            streams=tuple((bucket.num_rows, bucket.num_tokens) for bucket in menu.verify),
        )
        pool = BlockPool(1 + num_rows * (2 + (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) // 16))
        self.scheduler = Scheduler(
            self.limits, BlockManager([BlockTables(pool, 16)]), max_num_seqs=num_rows
        )
        depths = range(1, 1 + NUM_DRAFTS[-1]) if device.follow else ()
        self.controller = Controller(self.limits, depths=depths) if num_drafts is None else None
        self._sync = (
            DrafterSync(self.limits, self.controller, block_size=16) if device.follow else None
        )
        if self.controller is not None:
            costs, mistakes = self.controller.costs, np.random.default_rng(seed)
            for bucket in menu.decode + menu.verify:
                shape = bucket.num_rows, bucket.num_tokens
                alone = device.seconds(shape) * mistakes.lognormal(0.0, mistaken)
                costs.at_start(
                    shape,
                    alone,
                    [alone + device.ahead(shape, depth) for depth in range(1 + NUM_DRAFTS[-1])],
                )
        self._device, self._guesses, self._num_rows = device, guesses, num_rows
        self._requests = ScriptedRequests()
        self._random = np.random.default_rng(seed)
        self._now = 0.0  # seconds, without those of asking for drafts
        self.depths: list[int | None] = []  # of a device drafter, of each step
        self.speculator = self._new_speculator(self.controller)

    def _new_speculator(self, controller: Controller | None) -> ProposingSpeculator:
        return ProposingSpeculator(
            self._guesses,
            self.limits,
            controller,
            vocab_size=WRONG + 1,
            sync=self._sync,
            clock=lambda: self._now + self._device.draft * self._guesses.num_requested,
        )

    def run(self, num_steps: int) -> Progress:
        """Takes so many steps in which all decode; those between them, which compute prompts, do
        not count.
        """
        progress = Progress()
        while len(progress.shapes) < num_steps:
            for place in set(range(self._num_rows)) - set(self._guesses.places.values()):
                group = self._requests.new_group(Arrival(0.0, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS))
                self._guesses.places[group.sequences[0].sequence_id] = place
                self.scheduler.add(group)
            self._step(progress)
        return progress

    def _step(self, progress: Progress) -> None:
        drafts = self.speculator.propose(self.scheduler.running)
        plan = self.scheduler.plan(drafts)
        assert plan is not None
        depth = self.speculator.draft_depth(plan, self.scheduler.has_sequence_slots)
        plan = replace(plan, draft_depth=depth)
        self.depths.append(depth)
        edits = self._requests.edits(plan)
        self._guesses.num_ready = MAX_DRAFTS if self._sync is None else depth or 0
        groups = self.scheduler.commit(plan, edits)
        shape = self.limits.shape(len(plan.rows), plan.num_tokens - len(plan.rows))
        seconds = self._device.seconds(shape) + self._device.ahead(shape, depth)
        self._now += (
            seconds
            * self._random.lognormal(0.0, 0.05)
            * (10.0 if self._random.random() < 0.005 else 1.0)
        )
        self.speculator.observe(StepReport(drafts, plan, _result(plan), edits, groups))
        for group in groups:
            if group.finished:
                self.speculator.forget(group)
        if not plan.decodes:
            return
        self._guesses.step += 1
        progress.shapes.append(shape)
        progress.num_tokens += sum(type(edit) is Append for edit in edits)
        progress.seconds += seconds + drafts.seconds


def _result(plan: StepPlan) -> StepResult:
    """Returns a result, at which nobody looks."""
    ids, floats = np.zeros(len(plan.samples), np.int32), np.zeros(len(plan.samples), np.float32)
    tops = np.zeros((len(plan.samples), 0))
    return StepResult(
        ids, floats, ids, tops.astype(np.int32), tops.astype(np.float32), draft_candidates=ids
    )
