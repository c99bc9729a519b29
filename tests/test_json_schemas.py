"""JSON schemas before llguidance compiles them: a text that comes through is valid, as jsonschema
has it.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from jaxpage.decoding.grammars import matcher_of, overlap_of, problem_of, source_of, tokenizer_of
from tests.support.wire import tokenizer

BIG, INT64 = 1234567890123456789, {"minimum": -(2**63), "maximum": 2**63 - 1}
NUMBERS = [
    "0",
    "-0",
    "0.0",
    "-0.1",
    "-0.5",
    "0.1",
    "0.49",
    "0.5",
    "0.50",
    "1",
    "1.0",
    "1.2",
    "1.5",
    "1.7",
    "3",
    "3.1",
    "4",
]
INTEGERS = [
    *map(str, (0, -5, 7, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), BIG, BIG - 21))
]
UUIDS = [f"0b4d8f3e-1c2d-{version}e5f-8a9b-0c1d2e3f4a5b" for version in range(1, 9)]
KEYS = ["{}", '{"a":1}', '{"a":"s"}', '{"xy":1}', '{"xy":"s"}', '{"long":1}']
PAIR = {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}


@pytest.fixture(scope="module")
def grammar():
    return tokenizer_of(json.dumps(json.loads(tokenizer().backend_tokenizer.to_str())))


def admit(grammar: Any, schema: Any, texts: list[str]) -> list[str]:
    tokens, end_id = grammar
    texts_of_schema = []
    for text in texts:
        matcher = matcher_of(tokens, source_of("json", json.dumps(schema)))
        assert problem_of(matcher.deep_copy(), end_id) is None
        token_ids = tokens.tokenize_str(text)
        if matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting():
            texts_of_schema.append(text)
    return texts_of_schema


@pytest.mark.parametrize(
    ("schema", "texts", "some"),
    [
        ({"type": "number", **PAIR}, NUMBERS, ["0.1", "0.49"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, NUMBERS, ["0.1", "0.5"]),
        ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, NUMBERS, ["-0.1"]),
        ({"type": "number"}, ["1e400", "-1e999", "1e", "+1"], ["1e400", "-1e999"]),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, NUMBERS, ["3.1"]),
        ({"type": ["number", "null"], **PAIR}, [*NUMBERS, "null"], ["0.1", "null"]),
        (PAIR, [*NUMBERS, '"a"'], ["0.1", '"a"']),
        ({"type": "number", "exclusiveMinimum": 0}, ["0", "0.0000000001"], ["0.0000000001"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, NUMBERS,
         ["0.1", "0.5"]),
        ({"$ref": "#/$defs/a", "maximum": 0.5,
          "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}}}, NUMBERS, ["0.1"]),
        ({"type": "number", "exclusiveMinimum": 1.2, "exclusiveMaximum": 1.7}, NUMBERS, ["1.5"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4}, NUMBERS, ["1", "3"]),
        ({"type": "integer", **INT64}, INTEGERS, ["0", "-5", str(2**53 - 1)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64}, INTEGERS, ["7"]),
        ({"enum": [2**60, "a"]}, [str(2**60), str(2**60 + 1)], [str(2**60)]),
        ({"properties": {"const": {"type": "integer", **INT64}}, "required": ["const"]},
         ['{"const":1}', "{}"], ['{"const":1}']),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1,1]"],
         ["[1,1]"]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ["[]", "[2]"],
         ["[]", "[2]"]),
        ({"type": "array", "minContains": 0}, ["[]"], ["[]"]),
        *[({"type": "string", "format": kind}, ['"x"'], ['"x"'])
          for kind in ("password", "binary", "path", "file-path")],
        ({"type": "integer", "format": "int64"}, ["5"], ["5"]),
        ({"type": "string", "format": "uuid4"}, [json.dumps(uuid) for uuid in UUIDS], [json.dumps(UUIDS[3])]),
        ({"type": "string", "format": "uuid4", "pattern": "^0b"}, [json.dumps(uuid) for uuid in UUIDS], [json.dumps(UUIDS[3])]),
        ({"type": "string", "format": "base64"}, ['""', '"YQ=="', '"YQ="', '"YWI="', '"a"'], ['""', '"YQ=="', '"YWI="']),
        # zod 4 and pydantic write these.
        *[({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}},
           KEYS, ['{"a":1}', '{"xy":1}'])
          for names in ({"type": "string"}, True, {},
                        {"type": "string", "minLength": 0, "title": "x"})],
        ({"type": "object", "propertyNames": {"type": "string"}}, KEYS, ['{"a":1}', '{"xy":"s"}']),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]},
          "additionalProperties": {"type": "integer"}}, KEYS, ['{"a":1}', "{}"]),
        ({"type": "object", "propertyNames": {"const": "a"},
          "properties": {"a": {"type": "string"}, "xy": {}}}, KEYS, ['{"a":"s"}', "{}"]),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": False}, KEYS,
         ["{}"]),
        ({"type": "object", "propertyNames": {"pattern": "^x"},
          "additionalProperties": {"type": "integer"}}, KEYS, ['{"xy":1}']),
        ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, KEYS,
         ['{"xy":1}', '{"xy":"s"}']),
        ({"type": "object", "propertyNames": {"format": "uuid"}},
         [f'{{"{UUIDS[0]}":1}}', '{"a":1}'], [f'{{"{UUIDS[0]}":1}}']),
        ({"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}, ['"a1"', '"A"'],
         ['"a1"']),
        ({"type": "string", "format": "jwt", "pattern": "^a"}, ['"ab"', '"b"'], ['"ab"']),
        ({"type": "string", "format": "banana", "pattern": "^a", "minLength": 2}, ['"ab"', '"a"'],
         ['"ab"']),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, KEYS,
         ['{"a":1}']),
        ({"type": "object", "additionalProperties": {"type": "integer"},
          "unevaluatedProperties": False}, KEYS, ['{"xy":1}']),
        ({"type": "object", "unevaluatedProperties": True, "anyOf": [{}]}, KEYS, ['{"xy":1}']),
        ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False},
         ["[]", "[1]", "[1,1]"], ["[]", "[1]"]),
        ({"type": "array", "items": {"const": 1}, "unevaluatedItems": False}, ["[1,1]", "[2]"],
         ["[1,1]"]),
        ({"type": "string", "not": False}, ['"a"'], ['"a"']),
        ({"type": "string", "if": {"const": "a"}}, ['"a"'], ['"a"']),
        ({"type": "string", "then": {"const": "a"}, "else": False}, ['"b"'], ['"b"']),
        ({"type": "object", "dependentRequired": {}, "dependentSchemas": {}}, KEYS, ["{}"]),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['""', '"a"', '"abc"'], ['"a"']),
        *[({"$schema": uri, "type": "string"}, ['"a"', "1"], ['"a"']) for uri in (
            "https://example.com/dialect", "https://json-schema.org/draft-07/schema",
            "http://json-schema.org/draft/2020-12/schema#",
            "http://json-schema.org/schema#")],
    ],
)  # fmt: skip
def test_what_comes_through_is_valid(schema, texts, some, grammar):
    accepted = admit(grammar, schema, texts)
    valid = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert all(valid.is_valid(json.loads(text, parse_float=Decimal)) for text in accepted), accepted
    assert set(some) <= set(accepted)
    if schema.get("format") in ("uuid4", "base64"):  # which jsonschema does not check
        assert accepted == some


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["3", "4"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, ["2", "3"]),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": True}, ["3", "2"]),
        ({"type": "integer", "exclusiveMinimum": True}, ["3"]),
    ],
)
def test_bounds_of_draft_4_are_exclusive_by_a_boolean(schema, texts, grammar):
    valid = jsonschema.Draft4Validator(schema)
    accepted = admit(grammar, schema, texts)
    assert accepted == [text for text in texts if valid.is_valid(json.loads(text))]


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^a"}, "properties": {"ab": {}}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"enum": ["a"], "minLength": 2}},
        {"properties": {"a": {}}, "anyOf": [{}], "unevaluatedProperties": False},
        {"contains": {}, "prefixItems": [{}], "unevaluatedItems": False},
        {"if": {}, "then": {}},
        {"dependentRequired": {"a": ["b"]}},
    ],
)
def test_what_cannot_be_said_in_other_keywords_is_refused(schema, grammar):
    matcher = matcher_of(grammar[0], source_of("json", json.dumps(schema)))
    assert "keywords that are not supported" in str(problem_of(matcher, grammar[1]))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        *[({kind: value}, f"{kind} has {BIG}") for kind,
          value in (("const", BIG), ("enum", [1, BIG]), ("const", [{"a": BIG}]))],
        ({"const": 10**400}, "const has 1000"),
        ({"type": "integer", "multipleOf": BIG}, "multipleOf has"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum is 9007199254740993"),
        ({"anyOf": [{"exclusiveMaximum": -(2**63)}]}, "exclusiveMaximum is -9223372036854775808"),
        ({"exclusiveMinimum": 0, "maximum": 1e-10}, "exclusiveMinimum is 0, which is too near"),
    ],
)  # fmt: skip
def test_what_would_not_be_enforced_is_refused_by_its_keyword(schema, message):
    with pytest.raises(ValueError, match=message):
        source_of("json", json.dumps(schema))


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [("^a", True), ("b$", True), ("^ab$", True), ("", True), ("^x|[0-9]", False)],
)
def test_a_property_with_two_schemas_is_refused_before_anything_is_generated(
    pattern, covers, grammar
):
    schema = {
        "items": {
            "properties": {"ab": {"type": "string"}},
            "patternProperties": {pattern: {"type": "integer"}},
        }
    }
    assert (overlap_of(grammar[0], json.dumps(schema)) is not None) == covers
