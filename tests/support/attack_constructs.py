"""Constructs that make a server work: JSON schemas, patterns, choices, grammars, bodies that are no
request, and lists times prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
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
    """Returns a schema of a few hundred bytes that is 2 ** depth schemas when its references are
    followed.
    """
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
    "doubling objects": lambda: _doubling(40, lambda inner: _object(l=inner, r=inner)),
    "doubling all of": lambda: _doubling(40, lambda inner: {"allOf": [inner, inner]}),
    "doubling any of": lambda: _doubling(40, lambda inner: {"anyOf": [inner, inner]}),
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
    """Returns bodies at the server's bound that are no request, or hardly one.

    `field` is the one that a path's prompt is in.
    """
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


# Work that a request multiplies: by a list, by a pause of its reader, by a text that is JSON
# itself.


@dataclass(frozen=True)
class Multiplied:
    """A request whose answer costs more than its bytes; `make` is None for a GET."""

    name: str
    path: str
    make: Callable[[], bytes] | None
    num_connections: int = 4
    sending: str = "whole"
    content_type: str = "application/json"


def _request(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "demo", **fields}).encode()


def _called(arguments: Callable[[], str], num_calls: int = 1) -> Callable[[], bytes]:
    """Returns a chat with calls of tools in its history."""

    def make() -> bytes:
        function = {"name": "f", "arguments": arguments()}
        calls = [{"id": "1", "type": "function", "function": function}] * num_calls
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
        return json.dumps({"model": "demo", "max_tokens": 4, "messages": messages}).encode()

    return make


_CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}], "stream": True}
_LONG = {"max_tokens": 400, "ignore_eos": True}
_PAUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "chat of 64 choices": (
        "/v1/chat/completions",
        _request(**_CHAT, **_LONG, n=64, logprobs=True, top_logprobs=20),
    ),
    "completions of 32 prompts": (
        "/v1/completions",
        _request(prompt=["Once upon a time"] * 32, **_LONG, stream=True, logprobs=5),
    ),
    "echoed prompts": (
        "/v1/completions",
        _request(prompt=["a " * 200] * 32, **_LONG, stream=True, logprobs=5, echo=True),
    ),
    "token ids": (
        "/v1/completions",
        _request(prompt="a", **_LONG, n=64, stream=True, return_token_ids=True),
    ),
    "responses": ("/v1/responses", _request(input="a", max_output_tokens=480, stream=True)),
    "messages": (
        "/v1/messages",
        _request(messages=_CHAT["messages"], max_tokens=480, stream=True),
    ),
    "Ollama": ("/api/generate", _request(prompt="a", options={"num_predict": 480})),
}
_ARGUMENTS: dict[str, Callable[[], str]] = {
    "lists": lambda: '{"a":[' + "[]," * 900_000 + "[]]}",
    "objects": lambda: '{"a":[' + "{}," * 900_000 + "{}]}",
    "texts": lambda: '{"a":[' + '"",' * 600_000 + '""]}',
    "numbers": lambda: '{"a":[' + "1.5," * 600_000 + "1]}",
    "nested": lambda: '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "NaN": lambda: '{"a":NaN}',
    "an infinity": lambda: '{"a":1e999}',
    "twins": lambda: '{"a":1,"a":2}',
}
_FORM = "multipart/form-data; boundary=b"
_UPLOAD_BYTES = 60 << 20


def _upload(unit: bytes) -> Callable[[], bytes]:
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return lambda: _filled(head, unit, b"\r\n--b--\r\n", _UPLOAD_BYTES)


MULTIPLIED: list[Multiplied] = [
    *(
        Multiplied(f"{path} reader of {name} that pauses x {count}", path, make, count, "paused")
        for name, (path, make) in _PAUSED.items()
        for count in (1, 4)
    ),
    *(
        Multiplied(f"/v1/chat/completions arguments of {name}", "/v1/chat/completions",
                   _called(make), 8)
        for name, make in _ARGUMENTS.items()
    ),
    Multiplied(
        "/v1/chat/completions arguments of many calls",
        "/v1/chat/completions",
        _called(lambda: '{"a":[' + "[]," * 30_000 + "[]]}", 30),
        8,
    ),
    *(
        Multiplied(
            f"/v1/score prompt of {number} characters times 256 continuations",
            "/v1/score",
            _request(prompt="a " * (number // 2), continuation=[f" c{n}" for n in range(256)]),
        )
        for number in (800, 6600)
    ),
    Multiplied("/v1/rerank 256 documents", "/v1/rerank",
               _request(query="a " * 200, documents=["b " * 200] * 256)),
    Multiplied("/v1/embeddings 2048 inputs", "/v1/embeddings", _request(input=["a b c"] * 2048), 2),
    Multiplied(
        "/v1/completions 256 prompts and bad words",
        "/v1/completions",
        _request(prompt=["a " * 200] * 256, max_tokens=1, bad_words=[f"w{n}" for n in range(1024)]),
    ),
    Multiplied(
        "/v1/completions answers of many log probabilities",
        "/v1/completions",
        _request(prompt="a", n=64, **_LONG, logprobs=5),
    ),
    Multiplied("/tokenize a million characters", "/tokenize",
               _request(prompt="a " * 500_000, return_token_strs=True)),
    Multiplied("/detokenize as many ids as a body has", "/detokenize",
               _request(tokens=[7] * 1_000_000), 8),
    Multiplied("/detokenize as many ids as are allowed", "/detokenize",
               _request(tokens=[7] * 262_144), 8),
    Multiplied("/v1/completions crumbs", "/v1/completions", _request(prompt="a" * 200_000), 8,
               "crumbs"),
    *(
        Multiplied(f"/v1/files upload of {name}", "/v1/files", _upload(unit), 1, content_type=_FORM)
        for name, unit in (("boundaries", b"\r\n--b"), ("lines", b"{}\n"), ("zeros", b"\0"))
    ),
    *(
        Multiplied(f"GET {path} with {name}", f"{path}?{query}", None)
        for path in ("/v1/files", "/v1/batches", "/is_sleeping", "/v1/models", "/debug/state")
        for name, query in (
            ("a limit of many digits", "limit=" + "0" * 5000 + "11"),
            ("many limits", "&".join(["limit=1"] * 5000)),
            ("a level of many digits", "level=" + "1" * 5000),
            ("a long place", "after=" + "a" * 50_000),
        )
    ),
]  # fmt: skip
