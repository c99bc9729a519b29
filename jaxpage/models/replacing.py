"""Modules that take the place of others by path: quantised weights. No family knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxpage.errors import CheckpointError

Path = tuple[str | int, ...]
# what replaces the module at a path; None: it stays
Rule = Callable[[Path, nnx.Module], nnx.Module | None]


def replace_modules(module: nnx.Module, rule: Rule, path: Path = ()) -> None:
    """Ask the rule for each module inside, from the outside in. What it gives is put in its place, and not looked into.

    path: of the module itself: keys of the nested dict of `models.base.abstract`.
    Raises an ExceptionGroup of each CheckpointError that the rule raises.
    """
    errors: list[CheckpointError] = []
    _replace_modules(module, rule, path, errors)
    if errors:
        raise ExceptionGroup("modules that cannot be replaced", errors)


def _replace_modules(
    module: nnx.Module, rule: Rule, path: Path, errors: list[CheckpointError]
) -> None:
    children: dict[Any, Any] = (
        dict(enumerate(module)) if isinstance(module, nnx.List) else dict(vars(module))
    )
    for key, child in children.items():
        if not isinstance(child, nnx.Module):
            continue
        try:
            replacement = rule((*path, key), child)
        except CheckpointError as error:
            errors.append(error)
            continue
        if replacement is None:
            _replace_modules(child, rule, (*path, key), errors)
        elif isinstance(module, nnx.List):
            module[key] = replacement
        else:
            setattr(module, key, replacement)
