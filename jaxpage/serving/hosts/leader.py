"""Rank 0 of several hosts: tells all others what happens to its engine, in the form of the event log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from jaxpage.replay.differences import Leave
from jaxpage.replay.recorder import Record
from jaxpage.serving.hosts.channel import Channel
from jaxpage.serving.hosts.host_records import HostRecorder
from jaxpage.step.plan import StepPlan

logger = logging.getLogger(__name__)

PINGS_IN_TIME = 4  # before a host that does not answer counts as lost
REASON_SECONDS = 1.0  # after a failed step, for what may be the reason


class HostLost(Leave):
    """The engine cannot go on: a host is gone, or does something else."""


class Leader(HostRecorder):
    """Listens to the engine of rank 0. A plan is sent before its step begins, which ends on all hosts or on none."""

    def __init__(self, channels: Mapping[int, Channel], timeout_seconds: float) -> None:
        """channels: by rank. timeout_seconds: a host that is silent for longer is lost; each step must be shorter."""
        super().__init__(self._send)
        self._channels = dict(channels)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._tell: Callable[[BaseException], None] = lambda lost: None
        self._ended = threading.Event()

    def start(self, tell: Callable[[BaseException], None]) -> None:
        """tell: called once, on any thread, when a host is lost."""
        self._tell = tell
        threading.Thread(target=self._ping, name="jaxpage-hosts", daemon=True).start()
        for rank, channel in self._channels.items():
            threading.Thread(
                target=self._listen, args=(rank, channel), name=f"jaxpage-host-{rank}", daemon=True
            ).start()

    @property
    def has_lost(self) -> bool:
        return self._lost is not None

    def planned(self, plan: StepPlan) -> None:
        super().planned(plan)
        if self._lost is not None:
            raise HostLost(self._lost)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """What others hold of this step is not known, so that there is no going on. Of a host that is gone the device may know first."""
        self._ended.wait(REASON_SECONDS)
        self._lose(f"step {plan.step_id} failed: {type(error).__name__}: {error}")
        raise HostLost(self._lost)

    def closed(self) -> None:
        """The others end too."""
        if self._lost is None:
            super().closed()
        self._ended.set()

    def _send(self, record: Record) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(record)
            except OSError as error:
                self._lose(f"rank {rank} cannot be reached: {error}")

    def _ping(self) -> None:
        while not self._ended.wait(self._timeout / PINGS_IN_TIME):
            self._send({"event": "ping"})

    def _listen(self, rank: int, channel: Channel) -> None:
        """To answers to pings, which come between two steps of the other host."""
        channel.set_timeout(self._timeout)
        while True:
            try:
                record = channel.receive()
            except TimeoutError:
                return self._lose(f"rank {rank} has not answered for {self._timeout:g} s")
            except (OSError, ValueError) as error:
                return self._lose(f"rank {rank} is gone: {error}")
            if record.get("event") == "differs":
                return self._lose(f"rank {rank} does something else\n{record.get('difference')}")

    def _lose(self, why: str) -> None:
        if self._ended.is_set():
            return
        with self._lock:
            if self._lost is not None:
                return
            self._lost = why
        self._ended.set()
        logger.critical("the hosts cannot go on together: %s", why)
        for channel in self._channels.values():  # the others see that this one is gone
            channel.shut()
        self._tell(HostLost(why))
