"""Finds directories that requests name; they must be below the directory of a setting."""

from __future__ import annotations

from pathlib import Path

from jaxpage.serving.wire.errors import ApiError


def directory_inside(directory: Path, path: str, *, setting: str, param: str) -> Path:
    """Returns the directory that a request names by its path.

    Args:
        directory: The directory that the setting allows.
        path: The path from the request, relative to `directory`.
        setting: The name of the setting, for the message.
        param: The name of the request's field, for the error.

    Raises:
        ApiError: The path is not that of a directory, or leads out of `directory`. The error is the
            same for both, so that it tells nothing about the rest of the machine.
    """
    try:
        resolved = (directory / path).resolve(strict=True)
        is_inside = resolved.is_relative_to(directory.resolve()) and resolved.is_dir()
    except (
        OSError,
        ValueError,  # the path has a NUL
        RuntimeError,  # the path has a loop of links, in Python 3.11
    ):
        is_inside = False
    if not is_inside:
        raise ApiError(
            404, f"There is no such directory below {setting}", param=param, code="not_found"
        )
    return resolved
