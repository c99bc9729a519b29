"""Keeps the last steps of an engine in memory, and writes them as a log.

That happens when a step has failed, or when somebody asks for it. A log can be replayed only from
its beginning, because a step depends on the KV cache before it. The records that fall out of the
ring are therefore folded into a snapshot: the requests that are still there, the tokens that they
drew, and their block tables. As long as nothing has fallen out, an incident is a log like any
other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxpage.replay.event_log import write_log
from jaxpage.replay.log_walk import Walk
from jaxpage.replay.recorder import Record, Recorder
from jaxpage.step.plan import StepPlan

logger = logging.getLogger(__name__)

MAX_FILES = 100  # the most files of one process
# Parameters that hold text, token ids, or labels that a client chose.
_OF_TEXT = frozenset(
    [
        "stop",
        "stop_token_ids",
        "bad_words",
        "logit_bias",
        "allowed_token_ids",
        "structured_outputs",
        "thinking_markers",
        "cache_salt",
        "user",
    ]
)


class Incident(NamedTuple):
    """Holds the content of the ring at one moment.

    Attributes:
        reason: The reason why it was taken.
        step: The last step.
        num_steps: The number of steps in it.
        why_not_replayable: The reason why it cannot be replayed; None if it can.
        records: The records, a snapshot first if steps before them have fallen out.
    """

    reason: str
    step: int
    num_steps: int
    why_not_replayable: str | None
    records: list[Record]


class IncidentRing(Recorder):
    """Keeps the records of the last steps, on the engine's thread.

    Attributes:
        failure: Is called with an incident when a step has failed.
    """

    def __init__(self, num_steps: int, *, keeps_token_ids: bool, unsaid: str = "") -> None:
        """Starts with an empty ring.

        Args:
            num_steps: The number of steps that are kept.
            keeps_token_ids: False leaves out token ids and texts.
            unsaid: The part of this engine that records do not describe and a replay would need, if
                any.
        """
        super().__init__(self._keep)
        self._maximum = num_steps
        self._keeps_token_ids = keeps_token_ids
        self._unsaid = unsaid
        self._records: deque[Record] = deque()
        self._num_steps = 0
        self._before = Walk()  # the state after the records that have fallen out
        self._is_whole = True  # nothing has fallen out, and the weights are the first ones
        # Called after a failed step.
        self.failure: Callable[[Incident], None] = lambda incident: None

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Records the failure, and hands out the incident."""
        super().failed(plan, error)
        self.failure(self.read_ring("a step failed"))

    def read_ring(self, reason: str) -> Incident:
        """Returns the content of the ring."""
        why_not = None
        if not self._is_whole:
            why_not = (
                "it does not begin with the engine's first step, and a step depends on the KV "
                "cache before it"
            )
        elif not self._keeps_token_ids:
            why_not = "token ids were left out"
        elif self._unsaid:
            why_not = f"a log does not say {self._unsaid}"
        before = [] if self._is_whole else [self._before.snapshot()]
        return Incident(reason, self._step, self._num_steps, why_not, [*before, *self._records])

    def _keep(self, record: Record) -> None:
        try:
            self._add(record if self._keeps_token_ids else scrub(record))
        except Exception:  # no request may fail because of its records
            logger.exception("the records of the last steps are lost, and kept anew from here on")
            self._records.clear()
            self._num_steps = 0
            self._before = Walk()
            self._is_whole = False

    def _add(self, record: Record) -> None:
        if "embedded" in record:
            self._unsaid = self._unsaid or "what the pictures and vectors of its prompts are"
        self._records.append(record)
        self._num_steps += record["event"] == "plan"
        # A replay would compute what came before an update with the new weights.
        ends = record["event"] == "update"
        while (
            ends
            or self._num_steps > self._maximum
            or (not self._is_whole and self._records[0]["event"] != "plan")
        ):
            oldest = self._records.popleft()
            self._num_steps -= oldest["event"] == "plan"
            self._is_whole = False
            self._before.follow(oldest)
            if not self._records:
                break


class Incidents:
    """Writes incidents as logs into one directory; only their owner can read them."""

    def __init__(self, ring: IncidentRing, directory: Path, header: Callable[[], Record]):
        """Connects a ring with a directory.

        Args:
            ring: The ring.
            directory: The directory.
            header: Makes the header of a log of this engine; it may take seconds.
        """
        self.ring = ring
        self._directory = directory
        self._header = header
        self._lock = threading.Lock()
        self._num_files = 0
        ring.failure = self._write_aside

    def write(self, incident: Incident) -> Path:
        """Writes an incident, which takes a while, and returns the path of its file.

        Raises:
            FileExistsError: This process has written `MAX_FILES` incidents.
            OSError: The file cannot be written.
        """
        with self._lock:
            if self._num_files >= MAX_FILES:
                raise FileExistsError(
                    f"{MAX_FILES} incidents were written, which is the most of one process"
                )
            self._num_files += 1
            name = time.strftime("incident-%Y%m%dT%H%M%SZ", time.gmtime())
            path = self._directory / f"{name}-step-{incident.step}-{self._num_files}.jsonl"
            about = {name: value for name, value in incident._asdict().items() if name != "records"}
            write_log(path, [{**self._header(), "incident": about}, *incident.records])
        logger.warning(
            "the last %d steps are in %s (%s)", incident.num_steps, path, incident.reason
        )
        return path

    def _write_aside(self, incident: Incident) -> None:
        threading.Thread(
            target=self._try_to_write, args=(incident,), daemon=True, name="jaxpage-incident"
        ).start()

    def _try_to_write(self, incident: Incident) -> None:
        try:
            self.write(incident)
        except OSError as error:
            logger.error("the incident cannot be written: %s", error)


def scrub(record: Record) -> Record:
    """Returns a record without token ids, texts, and log probabilities, which could tell texts.

    The numbers of tokens stay.
    """
    match record["event"]:
        case "arrival":
            left_out = {"prompt_token_ids", "bad_word_token_ids", "embedded"}
            fields = {name: value for name, value in record.items() if name not in left_out}
            params = {
                name: value
                for name, value in fields.get("params", {}).items()
                if name not in _OF_TEXT
            }
            beam = {
                name: value
                for name, value in fields.get("beam", {}).items()
                if name not in _OF_TEXT
            }
            objects = {"params": params, "beam": beam}
            requested: Record = {name: objects[name] for name in objects if name in fields}
            if "present" in fields:
                requested["present"] = [
                    {**sequence, "token_ids": [None] * len(sequence["token_ids"])}
                    for sequence in fields["present"]
                ]
            return {**fields, **requested, "num_prompt_tokens": len(record["prompt_token_ids"])}
        case "plan" if "drafts" in record:
            return {
                **record,
                "drafts": [
                    [sequence_id, [None] * len(token_ids)]
                    for sequence_id, token_ids, *_ in record["drafts"]
                ],
            }
        case "result":
            edits = [_scrub_edit(edit) for edit in record.get("edits", [])]
            fields = {
                name: value for name, value in record.items() if name not in ("logprobs", "scores")
            }
            # A negative number says why no token was drawn, and tells nothing of a text.
            tokens = [token if token < 0 else None for token in record["tokens"]]
            return {**fields, "tokens": tokens, **({"edits": edits} if edits else {})}
    return record


def _scrub_edit(edit: list[Any]) -> list[Any]:
    """Returns an edit without the stop string or token."""
    return [*edit[:3], None, *edit[4:]] if edit[0] == "finish" else edit
