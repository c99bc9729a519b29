"""Looks into a log without an engine: one request, the state at a step, or two logs' difference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from jaxpage.errors import EventLogError, NotInLogError
from jaxpage.replay.differences import Differs, differ
from jaxpage.replay.event_log import LogReader, is_after
from jaxpage.replay.log_header import read_header
from jaxpage.replay.log_walk import SequenceWalk, Walk, num_prompt_tokens
from jaxpage.replay.recorder import Record, usual_draws
from jaxpage.settings.argument_checks import count

Path = str | os.PathLike[str]
_MAX_SHOWN = 16  # the most entries of a list in a line


def header_of(path: Path) -> Record:
    """Returns the header of a log.

    Raises:
        EventLogError: The file is no log, or has another format.
    """
    with LogReader(path) as log:
        return read_header(log)


def records_of(path: Path, until: int | None = None) -> Iterator[Record]:
    """Yields the records after the header, up to the end of the step `until`.

    Raises:
        EventLogError: The log is damaged.
    """
    with LogReader(path) as log:
        read_header(log)
        log.take()
        while (record := log.next) is not None:
            if is_after(record, until):
                return
            yield record
            log.take()


def check_until(until: int, path: Path) -> None:
    """Checks that the log has a step.

    Raises:
        NotInLogError: It does not have the step.
        EventLogError: It is damaged.
    """
    steps: list[int] = []
    for record in records_of(path):
        if record["event"] == "plan":
            steps.append(record.get("step", 0))
            if steps[0] <= until <= steps[-1]:
                return
    contents = f"has steps {steps[0]} to {steps[-1]}" if steps else "has no steps"
    raise NotInLogError(f"--until {until}: {os.fspath(path)} {contents}")


def state_lines(path: Path, until: int | None = None) -> Iterator[str]:
    """Yields lines with the requests after a step, and the block tables of their sequences.

    Raises:
        EventLogError: The log is damaged.
    """
    walk = Walk()
    for record in records_of(path, until):
        follow_checked(walk.follow, record)
    yield f"After step {walk.step}: {count(len(walk.arrivals), 'request')}"
    for request_id, arrival in walk.arrivals.items():
        yield f"{request_id}: {count(num_prompt_tokens(arrival), 'prompt token')}"
        for sequence_id in walk.sequences_of(request_id):
            sequence = walk.sequences[sequence_id]
            state = f"blocks {_tables(sequence)}" if sequence.is_running else "waits"
            yield f"  sequence {sequence_id}: {len(sequence.token_ids)} tokens drawn, {state}"


def request_lines(
    path: Path,
    request_id: str,
    until: int | None = None,
    text_of: Callable[[int], str] | None = None,
) -> Iterator[str]:
    """Yields what happened to one request: a line for each of its sequences in each step.

    Args:
        path: The path of the log.
        request_id: The request.
        until: The last step; None for all.
        text_of: Gives the text of a token, which is shown next to its id.

    Raises:
        NotInLogError: The log does not have the request.
        EventLogError: The log is damaged.
    """
    walk = Walk()
    seen = False
    plan: Record = {"rows": []}
    for record in records_of(path, until):
        # This comes before the record is followed, since it may end some of them.
        before = {
            sequence_id
            for sequence_id in walk.sequences
            if walk.sequences[sequence_id].request_id == request_id
        }
        follow_checked(walk.follow, record)
        place = f"step {walk.step}".ljust(10)
        if record["event"] == "plan":
            plan = record
            if request_id in record.get("preempted", ()):
                yield f"{place}preempted"
        elif (record["event"] == "arrival" and record["request_id"] == request_id) or (
            record["event"] == "snapshot" and request_id in walk.arrivals
        ):
            seen = True
            yield f"{place}{_describe_arrival(walk.arrivals[request_id], is_late=record['event'] == 'snapshot')}"
        elif record["event"] == "result":
            yield from (
                f"{place}{line}" for line in _row_lines(plan, record, walk, request_id, text_of)
            )
        elif record["event"] == "failure" and before:
            yield f"{place}the step failed: {record.get('error')}"
        for sequence_id in sorted(before & walk.ended.keys()):
            yield f"{place}sequence {sequence_id} ended: {walk.ended[sequence_id].finish_reason}"
    if not seen:
        raise NotInLogError(
            f"{os.fspath(path)} has no request {request_id!r}" + _names(path, until)
        )


def first_difference(path: Path, other: Path, until: int | None = None) -> str | None:
    """Returns the first difference of two logs, or None if there is none.

    Raises:
        EventLogError: A log is damaged.
    """
    plan: Record = {"rows": []}
    pairs = zip_longest(records_of(path, until), records_of(other, until))
    # The header is line 1.
    for line, (ours, theirs) in enumerate(pairs, start=2):
        if ours is not None and ours["event"] == "plan":
            plan = ours
        try:
            if ours != theirs:
                place = f"First difference: step {(ours or theirs or {}).get('step')} (line {line})"
                differ(place, ours, theirs, plan, names=(os.fspath(path), os.fspath(other)))
        except Differs as differs:
            return str(differs)
    return None


def header_differences(path: Path, other: Path) -> Iterator[str]:
    """Yields a line for each difference between the headers of two logs.

    It leaves out the paths of the logs, the reasons of incidents, and, if the weights are the same,
    the path of the model.
    """
    first, second = header_of(path), header_of(other)
    unsaid = {"config_hash", "incident", "config.event_log"}
    if first["weights_hash"] == second["weights_hash"]:
        unsaid |= {"config.model", "config.revision"}
    for name in dict.fromkeys([*first, *second]):
        ours = first.get(name)
        theirs = second.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            pairs = [
                (f"{name}.{key}", ours.get(key), theirs.get(key))
                for key in dict.fromkeys([*ours, *theirs])
            ]
        else:
            pairs = [(name, ours, theirs)]
        yield from (
            f"{label}: {log_path!r}, and {two!r}"
            for label, log_path, two in pairs
            if log_path != two and label not in unsaid
        )


def follow_checked(follow: Callable[[Record], None], record: Record) -> None:
    """Hands a record to a function that follows the log.

    Raises:
        EventLogError: The record does not follow from those before it.
    """
    try:
        follow(record)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EventLogError(
            f"this {record['event']} of step {record.get('step')} makes no sense: {error!r}"
        ) from error


def _row_lines(
    plan: Record, result: Record, walk: Walk, request_id: str, text_of: Callable[[int], str] | None
) -> Iterator[str]:
    logprobs = _logprobs(plan, result)
    for sequence_id, start, num_tokens in plan["rows"]:
        sequence = walk.sequences.get(sequence_id) or walk.ended.get(sequence_id)
        if sequence is None or sequence.request_id != request_id:
            continue
        computed = (
            f"token {start}" if num_tokens == 1 else f"tokens {start} to {start + num_tokens - 1}"
        )
        line = f"sequence {sequence_id}: computed {computed}, blocks {_tables(sequence)}"
        if (drawn := walk.drawn.get(sequence_id)) is not None:
            line += f", drew {_describe_tokens(drawn, text_of)}"
        if sequence_id in logprobs:
            line += f" (log probability {logprobs[sequence_id]:.4f})"
        yield line
    for kind, *edit in result.get("edits", ()):
        child = walk.sequences.get(edit[1]) or walk.ended.get(edit[1]) if kind == "fork" else None
        if child is not None and child.request_id == request_id:
            yield (
                f"sequence {edit[1]}: forked from sequence {edit[0]}, drew "
                f"{_describe_tokens(walk.drawn.get(edit[1], []), text_of)}"
            )


def _logprobs(plan: Record, result: Record) -> dict[int, float]:
    """Returns the log probability of each sequence's token, if it has one draw in the step."""
    draws = plan.get("draws", usual_draws(plan))
    rows = plan["rows"]
    logprobs = {}
    for draw, _, _, bits in result.get("logprobs", ()):
        if draws.count(draws[draw]) == 1:
            logprobs[rows[draws[draw]][0]] = float(np.array(bits[:1], np.int32).view(np.float32)[0])
    return logprobs


def _describe_arrival(arrival: Record, *, is_late: bool) -> str:
    requested: Record = arrival.get("beam") or arrival.get("params") or {}
    parameters = ", ".join(f"{name}={value!r}" for name, value in requested.items())
    was_there = "was there when the log begins" if is_late else "arrived"
    if "scored" in arrival and not is_late:
        was_there = "goes on after it was aborted"
    return (
        f"{was_there}: {count(num_prompt_tokens(arrival), 'prompt token')}, seed "
        f"{arrival.get('seed')}" + (parameters and f", {parameters}")
    )


def _tables(sequence: SequenceWalk) -> str:
    return " and ".join(map(_list_values, sequence.tables))


def _describe_tokens(token_ids: list[Any], text_of: Callable[[int], str] | None) -> str:
    if None in token_ids:
        return f"{len(token_ids)} tokens"
    texts = (
        " ".join(repr(text_of(token_id)) for token_id in token_ids[:_MAX_SHOWN]) if text_of else ""
    )
    return f"{_list_values(token_ids)} {texts}".rstrip()


def _list_values(values: list[Any]) -> str:
    if len(values) <= _MAX_SHOWN:
        return str(values)
    return f"[{', '.join(map(str, values[: _MAX_SHOWN - 1]))}, ... {values[-1]}] ({len(values)})"


def _names(path: Path, until: int | None) -> str:
    ids: dict[str, None] = {}
    for record in records_of(path, until):
        arrivals = (
            record["requests"]
            if record["event"] == "snapshot"
            else [record] * (record["event"] == "arrival")
        )
        ids |= dict.fromkeys(str(arrival["request_id"]) for arrival in arrivals)
    names = list(ids)
    return (
        f"; it has {', '.join(names[:8])}"
        + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else ""
    )
