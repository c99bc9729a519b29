"""Runs the engine of a rank above 0 like that of rank 0, and compares the records of both."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Mapping

from jaxpage.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.replay import Differs, LoggedDrafts, Record, add_arrival, differ, encode_record
from jaxpage.serving.hosts.channel import Channel
from jaxpage.serving.hosts.host_records import HostRecorder
from jaxpage.serving.hosts.weight_loading import WeightsOfFollower
from jaxpage.settings.argument_checks import show
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.step.plan import StepPlan

logger = logging.getLogger(__name__)

NAMES = ("rank 0", "this rank")


class _FollowerRecorder(HostRecorder):
    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Raises Differs, because rank 0 now waits for this host in a step that cannot end."""
        raise Differs(
            f"step {plan.step_id} failed on this rank alone: {type(error).__name__}: {error}"
        )


class Follower:
    """Does to its engine what rank 0 did to its own.

    The records have the block tables, the queues and the tokens of each step. So a difference is
    found where it begins, and one in a plan before its step runs.
    """

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        timeout_seconds: float,
        adapters: Mapping[str, LoRARequest] | None = None,
        weights: WeightsOfFollower | None = None,
    ) -> None:
        """Listens to the engine and to the channel.

        Args:
            engine: The engine of this host, which has not begun.
            channel: The channel to rank 0.
            timeout_seconds: Rank 0 is taken for gone if it is silent for longer.
            adapters: The adapters that requests may have, by name.
            weights: Loads other weights; None where there are no updates.
        """
        engine.events = _FollowerRecorder(self._came)
        # The drafts come from the records. The engine's own speculator might choose another number
        # of drafts, because it measures how many are worth their time.
        engine.speculator = self._drafts = LoggedDrafts()
        self._engine = engine
        self._channel = channel
        self._adapters = adapters or {}
        self._weights = weights
        self._received: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._theirs: Record | None = None  # the record that this engine must make next
        self._ours: deque[Record] = deque()  # records of this engine that rank 0 has not sent yet
        self._plan: Record = {}
        channel.set_timeout(timeout_seconds)

    def run(self) -> int:
        """Follows rank 0 until it ends, and returns the exit status: 1 after a difference.

        If rank 0 is gone the process ends at once with status 1, even in the middle of a step.
        """
        threading.Thread(target=self._receive, name="jaxpage-rank-0", daemon=True).start()
        try:
            while (record := self._received.get())["event"] != "end":
                if record["event"] == "ping":
                    self._channel.send({"event": "pong"})
                elif record["event"] in ("load", "loaded", "forget"):
                    self._prepare_update(record)
                else:
                    self.follow(record)
        except Differs as difference:
            logger.critical("this rank does something else than rank 0\n%s", difference)
            self._channel.send({"event": "differs", "difference": str(difference)})
            return 1
        return 0

    def _prepare_update(self, record: Record) -> None:
        """Has other weights loaded, tells rank 0 how that went, or forgets them."""
        assert self._weights is not None, "rank 0 has compared the settings of both"
        match record["event"]:
            case "load":
                self._weights.load(record, self._received.put)
            case "loaded":
                self._channel.send(self._weights.answer(record["number"], record["loading"]))
            case "forget":
                self._weights.forget(record["number"])

    def follow(self, record: Record) -> None:
        """Does what one record says, and compares the records of both engines.

        Raises:
            Differs: This engine does something else than that of rank 0.
        """
        if self._ours:
            self._compare(record, self._ours.popleft())
            return
        self._theirs = record
        self._do(record)
        if self._theirs is not None:
            self._differ(record, None)

    def _do(self, record: Record) -> None:
        engine = self._engine
        match record["event"]:
            case "arrival":
                self._add(record)
            case "abort":
                engine.abort(record["request_id"])
            case "plan":
                self._drafts.step(engine, record)
            case "reset":
                engine.reset_prefix_cache()
            case "rebuild":
                engine.rebuild_pages()
            case "update" if self._weights is not None:
                checksum = record["checksum"]
                engine.replace_weights(self._weights.take(checksum), record["mode"], checksum)

    def _add(self, record: Record) -> None:
        try:
            name, _ = record.get("lora", (None, None))
            lora = None if name is None else self._engine.open_adapter(self._adapters[name])
            add_arrival(self._engine, record, lora)
        except (LookupError, TypeError, ValueError, TimeoutError, JaxpageError) as error:
            why = f"{type(error).__name__}: {error}"
            raise Differs(
                f"this rank refuses request {show(record.get('request_id'))}: {why}"
            ) from error

    def _came(self, record: Record) -> None:
        """Takes a record of this engine; the record of a plan comes before the device begins."""
        # The other record came as JSON, in which a tuple is a list.
        ours = json.loads(encode_record(record))
        if self._theirs is None:
            self._ours.append(ours)
        else:
            theirs = self._theirs
            self._theirs = None
            self._compare(theirs, ours)

    def _compare(self, theirs: Record, ours: Record) -> None:
        if theirs != ours:
            self._differ(theirs, ours)
        if ours["event"] == "plan":
            self._plan = ours

    def _differ(self, theirs: Record, ours: Record | None) -> None:
        differ(f"First difference: step {theirs.get('step')}", theirs, ours, self._plan, NAMES)

    def _receive(self) -> None:
        try:
            while True:
                self._received.put(record := self._channel.receive())
                if record["event"] == "end":
                    return
        except (OSError, ValueError) as error:
            logger.critical("rank 0 is gone: %s", error)
            os._exit(1)  # the engine's thread may wait in a step that never ends
