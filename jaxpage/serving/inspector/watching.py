"""Notes the course of an engine's requests and its last steps, as long as a viewer looks.

A single look at the engine cannot show these.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxpage.engine import Engine
from jaxpage.outputs import RequestMetrics
from jaxpage.step.events import Both, Events
from jaxpage.step.plan import StepPlan
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup

logger = logging.getLogger(__name__)

MAX_SEGMENTS = 200  # the most segments of a timeline; further ones are merged, or the oldest go
NUM_STEPS = 160  # the number of steps that are remembered
NUM_FINISHED = 12  # the number of finished requests that are remembered
PATIENCE_SECONDS = 10.0  # after so long a time without a look nothing more is noted


@dataclass
class Timeline:
    """The course of a request, in segments of time.

    The kinds of segments are queued, chunk (the row computes tokens that were known: a prompt, or
    everything again after a preemption), decode, preempted and swapped.

    Attributes:
        segments: The segments [kind, start, end or None, tokens], by the clock of the watcher.
        last_step: The id of the last step that computed a row of the request.
    """

    segments: list[list[Any]] = field(default_factory=list)
    last_step: int = 0

    def wait(self, kind: str, at: float) -> None:
        """Ends the open segment, and begins one in which the request waits."""
        self.close(at)
        self.segments.append([kind, at, None, 0])

    def compute(self, kind: str, began: float, ended: float, num_tokens: int, step: int) -> None:
        """Adds a row of a step.

        Decodes of consecutive steps become one segment; the chunk of each step has its own.
        """
        self.close(began)
        last = self.segments[-1] if self.segments else None
        # Several sequences of a request may have a row in the same step.
        goes_on = self.last_step == step or (kind == "decode" and self.last_step == step - 1)
        if last is not None and last[0] == kind and (goes_on or len(self.segments) >= MAX_SEGMENTS):
            last[2] = ended
            last[3] += num_tokens
        else:
            self.segments.append([kind, began, ended, num_tokens])
            del self.segments[:-MAX_SEGMENTS]
        self.last_step = step

    def close(self, at: float) -> None:
        """Ends the last segment, if it is open."""
        if self.segments and self.segments[-1][2] is None:
            self.segments[-1][2] = at

    @classmethod
    def begin_late(cls, metrics: RequestMetrics, now: float) -> Timeline:
        """Makes the timeline of a request that began before anybody looked.

        Its segments come from the times that the engine keeps for every request.
        """
        line = cls()
        line.wait("queued", metrics.arrival_time)
        if metrics.first_scheduled_time is not None:
            line.compute(
                "chunk", metrics.first_scheduled_time, metrics.first_token_time or now, 0, 0
            )
        if metrics.first_token_time is not None:
            line.compute("decode", metrics.first_token_time, now, 0, 0)
        return line


@dataclass
class Track:
    """A request with its timeline."""

    group: SequenceGroup
    timeline: Timeline


def kind_of_row(start: int, num_tokens: int, num_drafts: int, num_prompt_tokens: int) -> str:
    """Returns the kind of a row.

    A "chunk" computes known tokens, those of a prompt or after a preemption, and "decode" others.
    """
    is_known = start < num_prompt_tokens or num_tokens - num_drafts > 1
    return "chunk" if is_known else "decode"


class Watcher(Both):
    """Listens to an engine in front of its present listener, which it tells everything.

    It leaves when nobody has looked for a while. An error in here costs the page its history, but
    no request anything.

    Attributes:
        tracks: The requests of the engine by id; those that have ended leave at the next look.
        finished: The last requests that have ended.
        steps: The last steps, as snapshots show them.
        last_visit: The time of the last look.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.tracks: dict[str, Track] = {}
        self.finished: deque[Track] = deque(maxlen=NUM_FINISHED)
        self.steps: deque[dict[str, Any]] = deque(maxlen=NUM_STEPS)
        self.last_visit = now = self._clock()
        self._engine = engine
        super().__init__(engine.events, Events())
        self._began = now
        # The requests of the step that is under way, by sequence id.
        self._group_of: dict[int, SequenceGroup] = {}
        for group in engine.groups:
            metrics = engine.times_of(group.request.request_id)
            self.tracks[group.request.request_id] = Track(group, Timeline.begin_late(metrics, now))
        engine.events = self

    @property
    def is_listening(self) -> bool:
        """Returns whether the engine still tells this watcher its events."""
        return self._engine.events is self

    def note_visit(self) -> None:
        """Notes that somebody looks now, and moves ended requests to the finished ones."""
        self.last_visit = self._clock()
        present = {group.request.request_id for group in self._engine.groups}
        for request_id in [request_id for request_id in self.tracks if request_id not in present]:
            self.finished.append(self.tracks.pop(request_id))
            self.finished[-1].timeline.close(self.last_visit)

    def arrived(self, group: SequenceGroup) -> None:
        """Begins the timeline of a new request."""
        super().arrived(group)
        track = self.tracks[group.request.request_id] = Track(group, Timeline())
        track.timeline.wait("queued", self._clock())

    def aborted(self, group: SequenceGroup) -> None:
        """Ends the timeline of an aborted request."""
        super().aborted(group)
        self._close(group)

    def pinned(self, group: SequenceGroup, pin_id: int) -> None:
        """Ends the timeline of a request whose prefix was pinned."""
        super().pinned(group, pin_id)
        self._close(group)

    def planned(self, plan: StepPlan) -> None:
        """Notes when a step begins, and whose sequences it may compute."""
        super().planned(plan)
        self._began = self._clock()
        self._group_of = {
            s.sequence_id: group for group in self._engine.running for s in group.unfinished
        }

    def stepped(self, report: StepReport) -> None:
        """Notes a step that ran, or leaves if nobody has looked for a while."""
        super().stepped(report)
        now = self._clock()
        if now - self.last_visit > PATIENCE_SECONDS:
            self._detach()
            return
        try:
            self._note(report.plan, now)
        except Exception:
            logger.exception(
                "the page's history of the engine ends here; it begins anew at the next look"
            )
            self._detach()

    def _detach(self) -> None:
        if self.is_listening:
            self._engine.events = self._first

    def _close(self, group: SequenceGroup) -> None:
        if track := self.tracks.get(group.request.request_id):
            track.timeline.close(self._clock())

    def _note(self, plan: StepPlan, now: float) -> None:
        """Adds a step that ran to the timelines and to the last steps."""
        for request_id in plan.preempted:
            if track := self.tracks.get(request_id):
                swapped = self._engine.is_swapped(track.group)
                track.timeline.wait("swapped" if swapped else "preempted", self._began)
        rows = []
        for row in plan.rows:
            group = self._group_of[row.sequence_id]
            num_tokens, num_drafts = len(row.token_ids), len(row.parents)
            num_known = len(group.request.prompt_token_ids)
            kind = kind_of_row(row.start, num_tokens, num_drafts, num_known)
            if track := self.tracks.get(group.request.request_id):
                track.timeline.compute(kind, self._began, now, num_tokens, plan.step_id)
            rows.append([group.arrival, row.sequence_id, row.start, num_tokens, num_drafts])
        numbers = [
            track.group.arrival
            for request_id in plan.preempted
            if (track := self.tracks.get(request_id))
        ]
        self.steps.append(self._describe(plan, rows, numbers, now - self._began))

    def _describe(
        self, plan: StepPlan, rows: list[list[int]], preempted: list[int], seconds: float
    ) -> dict[str, Any]:
        bucket = self._engine.bucket_of(plan)
        return {
            "step": plan.step_id,
            "bucket": [bucket.num_tokens, bucket.num_rows, bucket.max_query_len],
            "kind": bucket.kind,
            "rows": rows,  # [request number, sequence id, first position, tokens, of which drafts]
            "num_draws": len(plan.samples),
            "copies": plan.copies,
            "swap_out": plan.swap_out,
            "swap_in": plan.swap_in,
            "preempted": preempted,
            "seconds": round(seconds, 6),
        }
