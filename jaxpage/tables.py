"""Lays out tables of plain text, and writes numbers of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], *, num_words: int = 0) -> list[str]:
    """Returns lines with columns as wide as they need.

    Args:
        rows: The cells; the first row has the titles.
        num_words: The number of columns at the left that have words. These, and columns without a
            title, are aligned to the left, and numbers to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = [index < num_words or not title for index, title in enumerate(rows[0])]
    lines = []
    for row in rows:
        cells = zip(row, widths, left, strict=True)
        lines.append(
            "  ".join(
                cell.ljust(width) if to_left else cell.rjust(width)
                for cell, width, to_left in cells
            )
        )
    return [line.rstrip() for line in lines]


def gib(num_bytes: int) -> str:
    """Returns a number of bytes as text, in GiB, MiB, KiB or B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
