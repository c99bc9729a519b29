"""Holds the placeholders of markers, and compares and divides markers.

A marker is a fixed text of the form, such as `<tool_call>`. Two markers such as `<tool_call>`
and `<tool_calls>` share characters and are different, so texts are compared as lists of tags,
words, white space and single characters.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

# Characters of a marker that stand for what differs from call to call. They are from the private
# area of Unicode.
CALL_ID = "\ue000"
TOOL_NAME = "\ue001"
CALL_INDEX = "\ue002"
KEY = "\ue003"
ARGUMENTS = "\ue004"
PLACEHOLDER = re.compile(f"([{CALL_ID}{TOOL_NAME}{CALL_INDEX}{KEY}{ARGUMENTS}])")

_TAG = r"\[/?[A-Za-z_]+\]"
TAG = re.compile(rf"<[^<>]+>|{_TAG}")
_TOKENS = re.compile(rf"<[^<>\s][^<>]*>|{_TAG}|[\w:]+|\s+|.", re.DOTALL)
# A tag, or a run of other characters. White space may come between two of them.
_CHUNK = re.compile(rf"<[^<>\s]*>|{_TAG}|(?:(?!<[^<>\s]*>|{_TAG})\S)+")


def chunks(marker: str) -> list[str]:
    """Returns the parts of a marker that white space may come between."""
    return _CHUNK.findall(marker)


def before_placeholder(marker: str) -> str:
    """Returns the beginning of a marker up to its first placeholder."""
    return PLACEHOLDER.split(marker, maxsplit=1)[0]


@functools.lru_cache(maxsize=1024)
def first_chunk(marker: str) -> str:
    """Returns the first part of a marker, up to its first placeholder; it may be empty."""
    return next(iter(chunks(before_placeholder(marker))), "")


def leading_space(marker: str) -> str:
    """Returns the white space that a marker begins with."""
    return marker[: len(marker) - len(marker.lstrip())]


def trailing_space(marker: str) -> str:
    """Returns the white space that a marker ends with."""
    return marker[len(marker.rstrip()) :]


@functools.lru_cache(maxsize=256)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of any of some texts, the longest of those at one position."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def tokens(text: str) -> list[str]:
    """Returns the tags, words, runs of white space and other characters of a text."""
    return _TOKENS.findall(text)


def common_prefix(first: str, other: str) -> str:
    """Returns the tokens that both texts begin with."""
    return "".join(_common_start(tokens(first), tokens(other)))


def common_suffix(first: str, other: str) -> str:
    """Returns the tokens that both texts end with."""
    return "".join(_common_start(tokens(first)[::-1], tokens(other)[::-1])[::-1])


def _common_start(ones: list[str], others: list[str]) -> list[str]:
    num_shared = 0
    for first, other in zip(ones, others, strict=False):
        if first != other:
            break
        num_shared += 1
    return ones[:num_shared]


class ListMarkers(NamedTuple):
    """Holds the markers of a list: before it, before and after each item, between two, after it."""

    begin: str
    open: str
    close: str
    between: str
    end: str


def split_list(before: str, between: str, after: str) -> ListMarkers:
    """Returns the markers of a list of two items.

    before = begin + open, between = close + between + open, after = close + end. White space at
    the ends of a marker is compared leniently, because templates trim it.
    """
    opened = common_suffix(before, between)
    if not opened.strip():
        spaceless = common_suffix(before.rstrip(), between.rstrip())
        if spaceless.strip():
            opened = spaceless + trailing_space(before)
            between = between.rstrip() + trailing_space(before)
    begin = before[: len(before) - len(opened)]
    tail = between[: len(between) - len(opened)]
    close = common_prefix(tail, after)
    if not close.strip():
        spaceless = common_prefix(tail.lstrip(), after.lstrip())
        if spaceless.strip():
            close = leading_space(after) + spaceless
            tail = leading_space(after) + tail.lstrip()
    return ListMarkers(begin, opened, close, tail[len(close) :], after[len(close) :])


def without_suffix(text: str, suffix: str) -> str | None:
    """Returns the text before a suffix, or None if it does not end so.

    White space at the ends of the suffix makes no difference.
    """
    if text.endswith(suffix):
        return text[: len(text) - len(suffix)]
    stripped, core = text.rstrip(), suffix.strip()
    return stripped[: len(stripped) - len(core)].rstrip() if stripped.endswith(core) else None


def without_prefix(text: str, prefix: str) -> str:
    """Returns the text after a prefix, in which white space at the ends makes no difference."""
    if text.startswith(prefix):
        return text[len(prefix) :]
    stripped = text.lstrip()
    return stripped.removeprefix(prefix.strip()) if stripped.startswith(prefix.strip()) else text


def with_call_index(first: str, second: str) -> tuple[str, str]:
    """Returns a marker of two calls with a placeholder for the number of the call.

    The marker of the first call and that of the second differ in this number alone.
    """
    ones, others = tokens(first), tokens(second)
    for position in range(1, min(len(ones), len(others)) + 1):
        number, other = ones[-position], others[-position]
        if number == other:
            continue
        marker = re.sub(r"\d+", CALL_INDEX, number)
        if marker == number or marker != re.sub(r"\d+", CALL_INDEX, other):
            break
        ones[-position] = others[-position] = marker
    return "".join(ones), "".join(others)


def is_pair(opened: str, close: str) -> bool:
    """Returns whether a closing marker has the word of an opening one."""
    word = re.sub(r"\W", "", opened)
    return bool(word) and word in re.sub(r"\W", "", close)
