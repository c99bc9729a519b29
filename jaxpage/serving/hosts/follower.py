"""A rank above 0: does to its engine what rank 0 did to its own, and compares all that comes of it."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Mapping

from jaxpage.engine.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.replay.differences import Differs, differ
from jaxpage.replay.event_log import encoded
from jaxpage.replay.recorder import Record
from jaxpage.replay.replay import LoggedDrafts, add_arrival
from jaxpage.serving.hosts.channel import Channel
from jaxpage.serving.hosts.host_records import HostRecorder
from jaxpage.settings.argument_checks import shown
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.step.plan import StepPlan

logger = logging.getLogger(__name__)

NAMES = ("rank 0", "this rank")


class _Told(HostRecorder):
    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Rank 0 waits in this step for what will not come."""
        raise Differs(
            f"step {plan.step_id} failed on this rank alone: {type(error).__name__}: {error}"
        )


class Follower:
    """Block tables, queues and tokens of each step are in the records, so that the first difference is seen where it comes up: that of a
    plan before the step runs."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        timeout_seconds: float,
        adapters: Mapping[str, LoRARequest] | None = None,
    ) -> None:
        """timeout_seconds: rank 0 is gone if it is silent for longer. adapters: those that requests may have, by name."""
        engine.events = _Told(self._came)
        # The engine's own might draft otherwise: how many drafts are worth it is measured.
        engine.speculator = self._drafts = LoggedDrafts()
        self._engine, self._channel, self._adapters = engine, channel, adapters or {}
        self._received: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._theirs: Record | None = None  # what the engine must say next
        self._ours: deque[Record] = deque()  # what it has said, and rank 0 not yet
        self._plan: Record = {}
        channel.set_timeout(timeout_seconds)

    def run(self) -> int:
        """Until rank 0 ends. Returns the exit status; the process ends by itself if rank 0 is gone, in the middle of a step too."""
        threading.Thread(target=self._receive, name="jaxpage-rank-0", daemon=True).start()
        try:
            while (record := self._received.get())["event"] != "end":
                if record["event"] == "ping":
                    self._channel.send({"event": "pong"})
                else:
                    self.follow(record)
        except Differs as difference:
            logger.critical("this rank does something else than rank 0\n%s", difference)
            self._channel.send({"event": "differs", "difference": str(difference)})
            return 1
        return 0

    def follow(self, record: Record) -> None:
        """Raises Differs."""
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

    def _add(self, record: Record) -> None:
        try:
            name, _ = record.get("lora", (None, None))
            lora = None if name is None else self._engine.opened_adapter(self._adapters[name])
            add_arrival(self._engine, record, lora)
        except (LookupError, TypeError, ValueError, TimeoutError, JaxpageError) as error:
            why = f"{type(error).__name__}: {error}"
            raise Differs(
                f"this rank refuses request {shown(record.get('request_id'))}: {why}"
            ) from error

    def _came(self, record: Record) -> None:
        """The sink of the engine's recorder. Of a plan it is called before the device begins."""
        ours = json.loads(encoded(record))
        if self._theirs is None:
            self._ours.append(ours)
        else:
            theirs, self._theirs = self._theirs, None
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
            os._exit(1)  # the engine may wait in a step that never ends
