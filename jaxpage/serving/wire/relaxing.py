"""Removes from JSON schemas what no grammar can enforce and a client can do without.

What is removed is named to the client in the header `x-jaxpage-ignored-fields`:

    uniqueItems: true                         pydantic writes it for every set
    a pattern that looks around or back       where a known `format` says the same (zod's e-mail)
    a format that is not known                where no pattern stands next to it (zod's JWT)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from jaxpage.decoding import ENFORCED_FORMATS, KNOWN_FORMATS
from jaxpage.serving.wire.schemas import IS_NOT_REGULAR, parts_of, problem_of_pattern

MAX_NAMED = 16  # the names go into a header, whose length is limited
_MAX_PATH = 200


def relax_schema(schema: Any, path: str) -> tuple[Any, tuple[str, ...]]:
    """Returns a schema without the keywords that are removed, and their paths.

    Args:
        schema: The schema, which is not changed.
        path: The path of the field that it came from.
    """
    if not any(True for part, _, _ in parts_of(schema, path) for _ in _find_removed(part)):
        return schema, ()
    relaxed = copy.deepcopy(schema)
    removed = []
    for part, _, place in parts_of(relaxed, path):
        for keyword in list(_find_removed(part)):
            del part[keyword]
            # Sets are named once for the whole schema: there may be many.
            removed.append(f"{path if keyword == 'uniqueItems' else place}.{keyword}")
    return relaxed, tuple(dict.fromkeys(removed))


def name_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the paths in a form, and of a number, that a header has room for."""
    return tuple(
        path
        if path.isascii() and path.isprintable() and len(path) <= _MAX_PATH
        else f"{path:.32}..."
        for path in paths[:MAX_NAMED]
    )


def _find_removed(part: Any) -> Iterator[str]:
    if not isinstance(part, dict):
        return
    if part.get("uniqueItems") is True:
        yield "uniqueItems"
    kind = part.get("format")
    pattern = part.get("pattern")
    if not isinstance(kind, str):
        return
    if pattern is None:
        if kind not in KNOWN_FORMATS:
            yield "format"
    elif kind in ENFORCED_FORMATS and problem_of_pattern(pattern) == IS_NOT_REGULAR:
        yield "pattern"
