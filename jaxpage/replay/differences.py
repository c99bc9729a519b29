"""Describes the first difference between two records, either logged and replayed or of two logs."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NoReturn

from jaxpage.replay.recorder import Record, usual_draws
from jaxpage.settings.argument_checks import show

_LEGENDS = {  # explains the entries of a list, next to a difference
    "rows": "[sequence, first position, tokens]",
    "drafts": (
        "[sequence, token ids, parents where it is no chain, [ids, float32 bits] that each was "
        "drawn from]"
    ),
    "tables": "[sequence, blocks, [first place that changed, block, block, ...], ...]",
    "further_tables": "[cache group, sequence, blocks, [first place that changed, block, block, ...], ...]",
    "swap_out": "[block, host block]",
    "swap_in": "[host block, block]",
    "copies": "[source block, destination block]",
    "draws": "rows that are drawn from",
    "logprobs": "[draw, rank, token ids, float32 bits]",
    "scores": "[sequence, position, [rank, token ids, float32 bits], ...]",
    "edits": "[what, sequence, ...]",
    "paths": "of each row, which of its tokens are right drafts",
}
_NOTHING = "nothing"  # shown for a record or field that only one side has


class StepAbandoned(BaseException):
    """Leaves a step of the engine in the middle; no handler of Exception catches it."""


class Differs(StepAbandoned):
    """Reports that a replay came to something else than the log has."""


def differ(
    place: str,
    logged: Record | None,
    replayed: Record | None,
    plan: Record,
    names: tuple[str, str] = ("logged", "came out"),
) -> NoReturn:
    """Raises Differs with the first field that is different.

    Args:
        place: The place in the log, in words.
        logged: The record of the first side; None if it has none.
        replayed: The record of the second side; None if it has none.
        plan: The last plan of the first side.
        names: The names of the two sides.
    """
    if logged is None or replayed is None or replayed["event"] != logged["event"]:
        raise Differs(_contrast(place, _summary(logged), _summary(replayed), names))
    name = next(
        name
        for name in (*replayed, *logged)
        if replayed.get(name, _NOTHING) != logged.get(name, _NOTHING)
    )
    label = name
    ours = replayed.get(name, _NOTHING)
    theirs = logged.get(name, _NOTHING)
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = enumerate(zip_longest(ours, theirs, fillvalue=_NOTHING))
        index, (ours, theirs) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        label = f"{name}[{index}]"
        if name == "tokens":
            label += f" of sequence {_sequence_of(plan, index)}"
    legend = f"\n  ({name}: {_LEGENDS[name]})" if name in _LEGENDS else ""
    raise Differs(
        _contrast(f"{place}, {label} of its {replayed['event']}", theirs, ours, names) + legend
    )


def _sequence_of(plan: Record, draw: int) -> Any:
    rows = plan["rows"]
    draws = plan.get("draws", usual_draws(plan))
    return rows[draws[draw]][0] if draw < len(draws) else None


def without_text(record: Record) -> Record:
    """Returns a record without what a replay cannot have.

    These are stop strings and bad words as text, and the messages of failed steps.
    """
    fields = {name: value for name, value in record.items() if name != "error"}
    if isinstance(fields.get("params"), dict):
        fields["params"] = {
            name: value
            for name, value in fields["params"].items()
            if name not in ("stop", "bad_words")
        }
    return fields


def _summary(record: Record | None) -> str:
    if record is None:
        return _NOTHING
    fields = {name: value for name, value in record.items() if name not in ("event", "step")}
    return f"{record['event']} {show(fields) if fields else ''}".rstrip()


def _contrast(place: str, logged: Any, replayed: Any, names: tuple[str, str]) -> str:
    width = max(map(len, names)) + 3
    return f"{place}\n  {f'{names[0]}:':<{width}}{logged}\n  {f'{names[1]}:':<{width}}{replayed}"
