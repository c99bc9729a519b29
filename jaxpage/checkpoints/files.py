"""Opens files of a checkpoint: regular files in its directory, strict JSON, bounded sizes.

A file may lie elsewhere only in the Hugging Face cache, where a snapshot is made of links into the
cache's own `blobs`.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from jaxpage.checkpoints.problems import quote
from jaxpage.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000


def file_in(directory: Path, name: str) -> Path:
    """Returns the regular file `name` of a checkpoint directory.

    Raises:
        CheckpointError: It is missing, is not a regular file (a pipe would block the reader), or
            lies outside of `directory`: an absolute path, a `..`, or a symbolic link leading out.
    """
    if (
        "\\" in name
        or "\0" in name
        or PurePosixPath(name).is_absolute()
        or ".." in PurePosixPath(name).parts
    ):
        raise CheckpointError(f"{quote(name)} is a path that leaves the directory")
    file = directory / name
    try:
        real = file.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError:
        raise CheckpointError(f"{quote(name)} is missing") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, in Python 3.11
        raise CheckpointError(f"{quote(name)} cannot be opened: {_reason(error)}") from error
    if not any(real.is_relative_to(root) for root in _roots(directory)):
        raise CheckpointError(
            f"{quote(name)} is a symbolic link that leaves the directory: copy the file, or make a "
            "hard link"
        )
    if not regular:
        raise CheckpointError(f"{quote(name)} is not a regular file")
    return real


def has_file(directory: Path, name: str) -> bool:
    """Returns whether the directory has an entry `name`.

    A broken link counts, so that it is reported and not skipped.
    """
    return os.path.lexists(directory / name)


def read_object_if_there(directory: Path, name: str) -> dict[str, Any] | None:
    """Returns the JSON object in the file `name`, or None if there is no such file.

    Raises:
        CheckpointError: The file is not exactly that; the error names the file.
    """
    if not directory.is_dir() or not has_file(directory, name):
        return None
    return read_object(directory, name, constant=infinity_as_object)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def infinity_as_object(text: str) -> Any:
    """Returns Infinity in the form of transformers 5, an object; NaN and -Infinity are refused.

    Older files have it where a number has no limit. No reader of a number takes an object.
    """
    return {"__float__": text} if text == "Infinity" else _refuse_constant(text)


def read_object(
    directory: Path,
    name: str,
    max_bytes: int = MAX_JSON_BYTES,
    *,
    constant: Callable[[str], Any] = _refuse_constant,
) -> dict[str, Any]:
    """Returns the JSON object in the file `name`.

    Raises:
        CheckpointError: The file is not exactly that; the error names the file.
    """
    file = file_in(directory, name)
    try:
        num_bytes = file.stat().st_size
        if num_bytes > max_bytes:
            raise CheckpointError(
                f"{quote(name)} is {num_bytes} bytes long, more than the {max_bytes} allowed"
            )
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{quote(name)} cannot be read: {_reason(error)}") from error
    try:
        return parse_object(data, constant)
    except ValueError as error:
        raise CheckpointError(f"{quote(name)} {error}") from error


def parse_object(data: bytes, constant: Callable[[str], Any] = _refuse_constant) -> dict[str, Any]:
    """Returns the JSON object in `data`, in UTF-8 with or without a byte order mark.

    This is stricter than `json.loads`: duplicate keys, NaN, infinities and numbers that overflow
    are refused, and nesting too deep for the parser is an error like any other.

    Raises:
        ValueError: The data is not such an object. The text continues a sentence on the file.
    """
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise ValueError("is empty")
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("is not JSON: it is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, not an object")
    return value


def parse_list(file: Path, name: str) -> list[Any]:
    """Returns the JSON list in a file, which is read as strictly as an object.

    Raises:
        CheckpointError: The file is not exactly that; the error names it.
    """
    try:
        if (num_bytes := file.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{quote(name)} is {num_bytes} bytes long")
        # `parse_object` has all checks, and takes an object.
        items: Any = parse_object(b'{"list": ' + file.read_bytes() + b"}")["list"]
    except OSError as error:
        raise CheckpointError(f"{quote(name)} cannot be read: {_reason(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{quote(name)} {error}") from error
    if not isinstance(items, list):
        raise CheckpointError(f"{quote(name)} holds no JSON list")
    return items


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {quote(key)} is given twice")
            seen.add(key)
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {quote(text)} is not finite")
    return value


def _roots(directory: Path) -> list[Path]:
    """Returns the directories in which the files of `directory` may really lie.

    They are the directory itself and, for a snapshot in the hub's cache, the blobs there.
    """
    directory = directory.resolve()
    roots = [directory]
    repository = directory.parent.parent
    if directory.parent.name == "snapshots" and repository.name.startswith("models--"):
        roots += [repository / "blobs", repository.parent / "blobs"]
    return roots


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
