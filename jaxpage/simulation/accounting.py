"""Keeps the results of a simulated run: averages over virtual time, and the end of each request."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, fields
from statistics import fmean

from jaxpage.memory import MemorySplit
from jaxpage.simulation.traces import Arrival


@dataclass(frozen=True)
class Served:
    """A request that has finished. Seconds count from the beginning of the trace."""

    arrival: Arrival
    first_token: float
    finished: float
    num_preemptions: int
    num_output_tokens: tuple[int, ...]  # one number for each sample

    @property
    def latency(self) -> float:
        """Returns the seconds from the arrival to the last token."""
        return self.finished - self.arrival.seconds

    @property
    def normalized_latency(self) -> float:
        """Returns the latency per output token in seconds, the paper's measure."""
        return self.latency / self.arrival.num_output_tokens


@dataclass(frozen=True)
class State:
    """Describes the scheduler during one step, or holds the mean of many steps.

    The four kinds of slots add up to the pool.

    Attributes:
        token_slots: The slots that hold a token.
        reserved_slots: The slots that are kept for known tokens.
        internal_slots: The other slots of used blocks.
        free_slots: The slots of free blocks.
        running: The running requests.
        waiting: The waiting requests.
        saved_blocks: The blocks that sharing saves; see `MemorySplit`.
        unshared_blocks: The blocks that would be needed without sharing.
    """

    token_slots: float
    reserved_slots: float
    internal_slots: float
    free_slots: float
    running: float
    waiting: float
    saved_blocks: float
    unshared_blocks: float

    @classmethod
    def of(cls, split: MemorySplit, running: int, waiting: int) -> State:
        """Returns the state for a split of the memory and the numbers of requests."""
        slots = (
            split.token_slots,
            split.reserved_slots,
            split.internal_fragmentation_slots,
            split.free_slots,
        )
        return cls(*slots, running, waiting, split.saved_blocks, split.unshared_blocks)

    @property
    def num_slots(self) -> float:
        """Returns the slots of the pool."""
        return self.token_slots + self.reserved_slots + self.internal_slots + self.free_slots

    @property
    def saved_by_sharing(self) -> float:
        """Returns the share of blocks, 0 to 1, that sharing saves, as figure 15 shows it."""
        return self.saved_blocks / self.unshared_blocks if self.unshared_blocks else 0.0

    @property
    def pool_waste(self) -> float:
        """Returns the share of the pool that holds no token, which the paper's figure 2 counts."""
        return 1.0 - self.token_slots / self.num_slots

    @property
    def allocated_waste(self) -> float:
        """Returns the share of the used blocks that holds no token."""
        allocated = self.num_slots - self.free_slots
        return 1.0 - self.token_slots / allocated if allocated else 0.0


class TimeAverage:
    """Keeps the mean state over a window of virtual time.

    Each state is weighted by the time that it lasted.

    Attributes:
        start: The beginning of the window.
        stop: The end of the window.
        seconds: The time within the window that has states so far.
    """

    def __init__(self, start: float = 0.0, stop: float = math.inf) -> None:
        self.start = start
        self.stop = stop
        self.seconds = 0.0
        self._sums = [0.0] * len(fields(State))

    def holds(self, begin: float, end: float) -> bool:
        """Returns whether a part of an interval is within the window."""
        return begin < self.stop and end > self.start

    def add(self, state: State, begin: float, end: float) -> None:
        """Adds a state that lasted from `begin` to `end`; only its part in the window counts."""
        weight = min(end, self.stop) - max(begin, self.start)
        self.seconds += weight
        self._sums = [
            total + weight * value for total, value in zip(self._sums, astuple(state), strict=True)
        ]

    def mean(self) -> State:
        """Returns the mean state.

        Raises:
            ValueError: Nothing has happened within the window.
        """
        if not self.seconds:
            raise ValueError(f"nothing happened between {self.start} and {self.stop} s")
        return State(*(total / self.seconds for total in self._sums))


@dataclass
class Run:
    """Holds the results of a trace up to the last token, or up to where it was stopped.

    Attributes:
        average: The mean state over virtual time.
        served: The finished requests by id, in the order in which they finished.
        unfinished: The arrivals that had not finished when the run was stopped.
        seconds: The virtual time at the end.
        num_steps: The steps.
        max_step_seconds: The virtual seconds of the longest step.
        num_preemptions: The preemptions.
        num_swapped_out: The blocks that were swapped out.
        num_swapped_in: The blocks that were swapped in.
        swap_seconds: The virtual time that swapping took.
    """

    average: TimeAverage
    served: dict[str, Served] = field(default_factory=dict)
    unfinished: list[Arrival] = field(default_factory=list)
    seconds: float = 0.0
    num_steps: int = 0
    max_step_seconds: float = 0.0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    swap_seconds: float = 0.0

    @property
    def mean(self) -> State:
        """Returns the mean state over the run."""
        return self.average.mean()

    @property
    def normalized_latency(self) -> float:
        """Returns the mean latency per output token over the requests, which the paper measures.

        A request that has not finished counts with the time until now, which is a lower bound.
        """
        waited = [
            (self.seconds - arrival.seconds) / arrival.num_output_tokens
            for arrival in self.unfinished
        ]
        return fmean([*(served.normalized_latency for served in self.served.values()), *waited])
