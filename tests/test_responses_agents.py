"""OpenAI's Responses as agents use them: tools, calls and results, reasoning, events, truncation,
and responses that are kept.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from jaxpage.errors import ConfigError
from jaxpage.serving.dialects import responses as dialect
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.dialects.responses_items import (
    ChatMessage,
    decode_reasoning,
    encode_reasoning,
)
from jaxpage.serving.dialects.responses_truncation import fit_messages
from jaxpage.serving.requests.response_store import (
    OwnerResponses,
    ResponseStore,
    StoredResponse,
)
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.encoding import number_events
from jaxpage.serving.wire.errors import ApiError
from tests.support.chat_templates import TEMPLATES
from tests.support.running import demo_with_template, running
from tests.support.sweeps import examples
from tests.support.wire import Scripted, context, deltas, output, with_template
from tests.test_agent_dialects import as_chat, conversations

TEMPLATE = TEMPLATES["object in tags"]
REQUESTS = Path(__file__).parent / "support" / "agent_requests"
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 8}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file."}


@functools.cache
def agents(max_model_len: int = 4096) -> Any:
    return context(
        tokenizer=with_template(TEMPLATE),
        tool_parser="auto",
        reasoning_parser="auto",
        max_model_len=max_model_len,
    )


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "Go", **fields}


def open_exchange_of(body: dict[str, Any], responses: OwnerResponses | None = None) -> Any:
    stores = () if responses is None else (responses,)
    return open_response(body, agents(), *stores)


def refusal_of(body: dict[str, Any], responses: OwnerResponses | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        open_exchange_of(body, responses)
    return caught.value


@pytest.fixture
def chat_of(monkeypatch):
    """Returns the body of the chat that a request is translated into."""
    bodies: list[dict[str, Any]] = []

    class Chat:
        stream = False
        prompts: tuple[()] = ()
        ignored_fields = ("reasoning_effort", "verbosity", "tools[1]")

    def record(body: dict[str, Any], _: Any) -> Any:
        bodies.append(body)
        return Chat()

    monkeypatch.setattr(dialect, "open_chat", record)

    def translate(**fields: Any) -> dict[str, Any]:
        open_response(request(**fields), context())
        return {name: value for name, value in bodies.pop().items() if value is not None}

    return translate


# Requests


def test_tools_and_choices_are_those_of_a_chat(chat_of):
    grammar = {"syntax": "lark", "definition": "start: 'a'"}
    others = [{"type": "web_search"}, {"type": "namespace", "tools": [LOOK]}]
    with_grammar = {**PATCH, "format": {"type": "grammar", **grammar}}
    tools = [LOOK, others[0], PATCH, others[1], with_grammar]
    chat = chat_of(tools=tools, parallel_tool_calls=False, tool_choice="auto")
    function = {name: value for name, value in LOOK.items() if name != "type"}
    custom = {name: value for name, value in PATCH.items() if name != "type"}
    assert chat["tools"] == [
        {"type": "function", "function": function},
        {"type": "web_search"},
        {"type": "custom", "custom": custom},
        {"type": "namespace"},
        {"type": "custom", "custom": {**custom, "format": {"type": "grammar", "grammar": grammar}}},
    ]
    assert (chat["parallel_tool_calls"], chat["tool_choice"]) == (False, "auto")
    look, patch = {"name": "look"}, {"name": "patch"}
    for choice, expected in (
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", **look}, {"type": "function", "function": look}),
        ({"type": "custom", **patch}, {"type": "custom", "custom": patch}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "function", **look},
                    {"type": "custom", **patch},
                    {"type": "mcp"},
                ],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [
                        {"type": "function", "function": look},
                        {"type": "custom", "custom": patch},
                        {"type": "mcp"},
                    ],
                },
            },
        ),
    ):
        assert chat_of(tools=tools, tool_choice=choice)["tool_choice"] == expected
    nothings: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": None}]
    for nothing in nothings:
        assert "tools" not in (
            chat := chat_of(tool_choice="auto", parallel_tool_calls=True, **nothing)
        )
        assert "tool_choice" not in chat and "parallel_tool_calls" not in chat


def test_how_much_is_reasoned_and_said_is_that_of_a_chat(chat_of):
    chat = chat_of(
        reasoning={"effort": "high", "max_tokens": 7, "summary": None}, text={"verbosity": "low"}
    )
    assert (chat["reasoning_effort"], chat["thinking_token_budget"]) == ("high", 7)
    assert chat["verbosity"] == "low"
    assert "reasoning_effort" not in chat_of(reasoning={}, text={"format": {"type": "text"}})


def test_what_has_no_effect_is_named_by_the_clients_path():
    body = request(
        tools=[{**LOOK, "defer_loading": True}, {"type": "web_search"}],
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        service_tier="priority",
        store=True,
        prompt_cache_key="a",
        safety_identifier="b",
        metadata={"a": "b"},
        include=["reasoning.encrypted_content", "web_search_call.results"],
    )
    assert sorted(open_exchange_of(body).ignored_fields) == [
        "reasoning.effort",
        "reasoning.summary",
        "service_tier",
        "store",
        "text.verbosity",
        "tools[0].defer_loading",
        "tools[1]",
    ]
    neutral = request(
        store=False,
        truncation="disabled",
        service_tier="auto",
        background=False,
        reasoning={"summary": "none"},
        text={"verbosity": "medium"},
        tool_choice="none",
    )
    assert open_exchange_of(neutral).ignored_fields == ()


def test_a_format_of_the_text_is_no_matter_where_there_is_none():
    """Instructor sends it with the one function that must be called."""
    format_ = {"type": "json_schema", "name": "x", "schema": LOOK["parameters"]}
    body = request(tools=[LOOK], text={"format": format_})
    named = {"type": "function", "name": "look"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        exchange = open_exchange_of({**body, "tool_choice": choice})
        assert exchange.ignored_fields == ("text.format",)
        plain = open_exchange_of({**request(tools=[LOOK]), "tool_choice": choice})
        assert exchange.prompts == plain.prompts
    # Where the model may also say something, the format holds that.
    auto = open_exchange_of({**body, "tool_choice": "auto"})
    assert auto.ignored_fields == () and auto.prompts != plain.prompts


CALL = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "3"}
SAY = {"role": "user", "content": "Go"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True}, "background", "is not supported"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "is not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}, "tools": [LOOK]}, "tool_choice", "web_search"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [LOOK]}, "tool_choice", "'x'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "required"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "tools[0].name", "a b"),
        ({"tools": [{"type": "web_search"}, LOOK, LOOK]}, "tools[2].name", "twice"),
        ({"tools": [PATCH, {**LOOK, "name": "patch"}]}, "tools[1].name", "twice"),
        (
            {"tools": [{"type": "mcp"}, {**LOOK, "parameters": {"type": "text"}}],
             "tool_choice": "required"},
            "tools[1].parameters",
            "text",
        ),
        (
            {
                "tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
                "tool_choice": "required",
            },
            "tools[0].format",
            "grammar",
        ),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}]},
         "tools[0].format.syntax", "lark"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "much"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", "-1"),
        ({"input": [SAY, RESULT]}, "input[1].call_id", "no earlier call"),
        ({"input": [SAY, CALL, RESULT, RESULT]}, "input[3].call_id", "with a result"),
        ({"input": [SAY, CALL, CALL]}, "input[2].call_id", "earlier call"),
        ({"input": [SAY, CALL, {**CALL, "call_id": "b", "arguments": "[]"}]}, "input[2].arguments",
         "object"),
        ({"input": [SAY, {**CALL, "arguments": '{"a'}]}, "input[1].arguments", "not valid JSON"),
        ({"input": [SAY, {**CALL, "name": "a b"}]}, "input[1].name", "a b"),
        ({"input": [SAY, {**CALL, "call_id": ""}]}, "input[1].call_id", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].image_url", "is required"),
        ({"input": {"a": 1}}, "input", "list"),
        ({"input": [SAY, CALL, {**RESULT, "output": {"a": 1}}]}, "input[2].output", "list"),
        ({"input": [SAY, CALL, {**RESULT, "output": [{"type": "input_image"}]}]},
         "input[2].output[0].image_url", "is required"),
        ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type",
         "mesage"),
        ({"input": [SAY, {"type": "compaction", "encrypted_content": "x"}]}, "input[1].type",
         "only the server"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "send the item"),
        ({"input": [SAY, {"id": "msg_1"}]}, "input[1].id", "send the item"),
        ({"input": "x" * 100_000}, "input", "characters"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_clients_path(fields, param, words):
    error = refusal_of(request(**fields))
    assert error.param == param and words in error.message, error.message
    assert error.status == (404 if words == "send the item" else 400)


# Reasoning that is sent back


@given(text=st.text(), cut=st.integers(0, 40))
def test_encoded_reasoning_is_read_and_that_of_others_is_not(text, cut):
    encoded = encode_reasoning(text)
    assert encoded.isascii() and decode_reasoning(encoded) == text
    assert decode_reasoning("gAAAA" + encoded) is None
    assert decode_reasoning(encoded[:cut]) != text or text == "" or cut >= len(encoded)


def test_reasoning_comes_from_the_encoded_content_where_there_is_no_other():
    said = {"role": "assistant", "content": "It was"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("Hm")}
    exchange = open_exchange_of(request(input=[SAY, thought, said, SAY]))
    assert "<think>\nHm\n</think>" in str(exchange.prompts[0].prompt)
    assert exchange.ignored_fields == ()
    other = {**thought, "encrypted_content": "gAAAA"}
    exchange = open_exchange_of(request(input=[SAY, other, said, SAY]))
    assert exchange.ignored_fields == ("input[1].encrypted_content",)
    empty: dict[str, Any] = {
        "type": "reasoning",
        "summary": [],
        "content": None,
        "encrypted_content": None,
    }
    assert open_exchange_of(request(input=[SAY, empty, said, SAY])).ignored_fields == ()


# Answers

THOUGHTS = st.sampled_from(["", "<think>\nHm, so it is.\n</think>\n\n"])
SAYINGS = st.sampled_from(["", "I look.", "It is\na house."])
CALLS = st.lists(
    st.sampled_from(
        [
            '<tool_call>\n{"name": "look", "arguments": {"at": "a <house>"}}\n</tool_call>',
            '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "patch", "arguments": {"input": "+ a\\n- b"}}\n</tool_call>',
        ]
    ),
    max_size=3,
)


def events_of(exchange: Any, texts: list[str], reason: str) -> list[dict[str, Any]]:
    frame = number_events()
    scripts = [Scripted(texts, reason)]
    whole = output(exchange, scripts)
    chunks = [chunk for delta in deltas(whole, scripts) for chunk in exchange.chunks(0, delta)]
    chunks += exchange.last_chunks()
    lines = [frame(chunk).decode().splitlines() for chunk in chunks]
    assert [line[0] for line in lines] == [f"event: {chunk['type']}" for chunk in chunks]
    return [json.loads(line[1].removeprefix("data: ")) for line in lines]


DELTAS = {
    "response.output_text.delta": lambda item, event: item["content"][event["content_index"]],
    "response.reasoning_text.delta": lambda item, event: item["content"][event["content_index"]],
    "response.function_call_arguments.delta": lambda item, event: item,
    "response.custom_tool_call_input.delta": lambda item, event: item,
}
FIELDS = {
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}


def reassemble(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the output that a client makes of the events before the last, which each must fit."""
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind, _, what = event["type"].rpartition(".")
        if what in ("created", "in_progress"):
            raise AssertionError(event)
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(json.loads(json.dumps(event["item"])))
            continue
        item = output[event["output_index"]]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if event["type"] == "response.content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(dict(event["part"]))
        elif what == "delta":
            place = DELTAS[event["type"]](item, event)
            assert event["delta"] != ""
            place[FIELDS.get(kind, "text")] += event["delta"]
        elif event["type"] == "response.content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif event["type"] == "response.output_item.done":
            done = event["item"]
            assert {**item, "status": done["status"]} == {
                name: None if name == "encrypted_content" else value for name, value in done.items()
            }
            output[-1] = done
        else:
            assert what == "done"
            field = FIELDS.get(kind, "text")
            place = DELTAS[f"{kind}.delta"](item, event)
            assert place[field] == event[field]
    return output


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


@examples(20)
@given(
    thought=THOUGHTS,
    said=SAYINGS,
    calls=CALLS,
    cuts=st.lists(st.integers(0, 300), max_size=30),
    is_cut=st.booleans(),
)
def test_events_are_the_whole_response_whatever_the_cut(thought, said, calls, cuts, is_cut):
    """OpenAI's own client reads them so."""
    text = thought + said + "".join("\n" + call for call in calls)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    texts = [text[start:stop] for start, stop in itertools.pairwise(places)] or [""]
    reason = "length" if is_cut else "stop"
    body = request(
        tools=[LOOK, PATCH], include=["reasoning.encrypted_content"], metadata={"a": "b"}
    )
    events = events_of(open_exchange_of({**body, "stream": True}), texts, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == ("incomplete" if is_cut else "completed")
    final = events[-1]["response"]
    assert reassemble(events) == final["output"]
    exchange = open_exchange_of(body)
    whole = exchange.whole([output(exchange, [Scripted([text], reason)])])
    assert without_ids(whole["output"]) == without_ids(final["output"])
    assert whole.keys() == final.keys() and whole["usage"]["input_tokens"] > 0
    names_of_items = [item["type"] for item in whole["output"]]
    assert names_of_items.count("function_call") == sum("look" in call for call in calls)
    assert names_of_items.count("custom_tool_call") == sum("patch" in call for call in calls)
    for item in final["output"]:
        if item["type"] == "reasoning":
            assert decode_reasoning(item["encrypted_content"]) == item["content"][0]["text"]
    *before, last_item = final["output"]
    if last_item["type"] == "message" and not last_item["content"][0]["text"]:
        before = before[:-1]  # the answer was cut before it said anything
    assert {item["status"] for item in before} <= {"completed"}
    assert final["output"][-1]["status"] == final["status"]
    tools: Any = [LOOK, PATCH]
    state: Any = ResponseStreamState(input_tools=tools, text_format=openai.omit)
    for event in events:
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=event))
    if not is_cut:
        read = state._completed_response.to_dict()["output"]
        assert [item["type"] for item in read] == names_of_items
    # What was answered goes back as it came.
    results = [
        {**RESULT, "type": f"{item['type']}_output", "call_id": item["call_id"]}
        for item in final["output"]
        if "call_id" in item
    ]
    again = open_exchange_of({**body, "input": [SAY, *final["output"], *results, SAY]})
    assert again.ignored_fields == ()


@examples(12)
@given(thought=THOUGHTS, said=SAYINGS, calls=CALLS, num_deltas=st.integers(0, 40))
def test_a_response_that_fails_is_reported_and_kept_with_what_it_has_said(
    thought, said, calls, num_deltas
):
    store = ResponseStore(1 << 20, 60)
    text = thought + said + "".join("\n" + call for call in calls)
    texts = [text[index : index + 5] for index in range(0, len(text), 5)] or [""]
    exchange = open_exchange_of(request(tools=[LOOK, PATCH], stream=True), store.of_owner(""))
    scripts = [Scripted(texts)]
    said_before = [
        chunk
        for delta in itertools.islice(deltas(output(exchange, scripts), scripts), num_deltas)
        for chunk in exchange.chunks(0, delta)
    ]
    chunks = [*said_before, *dialect.DIALECT.failure_chunks(ApiError(500, "no"), exchange)]
    frame = number_events()
    events = [json.loads(frame(chunk).decode().partition("data: ")[2]) for chunk in chunks]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    *before, error, last = events
    assert error == {
        **{"type": "error", "code": "server_error", "message": "no", "param": None},
        "sequence_number": len(events) - 2,
    }
    assert last["type"] == "response.failed" and last["sequence_number"] == len(events) - 1
    response = last["response"]
    assert response["status"] == "failed" and response["id"] == exchange.id
    assert response["error"] == {"code": "server_error", "message": "no"}
    assert response["completed_at"] is response["usage"] is response["incomplete_details"] is None
    message = reassemble([*before, last])
    for item in message[:-1]:
        assert item["status"] == "completed"
    assert [{**item, "status": ""} for item in message] == [
        {**item, "status": ""} for item in response["output"]
    ]
    statuses = [item["status"] for item in response["output"]]
    assert set(statuses[:-1]) <= {"completed"} and set(statuses[-1:]) <= {"incomplete"}
    stored = store.find(exchange.id, "")
    assert stored is not None and json.loads(stored.response) == response
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=event))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(500, "no"), "server_error"),
        (ApiError(503, "no"), "server_error"),
        (ApiError(504, "no"), "server_error"),
        (ApiError(429, "no"), "rate_limit_exceeded"),
        (ApiError(400, "no", param="text.format"), "invalid_prompt"),
        (ApiError(400, "no", code="context_length_exceeded"), "context_length_exceeded"),
    ],
)
def test_the_code_of_a_response_that_failed_is_one_of_openais(error, code):
    exchange = open_exchange_of(request(stream=True, store=False))
    *begin, failure, last = dialect.DIALECT.failure_chunks(error, exchange)
    assert [event["type"] for event in begin] == ["response.created", "response.in_progress"]
    assert [event["response"]["status"] for event in begin] == 2 * ["in_progress"]
    assert last["response"]["error"] == {"code": code, "message": "no"}
    assert last["response"]["output"] == []
    # Without an exchange there is no response to tell of.
    assert dialect.DIALECT.failure_chunks(error, None) == [failure]


def test_a_response_says_what_was_requested():
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "look"}],
    }
    body = request(
        tools=[LOOK, {"type": "web_search"}],
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        prompt_cache_key="key",
        text={"verbosity": "low"},
        user="me",
    )
    exchange = open_exchange_of(body)
    answer = exchange.whole([output(exchange, [Scripted(["Well"])])])
    assert answer["tools"] == body["tools"] and answer["tool_choice"] == choice
    assert answer["parallel_tool_calls"] is False and answer["store"] is False
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert answer["truncation"] == "auto" and answer["prompt_cache_key"] == "key"
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    exchange = open_exchange_of(request())
    answer = exchange.whole([output(exchange, [Scripted(["Well"])])])
    assert (answer["tools"], answer["tool_choice"]) == ([], "auto")
    assert answer["parallel_tool_calls"] is True and answer["truncation"] == "disabled"
    (item,) = answer["output"]
    assert item["id"].startswith("msg_") and "encrypted_content" not in item


# Agents


@pytest.mark.parametrize(
    "path",
    [*sorted(REQUESTS.glob("codex_*.json")), *sorted(REQUESTS.glob("openai_*.json"))],
    ids=lambda path: path.stem,
)
def test_a_request_of_an_agent_is_answered(path):
    body = json.loads(path.read_text())
    known = context(
        tokenizer=with_template(TEMPLATE),
        tool_parser="auto",
        reasoning_parser="auto",
        max_model_len=8192,
        strict_requests=True,
    )
    exchange = open_response(body, known)
    prompt = str(exchange.prompts[0].prompt)
    ignored = set(exchange.ignored_fields)
    if body.get("stream"):
        text = (
            '<tool_call>\n{"name": "shell_command", "arguments": {"command": "ls"}}\n</tool_call>'
        )
        events = events_of(exchange, [text] if body["tools"] else ["A summary"], "stop")
        answer = events[-1]["response"]
    else:
        answer = exchange.whole([output(exchange, [Scripted(["It is sunny."])])])
    kinds = [item["type"] for item in answer["output"]]
    if path.stem in ("codex_first", "codex_tool_turn"):
        assert kinds == ["function_call"] and answer["output"][0]["name"] == "shell_command"
        assert {"tools[3]", "tools[4]", "reasoning.summary"} <= ignored
        assert '"apply_patch"' in prompt and "web_search" not in prompt
    else:
        assert kinds == ["message"]
    if path.stem.startswith("codex"):
        assert "List the files and add a note." in prompt
    if path.stem in ("codex_tool_turn", "codex_compaction"):
        passed_over = {"input[8]", "input[9]", "input[10]", "input[11].encrypted_content"}
        assert passed_over <= ignored
        assert "I look first." in prompt and "README.md" in prompt and "/repo\n" not in prompt
        assert prompt.index("I list the files.") < prompt.index(
            '"shell_command", "arguments": {"command": "ls"'
        )
        assert r"*** Begin Patch\n*** Add File: note.txt" in prompt and "Success." in prompt
    if path.stem == "openai_agents_tool_turn":
        assert (
            prompt.index('"Basel"}')
            < prompt.index('"Bern"}')
            < prompt.index("sunny")
            < prompt.index("cloudy")
        )
        assert ignored == {"tools[1]", "store"}
        assert answer["metadata"] == {"run": "7"}


# Truncation


def valid_leavings(bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Returns every set of messages that may stay, by trying all.

    It is written down from the rule, not from the code.
    """
    number = len(bodies)
    roles = [body["role"] for body in bodies]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), number)
    users = [i for i, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else -1
    request = {
        i for i in range(head, last + 1) if all(role == "user" for role in roles[i : last + 1])
    }
    leavings = []
    for cut in range(head, max(number, head + 1)):
        stays = [i for i in range(number) if i < head or i >= cut or i in request]
        if cut > head:
            turn = (
                cut <= min(request, default=head)
                and roles[cut] == "user"
                and roles[cut - 1] != "user"
            )
            step = cut > last and roles[cut] != "tool"
            if not turn and not step:
                continue
        made = {call["id"] for i in stays for call in bodies[i].get("tool_calls", ())}
        if all(bodies[i]["tool_call_id"] in made for i in stays if roles[i] == "tool"):
            leavings.append(stays)
    return leavings


@given(turns=conversations(min_answers=0), room=st.integers(0, 30), moved=st.booleans())
def test_the_oldest_messages_go_until_there_is_room(turns, room, moved):
    messages = [{"role": "system", "content": "Be brief."}, *as_chat(turns)]
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    if moved and results:  # a result after the next message of the user
        messages.append({"role": "user", "content": "And?"})
        messages.append(messages.pop(results[-1]))
    entries = [ChatMessage(message) for message in messages]
    stay, dropped = fit_messages(entries, lambda some: len(some) <= room)
    places = [index for index, entry in enumerate(entries) if any(entry is each for each in stay)]
    assert len(stay) + len(dropped) == len(entries) and places[0] == 0
    valid = valid_leavings(messages)
    with_room = [leaving for leaving in valid if len(leaving) <= room]
    expected = max(with_room, key=len) if with_room else min(valid, key=len)
    assert places == expected


def test_a_long_conversation_is_cut_on_request_only():
    turns: list[dict[str, Any]] = []
    for number in range(40):
        call = {**CALL, "call_id": f"c{number}", "arguments": json.dumps({"at": f"door {number}"})}
        result = {**RESULT, "call_id": f"c{number}", "output": f"It is shut. {number} " * 3}
        said = {"role": "assistant", "content": f"Shut {number}."}
        turns += [{"role": "user", "content": f"Look at door {number}"}, call, result, said]
    known = agents(512)
    body = request(instructions="Be brief.", input=turns, tools=[LOOK])
    exchange = open_response({**body, "truncation": "auto"}, known)
    prompt = str(exchange.prompts[0].prompt)
    assert "Be brief." in prompt and "Look at door 39" in prompt and "Look at door 0" not in prompt
    count = len(known.tokenizer(prompt)["input_ids"])
    assert 512 // 2 < count <= 512 - 512 // 8
    assert exchange.ignored_fields[:2] == ("input[0]", "input[1]")
    whole = open_response(body, agents(4096 * 2))
    assert exchange.prompts[0].prompt != whole.prompts[0].prompt
    uncut = open_response({**body, "truncation": "auto"}, agents(4096 * 2))
    assert (uncut.prompts, uncut.ignored_fields) == (whole.prompts, ())
    # What cannot become shorter is refused as it would be without.
    with pytest.raises(ApiError) as caught:
        open_response(request(input="x" * 100_000, truncation="auto"), known)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


# The store

OWNERS = st.sampled_from(["", "one", "two"])
NUMBERS = st.integers(0, 5)
SECONDS = 10.0
ROOM = 100


def id_of(number: int) -> str:
    return f"resp_{number:032x}"


class StoreMachine(RuleBasedStateMachine):
    """A store against a list of what it must have, the least recently used first."""

    directory: Path | None = None

    @initialize()
    def open(self) -> None:
        self.now = 1000.0
        self.expected: list[tuple[str, str, float, StoredResponse]] = []
        self.number = 100
        self.store = self.new()

    def new(self) -> ResponseStore:
        return ResponseStore(ROOM, SECONDS, self.directory, clock=lambda: self.now)

    def forget_old(self) -> None:
        self.expected = [entry for entry in self.expected if self.now - entry[2] < SECONDS]

    @rule(owner=OWNERS, number=NUMBERS, size=st.integers(0, 60), remaining=st.integers(0, 60))
    def put(self, owner: str, number: int, size: int, remaining: int) -> None:
        """Puts a response of its own id, as each answer has one."""
        self.number += 1
        stored = StoredResponse(
            json.dumps("x" * size).encode(), json.dumps("y" * remaining).encode()
        )
        self.store.put(id_of(self.number), owner, stored)
        self.forget_old()
        if stored.num_bytes <= ROOM:
            while sum(entry[3].num_bytes for entry in self.expected) + stored.num_bytes > ROOM:
                del self.expected[0]
            self.expected.append((id_of(self.number), owner, self.now, stored))

    @rule(owner=OWNERS, place=NUMBERS, is_deleted=st.booleans())
    def use(self, owner: str, place: int, is_deleted: bool) -> None:
        self.forget_old()
        response_id = self.expected[place % len(self.expected)][0] if self.expected else id_of(1)
        entries = [entry for entry in self.expected if entry[:2] == (response_id, owner)]
        view = self.store.of_owner(owner)
        if is_deleted:
            assert view.delete(response_id) == bool(entries)
            assert view.find(response_id) is None
            self.expected = [entry for entry in self.expected if entry not in entries]
            return
        assert view.find(response_id) == (entries[0][3] if entries else None)
        self.expected = [entry for entry in self.expected if entry not in entries] + entries

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0, -1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def start_again(self) -> None:
        if self.directory is None:
            return
        self.store.close()
        self.store = self.new()
        self.forget_old()
        self.expected.sort(key=lambda entry: entry[2])

    @invariant()
    def has_what_it_must(self) -> None:
        self.forget_old()
        assert self.store.num_bytes <= ROOM
        # To find them would be to use them.
        present = [
            (response_id, stored.owner, stored.stored)
            for response_id, stored in self.store._entries.items()
            if not self.store._is_over(stored)
        ]
        assert sorted(present) == sorted((entry[0], entry[1], entry[3]) for entry in self.expected)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            if self.directory is not None:
                for path in self.directory.iterdir():
                    path.unlink()


def test_a_store_has_what_it_must():
    run_machine(StoreMachine, 60)


def test_a_store_with_files_has_what_it_must(tmp_path):
    run_machine(type("WithFiles", (StoreMachine,), {"directory": tmp_path}), 20)


def run_machine(machine: Any, number: int) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=number, stateful_step_count=25)
    case("runTest").runTest()


def test_files_are_private_whole_and_in_use_once(tmp_path):
    directory = tmp_path / "responses"
    store = ResponseStore(1000, 60, directory)
    stored = StoredResponse(b'[{"role":"user","content":"\xc3\xa4"}]', b'{"output":[]}')
    store.put(id_of(1), "one", stored)
    with pytest.raises(ConfigError, match="another server uses"):
        ResponseStore(1000, 60, directory)
    store.close()
    path = directory / f"{id_of(1)}.json"
    assert directory.stat().st_mode & 0o77 == 0 and path.stat().st_mode & 0o77 == 0
    assert json.loads(path.read_bytes())["owner"] == "one"
    (directory / f"{id_of(2)}.json").write_text('{"owner": "o')
    (directory / f"{id_of(3)}.new").write_text("{")
    (directory / "resp_of_somebody.json").write_text("{")
    again = ResponseStore(1000, 60, directory)
    assert again.find(id_of(1), "one") == stored and again.find(id_of(2), "one") is None
    assert sorted(path.name for path in directory.iterdir()) == [
        "lock",
        f"{id_of(1)}.json",
        "resp_of_somebody.json",
    ]
    assert again.of_owner("one").delete(id_of(1))
    again.close()
    assert not path.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="response_store_directory"):
        ResponseStore(1000, 60, tmp_path / "file")


def test_a_disk_without_room_stops_no_answer(tmp_path, caplog):
    store = ResponseStore(1000, 60, tmp_path)
    tmp_path.chmod(0o700)
    for number in (1, 2):
        (tmp_path / f"{id_of(number)}.new").mkdir()
        store.put(id_of(number), "", StoredResponse(b"[]", b"{}"))
    store.close()
    assert store.find(id_of(2), "") is not None
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def finish(exchange: Any, text: str = "It is shut.") -> dict[str, Any]:
    answer: dict[str, Any] = exchange.whole([output(exchange, [Scripted([text])])])
    return answer


def test_a_conversation_goes_on_from_a_response_without_its_instructions():
    store = ResponseStore(1 << 20, 60)
    mine = store.of_owner("one")
    first = finish(
        open_exchange_of(request(instructions="Be brief.", input="Look", tools=[LOOK]), mine),
        '<think>\nHm\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>',
    )
    assert first["store"] is True
    call = first["output"][-1]
    result = {**RESULT, "call_id": call["call_id"]}
    body = request(
        input=[result], tools=[LOOK], instructions="Be kind.", previous_response_id=first["id"]
    )
    for _ in range(2):  # also a second time: a conversation may have branches
        exchange = open_exchange_of(body, mine)
        prompt = str(exchange.prompts[0].prompt)
        whole = open_exchange_of(
            request(
                input=[{"role": "user", "content": "Look"}, *first["output"], result],
                tools=[LOOK],
                instructions="Be kind.",
            )
        )
        assert prompt == whole.prompts[0].prompt and "Be brief." not in prompt
        assert exchange.ignored_fields == ()
    second = finish(exchange)
    assert second["previous_response_id"] == first["id"]
    assert mine.delete(first["id"])
    third = open_exchange_of(request(input="And?", previous_response_id=second["id"]), mine)
    assert "I look." in str(third.prompts[0].prompt)
    for wrong, whose in ((first["id"], mine), (second["id"], store.of_owner("two")), ("x", mine)):
        error = refusal_of(request(previous_response_id=wrong), whose)
        assert (error.status, error.param) == (404, "previous_response_id")
        assert error.code == "previous_response_not_found"


def test_a_reference_is_the_item_of_a_response_that_is_kept():
    """The AI SDK sends a conversation so."""
    store = ResponseStore(1 << 20, 60)
    mine = store.of_owner("one")
    first = finish(
        open_exchange_of(request(input="Look", tools=[LOOK]), mine),
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>',
    )
    result = {**RESULT, "call_id": first["output"][1]["call_id"]}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del references[1]["type"]
    requested = [{"role": "user", "content": "Look"}, *references, result]
    plain = [{"role": "user", "content": "Look"}, *first["output"], result]
    referring = open_exchange_of(request(input=requested, tools=[LOOK]), mine)
    assert referring.prompts == open_exchange_of(request(input=plain, tools=[LOOK])).prompts
    second = finish(referring)
    assert mine.delete(first["id"])
    assert open_exchange_of(request(previous_response_id=second["id"]), mine).prompts
    error = refusal_of(request(input=requested), mine)
    assert (error.status, error.param, error.code) == (404, "input[1].id", "item_not_found")


@pytest.mark.parametrize(
    ("fields", "is_stored", "ignored"),
    [
        ({}, True, ()),
        ({"store": None}, True, ()),
        ({"store": True}, True, ()),
        ({"store": False}, False, ()),
        ({"store": True, "input": "x" * 900}, False, ("store",)),
    ],
)
def test_what_is_kept(fields, is_stored, ignored):
    store = ResponseStore(900 + 900 * is_stored, 60)
    exchange = open_exchange_of(request(**fields), store.of_owner(""))
    assert exchange.ignored_fields == ignored and store.num_bytes == 0
    answer = finish(exchange)
    assert answer["store"] is is_stored
    assert (store.find(answer["id"], "") is not None) is is_stored
    stream = open_exchange_of(request(**fields, stream=True), store.of_owner(""))
    scripts = [Scripted(["It ", "is"])]
    for delta in deltas(output(stream, scripts), scripts):
        stream.chunks(0, delta)
    assert store.find(stream.id, "") is None, "a client may have left"
    last = stream.last_chunks()[-1]["response"]
    stored = store.find(stream.id, "")
    assert (None if stored is None else json.loads(stored.response)) == (
        last if is_stored else None
    )


# A server

KEYS = ("one", "two")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    model = demo_with_template(directory / "demo", TEMPLATE)
    config = ServerConfig(response_store_directory=str(directory / "kept"))
    with running(config, model=model, api_keys=KEYS) as running_server:
        yield running_server
        assert running_server.errors == []


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"{server.address}/v1", api_key=KEYS[0], max_retries=0, timeout=60
    ) as http_client:
        yield http_client


def test_what_is_kept_is_read_and_deleted(client):
    ask = {"model": "demo", "max_output_tokens": 4}
    first = client.responses.create(**ask, input="Hello")
    last = client.responses.create(**ask, input="And?", previous_response_id=first.id)
    assert client.responses.retrieve(last.id).output == last.output
    items = [item.to_dict() for item in client.responses.input_items.list(last.id, order="asc")]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert len({item["id"] for item in items}) == 3
    page = client.responses.input_items.list(last.id, limit=2)
    assert [item.id for item in page.data] == [items[2]["id"], items[1]["id"]] and page.has_more
    client.responses.delete(last.id)
    for wrong in (last.id, client.responses.create(**ask, input="x", store=False).id):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(wrong)
        assert (caught.value.code, caught.value.param) == ("response_not_found", "response_id")


def test_a_response_belongs_to_its_key(server, client):
    mine = client.responses.create(model="demo", max_output_tokens=4, input="Hello")
    url = f"{server.address}/v1/responses/{mine.id}"
    gone = f"{server.address}/v1/responses/resp_{'0' * 32}"
    other = {"Authorization": "Bearer two"}
    for method in ("GET", "DELETE"):
        answers = [httpx.request(method, each, headers=other) for each in (url, gone)]
        assert [answer.status_code for answer in answers] == [404, 404]
        texts = [answer.text.replace(mine.id, "") for answer in answers]
        assert texts[0] == texts[1].replace(gone.rpartition("/")[2], "")
    assert httpx.get(f"{url}/input_items", headers=other).status_code == 404
    headers = {"Authorization": "Bearer one"}
    assert httpx.get(url, headers=headers).json()["id"] == mine.id
    assert httpx.get(f"{url}?stream=true", headers=headers).json()["error"]["param"] == "stream"
    assert httpx.get(url).status_code == 401
    assert httpx.post(url, headers=headers, json={}).status_code == 405
    deleted = httpx.delete(url, headers=headers)
    assert deleted.json() == {"id": mine.id, "object": "response", "deleted": True}
