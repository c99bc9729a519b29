"""Values at the bounds of the fields of requests, and one beyond, made from the lines of their
table.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpage.settings.field_table import (
    Bool,
    Choice,
    Field,
    Float,
    Int,
    Kind,
    Text,
    Texts,
    TokenIdList,
    forms_in,
)

NAN, INF = math.nan, math.inf
# What a value at the bound of a field needs next to it.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("completions", "max_tokens"): {"echo": True},  # for 0 tokens
    ("chats", "top_logprobs"): {"logprobs": True},
    **{
        (request, name): needs
        for request in ("completions", "chats")
        for name, needs in (
            ("min_tokens", {"max_tokens": 2**31 - 1}),
            ("length_penalty", {"use_beam_search": True}),
        )
    },
}


def at_bounds(kind: Kind) -> list[Any]:
    """Returns the least and the greatest value of a kind."""
    match kind:
        case Float():
            low = kind.low if math.isfinite(kind.low) else -1e308
            high = kind.high if math.isfinite(kind.high) else 1e308
            return [math.nextafter(low, 1) if kind.above_low else low, high]
        case Int():
            return [kind.low, kind.high]
        case Bool():
            return [False, True]
        case Choice():
            return list(kind.values)
        case Text():
            return ["x" * kind.min_characters, "x" * kind.max_characters]
        case Texts():
            texts: list[Any] = [[], ["x" * kind.max_characters] * min(kind.max_items, 250)]
            return [*texts, "x"] if kind.or_one else texts
        case TokenIdList():
            return [[7] * kind.min_items, [7] * 2048]


def beyond(kind: Kind) -> list[tuple[Any, str]]:
    """Returns values that a kind refuses, each with the place in it that the error names."""
    match kind:
        case Float():
            low = kind.low if kind.above_low else math.nextafter(kind.low, -INF)
            values: list[Any] = [low, math.nextafter(kind.high, INF), NAN, "1", True]
        case Int():
            values = [kind.low - 1, kind.high + 1, 1.5, "1", True]
        case Bool():
            values = [1, "true"]
        case Choice():
            values = ["x", "", kind.values[0].upper(), 1, True]
        case Text():
            values = ["x" * (kind.max_characters + 1), 5]
            values += [""] if kind.min_characters else []
        case Texts():
            items: list[Any] = [["x"] * (kind.max_items + 1), 5, {}]
            wrong: list[Any] = [[""], ["x" * (kind.max_characters + 1)], [1], ["x", None]]
            if kind.or_one:
                values = [*items, *wrong, "", "x" * (kind.max_characters + 1)]
            else:
                places = ["[0]", "[0]", "[0]", "[1]"]
                return [*((value, "") for value in items), *zip(wrong, places, strict=True)]
        case TokenIdList():
            short = [([7] * (kind.min_items - 1), "")] if kind.min_items else []
            wrong = [(5, ""), ("5", ""), ({}, ""), ([-1], "[0]"), ([1, 2**31], "[1]")]
            return [*short, *wrong]
    return [(value, "") for value in values]


def fields_at_bounds(request: str) -> list[tuple[Field, str, Any]]:
    """Returns each field of a kind of request, its name there, and its values at the bounds."""
    return [
        (field, name, value)
        for field, name, kind in forms_in(request)
        if kind is not None
        for value in at_bounds(kind)
    ]


def fields_beyond(request: str) -> list[tuple[str, Any, str]]:
    """Returns the name of each field of a kind of request, values beyond it, and their places."""
    return [
        (name, value, name + place)
        for _, name, kind in forms_in(request)
        if kind is not None
        for value, place in beyond(kind)
    ]
