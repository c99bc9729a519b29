"""Encodes answers and streams as JSON, also large ones, in short calls."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Frame = Callable[[dict[str, Any]], bytes]  # encodes a part of a stream
COMMENT = b": keep-alive\n\n"  # a server-sent comment, which clients ignore
# JSON does not escape these characters, but they end a line in Unicode, and for clients that read a
# stream line by line.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_LINE_END = re.compile("[\x85\u2028\u2029]")
# The most values that are encoded in one call, which holds Python's lock: about a millisecond.
MAX_VALUES = 4096
PART_BYTES = 1 << 18  # the least bytes of a part of a large answer, but for the last


def encode(value: Any) -> bytes:
    """Returns compact JSON in one line.

    Raises:
        ValueError: The value has a NaN or an infinity, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode() if _LINE_END.search(text) else text.encode()


def encode_parts(value: Any) -> list[bytes]:
    """Returns the bytes of `encode` in parts of at least `PART_BYTES`, but for the last one.

    They are made in many short calls, so that other threads run meanwhile, however large the value
    is: each call encodes a row of a table, or some short rows.

    Raises:
        ValueError: The value has a NaN or an infinity.
    """
    parts = []
    pieces: list[bytes] = []
    size = 0
    for piece in _pieces(value):
        pieces.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            parts.append(b"".join(pieces))
            pieces.clear()
            size = 0
    if pieces:
        parts.append(b"".join(pieces))
    return parts


def _pieces(value: Any) -> Iterator[bytes]:
    if _num_values(value) <= MAX_VALUES:
        yield encode(value)
    elif isinstance(value, dict):
        opening = b"{"
        for name, item in value.items():
            yield opening + encode({name: 0})[1:-2]
            yield from _pieces(item)
            opening = b","
        yield b"}"
    else:
        yield b"["
        yield from _items(value)
        yield b"]"


def _items(items: Iterable[Any]) -> Iterator[bytes]:
    """Yields the items of a list without its brackets; short ones are encoded together."""
    separator = b""
    short: list[Any] = []
    total = 0
    for item in items:
        number = _num_values(item)
        if short and total + number > MAX_VALUES:
            yield separator + encode(short)[1:-1]
            separator = b","
            short.clear()
            total = 0
        if number > MAX_VALUES:
            yield separator
            yield from _pieces(item)
            separator = b","
        else:
            short.append(item)
            total += number
    if short:
        yield separator + encode(short)[1:-1]


def _num_values(value: Any) -> int:
    """Returns how many values are in a value, itself included; it stops to count at the bound."""
    number = 0
    waiting = [value]
    while waiting and number <= MAX_VALUES:
        item = waiting.pop()
        number += 1
        if isinstance(item, dict | list | tuple):
            if len(item) > MAX_VALUES:
                return len(item)
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return number


def event(data: bytes) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + data + b"\n\n"


def plain_events() -> Frame:
    """Returns a frame of events without names."""
    return lambda value: event(encode(value))


def name_events() -> Frame:
    """Returns a frame that names each event after its `type`."""
    return lambda value: b"event: " + value["type"].encode() + b"\n" + event(encode(value))


def number_events() -> Frame:
    """Returns a frame that names each event after its `type`, and numbers it."""
    frame = name_events()
    numbers = itertools.count()
    return lambda value: frame({**value, "sequence_number": next(numbers)})


def lines() -> Frame:
    """Returns a frame of lines of JSON."""
    return lambda value: encode(value) + b"\n"
