"""Turns how much a request wants reasoned and said into variables of the model's chat template.

Templates know `reasoning_effort` (a word), `enable_thinking` or `thinking` (true or false) and
`verbosity`, or none of them. What a template does not know has no effect, and is named to the
client.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from jinja2 import TemplateSyntaxError, nodes

from jaxpage.serving.wire.field_types import Effort
from jaxpage.serving.wire.template_source import parse_template, variables_of

EFFORTS: tuple[str, ...] = get_args(Effort)  # from the least to the most
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_VERBOSITY = "verbosity"
# What models know whose template takes any word.
_USUAL = ("low", "medium", "high")


class Variables(NamedTuple):
    """Holds variables of a template.

    Attributes:
        values: The variables.
        ignored: The names of the fields that have no effect, or not all of theirs.
    """

    values: dict[str, Any]
    ignored: tuple[str, ...] = ()


def variables_for(
    template: str, effort: str | None, verbosity: str | None, *, is_on: bool = False
) -> Variables:
    """Returns the template's variables for fields of a request.

    Args:
        template: The source of the template.
        effort: The field `reasoning_effort`, one of `EFFORTS`, or None.
        verbosity: The field `verbosity`, or None.
        is_on: True if the request asks for reasoning without an effort.
    """
    known = variables_of(template)
    values: dict[str, Any] = {}
    ignored = []
    if effort is not None:
        values = dict.fromkeys((name for name in _SWITCHES if name in known), effort != "none")
        is_off = bool(values) and effort == "none"
        if _EFFORT in known:
            words = _words_of(template)
            if effort in words or not is_off:
                values[_EFFORT] = _nearest(effort, words)
            is_off = is_off or values.get(_EFFORT) == "none"
        if not values or (effort == "none" and not is_off):
            ignored.append(_EFFORT)
    elif is_on:
        values = dict.fromkeys((name for name in _SWITCHES if name in known), True)
        if not values and _EFFORT in known and "none" in (words := _words_of(template)):
            values[_EFFORT] = _nearest("medium", words)
    if verbosity is not None:
        if _VERBOSITY in known:
            values[_VERBOSITY] = verbosity
        elif verbosity != "medium":  # which is OpenAI's default
            ignored.append(_VERBOSITY)
    return Variables(values, tuple(ignored))


def has_variables(template: str) -> bool:
    """Returns whether a template has a variable that says how much is reasoned."""
    return not variables_of(template).isdisjoint({*_SWITCHES, _EFFORT})


def _nearest(effort: str, words: tuple[str, ...]) -> str:
    """Returns the word that a template knows for an effort; only "none" means none."""
    if effort in words:
        return effort
    place = EFFORTS.index(effort)
    some = [word for word in words if word != "none"] or list(words)
    return min(some, key=lambda word: (abs(EFFORTS.index(word) - place), -EFFORTS.index(word)))


@functools.lru_cache(maxsize=8)
def _words_of(template: str) -> tuple[str, ...]:
    """Returns the words with which a template compares the effort, or the usual ones."""
    try:
        tree = parse_template(template)
    except TemplateSyntaxError:
        return _USUAL
    names = {_EFFORT}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _reads(assignment.node, names):
            names.add(assignment.target.name)
    words = {
        word
        for node in tree.find_all((nodes.Compare, nodes.Getitem))
        if _reads(node, names)
        for word in _texts(node)
    }
    return tuple(word for word in EFFORTS if word in words) or _USUAL


def _reads(node: nodes.Node, names: set[str]) -> bool:
    inside = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
    return any(name.name in names for name in inside)


def _texts(node: nodes.Node) -> Iterator[str]:
    yield from (each.value for each in node.find_all(nodes.Const) if isinstance(each.value, str))
