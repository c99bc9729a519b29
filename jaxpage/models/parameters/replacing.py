"""Replaces modules by path, for example by quantised ones. No family knows of the replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxpage.errors import CheckpointError

Path = tuple[str | int, ...]
# A rule returns the replacement of the module at a path; None if the module stays.
Rule = Callable[[Path, nnx.Module], nnx.Module | None]


def replace_modules(module: nnx.Module, rule: Rule, path: Path = ()) -> None:
    """Asks the rule for each module inside, from the outside in.

    A replacement takes the place of the module, and its own modules are not visited.

    Args:
        module: The module whose children are visited.
        rule: Returns the replacement of the module at a path, or None.
        path: The path of `module`: keys of the nested dict of `models.base.abstract`.

    Raises:
        ExceptionGroup: The rule raised CheckpointError; it has all these errors.
    """
    errors: list[CheckpointError] = []
    _replace_modules(module, rule, path, errors)
    if errors:
        raise ExceptionGroup("modules that cannot be replaced", errors)


def _replace_modules(
    module: nnx.Module, rule: Rule, path: Path, errors: list[CheckpointError]
) -> None:
    # These are copies, because the loop changes the module.
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
