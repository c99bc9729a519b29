"""Follows the records of a log without an engine: its requests, their tokens, and block tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpage.replay.recorder import Record, usual_draws


@dataclass
class SequenceWalk:
    """Holds the state of one sequence.

    Attributes:
        request_id: The id of its request.
        sample_index: Its index among the samples of the request.
        token_ids: The tokens that it drew. They are None in a scrubbed log, and for a beam search,
            whose tokens no log has.
        tables: Its block table in each cache group, at its last row.
        is_running: True while it owns blocks.
        finish_reason: The reason why it ended; None while it goes on.
    """

    request_id: str
    sample_index: int = 0
    token_ids: list[int | None] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    is_running: bool = False
    finish_reason: str | None = None


class Walk:
    """Holds the state after the last record that it followed.

    Attributes:
        step: The last step.
        arrivals: The arrival records of the requests that are there, by request id.
        sequences: Their sequences, by id.
        ended: The sequences that the last record ended.
        drawn: The tokens that each sequence drew in the last record.
    """

    def __init__(self) -> None:
        self.step = 0
        self.arrivals: dict[str, Record] = {}  # by request id
        self.sequences: dict[int, SequenceWalk] = {}
        self.ended: dict[int, SequenceWalk] = {}
        self.drawn: dict[int, list[int | None]] = {}
        self._plan: Record = {}

    def follow(self, record: Record) -> None:
        """Takes the next record."""
        self.step = record.get("step", self.step)
        self.ended = {}
        self.drawn = {}
        match record["event"]:
            case "snapshot":
                for arrival in record["requests"]:
                    self._arrive(arrival)
            case "arrival":
                self._arrive(record)
            case "abort" | "pin":
                self._end(self.sequences_of(record["request_id"]), record["event"])
            case "plan":
                self._follow_plan(record)
            case "update":
                self._preempt(record)
            case "result":
                self._drew(record)
            case "failure":
                self._end(
                    [
                        sequence_id
                        for sequence_id, sequence in self.sequences.items()
                        if sequence.is_running
                    ],
                    "error",
                )

    def sequences_of(self, request_id: str) -> list[int]:
        """Returns the ids of a request's sequences."""
        return [
            sequence_id
            for sequence_id, sequence in self.sequences.items()
            if sequence.request_id == request_id
        ]

    def _is_beam(self, sequence_id: int) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and "beam" in self.arrivals[sequence.request_id]

    def snapshot(self) -> Record:
        """Returns the whole state as a record, from which another walk may begin."""
        return {
            "event": "snapshot",
            "step": self.step,
            "requests": list(map(self._describe, self.arrivals)),
        }

    def _describe(self, request_id: str) -> Record:
        present = []
        for sequence_id in self.sequences_of(request_id):
            fields = asdict(self.sequences[sequence_id])  # a copy, because the walk goes on
            del fields["request_id"]
            present.append({"sequence": sequence_id, **fields})
        return {**self.arrivals[request_id], "present": present}

    def _arrive(self, record: Record) -> None:
        request_id = record["request_id"]
        self.arrivals[request_id] = {
            name: value for name, value in record.items() if name not in ("event", "present")
        }
        for present in record.get("present", [{"sequence": record["sequences"][0]}]):
            fields = {name: value for name, value in present.items() if name != "sequence"}
            if fields.get("finish_reason") is None:
                sequence = SequenceWalk(request_id, **fields)
                sequence.token_ids = sequence.token_ids.copy()  # the record keeps its own
                self.sequences[present["sequence"]] = sequence

    def _follow_plan(self, plan: Record) -> None:
        self._plan = plan
        self._preempt(plan)
        for sequence_id, *change in plan.get("tables", ()):
            _change(self.sequences[sequence_id].tables, 0, change)
        for group, sequence_id, *change in plan.get("further_tables", ()):
            _change(self.sequences[sequence_id].tables, group, change)
        for sequence_id, _, _ in plan["rows"]:
            self.sequences[sequence_id].is_running = True

    def _preempt(self, record: Record) -> None:
        for request_id in record.get("preempted", ()):
            for sequence_id in self.sequences_of(request_id):
                self.sequences[sequence_id].is_running = False

    def _drew(self, result: Record) -> None:
        edits: list[Any] = result.get("edits", [])
        cuts = {edit[1]: edit[4] for edit in edits if edit[0] == "finish" and len(edit) > 4}
        before = {
            sequence_id: len(sequence.token_ids) for sequence_id, sequence in self.sequences.items()
        }
        drawn = [*tokens_drawn(self._plan, result, [edit for edit in edits if edit[0] == "fork"])]
        self.drawn = {
            sequence_id: tokens[: cuts.get(sequence_id)]
            for sequence_id, tokens in drawn
            if not self._is_beam(sequence_id)
        }
        grown = {
            self.sequences[sequence_id].request_id
            for sequence_id, _ in drawn
            if self._is_beam(sequence_id)
        }
        for sequence_id in self.drawn.keys() & before.keys():
            self.sequences[sequence_id].token_ids += self.drawn[sequence_id]
        # Keep the order of the edits: a beam search drops a sequence and then gives its id to a
        # fork.
        for kind, sequence_id, *edit in edits:
            if kind == "fork":
                parent = self.sequences[sequence_id]
                child_id, sample_index = edit
                common = parent.token_ids[: before.get(sequence_id)]
                token_ids = common + self.drawn.get(child_id, [])
                self.sequences[child_id] = SequenceWalk(
                    parent.request_id, sample_index, token_ids, is_running=True
                )
            else:
                self._end([sequence_id], edit[0] if kind == "finish" else "drop")
        for sequence in self.sequences.values():  # every remaining beam drew a token
            if sequence.request_id in grown:
                sequence.token_ids.append(None)

    def _end(self, sequence_ids: Iterable[int], reason: str) -> None:
        for sequence_id in sequence_ids:
            if (sequence := self.sequences.pop(sequence_id, None)) is not None:
                sequence.finish_reason = reason
                sequence.is_running = False
                self.ended[sequence_id] = sequence
                if not self.sequences_of(sequence.request_id):
                    self.arrivals.pop(sequence.request_id, None)


def num_prompt_tokens(arrival: Record) -> int:
    """Returns the length of a recorded request's prompt, whose tokens an incident may lack."""
    if "num_prompt_tokens" in arrival:
        return int(arrival["num_prompt_tokens"])
    return len(arrival["prompt_token_ids"])


def tokens_drawn(
    plan: Record, result: Record, forks: Iterable[Any]
) -> Iterator[tuple[int, list[int | None]]]:
    """Yields each sequence of a step with the tokens that it drew, right drafts included.

    If a row without drafts has several draws, the last is its own, and the others are its forks'.
    """
    draws: dict[int, list[int | None]] = {}  # by row
    for row, token in zip(plan.get("draws", usual_draws(plan)), result["tokens"], strict=False):
        draws.setdefault(row, []).append(token)
    drafted = {draft[0] for draft in plan.get("drafts", ())}
    for row, tokens in draws.items():
        sequence_id = plan["rows"][row][0]
        if sequence_id in drafted:
            path = result["paths"][row] if "paths" in result else range(1, len(tokens))
            yield sequence_id, _valid([tokens[0], *(tokens[place] for place in path)])
            continue
        yield sequence_id, _valid(tokens[-1:])
        children = [child_id for _, parent_id, child_id, _ in forks if parent_id == sequence_id]
        for child_id, token in zip(children, tokens[:-1], strict=False):
            yield child_id, _valid([token])


def _valid(tokens: list[int | None]) -> list[int | None]:
    """Returns the tokens without the numbers that say that nothing could be drawn."""
    return [token for token in tokens if token is None or token >= 0]


def _change(tables: list[list[int]], group: int, change: list[Any]) -> None:
    """Applies a change [length, [first place that changed, block, ...], ...] to a block table."""
    length, *runs = change
    while len(tables) <= group:
        tables.append([])
    table = tables[group] = [*tables[group][:length], *[0] * (length - len(tables[group]))]
    for place, *blocks in runs:
        table[place : place + len(blocks)] = blocks
