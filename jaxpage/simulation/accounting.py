"""What a simulated run comes to: averages over virtual time, and what became of every request."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, fields
from statistics import fmean

from jaxpage.memory import MemorySplit
from jaxpage.simulation.traces import Arrival


@dataclass(frozen=True)
class Served:
    """One finished request. Seconds since the trace began."""

    arrival: Arrival
    first_token: float
    finished: float
    num_preemptions: int
    num_output_tokens: tuple[int, ...]  # of each sample

    @property
    def latency(self) -> float:
        return self.finished - self.arrival.seconds

    @property
    def normalized_latency(self) -> float:
        """Seconds per output token, the paper's measure."""
        return self.latency / self.arrival.num_output_tokens


@dataclass(frozen=True)
class State:
    """The scheduler during one step, or the mean of many. The four kinds of slots add up to the pool."""

    token_slots: float
    reserved_slots: float
    internal_slots: float
    free_slots: float
    running: float  # requests
    waiting: float  # requests
    saved_blocks: float  # by sharing: see `MemorySplit`
    unshared_blocks: float

    @classmethod
    def of(cls, split: MemorySplit, running: int, waiting: int) -> State:
        slots = (
            split.token_slots,
            split.reserved_slots,
            split.internal_fragmentation_slots,
            split.free_slots,
        )
        return cls(*slots, running, waiting, split.saved_blocks, split.unshared_blocks)

    @property
    def num_slots(self) -> float:
        return self.token_slots + self.reserved_slots + self.internal_slots + self.free_slots

    @property
    def saved_by_sharing(self) -> float:
        """Blocks saved by sharing / blocks without sharing, 0 to 1: figure 15."""
        return self.saved_blocks / self.unshared_blocks if self.unshared_blocks else 0.0

    @property
    def pool_waste(self) -> float:
        """Share of the pool that holds no token: what the paper's figure 2 counts."""
        return 1.0 - self.token_slots / self.num_slots

    @property
    def allocated_waste(self) -> float:
        """Share of the blocks in use that holds no token."""
        allocated = self.num_slots - self.free_slots
        return 1.0 - self.token_slots / allocated if allocated else 0.0


class TimeAverage:
    """The mean state over a window of virtual time, each state weighted by how long it lasted."""

    def __init__(self, start: float = 0.0, stop: float = math.inf) -> None:
        self.start = start
        self.stop = stop
        self.seconds = 0.0
        self._sums = [0.0] * len(fields(State))

    def holds(self, begin: float, end: float) -> bool:
        return begin < self.stop and end > self.start

    def add(self, state: State, begin: float, end: float) -> None:
        """A state that lasted from `begin` to `end`; what of it lies outside the window does not count."""
        weight = min(end, self.stop) - max(begin, self.start)
        self.seconds += weight
        self._sums = [
            total + weight * value for total, value in zip(self._sums, astuple(state), strict=True)
        ]

    def mean(self) -> State:
        """Raises ValueError if nothing has happened within the window."""
        if not self.seconds:
            raise ValueError(f"nothing happened between {self.start} and {self.stop} s")
        return State(*(total / self.seconds for total in self._sums))


@dataclass
class Run:
    """A trace from its beginning to the last token, or to where it was stopped. Seconds are virtual."""

    average: TimeAverage
    # by request id, in the order in which they finished
    served: dict[str, Served] = field(default_factory=dict)
    unfinished: list[Arrival] = field(default_factory=list)  # when it was stopped
    seconds: float = 0.0
    num_steps: int = 0
    longest_step: float = 0.0
    num_preemptions: int = 0
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0  # blocks
    swap_seconds: float = 0.0

    @property
    def mean(self) -> State:
        return self.average.mean()

    @property
    def normalized_latency(self) -> float:
        """Mean over the requests, the paper's measure of service. Who has not finished counts with the time until now, a lower bound."""
        waited = [
            (self.seconds - arrival.seconds) / arrival.num_output_tokens
            for arrival in self.unfinished
        ]
        return fmean([*(served.normalized_latency for served in self.served.values()), *waited])
