"""Finds names that do not say what they are: acts named like facts, and locals named by pronouns.

A function that does something is a verb in its plain form (`drain`), and one that computes a value
is a verb or a noun. A past participle (`drained`) is a property that is true or false of its
object, or a listener, which says what has happened (`stepped`).
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator, Sequence

from tests.support.sources import Function, Module

# Past participles that do not end in "ed"; those that are plain forms too ("read", "set") are not
# among them.
_IRREGULAR = """
begun bought broken brought built caught chosen done drawn driven fallen felt found given gone
grown heard held hidden kept known left lent lost made meant met paid said seen sent shown slept
sold spelt spent stood taken taught thought thrown told understood won worn written
"""
IRREGULAR = frozenset(_IRREGULAR.split())
# Words that end in "ed" and are no participles.
PLAIN = frozenset({"bed", "embed", "exceed", "feed", "need", "proceed", "seed", "speed", "unused"})
# Words that stood for a term of the field, with the term. They are parts of identifiers.
TERMS = {
    "head_width": "head_dim",
    "model_width": "hidden_size",
    "behind_attention": "post_attention_norm",
    "behind_mlp": "post_mlp_norm",
    "query_growth": "temperature_tuning",
    "asked": "requested",
    "obey": "run",
    "obeys": "runs",
    "taker": "the running thread",
}
FOREIGN_NAMES = frozenset({"most_common", "most_common_dtype", "_most_common_dtype"})
PRONOUNS = frozenset({"found", "given", "kept", "one", "own", "rest", "wanted"})


def is_participle(name: str) -> bool:
    """Returns whether the first word of a name is a past participle."""
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR or (word.endswith("ed") and word not in PLAIN)


def participles(modules: Sequence[Module]) -> tuple[list[str], int]:
    """Returns the functions that are named by a participle, and the number of all functions."""
    names = []
    count = 0
    for module in modules:
        for node in module.nodes:
            if isinstance(node, Function):
                count += 1
                if is_participle(node.name):
                    names.append(f"{module.path}:{node.lineno}: {node.name}")
    return names, count


def pronouns(modules: Sequence[Module]) -> tuple[list[str], int]:
    """Returns the locals and arguments that are named by a pronoun, and the number of all.

    A name counts once for each function that binds it.
    """
    names = []
    count = 0
    for module in modules:
        for node in module.nodes:
            if isinstance(node, Function | ast.Lambda):
                bound = set(bound_names(node))
                count += len(bound)
                place = f"{module.path}:{node.lineno}"
                names += [f"{place}: {name}" for name in sorted(bound & PRONOUNS)]
    return names, count


def old_words(modules: Sequence[Module]) -> list[str]:
    """Returns the identifiers with a word that stands for a term of the field."""
    pattern = re.compile(rf"(?:^|_)(?:{'|'.join(TERMS)})(?:_|$)|^_*most_")
    places = []
    for module in modules:
        for token in module.tokens:
            if token.type != tokenize.NAME or token.string in FOREIGN_NAMES:
                continue
            if match := pattern.search(token.string):
                term = TERMS.get(match[0].strip("_"), "max")
                places.append(f"{module.path}:{token.start[0]}: {token.string} ({term})")
    return places


def bound_names(function: ast.AST) -> Iterator[str]:
    """Yields the arguments of a function, and the names that it sets outside of inner functions."""
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))


def shared_classes(modules: Sequence[Module]) -> list[str]:
    """Returns the names of classes that two or more rooms of jaxpage have."""
    rooms: dict[str, set[str]] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                rooms.setdefault(node.name, set()).add(".".join(module.name.split(".")[:2]))
    return sorted(name for name, places in rooms.items() if len(places) > 1)
