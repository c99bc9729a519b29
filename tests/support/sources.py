"""Reads the project's modules: their syntax trees, imports, tokens and functions.

Shared by the laws of the house (`house.py`), by what the wheel reaches (`reach.py`) and by the
table that `tools/house.py` prints. It needs Python's standard library only.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WHEEL = ("jaxpage", "pallas_kernels")
Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A docstring that begins with one of these is a fragment: its subject is in another line.
FIRST_WORDS = ("Of", "What", "Whether", "As", "Behind")


@dataclass(frozen=True)
class Module:
    """A source file with its path relative to the root, its text and its syntax tree."""

    path: str
    tree: ast.Module
    source: str

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Returns all nodes of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """Returns all tokens of the text."""
        return list(tokenize.generate_tokens(io.StringIO(self.source).readline))

    @functools.cached_property
    def function_lines(self) -> set[int]:
        """Returns the lines inside of functions."""
        spans = (
            range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
            for node in self.nodes
            if isinstance(node, Function)
        )
        return set().union(*spans)

    @functools.cached_property
    def name(self) -> str:
        """Returns the dotted name under which the module is imported."""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cached_property
    def package(self) -> str:
        """Returns the package that relative imports of this module start from."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """A name that is imported, the line, and whether a function imports it when it runs."""

    target: str
    line: int
    in_function: bool


def read_modules(root: Path, tops: tuple[str, ...] = (*WHEEL, "tools")) -> list[Module]:
    """Returns the modules of these packages, in the order of their paths."""
    files = [path for top in tops for path in sorted((root / top).rglob("*.py"))]
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}
    return [_parse(path, text) for path, text in texts.items()]


@functools.cache
def _parse(path: str, text: str) -> Module:
    return Module(path, ast.parse(text, path), text)


def imports(module: Module, known: set[str]) -> Iterator[Import]:
    """Yields every import; `from package import module` names the module if it is a known one."""
    inside = module.function_lines
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node.lineno in inside)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in known else base, node.lineno, node.lineno in inside)


def imports_by_name(module: Module) -> Iterator[tuple[str, int]]:
    """Yields the constant arguments of `import_module`, each with its line."""
    for node in module.nodes:
        if is_import_by_name(node):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.lineno


def is_import_by_name(node: ast.AST) -> bool:
    """Returns whether a node calls `import_module`."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"


def door_names(module: Module) -> dict[str, int]:
    """Returns the names that an `__init__` gives to other rooms, each with its line.

    They are those that it imports from modules of its room, or, where it does more than that, in
    `__all__`. An inner room is a part of its room, so it may give names of modules next to it.
    """
    assigned = [node for node in module.tree.body if isinstance(node, ast.Assign)]
    for node in assigned:
        if ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            return {ast.literal_eval(name): name.lineno for name in node.value.elts}
    room = ".".join(module.name.split(".")[:2])
    return {
        alias.asname or alias.name: alias.lineno
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{room}.")
        for alias in node.names
    }


def token_lines(module: Module) -> list[int]:
    """Returns the line of each token of a module, comments and the ends of lines left out.

    An f-string is one token, as it is before Python 3.12.
    """
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    left_out = layout | {tokenize.COMMENT}
    starts, ends = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    lines, depth = [], 0
    for token in module.tokens:
        depth -= token.type == ends
        if depth == 0 and token.type not in left_out and token.type != ends:
            lines.append(token.start[0])
        depth += token.type == starts
    return lines


def functions(module: Module) -> Iterator[tuple[Function, int]]:
    """Yields every function with its number of lines, signature and docstring included."""
    for node in module.nodes:
        if isinstance(node, Function):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1
