"""Tells the other hosts what happens to the engine of rank 0, in the form of the event log."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from jaxpage.errors import CheckpointError, EngineFailed
from jaxpage.replay import Record, StepAbandoned
from jaxpage.serving.hosts.channel import Channel
from jaxpage.serving.hosts.host_records import HostRecorder
from jaxpage.serving.hosts.weight_loading import LoadedWeights
from jaxpage.step.plan import StepPlan

logger = logging.getLogger(__name__)

PINGS_IN_TIME = 4  # the pings in the time after which a silent host is lost
# A lost host that is noticed within this time after a failed step counts as the reason.
REASON_SECONDS = 1.0


class HostLost(StepAbandoned):
    """Says that the engine cannot go on, because a host is gone or does something else."""


class Leader(HostRecorder):
    """Listens to the engine of rank 0, and sends its records to the other hosts.

    A plan is sent before its step begins, because a step ends on all hosts or on none.
    """

    def __init__(self, channels: Mapping[int, Channel], timeout_seconds: float) -> None:
        """Makes a leader that is not started.

        Args:
            channels: The channels to the other hosts by rank.
            timeout_seconds: A host that is silent for longer is lost; so each step must be shorter.
        """
        super().__init__(self._send)
        self._channels = dict(channels)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._report: Callable[[BaseException], None] = lambda lost: None
        self._ended = threading.Event()
        # What other hosts say of weights, by rank; None when no more will come.
        self._loaded: queue.SimpleQueue[tuple[int, Record] | None] = queue.SimpleQueue()

    def start(self, report: Callable[[BaseException], None]) -> None:
        """Starts the threads that send pings and receive the answers.

        Args:
            report: Called once, on any thread, when a host is lost.
        """
        self._report = report
        threading.Thread(target=self._ping, name="jaxpage-hosts", daemon=True).start()
        for rank, channel in self._channels.items():
            threading.Thread(
                target=self._listen, args=(rank, channel), name=f"jaxpage-host-{rank}", daemon=True
            ).start()

    @property
    def has_lost(self) -> bool:
        """Returns whether a host was lost."""
        return self._lost is not None

    def planned(self, plan: StepPlan) -> None:
        """Sends the plan to the other hosts, and raises HostLost if one was lost."""
        super().planned(plan)
        if self._lost is not None:
            raise HostLost(self._lost)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Raises HostLost, because nobody knows what the other hosts have computed of this step.

        The device may notice before the channel that a host is gone, so it waits a moment for the
        better reason.
        """
        self._ended.wait(REASON_SECONDS)
        self._lose(f"step {plan.step_id} failed: {type(error).__name__}: {error}")
        raise HostLost(self._lost)

    def closed(self) -> None:
        """Tells the other hosts to end, too, unless one was lost."""
        if self._lost is None:
            super().closed()
        self._ended.set()
        self._loaded.put(None)

    def load_on_all(
        self, number: int, path: str, *, check_finite: bool, load: Callable[[], LoadedWeights]
    ) -> LoadedWeights:
        """Loads other weights on all hosts at the same time, and returns those of this one.

        It is called on one thread at a time. The other hosts keep theirs until the engine of rank 0
        takes its own, or `forget_weights`.

        Args:
            number: The number of the update; each is greater than the one before.
            path: The directory, below the one that each host has for weights.
            check_finite: True refuses NaN and infinite numbers.
            load: Loads the weights on this host.

        Raises:
            CheckpointError: A host cannot load them, or has other files; the message names its
                rank. The errors of `load` come as they are.
            EngineFailed: A host was lost, or the engine has ended.
        """
        order = {"number": number, "path": path, "check_finite": check_finite}
        self._send({"event": "load", **order})
        try:
            loaded = load()
        finally:
            answers = self._wait_for_answers()  # or the next update would get them
        problems = []
        for rank, answer in sorted(answers.items()):
            if (why := answer.get("why")) is not None:
                problems.append(f"rank {rank}: {why}")
            elif answer["checksum"] != loaded.checksum:
                problems.append(
                    f"rank {rank}: the files of {path} differ (hash {answer['checksum']} there, "
                    f"{loaded.checksum} on rank 0)"
                )
        if problems:
            raise CheckpointError("\n".join(problems))
        return loaded

    def _wait_for_answers(self) -> dict[int, Record]:
        answers: dict[int, Record] = {}
        while len(answers) < len(self._channels):
            answer = self._loaded.get()
            if answer is None:
                self._loaded.put(None)  # for the next one that waits
                raise EngineFailed("The engine has ended, or a host was lost")
            answers[answer[0]] = answer[1]
        return answers

    def forget_weights(self, number: int) -> None:
        """Lets the other hosts drop the weights of an update that has ended.

        It is called between two steps, so that they hear first of an update that was made.
        """
        self._send({"event": "forget", "number": number})

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
        """Receives the answers to pings, which a host sends between two steps, until it is lost."""
        channel.set_timeout(self._timeout)
        while True:
            try:
                record = channel.receive()
            except TimeoutError:
                return self._lose(f"rank {rank} has not answered for {self._timeout:g} s")
            except (OSError, ValueError) as error:
                return self._lose(f"rank {rank} is gone: {error}")
            if record.get("event") == "loaded":
                self._loaded.put((rank, record))
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
        self._loaded.put(None)
        logger.critical("the hosts cannot go on together: %s", why)
        # The other hosts see that their connection has ended, and end, too.
        for channel in self._channels.values():
            channel.shut()
        self._report(HostLost(why))
