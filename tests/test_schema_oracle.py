"""Random JSON schemas: whatever a grammar admits is JSON and valid by `jsonschema`.

What it cannot enforce is refused.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.decoding.grammars import matcher_of, overlap_of, problem_of, source_of, tokenizer_of
from tests.support.wire import tokenizer

MAX_TOKENS = 200
CLOSING_TOKENS = 30  # after which a text is brought to its end
PATTERNS = (
    "^[a-z]{2,4}$",
    "^(a|bc)+$",
    "[0-9]",
    "^x",
    "y$",
    "^\\d{3}-\\d{2}$",
    "^.{0,3}$",
    '^[^"]*$',
    "\\w\\s\\w",
    "^é?$",
)
FORMATS = ("date", "time", "ipv4", "ipv6", "uuid", "email")

small = st.integers(-30, 30)
floats = st.one_of(
    st.integers(-300, 300).map(lambda value: value / 100), st.sampled_from((1e-7, 1e5, 0.1, -2.5))
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), small, floats, st.text(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


def _optional(**fields: Any) -> Any:
    return st.fixed_dictionaries({}, optional=fields)


def _with_type(name: str, fields: Any) -> Any:
    return fields.map(lambda values: {"type": name, **values})


integers = _with_type(
    "integer",
    _optional(
        minimum=small,
        maximum=small,
        exclusiveMinimum=small,
        exclusiveMaximum=small,
        multipleOf=st.integers(1, 7),
    ),
)
numbers = _with_type(
    "number",
    _optional(
        minimum=floats,
        maximum=floats,
        exclusiveMinimum=floats | small,
        exclusiveMaximum=floats | small,
        multipleOf=st.sampled_from((1, 3, 0.5, 0.01)),
    ),
)
strings = _with_type(
    "string",
    _optional(
        minLength=st.integers(0, 5),
        maxLength=st.integers(0, 8),
        pattern=st.sampled_from(PATTERNS),
        format=st.sampled_from(FORMATS),
    ),
)
names = st.sampled_from(("a", "b", "é", "a b", 'x"y'))


def _containers(inner: Any) -> Any:
    arrays = _optional(
        items=inner | st.booleans(),
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 3),
        maxItems=st.integers(2, 4),
    )
    objects = _optional(
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(st.sampled_from(("^a", "^z[0-9]$")), inner, max_size=1),
    )
    merged = _optional(
        anyOf=st.lists(inner, min_size=1, max_size=2),
        allOf=st.lists(inner, min_size=1, max_size=2),
        oneOf=st.lists(inner, min_size=1, max_size=2),
    )
    return st.one_of(_with_type("array", arrays), _with_type("object", objects), merged)


leaves = st.one_of(
    integers,
    numbers,
    strings,
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": values}),
    st.sampled_from(
        ({"type": "boolean"}, {"type": ["null", "integer"]}, {"minimum": 3}, {"maxLength": 2}, {})
    ),
)
schemas = st.recursive(leaves, _containers, max_leaves=4)
# Keywords of which llguidance has none, or not all: a schema with one of them is refused, or kept
# to all the same.
unusual = st.one_of(
    st.fixed_dictionaries({name: schemas})
    for name in (
        "not",
        "contains",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "dependentSchemas",
    )
) | st.sampled_from(
    (
        {"type": "array", "uniqueItems": True},
        {"type": "object", "minProperties": 1},
        {"type": "object", "maxProperties": 1},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"if": {"type": "integer"}, "then": {"minimum": 3}},
        {"type": "object", "propertyNames": {"type": "string"}},
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "x"]},
            "additionalProperties": {"type": "integer"},
        },
        {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}},
        {"type": "object", "propertyNames": {"minLength": 2}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "array", "unevaluatedItems": False},
        {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
    )
)
with_unusual = st.builds(lambda schema, more: {**schema, **more}, schemas, unusual)


@pytest.fixture(scope="module")
def grammar():
    return tokenizer_of(json.dumps(json.loads(tokenizer().backend_tokenizer.to_str())))


def write(grammar: Any, matcher: Any, choice: random.Random) -> str | None:
    """Returns a text that the matcher admits, token by token; None if it does not end."""
    end_id = grammar[1]
    token_ids: list[int] = []
    for index in range(MAX_TOKENS):
        allowed = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        )
        assert not matcher.is_error(), matcher.get_error()
        assert len(allowed), "nothing is admitted, and the text is not over"
        if end_id in allowed and (
            len(allowed) == 1 or index > CLOSING_TOKENS or choice.random() < 0.3
        ):
            return str(tokenizer().decode(token_ids))
        allowed = allowed[allowed != end_id]
        if index > CLOSING_TOKENS and (closing := [each for each in allowed if _closes(each)]):
            allowed = closing
        token_ids.append(int(allowed[choice.randrange(len(allowed))]))
        matcher.consume_token(token_ids[-1])
    return None


def _closes(token_id: int) -> bool:
    return str(tokenizer().decode([int(token_id)]))[:1] in ('"', "]", "}")


def test_whatever_a_grammar_admits_is_valid_by_its_schema(grammar):
    ends: Counter[str] = Counter()

    @given(schema=schemas | schemas | with_unusual, seed=st.integers(0, 2**32))
    def holds(schema: Any, seed: int) -> None:
        text_of_schema = json.dumps(schema)
        try:
            source = source_of("json", text_of_schema)
        except ValueError:
            ends["refused"] += 1
            return
        matcher = matcher_of(grammar[0], source)
        if problem_of(matcher.deep_copy(), grammar[1]) or overlap_of(grammar[0], text_of_schema):
            ends["refused"] += 1
            return
        exact = json.loads(text_of_schema, parse_float=Decimal)
        valid = jsonschema.Draft202012Validator(exact, format_checker=jsonschema.FormatChecker())
        choice = random.Random(seed)
        for _ in range(3):
            text = write(grammar, matcher.deep_copy(), choice)
            ends["open" if text is None else "written"] += 1
            if text is not None:
                valid.validate(json.loads(text, parse_float=Decimal, parse_constant=_no_json))

    holds()
    assert ends["written"] > 2 * ends["open"] and ends["written"] > ends["refused"] / 2, ends


def _no_json(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")
