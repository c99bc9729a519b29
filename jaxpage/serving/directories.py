"""Directories that requests may name: those below one that a setting gives."""

from __future__ import annotations

from pathlib import Path

from jaxpage.serving.wire.errors import ApiError


def directory_inside(directory: Path, path: str, *, setting: str, param: str) -> Path:
    """Raises ApiError, one for what is not there and for what lies elsewhere: nothing is told of the rest of the machine."""
    try:
        found = (directory / path).resolve(strict=True)
        is_inside = found.is_relative_to(directory.resolve()) and found.is_dir()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # ValueError: a NUL; RuntimeError: a loop of links in Python 3.11
        is_inside = False
    if not is_inside:
        raise ApiError(
            404, f"There is no such directory below {setting}", param=param, code="not_found"
        )
    return found
