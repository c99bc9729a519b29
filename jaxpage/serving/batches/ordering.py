"""Reads the input of a batch in windows, and puts each window in an order that shares prefixes.

Lines whose prompts begin alike follow each other, so that the prefix cache still has the blocks of
the one when the next comes. A window bounds the memory that the lines take, and how far a line may
move from its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from jaxpage.errors import ConfigError
from jaxpage.serving.batches.lines import Line, RefusedLine, line_id, read_line
from jaxpage.serving.batches.output_file import number_of

DEFAULT_WINDOW = 4096
MAX_WINDOW_BYTES = 1 << 26
LINE_EXTRA_BYTES = 1 << 16  # the most bytes of a line around its request


def number_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty with their numbers, from 1 on.

    Of a longer line it yields the first `max_bytes` + 1 bytes.
    """
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        line = raw
        # The rest of a line that is too long is passed over, so that the numbers of later ones are
        # right.
        while len(line) > max_bytes and not line.endswith(b"\n"):
            line = file.readline(max_bytes + 1)
        if raw.strip():
            yield number, raw


def num_lines(path: Path, max_bytes: int, done: Collection[str]) -> int:
    """Returns the number of lines of the input, and checks that the answers are those of its lines.

    Args:
        path: The input.
        max_bytes: The longest line.
        done: The ids of the lines that were answered before.

    Raises:
        ConfigError: The input cannot be read, or has changed since lines of it were answered.
    """
    number_of_lines = 0
    known = 0
    try:
        with path.open("rb") as file:
            for number, raw in number_lines(file, max_bytes):
                number_of_lines += 1
                known += line_id(number, raw) in done
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if known < len(done):
        with path.open("rb") as file:
            ids = {line_id(number, raw) for number, raw in number_lines(file, max_bytes)}
        first = min(number_of(answer_id) for answer_id in done if answer_id not in ids)
        raise ConfigError(
            f"{path} has changed since line {first} was answered: give another file for the answers"
        )
    return number_of_lines


def windows(
    path: Path,
    done: dict[str, str | None],
    *,
    window: int,
    max_bytes: int,
    url: str | None = None,
) -> Iterator[list[Line | RefusedLine]]:
    """Yields the lines that are not answered yet, in windows of which each is ordered.

    Args:
        path: The input.
        done: The names of the lines that were answered before, by their ids.
        window: The most lines of a window; 1 keeps the order of the file.
        max_bytes: The longest line; a longer one is refused.
        url: The path that all lines must name; None allows all.
    """
    # The caller adds the lines that are answered meanwhile, on another thread.
    done = dict(done)
    seen: set[str] = set()
    lines: list[Line | RefusedLine] = []
    size = 0
    with path.open("rb") as file:
        for number, raw in number_lines(file, max_bytes):
            answer_id = line_id(number, raw)
            if answer_id in done:
                if (name := done[answer_id]) is not None:
                    seen.add(name)
                continue
            if len(raw) > max_bytes:
                message = f"Line {number}: it has more than the {max_bytes} bytes that are read"
                lines.append(RefusedLine(answer_id, None, "line_too_long", message))
            else:
                lines.append(read_line(number, raw, seen, url))
            if lines[-1].custom_id is not None:
                seen.add(lines[-1].custom_id)
            size += min(len(raw), max_bytes)
            if len(lines) >= window or size >= MAX_WINDOW_BYTES:
                yield _order(lines)
                lines = []
                size = 0
    if lines:
        yield _order(lines)


def _order(lines: list[Line | RefusedLine]) -> list[Line | RefusedLine]:
    """Returns the lines, those that are refused first, and the others by their prompts."""
    return sorted(lines, key=lambda line: line.order if isinstance(line, Line) else "")
