"""Parsers of tool calls and of reasoning: whatever the text and however it is cut, nothing is lost
and nothing leaks; and their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.chat_forms import REASONING_FORMS, TOOL_FORMS, ChatFormat, PieceParser, Tools
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.tools import NamedCall
from tests.support.sweeps import few
from tests.support.wire import admits, chatml, context, tokenizer, with_template

NAMES = Tools({"f": None, "g": None})
F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {}}'
MARKS = r"\"</tool_call><tool_call>\\"
CALL_F, CALL_G = ("call", "f", '{"a": 1}'), ("call", "g", "{}")
HERMES, LLAMA, THINK = TOOL_FORMS["hermes"], TOOL_FORMS["llama3_json"], REASONING_FORMS["think"]
PARSERS: dict[str, Callable[[], PieceParser]] = {
    "hermes": lambda: ChatFormat(HERMES).parser(NAMES, ""),
    "llama3_json": lambda: ChatFormat(LLAMA).parser(NAMES, ""),
    "named": lambda: NamedCall("f"),
    "think": lambda: ChatFormat(reasoning=THINK).parser(None, ""),
    "open think": lambda: ChatFormat(reasoning=THINK).parser(None, "<think>"),
    "think and hermes": lambda: ChatFormat(HERMES, THINK).parser(NAMES, ""),
}


def read_all(parser: PieceParser, texts: Iterable[str]) -> list[tuple[str, str, str]]:
    """Returns (kind, name, text) of what comes, neighbours of one kind joined."""
    pieces = [piece for text in texts for piece in parser.push(text)] + list(parser.finish())
    parts: list[tuple[str, str, str]] = []
    for kind, text, name in pieces:
        assert text, "an empty piece says nothing"
        if kind == "arguments" or (parts and parts[-1][0] == kind != "call"):
            parts[-1] = (*parts[-1][:2], parts[-1][2] + text)
        else:
            parts.append((kind, name, text))
    return parts


CASES = [
    ("hermes", "", []),
    ("hermes", "Hello <tool", [("content", "", "Hello <tool")]),
    ("hermes", f"<tool_call>{F}</tool_call>", [CALL_F]),
    ("hermes", f" Hm. \n<tool_call>\n{F}\n</tool_call> \n<tool_call>{G}</tool_call>\n",
     [("content", "", " Hm."), CALL_F, CALL_G]),
    ("hermes", f"<tool_call>{F}</tool_call> then\n", [CALL_F, ("content", "", " then")]),
    ("hermes", "<tool_call>{no}</tool_call> \n",
     [("content", "", "<tool_call>{no}</tool_call> \n")]),
    *[("hermes", f"Hm.\n<tool_call>{F}{cut}", [("content", "", "Hm."), CALL_F])
      for cut in ("", "\n", "</tool_ca")],
    ("hermes", f"<tool_call>{F[:-1]}", [("content", "", f"<tool_call>{F[:-1]}")]),
    ("hermes", f"<tool_call>{F}x</tool_ca", [("content", "", f"<tool_call>{F}x</tool_ca")]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{MARKS}"}}}}</tool_call>{MARKS}',
     [("call", "f", f'{{"a": "{MARKS}"}}'), ("content", "", MARKS)]),
    ("hermes", f'<tool_call>{{"name: "f"}}</tool_call>\n<tool_call>{F}</tool_call>',
     [("content", "", '<tool_call>{"name: "f"}</tool_call>'), CALL_F]),
    ("hermes", f'<tool_call>"</tool_call><tool_call>\\"</tool_call>\n<tool_call>{F}',
     [("content", "", '<tool_call>"</tool_call><tool_call>\\"</tool_call>'), CALL_F]),
    ("hermes", f'<tool_call>"\\</tool_call>\n<tool_call>{F}',
     [("content", "", '<tool_call>"\\</tool_call>'), CALL_F]),
    ("hermes", '<tool_call>{"a": "</tool_call>',
     [("content", "", '<tool_call>{"a": "</tool_call>')]),
    ("hermes", '<tool_call>{"name": "h"}</tool_call>',
     [("content", "", '<tool_call>{"name": "h"}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
     [("content", "", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e400}}</tool_call>',
     [("call", "f", '{"a": 1e400}')]),
    ("hermes", '<tool_call>{"a": "x</tool_call>y<\nz',
     [("content", "", '<tool_call>{"a": "x</tool_call>y<\nz')]),
    ("hermes", '<tool_call>{"name": "f\\', [("content", "", '<tool_call>{"name": "f\\')]),
    ("hermes", f"Hi \n<tool_call>{F}</tool_call>bye",
     [("content", "", "Hi"), CALL_F, ("content", "", "bye")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}', [CALL_F]),
    ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>",
     [("content", "", "<tool_call>" + "[" * 5000 + "</tool_call>")]),
    ("hermes", "</tool_call><tool_call><tool_call></tool_call>",
     [("content", "", "</tool_call><tool_call><tool_call></tool_call>")]),
    ("llama3_json", F, [CALL_F]),
    ("llama3_json", f" \n<|python_tag|> {F};\n{G}", [CALL_F, CALL_G]),
    ("llama3_json", f"{F} and more", [CALL_F, ("content", "", " and more")]),
    ("llama3_json", f"{F}<", [CALL_F, ("content", "", "<")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": "\\n"}}', [("call", "f", '{"a": "\\n"}')]),
    ("llama3_json", "Hello", [("content", "", "Hello")]),
    ("llama3_json", '{"x": "}\\""} tail', [("content", "", '{"x": "}\\""} tail')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": "}\\\\\\"{"}}',
     [("call", "f", '{"a": "}\\\\\\"{"}')]),
    ("llama3_json", '{"name": "f", ', [("content", "", '{"name": "f", ')]),
    ("llama3_json", "<|python_tag|", [("content", "", "<|python_tag|")]),
    ("llama3_json", "<|python_x", [("content", "", "<|python_x")]),
    ("named", '{"a": 1}', [("call", "f", '{"a": 1}')]),
    ("named", "", []),
    ("think", "<think>a</think>b", [("reasoning", "", "a"), ("content", "", "b")]),
    ("think", " \n<think>a<b</thin</think>", [("reasoning", "", "a<b</thin")]),
    ("think", "b<think>a</think>", [("content", "", "b<think>a</think>")]),
    ("think", "<think>never ends</thi", [("reasoning", "", "never ends</thi")]),
    ("think", "<thi", [("content", "", "<thi")]),
    ("open think", "a</think>b</think>", [("reasoning", "", "a"), ("content", "", "b</think>")]),
    ("think and hermes", f"<think><tool_call></think><tool_call>{F}</tool_call>",
     [("reasoning", "", "<tool_call>"), CALL_F]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"), CASES, ids=[f"{name} {text[:40]}" for name, text, _ in CASES]
)
def test_what_a_text_says(name, text, expected):
    assert read_all(PARSERS[name](), [text]) == expected
    assert read_all(PARSERS[name](), text) == expected, "a character at a time"


BITS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    F,
    G,
    '{"',
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ";",
    ",",
]
TEXT = st.lists(
    st.sampled_from([*BITS, " ", "\n", "x", "<", "</tool", "<thi", "é"]), max_size=12
).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@given(text=TEXT, data=st.data())
def test_it_makes_no_difference_how_a_text_is_cut(name, text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read_all(PARSERS[name](), [text])
    assert read_all(PARSERS[name](), pieces) == whole
    if name in ("hermes", "llama3_json") and not any(kind == "call" for kind, *_ in whole):
        assert "".join(text for *_, text in whole) == text, "what is no call is content, all of it"


ADVERSARIAL = [
    *[("hermes", unit) for unit in ("<tool_call></tool_call>", "<tool_call>", "<tool_cal", " ")],
    *[
        ("hermes", unit)
        for unit in (
            '<tool_call>"</tool_call>',
            '<tool_call>\\"</tool_call>',
            '<tool_call>"</tool_call>\n',
        )
    ],
    *[("hermes", "<tool_call>" + unit) for unit in ('"', '"\\', '"a\\"')],
    *[("llama3_json", unit) for unit in (" ", "{", '{"\\', G + ";")],
    *[("think and hermes", unit) for unit in (" ", "<think>", "x")],
    ("open think", "</think"),
]


@pytest.mark.parametrize(("name", "unit"), few(ADVERSARIAL, ADVERSARIAL[1::4]))
@pytest.mark.timeout(15)  # a parser that is not linear takes longer
def test_a_long_text_takes_no_longer_than_it_is(name, unit):
    text = unit * (60_000 // len(unit))
    assert read_all(PARSERS[name](), [text])
    assert read_all(PARSERS[name](), (text[index : index + 3] for index in range(0, len(text), 3)))


@given(st.text(max_size=30))
def test_arguments_are_what_the_model_wrote(text):
    arguments = {"a": [text, 1.5, None]}
    for ascii_only in (True, False):
        written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
        ((kind, name, call_arguments),) = read_all(PARSERS["llama3_json"](), [written])
        assert (kind, name, json.loads(call_arguments)) == ("call", "f", arguments)


def test_a_lone_surrogate_in_arguments_can_be_sent():
    written = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    ((_, _, arguments),) = read_all(PARSERS["hermes"](), [written])
    assert json.loads(arguments.encode()) == {"a": "\ud800"}


RECURSIVE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}},
    "$defs": {"leaf": {"type": "integer"}},
}


def test_required_calls_keep_to_the_schemas_of_the_tools():
    """The model writes one call or more in its own form."""

    def write(*calls: Any) -> str:
        texts = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
        return "\n".join(texts)

    good = (
        [{"name": "f", "arguments": {"next": {"next": {"leaf": 1}}}}],
        [{"name": "g", "arguments": {}}],
    )
    two = [{"name": "g", "arguments": {}}] * 2
    bad = [
        [],
        [{"name": "f", "arguments": {"next": {"leaf": "1"}}}],
        [{"name": "h", "arguments": {}}],
        [{"name": "g"}],
    ]
    held = open_chat_with("required").prompts[0].params.structured_outputs
    single = (
        open_chat_with("required", {"parallel_tool_calls": False})
        .prompts[0]
        .params.structured_outputs
    )
    for calls in good:
        assert admits(held, write(*calls)) and admits(single, write(*calls))
    assert admits(held, write(*two)) and not admits(single, write(*two))
    assert not any(admits(held, write(*calls)) for calls in bad)


INTEGER = {"type": "integer"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
# a tool's, arguments that keep to it, objects that do not
SCHEMAS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({}, [{}], [{"a": 1}]),  # as without a schema: no parameters
    ({"properties": {"a": INTEGER}}, [{}, {"a": 1}], [{"a": "x"}]),
    ({"type": ["object", "null"], "properties": {"a": INTEGER}}, [{"a": 1}], [{"a": "x"}]),
    ({"type": ["string", "object"]}, [{"x": 1}], []),
    ({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"a": INTEGER}}]}, [{"a": 1}],
     [{"a": "x"}]),
    ({"oneOf": [{"type": "null"}, {"properties": {"a": INTEGER}, "type": "object"}]}, [{"a": 1}],
     [{"a": "x"}]),
    ({"allOf": [{"type": ["object", "null"]}, {"properties": {"a": INTEGER}}]}, [{"a": 1}],
     [{"a": "x"}]),
    ({"enum": ["x", {"a": 1}, None]}, [{"a": 1}], [{"a": 2}, {}]),
    ({"const": {"$ref": "#/a"}}, [{"$ref": "#/a"}], [{"$ref": "#/$defs/tool0/a"}]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": INTEGER}}}}, [{"a": 1}],
     [{"a": "x"}]),
    ({"$ref": "#/$defs/any", "$defs": {"any": True}}, [{"x": 1}], []),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"properties": {"a": INTEGER}}},
      "$schema": DRAFT_7}, [{"a": 1}], [{"a": "x"}]),
    ({"$id": "http://a/b", "properties": {"a": {"$ref": "#/$defs/i"}}, "$defs": {"i": INTEGER}},
     [{"a": 1}], [{"a": "x"}]),
    ({"properties": {"a": {"$ref": "#i"}}, "$defs": {"i": {**INTEGER, "$anchor": "i"}}}, [{"a": 1}],
     [{"a": "x"}]),
    ({"properties": {"a": {"$ref": "#/parts/i"}},
      "parts": {"i": {"$ref": "#/parts/j"}, "j": INTEGER}}, [{"a": 1}], [{"a": "x"}]),
    ({"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}},
     [{"next": {"next": None}}], [{"next": 1}]),
    (
        {"properties": {"$ref": INTEGER, "$id": INTEGER, "enum": {"enum": [{"$ref": "#/b"}]},
                        "properties": {"const": {"$ref": "#"}}}},
        [{"$ref": 1, "$id": 1}, {"enum": {"$ref": "#/b"}}, {"properties": {"$ref": "#"}}],
        [{"$ref": "1"}, {"enum": {"$ref": "#/$defs/tool0/b"}},
         {"properties": {"$ref": "#/$defs/tool0"}}],
    ),
    (
        {"default": {"$ref": "#"}, "examples": [{"$ref": "#"}],
         "properties": {"a": {**INTEGER, "default": {"$ref": "http://a/b"}}}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
]  # fmt: skip
OTHERS = [None, True, 1, " 18", [], [{}]]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), SCHEMAS, ids=[f"{schema!r:.60}" for schema, *_ in SCHEMAS]
)
def test_arguments_are_an_object_that_keeps_to_the_schema(schema, good, bad):
    """The schema may admit anything else, and refer to names that another tool's has, too."""
    choice = {"type": "function", "function": {"name": "f"}}
    named, alone = hold_to(choice, schema), hold_to(choice, schema, "none")
    required = hold_to("required", schema)

    def call(arguments: Any) -> str:
        written = json.dumps({"name": "f", "arguments": arguments})
        return f"<tool_call>\n{written}\n</tool_call>"

    for each in good:
        assert admits(alone, json.dumps(each))
        assert admits(named, call(each)) and admits(required, call(each))
    for each in bad + OTHERS:
        assert not admits(alone, json.dumps(each))
        assert not admits(named, call(each)) and not admits(required, call(each))


def hold_to(choice: Any, schema: dict[str, Any], tool_parser: str = "hermes") -> tuple[str, str]:
    """Returns what an answer is held to that has to call `f`, whose parameters the schema is."""
    another = {
        "$defs": {"a": {"type": "null"}, "i": {"type": "null"}},
        "definitions": {"a": {"type": "null"}},
    }
    tools = [{"name": "f", "parameters": schema}, {"name": "g", "parameters": another}]
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tool_choice": choice}
    body["tools"] = [{"type": "function", "function": function} for function in tools]
    held = open_chat(body, context(tool_parser=tool_parser)).prompts[0].params.structured_outputs
    assert held is not None
    return held


def refuse_parameters(schema: Any, choice: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        hold_to(choice, schema)
    return caught.value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": []},
        {"const": 3},
        {"enum": ["a", None]},
        {"enum": []},
        {"anyOf": [{"type": "string"}, {"const": []}, False]},
        {"oneOf": [False]},
        {"type": "object", "allOf": [{}, {"type": "array"}]},
        {"$ref": "#/$defs/a/anyOf/0",
         "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b~1~0%25"}]}, "b/~%": {"type": "number"}}},
        {"$ref": "#/parts/0", "parts": [{"type": "string"}]},
        {"$ref": "#/$defs/0",
         "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"},
                                      {"$ref": f"#/$defs/{i + 1}"}]} for i in range(30)}
         | {"30": {"type": "string"}}},
    ],
    ids=lambda value: f"{value!r:.50}",
)  # fmt: skip
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_admit_no_object_are_refused(schema, choice):
    error = refuse_parameters(schema, choice)
    assert (error.status, error.param) == (400, "tools[0].function.parameters")
    assert "must allow an object" in error.message


@pytest.mark.parametrize("schema", [True, False, [], "x"])
def test_parameters_are_a_schema_that_is_an_object(schema):
    assert refuse_parameters(schema, "required").param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/nowhere/0/x"},
        {"$ref": "#nowhere"},
        {"type": "object", "required": {"$ref": "http://a"}},
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)},
         "$ref": "#/$defs/d0"},
    ],
    ids=lambda value: f"{value!r:.50}",
)  # fmt: skip
def test_a_schema_that_goes_round_or_nowhere_is_the_compilers_to_refuse(schema):
    """Looking whether it admits an object ends, in a time that grows with its length."""
    assert hold_to("required", schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/parts/0", "parts": [{"$ref": "http://a/b"}]},
        {"unevaluatedProperties": {"$ref": "http://a/b"}},
        {"dependencies": {"a": ["b"], "c": {"$ref": "http://a/b"}}},
        {"$dynamicRef": "http://a/b"},
    ],
)
def test_references_lead_nowhere_outside_wherever_they_stand(schema):
    assert "external references are not fetched" in refuse_parameters(schema, "required").message


def open_chat_with(choice: Any, fields: dict[str, Any] | None = None, **settings: Any) -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": RECURSIVE}}
        for name in ("f", "g")
    ]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "tool_choice": choice,
        **(fields or {}),
    }
    return open_chat(body, context(**{"tool_parser": "hermes", **settings}))


def test_what_a_choice_of_tools_asks_of_the_engine():
    named = open_chat_with({"type": "function", "function": {"name": "g"}}, tool_parser="none")
    closed = {**RECURSIVE, "additionalProperties": False}
    assert json.loads(named.prompts[0].params.structured_outputs[1]) == closed
    problem = ValueError("structured_outputs={'json': ...} is refused: x")
    assert named.refusal(problem).param == "tools[1].function.parameters"
    assert open_chat_with("required").refusal(problem).param == "tools"
    assert open_chat_with("required").prompts[0].params.structured_outputs[0] == "grammar"
    assert open_chat_with("auto").prompts[0].params.structured_outputs is None
    assert open_chat_with("auto").prompts[0].prompt.startswith("[f][g]") and not open_chat_with(
        "none"
    ).prompts[0].prompt.startswith("[f]")


@pytest.mark.parametrize("function", [{}, {"parameters": {}}, {"parameters": RECURSIVE}])
def test_the_model_is_shown_the_schema_that_it_is_held_to(function):
    shows = with_template("{{ tools[0].function.parameters | tojson }}")
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    body |= {"tools": [{"type": "function", "function": {"name": "f", **function}}]}
    body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    (prompt_request,) = open_chat(body, context(tokenizer=shows)).prompts
    held = json.loads(prompt_request.params.structured_outputs[1])
    assert {**json.loads(prompt_request.prompt), "additionalProperties": False} == held


def test_marks_that_are_special_tokens_are_kept_in_the_text():
    assert open_chat_with("auto").prompts[0].params.skip_special_tokens
    special = with_template(chatml().chat_template)
    special.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert not open_chat_with("auto", tokenizer=special).prompts[0].params.skip_special_tokens


def test_a_template_without_tools_has_none_to_choose_from():
    with pytest.raises(ApiError, match="does not support tools"):
        open_chat_with("auto", tokenizer=tokenizer())
