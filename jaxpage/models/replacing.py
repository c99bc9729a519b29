"""Modules that take the place of others by path: quantised weights. No family knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

Path = tuple[str | int, ...]
Rule = Callable[[Path, nnx.Module], nnx.Module | None]  # what replaces the module at a path; None: it stays


def replace_modules(module: nnx.Module, rule: Rule, path: Path = ()) -> None:
    """Ask the rule for each module inside, from the outside in. What it gives is put in its place, and not looked into.

    path: of the module itself: keys of the nested dict of `models.base.abstract`.
    """
    children: dict[Any, Any] = dict(enumerate(module)) if isinstance(module, nnx.List) else dict(vars(module))
    for key, child in children.items():
        if not isinstance(child, nnx.Module):
            continue
        replacement = rule((*path, key), child)
        if replacement is None:
            replace_modules(child, rule, (*path, key))
        elif isinstance(module, nnx.List):
            module[key] = replacement
        else:
            setattr(module, key, replacement)
