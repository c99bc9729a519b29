"""Tools of agents in chats: custom tools, tools of other vendors, and calls with their results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange, open_chat
from jaxpage.serving.wire.tokenizing import tokenize
from tests.support.wire import Scripted, admits, context, deltas, output, with_template

USER = {"role": "user", "content": "x"}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}: {{ tool.function.description }}]{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
KNOWN = context(tokenizer=with_template(TEMPLATE), tool_parser="hermes")
WITHOUT_FORM = context(tokenizer=with_template(TEMPLATE), tool_parser="none")
F = {"type": "function", "function": {"name": "f"}}
PLAIN = {"type": "custom", "custom": {"name": "note", "description": "Writes a note."}}
LARK = 'start: "add " /[a-z]+/'


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": grammar}}


PATCH = custom("lark", LARK)
SEARCH = {"type": "web_search", "filters": {"allowed_domains": ["example.com"]}}
NAMED = {"type": "custom", "custom": {"name": "patch"}}


def chat(tools: Any = None, *messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER, *messages], "tools": tools, **fields}


def calls_of(exchange: Exchange, *texts: str) -> list[dict[str, Any]]:
    """Returns the calls of an answer, which are the same in a stream."""
    scripts = [Scripted(texts)]
    (choice,) = exchange.whole([output(exchange, scripts)])["choices"]
    calls: list[dict[str, Any]] = choice["message"]["tool_calls"]
    return calls


def stream_calls(exchange: Exchange, *texts: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas(output(exchange, [Scripted(texts)]), [Scripted(texts)]):
        for chunk in exchange.chunks(0, delta):
            for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append({name: part[name] for name in ("id", "type", part["type"])})
                else:
                    calls[part["index"]]["custom"]["input"] += part["custom"]["input"]
    return calls


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_the_model_sees_a_custom_tool_as_a_function():
    prompt = str(open_chat(chat([PLAIN, PATCH, F]), KNOWN).prompts[0].prompt)
    assert prompt.startswith(
        f"[note: Writes a note.][patch: The input keeps to this lark grammar:\n{LARK}][f: ]"
    )


def test_a_call_of_a_custom_tool_has_its_input():
    text = '<tool_call>{"name": "note", "arguments": {"input": "a \\"b\\"\\n"}}</tool_call>'
    expected = {"type": "custom", "custom": {"name": "note", "input": 'a "b"\n'}}
    body = chat([F, PLAIN])
    assert without_ids(calls_of(open_chat(body, KNOWN), text)) == [expected]
    assert without_ids(stream_calls(open_chat(body, KNOWN), *text)) == [expected]


def test_a_chunk_has_one_call():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    exchange = open_chat(chat([F], stream=True), KNOWN)
    scripts = [Scripted([call * 3])]
    chunks = exchange.chunks(0, output(exchange, scripts))
    calls = [
        choice["delta"].get("tool_calls", []) for chunk in chunks for choice in chunk["choices"]
    ]
    assert [[call["index"] for call in part] for part in calls if part] == [[0], [1], [2]]


@pytest.mark.parametrize("arguments", ['{"text": "a"}', '{"input": 1}', "{}"])
def test_an_input_under_another_name_stays_as_the_model_wrote_it(arguments):
    text = f'<tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>'
    (call,) = calls_of(open_chat(chat([PLAIN]), KNOWN), text)
    assert json.loads(call["custom"]["input"]) == json.loads(arguments)


@pytest.mark.parametrize("known", [KNOWN, WITHOUT_FORM], ids=["form", "no form"])
@pytest.mark.parametrize(
    ("tool", "outputs", "good", "bad"),
    [
        (PATCH, {"grammar": LARK}, "add me", "del me"),
        (custom("regex", "[0-9]{3}"), {"regex": "[0-9]{3}"}, "123", "12"),
    ],
)
def test_the_grammar_of_a_named_custom_tool_is_kept(known, tool, outputs, good, bad):
    exchange = open_chat(chat([F, tool], tool_choice=NAMED), known)
    held = exchange.prompts[0].params.structured_outputs
    assert {held[0]: json.loads(held[1])} == outputs
    expected = [{"type": "custom", "custom": {"name": "patch", "input": good}}]
    assert without_ids(calls_of(exchange, good)) == expected
    fresh = open_chat(chat([F, tool], tool_choice=NAMED), known)
    assert without_ids(stream_calls(fresh, *good)) == expected
    assert admits(held, good) and not admits(held, bad)


def test_a_named_custom_tool_without_a_grammar_is_called():
    choice = {"type": "custom", "custom": {"name": "note"}}
    exchange = open_chat(chat([PLAIN], tool_choice=choice), KNOWN)
    assert "grammar" in exchange.prompts[0].params.structured_outputs
    text = '<tool_call>\n{"name": "note", "arguments": {"input": "a"}}\n</tool_call>'
    (call,) = calls_of(exchange, text)
    assert call["custom"] == {"name": "note", "input": "a"}
    # Where the model has no form of calls, the whole answer is the input.
    exchange = open_chat(chat([PLAIN], tool_choice=choice), WITHOUT_FORM)
    assert exchange.prompts[0].params.structured_outputs is None
    (call,) = calls_of(exchange, "any text")
    assert call["custom"] == {"name": "note", "input": "any text"}


@pytest.mark.parametrize(
    ("choice", "shown", "param"),
    [
        (None, "[f: ]", None),
        ("auto", "[f: ]", None),
        ("required", "[f: ]", None),
        ("none", "", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [SEARCH]}}, "", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SEARCH]}}, "",
         "tool_choice"),
        ({"type": "web_search"}, "", "tool_choice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_tool_of_another_vendor_is_passed_over(choice, shown, param, is_strict):
    known = context(
        tokenizer=with_template(TEMPLATE), tool_parser="hermes", strict_requests=is_strict
    )
    body = chat([SEARCH, F, {"type": "local_shell"}], tool_choice=choice)
    if param is not None:
        with pytest.raises(ApiError) as refused:
            open_chat(body, known)
        assert (refused.value.status, refused.value.param) == (400, param)
        return
    exchange = open_chat(body, known)
    assert exchange.ignored_fields == ("tools[0]", "tools[2]")
    assert str(exchange.prompts[0].prompt).startswith(f"{shown}<|user|>")


@pytest.mark.parametrize(
    ("choice", "is_refused"), [(None, False), ("auto", False), ("none", False), ("required", True)]
)
def test_nothing_but_tools_of_other_vendors(choice, is_refused):
    body = chat([SEARCH], tool_choice=choice)
    if is_refused:
        with pytest.raises(ApiError, match="no tool is a function: tools.0..type is 'web_search'"):
            open_chat(body, KNOWN)
        return
    assert open_chat(body, KNOWN).ignored_fields == ("tools[0]",)
    counted = tokenize({"messages": [USER], "tools": [SEARCH]}, KNOWN)
    assert counted.ignored_fields == ("tools[0]",)


@pytest.mark.parametrize(
    ("tools", "fields", "param", "message"),
    [
        ([custom("bnf", "x")], {}, "tools[0].custom.format.grammar.syntax", "must be"),
        ([{"type": "custom"}], {}, "tools[0].custom", "is required"),
        ([{"name": "f"}], {}, "tools[0].type", "is required"),
        ([{"type": 3}], {}, "tools[0].type", "must be"),
        ([F, PLAIN, PLAIN], {}, "tools[2].custom.name", "twice"),
        ([F, PATCH], {"tool_choice": "required"}, "tools[1].custom.format",
         "only where tool_choice names"),
        ([F], {"tool_choice": NAMED}, "tool_choice", "not in tools"),
        ([PATCH], {"tool_choice": {"type": "function", "function": {"name": "patch"}}},
         "tool_choice", "not in tools"),
([F], {"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported with tools"),
        ([F], {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"not": {}}}}}},
         "response_format.json_schema.schema.items.not", "no grammar can"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_be_honoured_is_refused(tools, fields, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        open_chat(chat(tools, **fields), KNOWN)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("space", ["", "\n", "\n\n"])
def test_white_space_may_stand_between_required_calls(space):
    """Templates write a line break before each call, and models write what templates write."""
    held = open_chat(chat([F], tool_choice="required"), KNOWN).prompts[0].params.structured_outputs
    assert admits(held, space + CALL + space + CALL)
    assert not admits(held, CALL + space + "x") and not admits(held, "\n" * 5 + CALL)


# A format of the text

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMATS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("response_format", FORMATS, ids=["object", "schema"])
@pytest.mark.parametrize("prompt_ends_with", ["", "<think>\n"])
def test_a_format_holds_the_text_of_an_answer_that_calls_no_tool(response_format, prompt_ends_with):
    known = context(
        tokenizer=with_template(TEMPLATE + prompt_ends_with),
        tool_parser="hermes",
        reasoning_parser="think",
    )
    body = chat([F], response_format=response_format)
    before = "I think.</think>\n\n" if prompt_ends_with else ""
    held = open_chat(body, known).prompts[0].params.structured_outputs
    for text, is_good in (
        ('{"a": 1}', True),
        (CALL, True),
        (f"{CALL}\n{CALL}", True),
        ('{"b": 1}', response_format["type"] == "json_object"),
        ("Hello", False),
        ("[1]", False),
    ):
        assert admits(held, before + text) == is_good, text
    exchange = open_chat(body, known)
    (choice,) = exchange.whole([output(exchange, [Scripted([before + '{"a": 1}'])])])["choices"]
    assert choice["message"]["content"].strip() == '{"a": 1}'
    assert choice["message"].get("reasoning_content") == ("I think." if before else None)
    exchange = open_chat(body, known)
    (choice,) = exchange.whole([output(exchange, [Scripted([before + CALL])])])["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_format_has_no_effect_where_a_call_is_required(choice):
    exchange = open_chat(chat([F], tool_choice=choice, response_format=FORMATS[1]), KNOWN)
    assert exchange.ignored_fields == ("response_format",)
    held = exchange.prompts[0].params.structured_outputs
    assert admits(held, CALL) and not admits(held, '{"a": 1}')


def test_a_format_beside_calls_needs_a_marker_before_them():
    known = context(tokenizer=with_template(TEMPLATE), tool_parser="llama3_json")
    with pytest.raises(ApiError, match="no marker of the model's form tells") as refused:
        open_chat(chat([F], response_format=FORMATS[0]), known)
    assert refused.value.param == "response_format"


# Calls and results


def message_with_calls(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": "r", "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([result("a")], "messages[1].tool_call_id", "'a' is the id of no earlier call"),
        ([result("a"), message_with_calls("a")], "messages[1].tool_call_id", "no earlier call"),
        ([message_with_calls("a", "b", "a")], "messages[1].tool_calls[2].id",
         "'a' is the id of an earlier call"),
        ([message_with_calls("a"), result("a"), USER, message_with_calls("a")],
         "messages[4].tool_calls[0].id", "an earlier call"),
        ([message_with_calls("a", "b"), result("b"), result("b")], "messages[3].tool_call_id",
         "a call with a result"),
        ([message_with_calls("a", "b"), result("b"), result("a")], None, ""),
        ([message_with_calls("a", "b"), result("b"), USER, result("a")], None, ""),
        ([message_with_calls("a"), USER, message_with_calls("b"), result("b")], None, ""),
    ],
)  # fmt: skip
def test_results_belong_to_calls(messages, param, message):
    if param is None:
        assert open_chat(chat(None, *messages), KNOWN).prompts
        return
    for body in (chat([F], *messages), {"messages": [USER, *messages]}):
        with pytest.raises(ApiError, match=message) as refused:
            (open_chat if "model" in body else tokenize)(body, KNOWN)
        assert (refused.value.status, refused.value.param) == (400, param)


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["call", "result"]), st.sampled_from("abc")), max_size=8
    )
)
def test_a_conversation_is_accepted_if_each_call_is_new_and_each_result_is_the_first(events):
    messages = [
        message_with_calls(each) if kind == "call" else result(each) for kind, each in events
    ]
    calls = [each for kind, each in events if kind == "call"]
    results = [each for kind, each in events if kind == "result"]
    is_good = (
        len(set(calls)) == len(calls)
        and len(set(results)) == len(results)
        and all(
            ("call", each) in events[:index]
            for index, (kind, each) in enumerate(events)
            if kind == "result"
        )
    )
    try:
        open_chat(chat(None, *messages), KNOWN)
    except ApiError as error:
        assert error.status == 400 and not is_good
    else:
        assert is_good


def test_a_call_of_a_custom_tool_in_a_history():
    call = {"id": "c", "type": "custom", "custom": {"name": "note", "input": 'a"'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    exchange = open_chat(chat([PLAIN], said, result("c")), KNOWN)
    written = '<tool_call>{"name": "note", "arguments": {"input": "a\\""}}</tool_call>'
    assert written in str(exchange.prompts[0].prompt)


# Orders that templates refuse

STRICT = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == 'system' and ns.last or m.role == 'user' and ns.last not in ('', 'system', 'assistant') %}"
    "{{ raise_exception('not in order') }}{% endif %}{% set ns.last = m.role %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def message_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([message_of("system", "a"), message_of("user", "b")], "[system]a[user]b"),
        ([message_of("developer", "a"), message_of("system", "b"), message_of("user", "c")],
         "[system]a\n\nb[user]c"),
        ([message_of("user", "a"), message_of("system", "b"), message_of("user", "c")],
         "[user]a\n\nb\n\nc"),
        ([message_of("user", "a"), message_with_calls("i", "j"), result("i"), result("j"),
          message_of("user", "b")],
         "[user]a[assistant][tool]r[tool]r\n\nb"),
    ],
)  # fmt: skip
def test_a_template_that_refuses_the_order_gets_a_strict_one(messages, prompt):
    body = {"model": "demo", "messages": messages}
    strict = open_chat(body, context(tokenizer=with_template(STRICT)))
    assert strict.prompts[0].prompt == prompt
    # Other templates get the messages as they are.
    lenient = with_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    shown = str(open_chat(body, context(tokenizer=lenient)).prompts[0].prompt)
    assert shown.count("[") == len(messages)


def test_a_template_that_refuses_every_order_says_why():
    always = with_template("{{ raise_exception('order ' ~ messages | length) }}")
    body = {"model": "demo", "messages": [USER, USER]}
    with pytest.raises(ApiError, match="refuses these messages: order 2") as refused:
        open_chat(body, context(tokenizer=always))
    assert refused.value.param == "messages"
