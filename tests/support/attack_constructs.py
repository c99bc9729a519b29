"""Constructs that make a grammar or a parser work: JSON schemas, patterns, choices, grammars, and bodies that are no request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxpage.settings.structured_outputs import STRUCTURED_OUTPUT_KINDS

BODY_BYTES = 4 << 20  # the server's usual bound
TEXT = {"type": "string"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {**_object(a=schema), "required": ["a"]}
    return schema


def _doubling(depth: int, join: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema of a few hundred bytes that is 2 ** depth schemas when its references are followed."""
    definitions = {f"a{level}": join({"$ref": f"#/$defs/a{level + 1}"}) for level in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{depth}": {"type": "integer"}}}


PATTERNS = {
    "repeated choice": "(a|b|ab){1,2000}",
    "repeated wildcard": "(.*a){30}",
    "states": "[ab]*a[ab]{40}",
    "nested counts": "((a{1,40}){1,40}){1,40}",
    "nested stars": "(((a*)*)*)*b",
    "optional": "(x?){500}x{500}",
    "long count": "^.{1,30000}$",
    "classes": r"(\p{L}|\p{N}|\s){1,3000}",
    "words": "|".join(f"(w{number}[a-z]+)" for number in range(3000)),
    "without case": "(?i)" + "abcdefgh" * 3000,
    "dots": "." * 20_000,
    "parentheses": "(" * 2000 + "a" + ")" * 2000,
    "alternatives in a row": "(a|b|c|d)" * 2000,
}

SCHEMAS: dict[str, Callable[[], Any]] = {
    "properties": lambda: _object(**{f"p{number}": TEXT for number in range(2000)}),
    "required properties": lambda: {
        **_object(**{f"p{number}": TEXT for number in range(1000)}),
        "required": [f"p{number}" for number in range(1000)],
    },
    "properties of objects": lambda: _object(
        **{f"p{number}": _object(a=TEXT, b=TEXT) for number in range(700)}
    ),
    "pattern properties": lambda: {
        "type": "object",
        "patternProperties": {f"^{number}[a-z]+$": TEXT for number in range(500)},
    },
    "nested": lambda: _nested(60),
    "nested too deeply": lambda: _nested(120),
    "enum": lambda: {"enum": [f"value {number}" for number in range(3500)]},
    "enum of prefixes": lambda: {"enum": ["a" * number for number in range(340)]},
    "long constant": lambda: {"const": "a" * 60_000},
    "any of": lambda: {"anyOf": [_object(**{f"a{number}": TEXT}) for number in range(900)]},
    "one of": lambda: {"oneOf": [{"const": number} for number in range(2000)]},
    "all of": lambda: {
        "allOf": [{**TEXT, "pattern": f"^[a-z]*{number}[a-z]*$"} for number in range(60)]
    },
    "tree": lambda: {
        "$ref": "#/$defs/a",
        "$defs": {"a": _object(l={"$ref": "#/$defs/a"}, r={"$ref": "#/$defs/a"})},
    },
    "doubling objects": lambda: _doubling(40, lambda one: _object(l=one, r=one)),
    "doubling all of": lambda: _doubling(40, lambda one: {"allOf": [one, one]}),
    "doubling any of": lambda: _doubling(40, lambda one: {"anyOf": [one, one]}),
    "many items": lambda: {"type": "array", "items": TEXT, "minItems": 20_000},
    "items of items": lambda: {
        "type": "array",
        "maxItems": 1000,
        "items": {"type": "array", "maxItems": 1000, "items": TEXT},
    },
    "prefix items": lambda: {"type": "array", "prefixItems": [TEXT] * 3000},
    "long text": lambda: {**TEXT, "minLength": 30_000, "maxLength": 10**6},
    "bounds": lambda: {"type": "number", "minimum": 1e-300, "maximum": 1.2345678901234567},
    "bounds of properties": lambda: _object(
        **{
            f"p{number}": {"type": "integer", "minimum": -number, "maximum": 10**15 + number}
            for number in range(900)
        }
    ),
    "multiples": lambda: {"type": "integer", "multipleOf": 99_991},
    **{
        f"pattern, {name}": lambda value=value: {**TEXT, "pattern": value}
        for name, value in PATTERNS.items()
    },
}

GRAMMARS = {
    "ambiguous": 'start: e\ne: e e | e "b" e | "a"',
    "ambiguous GBNF": 'root ::= root root | "a"',
    "nested stars": 'start: ((("a"*)*)*)*',
    "empty rules": 'start: a a a a a a a a "x"\na: b?\nb: c?\nc: "y"?',
    "chain": "\n".join(
        ["start: r0", *(f"r{number}: r{number + 1}" for number in range(2500)), 'r2500: "a"']
    ),
    "alternatives": "start: "
    + " | ".join(f'"w{number}" start' for number in range(2500))
    + ' | "x"',
    "doubling": "\n".join(
        [
            "start: r0",
            *(f"r{number}: r{number + 1} r{number + 1}" for number in range(40)),
            'r40: "a"?',
        ]
    ),
    "long count": 'start: "a"{1,100000}',
    "nested counts": 'start: (("a"{1,300}){1,300}){1,300}',
    "parentheses": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "left recursion": 'start: start "a" | start "b" | ',
    "GBNF counts": 'root ::= ([a-z]{1,500} " "){1,500}',
    **{f"terminal, {name}": f"start: T\nT: /{value}/" for name, value in PATTERNS.items()},
}

_CHOICES: dict[str, Callable[[], Any]] = {
    "many": lambda: [str(number) for number in range(6000)],
    "prefixes": lambda: ["a" * number for number in range(1, 340)],
    "long": lambda: ["ab" * 30_000],
    "of one character": lambda: [chr(number) for number in range(0x4E00, 0x6000)],
}

STRUCTURED: dict[str, dict[str, Callable[[], Any]]] = {
    "json": SCHEMAS,
    "json_object": {"true": lambda: True},
    "regex": {name: lambda value=value: value for name, value in PATTERNS.items()},
    "choice": _CHOICES,
    "grammar": {name: lambda value=value: value for name, value in GRAMMARS.items()},
}
assert STRUCTURED.keys() == set(STRUCTURED_OUTPUT_KINDS), (
    "a kind of structured outputs has no constructs here"
)


def _filled(head: bytes, unit: bytes, tail: bytes, num_bytes: int = BODY_BYTES) -> bytes:
    return head + unit * ((num_bytes - len(head) - len(tail)) // len(unit)) + tail


def raw_bodies(field: str) -> dict[str, Callable[[], bytes]]:
    """Bodies at the server's bound that are no request, or hardly one. `field` is the one that a path's prompt is in."""
    head = b'{"model":"demo","' + field.encode() + b'":'
    lists = {
        "empty lists": b"[],",
        "empty objects": b"{},",
        "empty texts": b'"",',
        "zeros": b"0,",
        "lists of one": b"[1],",
        "nulls": b"null,",
        "floats": b"1.5e3,",
        "long numbers": b"1" * 300 + b",",
    }
    fill: dict[str, Callable[[], bytes]] = {
        name: lambda unit=unit: _filled(head + b"[", unit, unit[:-1] + b"]}")
        for name, unit in lists.items()
    }
    return {
        **fill,
        "brackets": lambda: b"[" * BODY_BYTES,
        "braces": lambda: _filled(b"", b'{"a":', b""),
        "nested list": lambda: head + b"[" * 120 + b"]" * 120 + b"}",
        "one integer": lambda: _filled(head, b"9", b"}"),
        "infinity": lambda: head + b"1e999}",
        "spaces": lambda: _filled(b"", b" ", head + b'"x"}'),
        "one text": lambda: _filled(head + b'"', b"ab ", b'"}'),
        "escapes": lambda: _filled(head + b'"', b"\\u0001", b'"}'),
        "surrogates": lambda: _filled(head + b'"', b"\\ud800", b'"}'),
        "characters": lambda: _filled(head + b'"', "\N{PILE OF POO}".encode(), b'"}'),
        "an open text": lambda: _filled(head + b'"', b"\\", b""),
        "not UTF-8": lambda: _filled(head + b'"', b"\xff", b'"}'),
        "one key": lambda: b"{" + b",".join([b'"a":0'] * 200_000) + b"}",
        "many keys": lambda: json.dumps(
            {"model": "demo", **{f"k{number}": 0 for number in range(200_000)}}
        ).encode(),
        "a long key": lambda: _filled(b'{"', b"k", b'":0}'),
        "too large": lambda: b" " * (BODY_BYTES + 1),
    }
