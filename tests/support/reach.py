"""Finds the modules of the wheel that no user can reach.

A user enters by a public module, by `python -m jaxpage`, or by a command or an entry point that
pyproject.toml names. From there a module leads to those that it imports, anywhere in its text, and
to those that it names in a string: registries import by such names, when one is asked for.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support.sources import WHEEL, Module, imports, is_import_by_name, read_modules

# The modules whose names the documentation gives to users, each with the page that does.
PUBLIC = {
    "jaxpage": "docs/reference/python.md",
    "jaxpage.errors": "docs/reference/python.md",
    "jaxpage.integrations": "docs/guides/reinforcement-learning.md",
    "jaxpage.integrations.tunix": "docs/guides/reinforcement-learning.md",
    "jaxpage.integrations.trl": "docs/guides/reinforcement-learning.md",
    "jaxpage.models": "docs/reference/python.md",
    "jaxpage.training": "docs/reference/python.md",
    "jaxpage.serving.asgi": "docs/guides/replicas.md",
    "jaxpage.simulation.setup": "docs/walkthrough.md",
    "jaxpage.simulation.walk": "docs/walkthrough.md",
    "pallas_kernels": "docs/internals/kernels.md",
}


def unreached(root: Path) -> list[str]:
    """Returns the names of the modules of the wheel that nothing leads to."""
    modules = {module.name: module for module in read_modules(root, WHEEL)}
    prefixes = _prefixes(modules.values())
    doors = ["jaxpage.__main__", *PUBLIC, *entry_points(root)]
    waiting = [name for name in doors if name in modules]
    reached = set(waiting)
    while waiting:
        for name in _leads_to(modules[waiting.pop()], modules.keys(), prefixes):
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return sorted(modules.keys() - reached)


def entry_points(root: Path) -> list[str]:
    """Returns the modules that pyproject.toml names as commands and entry points."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    return [target.partition(":")[0] for group in groups for target in group.values()]


def _prefixes(modules: Collection[Module]) -> set[str]:
    """Returns what names are put after in `import_module(f"jaxpage.models.{name}")`."""
    return {
        str(part.value)
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Call) and is_import_by_name(node)
        for argument in node.args
        if isinstance(argument, ast.JoinedStr)
        for part in argument.values[:1]
        if isinstance(part, ast.Constant)
    }


def _leads_to(module: Module, known: Collection[str], prefixes: set[str]) -> Iterator[str]:
    """Yields the modules that a module imports, with their packages, and those that it names."""
    for item in imports(module, set(known)):
        parts = item.target.split(".")
        for end in range(1, len(parts) + 1):
            if (name := ".".join(parts[:end])) in known:
                yield name
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
            # A registry names the modules of its own package, or `module:class`.
            if f"{module.package}." in prefixes:
                names.append(f"{module.package}.{node.value.partition(':')[0]}")
            yield from (name for name in names if name in known)
