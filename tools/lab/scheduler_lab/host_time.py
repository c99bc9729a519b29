"""Measures the wall time of the scheduler itself.

It shows what planning costs the host at every step, and whether a long queue makes planning slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import median
from typing import TypeVar

from jaxpage.device.inputs.buckets import make_menu
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.memory import pool_ids
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.traces import Arrival
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import SequenceGroup

BLOCK_SIZE = 16
# The prompts have 200 lengths, in an order in which neighbours differ.
MIN_PROMPT, NUM_PROMPTS, STRIDE = 200, 200, 37
SAMPLES = 200  # the steps, arrivals or departures of which the median is taken

T = TypeVar("T")


@dataclass(frozen=True)
class PlanningTime:
    """Holds medians over decode steps.

    No sequence begins or ends; one in sixteen takes a block.
    """

    num_running: int
    prefix_caching: bool
    plan_us: float
    commit_us: float
    build_us: float  # of the batch builder: not the scheduler's time, but in the same step

    @property
    def us_per_sequence(self) -> float:
        """Returns the scheduler's time of a step for each sequence: planning and committing."""
        return (self.plan_us + self.commit_us) / self.num_running


@dataclass(frozen=True)
class WaitingTime:
    """Holds medians while requests wait, the first of them for more blocks than are free."""

    num_waiting: int
    num_running: int
    plan_us: float
    commit_us: float
    add_us: float
    abort_us: float  # for a request in the middle of the queue


Times = TypeVar("Times", PlanningTime, WaitingTime)


class Decoding:
    """A scheduler whose `num_running` sequences all decode.

    It has blocks for `num_steps` more steps, and one free sequence slot.
    """

    def __init__(self, num_running: int, num_steps: int, *, prefix_caching: bool) -> None:
        # Some sequences decode while the prompts of others are computed, a few in each step.
        self.max_length = MIN_PROMPT + NUM_PROMPTS + num_running + num_steps
        self.scheduler = Setup(
            num_blocks=num_running * -(-self.max_length // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running + 1,
            prefix_caching=prefix_caching,
        ).new_scheduler()
        self.requests = ScriptedRequests()
        self.steps: list[tuple[float, float]] = []  # the seconds of plan and of commit
        for index in range(num_running):
            self.scheduler.add(
                self.new_group(MIN_PROMPT + index * STRIDE % NUM_PROMPTS, self.max_length)
            )
        while self.step().num_tokens > num_running or self.scheduler.num_waiting:
            pass
        self.steps.clear()

    def new_group(self, num_prompt_tokens: int, num_tokens: int) -> SequenceGroup:
        """Returns a request that ends with `num_tokens` tokens in all."""
        return self.requests.new_group(
            Arrival(0.0, num_prompt_tokens, num_tokens - num_prompt_tokens)
        )

    def step(self) -> StepPlan:
        """Plans and commits a step, and keeps the times."""
        planning, plan = time_call(self.scheduler.plan)
        assert plan is not None
        edits = self.requests.edits(plan)
        committing, _ = time_call(partial(self.scheduler.commit, plan, edits))
        self.steps.append((planning, committing))
        return plan

    def medians(self) -> tuple[float, float]:
        """Returns the medians of plan and of commit, in microseconds."""
        plans, commits = zip(*self.steps, strict=True)
        return _microseconds(plans), _microseconds(commits)

    def new_waiting(self, *, is_first: bool = False) -> SequenceGroup:
        """Returns a request that cannot run now.

        The first such request needs the whole pool; those after it need hardly anything.
        """
        num_slots = self.scheduler.block_manager.num_usable * BLOCK_SIZE
        return (
            self.new_group(num_slots - 1, num_slots)
            if is_first
            else self.new_group(MIN_PROMPT, self.max_length)
        )


class Queue:
    """Holds the requests that wait at a scheduler; measures the cost of adding and aborting one."""

    def __init__(self, decoding: Decoding, num_waiting: int) -> None:
        self.decoding = decoding
        self.adds: list[float] = []  # seconds
        self.aborts: list[float] = []  # seconds
        self._request_ids: list[str] = []  # in order of arrival
        for index in range(num_waiting):
            self.add(decoding.new_waiting(is_first=index == 0))
        self.adds.clear()

    def add(self, group: SequenceGroup) -> None:
        """Adds a request, and keeps the time."""
        self.adds.append(time_call(partial(self.decoding.scheduler.add, group))[0])
        self._request_ids.append(group.request.request_id)

    def abort_one(self) -> None:
        """Aborts a request from the middle of the queue, and keeps the time."""
        request_id = self._request_ids.pop(len(self._request_ids) // 2)
        self.aborts.append(time_call(partial(self.decoding.scheduler.abort, request_id))[0])


def time_call(function: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds that the call took, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def planning_times(num_running: int) -> list[PlanningTime]:
    """Measures planning without and with prefix caching.

    The two take turns step by step, so that other load on the machine meets both alike.
    """
    cachings = (False, True)
    sides = [Decoding(num_running, SAMPLES, prefix_caching=caching) for caching in cachings]
    builder = BatchBuilder(
        make_menu(num_running, Setup.max_num_batched_tokens),
        table_width=-(-sides[0].max_length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        blocks=pool_ids([sides[0].scheduler.block_manager.groups[0].pool.num_blocks]),
        vocab_size=max(num_running, 32_000),
    )
    building: dict[bool, list[float]] = {caching: [] for caching in cachings}
    for _ in range(SAMPLES):
        for caching, side in zip(cachings, sides, strict=True):
            building[caching].append(time_call(partial(builder.build, side.step()))[0])
    return [
        PlanningTime(num_running, caching, *side.medians(), _microseconds(building[caching]))
        for caching, side in zip(cachings, sides, strict=True)
    ]


def waiting_times(nums_waiting: Sequence[int], num_running: int = 64) -> list[WaitingTime]:
    """Measures steps with each number of waiting requests, which take turns step by step.

    Prefix caching is on, as in the engine.
    """
    queues = [
        Queue(Decoding(num_running, SAMPLES, prefix_caching=True), num) for num in nums_waiting
    ]
    for _ in range(SAMPLES):
        for queue in queues:
            queue.decoding.step()
            queue.abort_one()
            queue.add(queue.decoding.new_waiting())
    times = []
    for queue, num_waiting in zip(queues, nums_waiting, strict=True):
        scheduler, (plan, commit) = queue.decoding.scheduler, queue.decoding.medians()
        assert (scheduler.num_waiting, scheduler.num_running) == (num_waiting, num_running)
        add, abort = _microseconds(queue.adds), _microseconds(queue.aborts)
        times.append(WaitingTime(num_waiting, num_running, plan, commit, add, abort))
    return times


def minimum(rounds: Iterable[Sequence[Times]]) -> list[Times]:
    """Returns, for each median, the least value of repeated measurements.

    Other load on the machine only makes a time longer, never shorter.
    """
    merged = []
    for same in zip(*rounds, strict=True):
        names = [field.name for field in fields(same[0]) if field.name.endswith("_us")]
        merged.append(
            replace(same[0], **{name: min(getattr(item, name) for item in same) for name in names})
        )
    return merged


def _microseconds(seconds: Sequence[float]) -> float:
    return 1e6 * median(seconds)
