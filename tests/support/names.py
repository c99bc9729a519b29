"""Finds names that do not say what they are: acts named like facts, and locals named by pronouns.

A function that does something is a verb in its plain form (`drain`), and one that computes a value
is a verb or a noun. A past participle (`drained`) is a property that is true or false of its
object, or a listener, which says what has happened (`stepped`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator, Sequence

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
# Words that end in "s" and begin a docstring without being its verb.
_NO_VERBS = """
Always Arguments As Bodies Bytes Candidates Cases Engines Globs Its Kernels Less Logits Modules
Names Outputs Packages Parameters Pictures Questions Rows Seconds Status Statuses Tables This Tokens
Trees
"""
NO_VERBS = frozenset(_NO_VERBS.split())
# Words that stood for a term of the field, with the term, which docs/glossary.md lists. They are
# parts of identifiers, in lower case.
TERMS = {
    "apart": "separate",
    "asked": "requested",
    "behind": "after",
    "behind_attention": "post_attention_norm",
    "behind_mlp": "post_mlp_norm",
    "both_ways": "bidirectional",
    "chance": "probability",
    "chances": "probabilities",
    "fewest": "min",
    "front": "facade",
    "head_width": "head_dim",
    "least": "min, or minimum",
    "leave": "detach, or end",
    "lend": "share",
    "lent": "shared",
    "likeliest": "top",
    "longest": "max_length, or max and the unit",
    "look": "observe, poll or sample",
    "looks": "samples",
    "model_width": "hidden_size",
    "most": "max, or maximum",
    "obey": "run",
    "obeys": "runs",
    "odds": "scores",
    "orders": "commands",
    "product": "matmul",
    "products": "matmuls",
    "query_growth": "temperature_tuning",
    "shortest": "min_length, or min and the unit",
    "smallest": "min",
    "taker": "the running thread",
    "tell": "report",
    "told": "what was reported, such as message",
    "turned": "rotated",
    "wanted": "requested, or expected",
}
# Names with such a word that belong to others, or in which it means what it says.
EXEMPT_NAMES = frozenset(
    [
        "at_least",
        "at_most",
        "in_front",
        "longest_first",
        "look_up",
        "most_common",
        "product",
        "tell",
        "zip_longest",
        "scaled_dot_product_attention",
    ]
)
# Where a syntax tree has identifiers.
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), ("name",)),
    **dict.fromkeys((ast.arg, ast.keyword), ("arg",)),
    ast.Name: ("id",),
    ast.Attribute: ("attr",),
    ast.alias: ("name", "asname"),
    ast.ImportFrom: ("module",),
    ast.ExceptHandler: ("name",),
    ast.MatchAs: ("name",),
}
_TERM = re.compile(rf"(?:^|_)({'|'.join(TERMS)})(?=_|$)")
_EXEMPT = re.compile(rf"(?:^|_)(?:{'|'.join(EXEMPT_NAMES - {'product', 'tell'})})(?=_|$)")
PRONOUNS = frozenset({"found", "given", "kept", "one", "own", "rest", "wanted"})
# Words that no local of the wheel and the tools is called by, either.
PARTICLES = frozenset({"both", "came", "here", "of", "said", "there", "what", "without"})


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


def pronouns(modules: Sequence[Module], words: Collection[str] = PRONOUNS) -> tuple[list[str], int]:
    """Returns the locals and arguments that are named by a pronoun, and the number of all.

    A name counts once for each function that binds it.

    Args:
        modules: The modules.
        words: The pronouns.
    """
    names = []
    count = 0
    for module in modules:
        for node in module.nodes:
            if isinstance(node, Function | ast.Lambda):
                bound = set(bound_names(node))
                count += len(bound)
                place = f"{module.path}:{node.lineno}"
                names += [f"{place}: {name}" for name in sorted(bound.intersection(words))]
    return names, count


@functools.cache
def snake_case(name: str) -> str:
    """Returns an identifier in lower case, with underscores between its words."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


@functools.cache
def words_in(name: str) -> tuple[str, ...]:
    """Returns the words of `TERMS` that an identifier in snake case has."""
    return tuple(_TERM.findall(_EXEMPT.sub("", name)))


def old_words(modules: Sequence[Module], allowed: Collection[str] = ()) -> list[str]:
    """Returns the identifiers with a word that stands for a term of the field.

    The name of a test is a sentence, and has any words.

    Args:
        modules: The modules.
        allowed: Words of the table that mean what they say in these modules.
    """
    places = []
    for module in modules:
        for node in module.nodes:
            for field in _FIELDS.get(type(node), ()):
                for name in (getattr(node, field) or "").split("."):
                    is_exempt = name.startswith("test_") or (
                        isinstance(node, ast.Attribute) and name in EXEMPT_NAMES
                    )
                    if is_exempt:
                        continue
                    if words := [
                        word for word in words_in(snake_case(name)) if word not in allowed
                    ]:
                        line = getattr(node, "lineno", 1)
                        places.append(f"{module.path}:{line}: {name} ({TERMS[words[0]]})")
    return places


def first_word(text: str) -> str:
    """Returns the word that a docstring begins with, which is empty before a quote."""
    match = re.match(r"[\w'-]*", text)
    return match[0] if match else ""


def without_verb(modules: Sequence[Module], *, tests: bool = True) -> list[str]:
    """Returns the functions whose docstring does not begin with a verb in the third person.

    Such a verb ("Returns", "Is") ends in "s", so this is an estimate.

    Args:
        modules: The modules.
        tests: Whether functions count that are named as tests are, whose docstrings are sentences
            with any subject.
    """
    places = []
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, Function) or not (text := ast.get_docstring(node)):
                continue
            word = first_word(text)
            is_verb = word[:1].isupper() and word.endswith("s") and "'" not in word
            if (tests or not node.name.startswith("test_")) and not (
                is_verb and word not in NO_VERBS
            ):
                places.append(f"{module.path}:{node.lineno}: {node.name}: {text.splitlines()[0]}")
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
