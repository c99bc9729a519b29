"""Writes the snapshots of a recorded event log to a file, which the page shows.

A line of the file is a snapshot, as `state.py` makes it of a running engine; the first line says
what the file is:

    {"event": "snapshots", "format": 1, "log": "run.jsonl"}
    {"clock": {"unit": "steps", "now": 0}, "pool": ..., "requests": [], "step": null, ...}
    {"clock": {"unit": "steps", "now": 1}, "pool": ..., "requests": [...], "step": {...}, ...}

The log is run again, and the engine that runs it is looked at after each step. An incident that
cannot be run again is shown by its records alone: with the block tables of its plans, but without
the prefix cache.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jaxpage.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.private_files import open_private
from jaxpage.replay import Record, Report, check_new, encode_record, replay
from jaxpage.replay.reading import RecordedSteps, SequenceWalk, num_prompt_tokens
from jaxpage.serving.inspector.state import Inspector, Snapshot, describe_vectors, history_row
from jaxpage.serving.inspector.watching import NUM_FINISHED, NUM_STEPS, Timeline, kind_of_row

FORMAT = 1
MAX_IDS = 65  # the most tokens of a prompt in a snapshot: one more than the page shows


def write_snapshots(
    path: Path,
    log: str | os.PathLike[str],
    text_of: Callable[[int], str] | None = None,
    *,
    model: str | None = None,
    force: bool = False,
    until: int | None = None,
    weights: Sequence[str] = (),
) -> Report | None:
    """Writes the snapshots of a log to a new file, which only this user can read.

    Args:
        path: The path of the file.
        log: The path of the log.
        text_of: Gives the text of a token; None shows token ids alone.
        model: The path of the model, if it is not where the log says.
        force: True goes on with other weights, settings or shapes than those of the log.
        until: The last step; None for all.
        weights: See `replay`.

    Returns:
        The report of the replay, or None for an incident that cannot be run again.

    Raises:
        ConfigError: The file exists, or its directory cannot be written to.
        EventLogError: The log is damaged or incomplete, or the engine differs from that of the log.
        ModelNotFoundError: There is no such model.
        CheckpointError: The model's files cannot be used.
        CapacityError: The memory is too small.
    """
    check_new(path)
    steps = RecordedSteps(log, text_of)
    incident = steps.header.get("incident") or {}
    about = {"incident": incident} if incident else {}
    try:
        with open_private(path, "xb") as file:
            lines = _Lines(file, steps)
            lines.write({"event": "snapshots", "format": FORMAT, "log": Path(log).name, **about})
            if not incident.get("why_not_replayable"):
                viewer = _EngineView(lines)
                run: Any = {"model": model, "force": force, "until": until, "weights": weights}
                return replay(log, viewer=viewer, **run)
            view = _RecordView(lines)
            for record in steps.records(until):
                view.follow(record)
    except JaxpageError:
        path.unlink()  # so that the same command can be given again
        raise
    return None


class _Lines:
    """Writes snapshots as lines, each with what the records say of its step."""

    def __init__(self, file: BinaryIO, steps: RecordedSteps) -> None:
        self.steps = steps
        self._file = file
        self._last: Snapshot = {}
        self._num_steps = 0
        self._history: deque[list[Any]] = deque(maxlen=NUM_STEPS)

    def follow(self, record: Record) -> None:
        """Takes the next record of the log."""
        self.steps.follow(record)
        step = self.steps.step
        if step is not None and record["event"] == "result":
            self._num_steps += 1
            self._history.append(history_row(step))

    def add(self, pool: Snapshot, requests: list[Snapshot]) -> None:
        """Writes a snapshot, unless it is the last one again."""
        step = self.steps.step
        snapshot = {
            "clock": {"unit": "steps", "now": self.steps.ended},
            "pool": pool,
            "requests": requests,
            "step": step,
            "history": list(self._history),
            "copies": [[step["step"], *pair] for pair in step["copies"]] if step else [],
            "num_steps": self._num_steps,
            "compiles": None,
        }
        if snapshot != self._last:
            self._last = snapshot
            self.write(snapshot)

    def write(self, line: Record) -> None:
        """Writes a line."""
        self._file.write(encode_record(line))


class _EngineView:
    """Looks at the engine that runs the log again."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._inspector = Inspector(show_prompts=True, clock=lambda: lines.steps.ended)

    def follow(self, record: Record) -> None:
        """Takes a record of the log that the engine has made again."""
        self._lines.follow(record)

    def observe(self, engine: Engine) -> None:
        """Writes a snapshot of the engine."""
        snapshot = self._inspector.inspect(engine)
        requests = [
            {**request, "prompt": request["prompt"][:MAX_IDS]} for request in snapshot["requests"]
        ]
        self._lines.add(snapshot["pool"], requests)


@dataclass
class _Course:
    """Holds what records say of a request, next to its tokens and block tables.

    Attributes:
        arrival: The record of its arrival.
        timeline: Its timeline, in steps.
        state: Its state, as snapshots name it.
        num_preemptions: How often it was preempted.
        cached_tokens: The tokens that its first row found computed; None before its first row.
        computed: The number of computed tokens by sequence id.
        host_blocks: The blocks in host memory by sequence id.
    """

    arrival: Record
    timeline: Timeline
    state: str = "waiting"
    num_preemptions: int = 0
    cached_tokens: int | None = None
    computed: dict[int, int] = field(default_factory=dict)
    host_blocks: dict[int, list[int]] = field(default_factory=dict)


class _RecordView:
    """Makes snapshots of records alone.

    A block is shown as used from the first row of a sequence that has it in its table to the end of
    that sequence. The records do not say which blocks are cached, so none is.
    """

    def __init__(self, lines: _Lines) -> None:
        header = lines.steps.header
        self._lines = lines
        self._walk = lines.steps.walk
        self._engine: Record = header["engine"]
        self._block_size: int = header["config"]["block_size"]
        self._courses: dict[str, _Course] = {}  # by request id
        self._finished: deque[Snapshot] = deque(maxlen=NUM_FINISHED)
        self._observe()

    def follow(self, record: Record) -> None:
        """Takes the next record, and writes a snapshot at the end of a step."""
        self._lines.follow(record)
        for request_id, arrival in self._walk.arrivals.items():
            if request_id not in self._courses:
                self._arrive(arrival)
        if record["event"] == "plan":
            self._plan(record)
        elif record["event"] == "result":
            self._compute()
        for request_id in [*self._courses]:
            if request_id not in self._walk.arrivals:
                self._finish(self._courses.pop(request_id))
        if record["event"] in ("result", "failure"):
            self._observe()

    def _arrive(self, arrival: Record) -> None:
        course = self._courses[arrival["request_id"]] = _Course(arrival, Timeline())
        course.timeline.wait("queued", self._lines.steps.ended)
        for sequence_id, sequence in self._sequences(arrival["request_id"]).items():
            if sequence.is_running:  # it was there when the incident begins
                course.state = "running"
                course.computed[sequence_id] = _num_known(arrival, sequence) - 1

    def _plan(self, plan: Record) -> None:
        host = dict(plan.get("swap_out", ()))
        for request_id in plan.get("preempted", ()):
            course = self._courses[request_id]
            course.host_blocks = {
                sequence_id: [host.get(block, 0) for block in sequence.tables[0] if block in host]
                for sequence_id, sequence in self._sequences(request_id).items()
            }
            course.state = "swapped" if any(course.host_blocks.values()) else "preempted"
            course.num_preemptions += 1
            course.computed = {} if course.state == "preempted" else course.computed
            course.timeline.wait(course.state, self._lines.steps.ended)
        for sequence_id, start, _ in plan["rows"]:
            course = self._courses[self._walk.sequences[sequence_id].request_id]
            course.state = "running"
            course.host_blocks = {}
            course.computed[sequence_id] = start
            if course.cached_tokens is None:
                course.cached_tokens = start

    def _compute(self) -> None:
        step = self._lines.steps.step
        assert step is not None, "a result follows a plan"
        accepted = step.get("accepted", [0] * len(step["rows"]))
        for row, num_accepted in zip(step["rows"], accepted, strict=True):
            _, sequence_id, start, num_tokens, num_drafts = row
            sequence = self._walk.sequences.get(sequence_id) or self._walk.ended[sequence_id]
            if (course := self._courses.get(sequence.request_id)) is None:
                continue  # it was aborted during the step
            course.computed[sequence_id] = start + num_tokens - num_drafts + num_accepted
            kind = kind_of_row(start, num_tokens, num_drafts, num_prompt_tokens(course.arrival))
            course.timeline.compute(kind, step["step"] - 1, step["step"], num_tokens, step["step"])

    def _finish(self, course: _Course) -> None:
        ended = {
            sequence_id: sequence
            for sequence_id, sequence in self._walk.ended.items()
            if sequence.request_id == course.arrival["request_id"]
        }
        course.state = "finished"
        course.timeline.close(self._lines.steps.ended)
        reasons = [sequence.finish_reason for sequence in ended.values()]
        self._finished.append({**self._describe(course, ended), "reasons": reasons})

    def _observe(self) -> None:
        requests = [
            self._describe(course, self._sequences(request_id))
            for request_id, course in self._courses.items()
        ]
        requests.sort(key=lambda request: request["state"] != "running")
        self._lines.add(self._pool(), [*requests, *reversed(self._finished)])

    def _sequences(self, request_id: str) -> dict[int, SequenceWalk]:
        return {
            sequence_id: self._walk.sequences[sequence_id]
            for sequence_id in self._walk.sequences_of(request_id)
        }

    def _describe(self, course: _Course, sequences: dict[int, SequenceWalk]) -> Snapshot:
        arrival = course.arrival
        params = arrival.get("params", {})
        beam_width = arrival.get("beam", {}).get("beam_width", 0)
        return {
            "number": self._lines.steps.numbers[arrival["request_id"]],
            "id": arrival["request_id"],
            "state": course.state,
            "beam_width": beam_width,
            "num_sequences": beam_width or params.get("best_of") or params.get("n", 1),
            "prompt_tokens": num_prompt_tokens(arrival),
            "max_total_tokens": arrival["max_total_tokens"],
            "cached_tokens": course.cached_tokens or 0,
            "num_preemptions": course.num_preemptions,
            "sequences": [
                _describe_sequence(sequence_id, sequence, course)
                for sequence_id, sequence in sequences.items()
            ],
            "timeline": [list(segment) for segment in course.timeline.segments],
            **({"vectors": _vectors(arrival)} if "embedded" in arrival else {}),
        }

    def _pool(self) -> Snapshot:
        tables = [
            sequence.tables for sequence in self._walk.sequences.values() if sequence.is_running
        ]
        num_blocks: int = self._engine["num_blocks"]
        first_block = num_blocks
        groups = []
        # The first group is the pool of `num_blocks`; the inspector lists the others after it.
        for index, (window, size) in enumerate(self._engine.get("cache_groups", [])[1:], start=1):
            counts = _count_references(tables, index, range(first_block, first_block + size))
            groups.append(
                {
                    "window": window,
                    "num_blocks": size,
                    "num_free": counts.count(0),
                    "first_block": first_block,
                    "ref_counts": counts,
                    "kept": [],
                }
            )
            first_block += size
        return {
            "block_size": self._block_size,
            "num_blocks": num_blocks,
            "num_host_blocks": self._engine.get("swap_space_blocks") or 0,
            "ref_counts": _count_references(tables, 0, range(num_blocks)),
            "kept": [],
            "further_groups": groups,
            "pins": [],
        }


def _num_known(arrival: Record, sequence: SequenceWalk) -> int:
    return num_prompt_tokens(arrival) + len(sequence.token_ids)


def _vectors(arrival: Record) -> list[list[int]]:
    # A record does not say what the vectors are, but those of a client are the whole prompt.
    num_tokens = num_prompt_tokens(arrival)
    pictures = {key for _, length, key, *_ in arrival["embedded"] if length < num_tokens}
    return describe_vectors(arrival["embedded"], pictures)


def _describe_sequence(sequence_id: int, sequence: SequenceWalk, course: _Course) -> Snapshot:
    first, *further = sequence.tables if sequence.is_running else [[]]
    return {
        "id": sequence_id,
        "sample": sequence.sample_index,
        "known": _num_known(course.arrival, sequence),
        "computed": course.computed.get(sequence_id, 0),
        "host_blocks": course.host_blocks.get(sequence_id, []),
        "blocks": list(first),
        **({"further_blocks": [list(table) for table in further]} if further else {}),
    }


def _count_references(tables: list[list[list[int]]], group: int, blocks: range) -> list[int]:
    """Returns how many of the sequences' tables in a cache group have each block.

    The null block counts as in none.
    """
    counts = Counter(block for each in tables for block in _table_of(each, group) if block)
    return [counts[block] for block in blocks]


def _table_of(tables: list[list[int]], group: int) -> list[int]:
    return tables[group] if group < len(tables) else []
