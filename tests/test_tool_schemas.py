"""Schemas of tools: with "auto" none refuses a request, and in enforced calls objects are closed,
as `jsonschema` has it.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.serving.dialects.ollama import open_ollama_chat
from jaxpage.serving.wire.closed_objects import close_schema
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from tests.support.wire import Scripted, admits, context, output, with_template

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = {"type": "string", "format": "email", "pattern": ZOD_EMAIL}
# No grammar has these, or no JSON schema does.
STRANGE: list[Any] = [
    EMAIL,
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    {"$ref": "https://example.com/schema.json"},
    {"$dynamicRef": "#node"},
    {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
    {"type": ["string", {"a": 1}]},
    {"type": 5},
    {"type": None},
    {"enum": "x"},
    {"pattern": "("},
    {"pattern": 5},
    {"properties": ["a"], "required": "a"},
    {"items": None},
    {"format": "banana", "x-order": 1, "foo": [{}]},
    {"not": {}},
    {"$ref": "#/nowhere"},
    {"$ref": 5},
    True,
    False,
    "x",
]
CHOICE = {"type": "function", "function": {"name": "f"}}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat(*tools: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"model": "demo", "messages": messages, "tools": [*tools], **fields}


def arguments(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize("schema", STRANGE, ids=lambda value: f"{value!r:.50}")
def test_with_auto_a_schema_goes_to_the_template_as_it_is(schema):
    """Calls are read by whatever it says."""
    shows = with_template("{{ tools | tojson }}{{ messages }}")
    whole = [schema] if isinstance(schema, dict | bool) else []
    for parameters in (arguments(a=schema), {"type": "object", "$defs": {"a": schema}}, *whole):
        body = chat(tool("f", parameters), tool("g", arguments()))
        exchange = open_chat(body, context(tokenizer=shows, tool_parser="hermes"))
        shown, _ = json.JSONDecoder().raw_decode(str(exchange.prompts[0].prompt))
        assert shown[0]["function"]["parameters"] == parameters
        assert exchange.prompts[0].params.structured_outputs is None
        assert exchange.ignored_fields == ()
        call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        (choice,) = exchange.whole([output(exchange, [Scripted([call])])])["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


TAGGED = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>"
    "{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


KNOWN = (
    context(tool_parser="hermes"),
    context(tokenizer=with_template(TAGGED), tool_parser="auto"),
)


def test_bare_values_are_read_whatever_a_schema_says():
    known = context(tokenizer=with_template(TAGGED), tool_parser="auto")
    for schema in STRANGE:
        exchange = open_chat(chat(tool("f", arguments(a=schema))), known)
        call = "<function=f><parameter=a>3</parameter></function>"
        (choice,) = exchange.whole([output(exchange, [Scripted([call])])])["choices"]
        (read,) = choice["message"]["tool_calls"]
        assert json.loads(read["function"]["arguments"])["a"] in (3, "3")
    capitals = arguments(a={"type": "STRING"}, b={"type": "INTEGER"})
    exchange = open_chat(chat(tool("f", capitals)), known)
    call = "<function=f><parameter=a>3</parameter><parameter=b>3</parameter></function>"
    (choice,) = exchange.whole([output(exchange, [Scripted([call])])])["choices"]
    read = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(read) == {"a": "3", "b": 3}


def test_with_auto_a_schema_may_be_as_large_as_a_body():
    large = arguments(**{f"p{index}": {"description": "x" * 100} for index in range(1000)})
    known = context(tool_parser="hermes")
    assert open_chat(chat(tool("f", large)), known).prompts
    with pytest.raises(ApiError, match="at most 65536 characters"):
        open_chat(chat(tool("f", large), tool_choice="required"), known)


def test_only_tools_that_must_be_called_need_a_grammar():
    strange = [tool(f"s{index}", arguments(a=schema)) for index, schema in enumerate(STRANGE)]
    known = context(tool_parser="hermes")
    for choice in (
        CHOICE,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOICE]}},
    ):
        body = chat(*strange, tool("f", arguments()), tool_choice=choice)
        assert open_chat(body, known).prompts[0].params.structured_outputs is not None


@pytest.mark.parametrize(
    ("schema", "path", "message"),
    [
        ({"type": "string", "pattern": DECIMAL}, ".pattern", "looks around"),
        ({"type": "string", "pattern": r"\bfoo"}, ".pattern", "looks around"),
        ({"anyOf": [{}, {"pattern": DECIMAL}]}, ".anyOf[1].pattern", "looks around"),
        ({"format": "int64", "pattern": DECIMAL}, ".pattern", "looks around"),
        ({"items": {"$ref": "http://a/b"}}, ".items.$ref", "external references"),
        ({"type": "OBJECT"}, ".type", "'OBJECT' is none of JSON's"),
        ({"properties": {"a": 3}}, ".properties.a", "is not a JSON schema"),
        ({"not": {"const": 1}}, ".not", "no grammar can enforce not"),
        ({"items": {"if": {}, "then": {}}}, ".items.if", "no grammar can enforce if"),
        ({"propertyNames": {"type": "integer"}}, ".propertyNames", "no grammar can enforce"),
    ],
)
def test_what_no_grammar_holds_is_refused_by_its_path(schema, path, message):
    known = context(tool_parser="hermes")
    tools = [tool(f"t{index}", arguments()) for index in range(3)]
    expected = {"name": "x", "schema": arguments(email=schema)}
    for body, field in (
        (chat(*tools, tool("f", arguments(email=schema)), tool_choice="required"), "tools[3].function.parameters"),
        (chat(*tools, tool("f", arguments(email=schema)), tool_choice=CHOICE), "tools[3].function.parameters"),
        (chat(response_format={"type": "json_schema", "json_schema": expected}), "response_format.json_schema.schema"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=message) as caught:
            open_chat(body, known)
        assert caught.value.param == f"{field}.properties.email{path}"
        assert caught.value.message.startswith(f"{caught.value.param}: ")
    body = {"model": "demo", "messages": [], "format": arguments(email=schema)}
    body["messages"] = [{"role": "user", "content": "x"}]
    with pytest.raises(ApiError) as caught:
        open_ollama_chat(body, known)
    assert caught.value.param == f"format.properties.email{path}"


@pytest.mark.parametrize(
    ("schema", "keyword", "others"),
    [
        (EMAIL, "pattern", {"type": "string", "format": "email"}),
        ({"format": "uuid", "pattern": "(?i)(?=a)b"}, "pattern", {"format": "uuid"}),
        ({"type": "string", "format": "jwt"}, "format", {"type": "string"}),
    ],
)
def test_what_a_format_says_already_is_left_out_and_told(schema, keyword, others):
    for choice in ("required", CHOICE):
        body = chat(tool("f", arguments(email=schema)), tool_choice=choice)
        exchange = open_chat(body, context(tool_parser="hermes"))
        assert exchange.ignored_fields == (
            f"tools[0].function.parameters.properties.email.{keyword}",
        )
    expected = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": arguments(email=schema)},
    }
    exchange = open_chat(chat(response_format=expected), context())
    assert exchange.ignored_fields == (
        f"response_format.json_schema.schema.properties.email.{keyword}",
    )
    _, text = exchange.prompts[0].params.structured_outputs
    assert json.loads(text) == arguments(email=others)
    if keyword == "pattern":
        with pytest.raises(ApiError, match="looks around"):
            open_chat(chat(response_format=expected), context(strict_requests=True))


def test_sets_of_tools_are_reported():
    body = chat(tool("f", arguments(a={"type": "array", "uniqueItems": True})), tool_choice=CHOICE)
    exchange = open_chat(body, context())
    assert exchange.ignored_fields == ("tools[0].function.parameters.uniqueItems",)


def test_allowed_tools():
    def open_chat_of(mode: str, *names: str) -> Any:
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        tools = [tool(name, arguments(**{name: {}})) for name in "fgh"]
        return open_chat(chat(*tools, tool_choice=choice), context(tool_parser="hermes"))

    def calls(exchange: Any) -> list[str]:
        text = "\n".join(
            f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fgh"
        )
        (choice,) = exchange.whole([output(exchange, [Scripted([text])])])["choices"]
        return [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]

    assert calls(open_chat_of("auto", "h", "f")) == ["f", "h"]
    assert open_chat_of("auto", "h", "f").prompts[0].params.structured_outputs is None
    assert str(open_chat_of("auto", "h", "f").prompts[0].prompt).startswith("[f][h]<")
    _, grammar = open_chat_of("required", "g").prompts[0].params.structured_outputs
    assert '\\"g\\"' in grammar and '\\"f\\"' not in grammar
    for wrong in (("auto", "x"), ("required",), ("sometimes", "f")):
        with pytest.raises(ApiError, match="tool_choice"):
            open_chat_of(*wrong)


KEYWORDS = (
    *(
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "items",
        "anyOf",
        "allOf",
        "oneOf",
        "$ref",
    ),
    *(
        "additionalProperties",
        "propertyNames",
        "patternProperties",
        "pattern",
        "format",
        "minLength",
    ),
    *("prefixItems", "$defs", "not", "contains", "minContains", "uniqueItems", "$schema", "$id"),
    *("unevaluatedProperties", "exclusiveMinimum", "minimum", "multipleOf", "dependentRequired"),
)
ANYTHING = st.recursive(
    st.sampled_from(
        (None, True, False, 0, -1, 1.5, "", "object", "a", "#", "#/$defs/a", "(", 10**400)
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from((*KEYWORDS, "a")), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    parameters=st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=4),
    choice=st.sampled_from(("auto", "required", CHOICE)),
    is_tagged=st.booleans(),
)
def test_any_schema_is_taken_or_refused(parameters, choice, is_tagged):
    """ "auto" always takes it."""
    try:
        open_chat(chat(tool("f", parameters), tool_choice=choice), KNOWN[is_tagged])
    except ApiError as error:
        assert error.status == 400 and choice != "auto"


# Which objects are closed.

INTEGER = {"type": "integer"}
KEYS = st.sampled_from("abc")


def _object(inner: Any) -> Any:
    return st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(KEYS, inner, min_size=1, max_size=2),
        },
        optional={
            "required": st.lists(KEYS, max_size=1),
            "additionalProperties": st.sampled_from((True, False, INTEGER)),
        },
    )


def _union_of(inner: Any) -> Any:
    return st.fixed_dictionaries(
        {"anyOf": st.lists(inner, min_size=1, max_size=2)},
        optional={"properties": st.dictionaries(KEYS, st.just(INTEGER), max_size=1)},
    )


def _merge_of(inner: Any) -> Any:
    members = st.lists(_object(inner), min_size=1, max_size=2)
    return st.fixed_dictionaries({"allOf": members}, optional={"title": st.just("x")})


schemas = st.recursive(
    st.sampled_from((INTEGER, {"$ref": "#/$defs/d"}, {"type": "object"})),
    lambda inner: st.one_of(
        _object(inner),
        _union_of(_object(inner)),
        _merge_of(inner),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
    ),
    max_leaves=5,
)
values = st.recursive(
    st.sampled_from((1, "x")),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcz"), inner, max_size=3)
    ),
    max_leaves=6,
)


def strictly(schema: Any, *, is_merged: bool = False) -> Any:
    """Returns the schema with `unevaluatedProperties: false` where nothing opens an object: the
    oracle.

    A member of a merge leaves that to the schema that merges.
    """
    if not isinstance(schema, dict):
        return schema
    result = {**schema}
    for name in ("properties", "$defs"):
        if name in schema:
            result[name] = {key: strictly(inner) for key, inner in schema[name].items()}
    if "items" in schema:
        result["items"] = strictly(schema["items"])
    for name in ("anyOf", "allOf"):
        if name in schema:
            result[name] = [strictly(member, is_merged=True) for member in schema[name]]
    if not is_merged and not _opens(schema) and (schema.keys() & {"properties", "anyOf", "allOf"}):
        result["unevaluatedProperties"] = False
        # A key that is required may be there, even if nothing says what it is.
        required = dict.fromkeys(schema.get("required", ()), True)
        result["properties"] = {**required, **result.get("properties", {})}
    return result


def _opens(schema: Any) -> bool:
    return schema.get("additionalProperties", False) is not False


@given(schema=_object(schemas), definition=_object(st.just(INTEGER)), value=values)
def test_objects_are_closed_as_by_unevaluated_properties(schema, definition, value):
    schema = {**schema, "$defs": {"d": definition}}
    before = copy.deepcopy(schema)
    closed = jsonschema.Draft202012Validator(close_schema(schema))
    oracle = jsonschema.Draft202012Validator(strictly(schema))
    assert schema == before
    assert closed.is_valid(value) == oracle.is_valid(value)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (arguments(a=INTEGER), [{}, {"a": 1}], [{"x": 1}]),
        ({"type": "object"}, [{}], [{"x": 1}]),
        (arguments(a={"type": "object"}), [{"a": {"x": 1}}], [{"x": {}}]),
        (arguments(a={"type": "array", "items": arguments(b=INTEGER)}), [{"a": [{"b": 1}]}],
         [{"a": [{"x": 1}]}]),
        (arguments(a={"anyOf": [arguments(b=INTEGER), {"type": "null"}]}),
         [{"a": None}, {"a": {"b": 1}}], [{"a": {"x": 1}}]),
        (arguments(a={"allOf": [{"$ref": "#/$defs/n"}],
                      "default": {}}) | {"$defs": {"n": arguments(b=INTEGER)}},
         [{"a": {"b": 1}}], [{"a": {"x": 1}}]),
        ({"allOf": [{"$ref": "#/$defs/n"}, arguments(c=INTEGER)],
          "$defs": {"n": arguments(b={"$ref": "#/$defs/n"})}},
         [{"b": {"b": {}}}, {"b": {}, "c": 1}], [{"x": 1}, {"b": {"c": 1}}]),
        (arguments(a={"additionalProperties": INTEGER}), [{"a": {"x": 1}}], [{"a": {"x": "y"}}]),
        ({**arguments(a=INTEGER), "additionalProperties": True}, [{"x": 1}], []),
        ({**arguments(), "patternProperties": {"^x": INTEGER}}, [{"x1": 1}], [{"y": 1}]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}], [{"a": 1, "b": 1}]),
        (arguments(next={"$ref": "#"}), [{"next": {"next": {}}}], [{"next": {"x": 1}}]),
    ],
)  # fmt: skip
def test_enforced_calls_have_no_other_keys(schema, good, bad):
    body = chat(tool("f", schema), tool_choice=CHOICE)
    held = open_chat(body, context()).prompts[0].params.structured_outputs
    assert all(admits(held, json.dumps(value)) for value in good)
    assert not any(admits(held, json.dumps(value)) for value in bad)
    # `response_format` keeps to JSON schema.
    expected = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (prompt,) = open_chat(chat(response_format=expected), context()).prompts
    assert json.loads(prompt.params.structured_outputs[1]) == schema
