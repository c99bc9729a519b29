"""Opens doors of rooms whose names are loaded at first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def open_door(room: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a room, for a part that asks for few of its names.

    The names are those that the room's `__init__` imports under TYPE_CHECKING. So each is written
    once, where type checkers and readers look for it.

    Args:
        room: The dotted name of the package, whose `__init__` runs now.
    """
    loader: Any = sys.modules[room].__loader__
    tree = ast.parse(loader.get_source(room))
    homes = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return find, lambda: sorted({*vars(sys.modules[room]), *homes})
