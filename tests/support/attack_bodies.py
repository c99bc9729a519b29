"""Requests at the bounds of their fields, from the server's OpenAPI document: a field that is new
is attacked without a word here.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.support.attack_constructs import MULTIPLIED, SCHEMAS, STRUCTURED, raw_bodies

Extreme = tuple[str, Callable[[], Any]]  # its name, and what makes the value
Sending = Literal["whole", "chunked", "bytes", "drip", "cut", "unread", "crumbs", "paused"]
SENDINGS: tuple[Sending, ...] = (
    "whole",
    "chunked",
    "bytes",
    "drip",
    "cut",
    "unread",
    "crumbs",
    "paused",
)
PROMPT = "Once upon a time"
NUM_ITEMS, NUM_CHARACTERS, DEPTH = 60_000, 1 << 19, 100  # where a field has no bound of its own
# asked for even where a request may leave them out
CONTENT_FIELDS = ("prompt", "messages", "input", "tokens")
LENGTH_FIELDS = ("max_tokens", "max_output_tokens", "num_predict")
# free objects that are read as JSON schemas
SCHEMA_FIELDS = ("schema", "schema_", "format", "parameters")
NUM_TOKENS, NUM_SEQUENCES, NUM_PROMPTS, NUM_CONNECTIONS = 24, 64, 32, 8


@dataclass(frozen=True)
class Attack:
    """One request, sent over some connections at once."""

    name: str
    path: str
    make: Callable[[], bytes] | None  # the body; None: GET
    num_connections: int = 1
    sending: Sending = "whole"
    content_type: str = "application/json"


def attacks(document: dict[str, Any], seed: int) -> Iterator[Attack]:
    """Yields all attacks once, in a random order in which plain fields, constructs and raw bodies
    take turns.
    """
    rng = random.Random(seed)
    kinds = kinds_of(document)
    for kind in kinds:
        rng.shuffle(kind)
    for attack in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*kinds))):
        # Crumbs and pauses take long; `MULTIPLIED` has them where they matter.
        sending = rng.choices(SENDINGS, (20, 2, 1, 1, 1, 1, 0, 0))[0]
        yield (
            replace(attack, name=f"{attack.name}, sent {sending}", sending=sending)
            if attack.make and attack.sending == "whole"
            else attack
        )


def kinds_of(document: dict[str, Any]) -> tuple[list[Attack], list[Attack], list[Attack]]:
    """Returns attacks through plain fields, through what is compiled, parsed or multiplied, and
    through whole bodies.
    """
    plain: list[Attack] = []
    constructs: list[Attack] = [
        Attack(
            each.name, each.path, each.make, each.num_connections, each.sending, each.content_type
        )  # type: ignore[arg-type]
        for each in MULTIPLIED
    ]
    whole: list[Attack] = []
    for path, methods in document["paths"].items():
        if "get" in methods and "{" not in path:
            whole += [Attack(f"GET {path} x {count}", path, None, count) for count in (1, 64)]
        if "post" not in methods:
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for each in schema.get("anyOf", [schema]):
            fields = RequestFields(document, path, each)
            for attack in fields.attacks():
                (constructs if "construct " in attack.name else plain).append(attack)
        whole += [
            Attack(f"{path} body of {name} x {count}", path, make, count)
            for name, make in raw_bodies(fields.content).items()
            for count in (1, NUM_CONNECTIONS)
        ]
    return plain, constructs, whole


class RequestFields:
    """The extremes of every field of one kind of request."""

    def __init__(self, document: dict[str, Any], path: str, schema: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._path = path
        self._schema = self._resolved(schema)
        self.properties: dict[str, Any] = self._schema["properties"]
        self.content = next((name for name in CONTENT_FIELDS if name in self.properties), "model")

    def attacks(self) -> Iterator[Attack]:
        """Yields every extreme alone, times n, times prompts, times connections, and times all of
        them.
        """
        for field, schema in self.properties.items():
            for name, make in self._extremes(schema, field, 0):
                for times, more, num_connections in self._multiples(field):

                    def body(field: str = field, make: Any = make, more: Any = more) -> bytes:
                        return json.dumps(
                            {**self.plain(), **more, field: make()}, ensure_ascii=False
                        ).encode(errors="surrogatepass")

                    yield Attack(
                        f"{self._path} {field}: {name}{times}", self._path, body, num_connections
                    )

    def plain(self) -> dict[str, Any]:
        """Returns a request that is nothing special."""
        body: dict[str, Any] = self._base(self._schema, "")
        if "options" in self.properties:
            body["options"] = {"num_predict": NUM_TOKENS}
        return body

    def _multiples(self, field: str) -> Iterator[tuple[str, dict[str, Any], int]]:
        n = {"n": NUM_SEQUENCES} if "n" in self.properties and field != "n" else {}
        takes_many = field != self.content and self.content in ("prompt", "input")
        prompts = (
            {self.content: [PROMPT] * NUM_PROMPTS} if takes_many and self._takes_texts() else {}
        )
        yield "", {}, 1
        yield f" x {NUM_CONNECTIONS} connections", {}, NUM_CONNECTIONS
        if n:
            yield f" x n {NUM_SEQUENCES}", n, 1
        if prompts:
            yield f" x {NUM_PROMPTS} prompts", prompts, 1
        if n or prompts:
            fewer = {
                name: value if isinstance(value, int) else value[:4]
                for name, value in {**n, **prompts}.items()
            }
            few = {**fewer, "n": 16} if n else fewer
            yield " x everything", few, 4

    def _takes_texts(self) -> bool:
        branches = self._branches(self.properties[self.content])
        return any(branch.get("items", {}).get("type") == "string" for branch in branches)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _branches(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what a union is of, without null."""
        schema = self._resolved(schema)
        members = schema.get("anyOf") or schema.get("oneOf")
        if members is None:
            return [] if schema.get("type") == "null" else [schema]
        return [branch for member in members for branch in self._branches(member)]

    def _base(self, schema: dict[str, Any], name: str) -> Any:
        branches = self._branches(schema)
        users = [
            branch
            for branch in branches
            if "user" in json.dumps(branch.get("properties", {}).get("role", ""))
        ]
        branch = (users or branches)[0]
        if "const" in branch or "enum" in branch:
            return (
                branch["const"]
                if "const" in branch
                else ("user" if "user" in branch["enum"] else branch["enum"][0])
            )
        kind = branch.get("type")
        if kind == "object":
            expected = {*branch.get("required", ()), *CONTENT_FIELDS, *LENGTH_FIELDS}
            return {
                field: self._base(inner, field)
                for field, inner in branch.get("properties", {}).items()
                if field in expected
            }
        if kind == "array":
            return [self._base(branch.get("items", {}), name)]
        plain: dict[Any, Any] = {
            "string": "name" if "pattern" in branch else PROMPT,
            "boolean": False,
            "number": 1.0,
        }
        return plain.get(kind, NUM_TOKENS if name in LENGTH_FIELDS else branch.get("minimum", 1))

    def _extremes(self, schema: dict[str, Any], name: str, level: int) -> Iterator[Extreme]:
        for branch in self._branches(schema):
            if "const" in branch or "enum" in branch:
                for value in [branch["const"]] if "const" in branch else branch["enum"]:
                    yield f"{value!r}", lambda value=value: value
                continue
            kind = branch.get("type")
            if kind == "object":
                yield from self._objects(branch, name, level)
            elif kind == "array":
                yield from self._arrays(branch, name, level)
            elif kind == "string":
                yield from _texts(branch)
            elif kind in ("integer", "number"):
                yield from _numbers(branch)
            elif kind == "boolean":
                yield from (("true", lambda: True), ("false", lambda: False))
            else:
                yield from _anything()

    def _arrays(self, schema: dict[str, Any], name: str, level: int) -> Iterator[Extreme]:
        items = schema.get("items", {})
        maximum = schema.get("maxItems", NUM_ITEMS)
        for count in {0, maximum, maximum + 1}:
            yield f"{count} items", lambda count=count: [self._base(items, name)] * count
        yield "empty items", lambda: [[]] * min(maximum, NUM_ITEMS)
        if level < 3:
            for label, make in self._extremes(items, name, level + 1):
                yield f"[{label}]", lambda make=make: [make()]
                if level == 0 and "characters" not in label and "items" not in label:
                    yield f"[{label}] x 64", lambda make=make: [make()] * min(maximum, 64)

    def _objects(self, schema: dict[str, Any], name: str, level: int) -> Iterator[Extreme]:
        if level < 4:
            for field, inner in schema.get("properties", {}).items():
                for label, make in self._extremes(inner, field, level + 1):
                    yield (
                        f"{field}: {label}",
                        lambda field=field, make=make: {**self._base(schema, ""), field: make()},
                    )
        values = schema.get("additionalProperties")
        if values is False or ("properties" in schema and not isinstance(values, dict)):
            return
        if name == "structured_outputs":
            for kind, constructs in STRUCTURED.items():
                for label, make in constructs.items():
                    yield f"construct {kind}, {label}", lambda kind=kind, make=make: {kind: make()}
        if name in SCHEMA_FIELDS:
            for label, make in SCHEMAS.items():
                yield f"construct {label}", make
        maximum = schema.get("maxProperties", NUM_ITEMS)
        for count in (maximum, maximum + 1):
            # Numbers, since the keys of some objects are token ids.
            yield (
                f"{count} properties",
                lambda count=count: {
                    str(number): self._value_of(values, number) for number in range(count)
                },
            )
        yield from _anything()

    def _value_of(self, schema: Any, number: int) -> Any:
        return self._base(schema, "") if isinstance(schema, dict) and schema else number


def _texts(schema: dict[str, Any]) -> Iterator[Extreme]:
    maximum = schema.get("maxLength", NUM_CHARACTERS)
    for count in {0, maximum, maximum + 1}:
        yield f"{count} characters", lambda count=count: "a" * count
    for label, unit in (
        ("words", " a"),
        ("NULs", "\0"),
        ("beyond 16 bits", "\U0001d11e"),
        ("joined", "e\u0301"),
    ):
        yield f"{maximum} characters, {label}", lambda unit=unit: unit * (maximum // len(unit))


def _numbers(schema: dict[str, Any]) -> Iterator[Extreme]:
    fields: dict[str, Any] = {
        "2^63": 2**63,
        "-2^63": -(2**63),
        "400 digits": 10**400,
        "0": 0,
        "-1": -1,
        "1.5": 1.5,
    }
    fields |= {"smallest": 5e-324, "largest": 1.7e308}
    for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if bound in schema:
            fields |= {
                bound: schema[bound],
                f"below {bound}": schema[bound] - 1,
                f"above {bound}": schema[bound] + 1,
            }
    for label, value in fields.items():
        yield label, lambda value=value: value


def _anything() -> Iterator[Extreme]:
    yield "deep", lambda: _deep(DEPTH)
    yield "deeper", lambda: _deep(4 * DEPTH)
    yield "wide", lambda: {f"k{number}": [number] for number in range(NUM_ITEMS // 2)}
    yield "a long name", lambda: {"k" * NUM_CHARACTERS: 0}


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": [value]}
    return value
