"""Compares the fixed texts of a template, mark by mark.

Two marks such as `<tool_call>` and `<tool_calls>` share characters and are different marks, so
texts are compared as lists of tags, words, white space and single characters.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxpage.chat_forms.forms import INDEX

TAG = re.compile(r"<[^<>]+>|\[/?[A-Za-z_]+\]")
_TOKENS = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Za-z_]+\]|[\w:]+|\s+|.", re.DOTALL)


def tokens(text: str) -> list[str]:
    """Returns the tags, words, runs of white space and other characters of a text."""
    return _TOKENS.findall(text)


def common_prefix(one: str, other: str) -> str:
    """Returns the marks that both texts begin with."""
    found = []
    for left, right in zip(tokens(one), tokens(other), strict=False):
        if left != right:
            break
        found.append(left)
    return "".join(found)


def common_suffix(one: str, other: str) -> str:
    """Returns the marks that both texts end with."""
    found = []
    for left, right in zip(reversed(tokens(one)), reversed(tokens(other)), strict=False):
        if left != right:
            break
        found.append(left)
    return "".join(reversed(found))


class Split(NamedTuple):
    """The marks of a list: before it, before and after each item, between two, and after it."""

    begin: str
    open: str
    close: str
    between: str
    end: str


def split_list(before: str, between: str, after: str) -> Split:
    """Returns the marks of a list of two items.

    before = begin + open, between = close + between + open, after = close + end. White space at
    the ends of a mark is compared leniently, because templates trim it.
    """
    opened = common_suffix(before, between)
    if (
        not opened.strip()
        and (spaceless := common_suffix(before.rstrip(), between.rstrip())).strip()
    ):
        opened = spaceless + before[len(before.rstrip()) :]
        between = between.rstrip() + before[len(before.rstrip()) :]
    begin = before[: len(before) - len(opened)]
    rest = between[: len(between) - len(opened)]
    close = common_prefix(rest, after)
    if not close.strip() and (spaceless := common_prefix(rest.lstrip(), after.lstrip())).strip():
        space = after[: len(after) - len(after.lstrip())]
        close = space + spaceless
        rest = space + rest.lstrip()
    return Split(begin, opened, close, rest[len(close) :], after[len(close) :])


def without_suffix(text: str, suffix: str, *, exact: bool = False) -> str | None:
    """Returns the text before a suffix, or None if it does not end so.

    Args:
        text: The text.
        suffix: The suffix.
        exact: False if white space at the ends of the suffix makes no difference.
    """
    if text.endswith(suffix):
        return text[: len(text) - len(suffix)]
    if exact:
        return None
    stripped, core = text.rstrip(), suffix.strip()
    return stripped[: len(stripped) - len(core)].rstrip() if stripped.endswith(core) else None


def without_prefix(text: str, prefix: str) -> str:
    """Returns the text after a prefix, in which white space at the ends makes no difference."""
    if text.startswith(prefix):
        return text[len(prefix) :]
    stripped = text.lstrip()
    return stripped.removeprefix(prefix.strip()) if stripped.startswith(prefix.strip()) else text


def numbered(first: str, second: str) -> tuple[str, str]:
    """Returns two marks with holes for the numbers of their calls, which differ by one."""
    ones, others = tokens(first), tokens(second)
    for place in range(1, min(len(ones), len(others)) + 1):
        one, other = ones[-place], others[-place]
        if one == other:
            continue
        holed = re.sub(r"\d+", INDEX, one)
        if holed == one or holed != re.sub(r"\d+", INDEX, other):
            break
        ones[-place] = others[-place] = holed
    return "".join(ones), "".join(others)


def mirrors(opened: str, close: str) -> bool:
    """Returns whether a closing mark has the word of an opening one."""
    word = re.sub(r"\W", "", opened)
    return bool(word) and word in re.sub(r"\W", "", close)
