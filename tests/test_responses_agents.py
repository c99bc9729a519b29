"""OpenAI's Responses as agents use them: tools, calls and results, reasoning, events, truncation, and responses that are kept."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
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
from jaxpage.serving.config import ServerConfig
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
from jaxpage.serving.wire.encoding import numbered_events
from jaxpage.serving.wire.errors import ApiError
from tests.support.chat_templates import TEMPLATES
from tests.support.running import Running, demo_with_template, running
from tests.support.wire import Scripted, context, deltas, output, with_template

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
NONE: Any = object()


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


def opened(body: dict[str, Any], responses: OwnerResponses | None = None) -> Any:
    kept = () if responses is None else (responses,)
    return open_response(body, agents(), *kept)


def refused(body: dict[str, Any], responses: OwnerResponses | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        opened(body, responses)
    return caught.value


@pytest.fixture
def chat_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The body of the chat that a request is translated into."""
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


def test_tools_and_choices_are_those_of_a_chat(chat_of: Any) -> None:
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
    for choice, wanted in (
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
        assert chat_of(tools=tools, tool_choice=choice)["tool_choice"] == wanted
    for nothing in ({}, {"tools": []}, {"tools": None}):
        assert "tools" not in (
            chat := chat_of(tool_choice="auto", parallel_tool_calls=True, **nothing)
        )
        assert "tool_choice" not in chat and "parallel_tool_calls" not in chat


def test_how_much_is_reasoned_and_said_is_that_of_a_chat(chat_of: Any) -> None:
    chat = chat_of(
        reasoning={"effort": "high", "max_tokens": 7, "summary": None}, text={"verbosity": "low"}
    )
    assert (chat["reasoning_effort"], chat["thinking_token_budget"]) == ("high", 7)
    assert chat["verbosity"] == "low"
    assert "reasoning_effort" not in chat_of(reasoning={}, text={"format": {"type": "text"}})


def test_what_has_no_effect_is_named_by_the_clients_path() -> None:
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
    assert sorted(opened(body).ignored_fields) == [
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
    assert opened(neutral).ignored_fields == ()


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
            {"tools": [{"type": "mcp"}, {**LOOK, "parameters": {"type": "text"}}], "tool_choice": "required"},
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
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax", "lark"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "much"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", "-1"),
        ({"input": [SAY, RESULT]}, "input[1].call_id", "no earlier call"),
        ({"input": [SAY, CALL, RESULT, RESULT]}, "input[3].call_id", "with a result"),
        ({"input": [SAY, CALL, CALL]}, "input[2].call_id", "earlier call"),
        ({"input": [SAY, CALL, {**CALL, "call_id": "b", "arguments": "[]"}]}, "input[2].arguments", "object"),
        ({"input": [SAY, {**CALL, "arguments": '{"a'}]}, "input[1].arguments", "not valid JSON"),
        ({"input": [SAY, {**CALL, "name": "a b"}]}, "input[1].name", "a b"),
        ({"input": [SAY, {**CALL, "call_id": ""}]}, "input[1].call_id", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_image"),
        ({"input": {"a": 1}}, "input", "list"),
        ({"input": [SAY, CALL, {**RESULT, "output": {"a": 1}}]}, "input[2].output", "list"),
        ({"input": [SAY, CALL, {**RESULT, "output": [{"type": "input_image"}]}]}, "input[2].output[0].type", "input_image"),
        ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type", "mesage"),
        ({"input": [SAY, {"type": "compaction", "encrypted_content": "x"}]}, "input[1].type", "only the server"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "send the item"),
        ({"input": [SAY, {"id": "msg_1"}]}, "input[1].id", "send the item"),
        ({"input": "x" * 100_000}, "input", "characters"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_clients_path(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(request(**fields))
    assert error.param == param and words in error.message, error.message
    assert error.message.startswith(param) or "item_reference" in str(fields) or error.status == 400


# Conversations: a chat written as items comes back as the chat.

NAMES = st.sampled_from(["look", "update"])
TEXT = st.text("ab <>\n", min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)).map(json.dumps)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages of a chat."""
    messages: list[dict[str, Any]] = []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "user", "developer", "system"]))
        messages.append({"role": role, "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            answer: dict[str, Any] = {"role": "assistant", "content": None}
            if draw(st.booleans()):
                answer["reasoning_content"] = draw(TEXT)
            calls = []
            for _ in range(draw(st.integers(0, 3))):
                number += 1
                name = draw(NAMES)
                called: dict[str, Any] = {"name": name, "arguments": draw(ARGUMENTS)}
                kind = draw(st.sampled_from(["function", "custom"]))
                if kind == "custom":
                    called = {"name": name, "input": draw(TEXT)}
                calls.append({"id": f"call_{number}", "type": kind, kind: called})
            if calls:
                answer["tool_calls"] = calls
            if not calls or draw(st.booleans()):
                answer["content"] = draw(TEXT)
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)}
                for call in calls
            ]
            if not calls:
                break
    return messages


def items_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat as the items that OpenAI's client would send."""
    items: list[dict[str, Any]] = []
    kinds = {
        call["id"]: call["type"] for message in messages for call in message.get("tool_calls", ())
    }
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            kind = {"function": "function_call_output", "custom": "custom_tool_call_output"}
            items.append({"type": kind[kinds[call_id]], "call_id": call_id, "output": content})
            continue
        if reasoning := message.get("reasoning_content"):
            thought = {"type": "reasoning_text", "text": reasoning}
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
        if message["role"] == "assistant" and content is not None:
            part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        elif content is not None:
            items.append({"role": message["role"], "content": content})
        for call in message.get("tool_calls", ()):
            called = call[call["type"]]
            kind_of_item = {"function": "function_call", "custom": "custom_tool_call"}[call["type"]]
            items.append(
                {"type": kind_of_item, "call_id": call["id"], "status": "completed", **called}
            )
    return items


def as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with each content as one text, and an empty one as none."""
    return [
        {
            **message,
            "content": "".join(part["text"] for part in message["content"])
            if isinstance(message["content"], list)
            else message["content"] or None,
        }
        for message in messages
    ]


@given(messages=conversations())
def test_items_are_the_messages_of_the_chat(messages: list[dict[str, Any]]) -> None:
    made = dialect.ChatMessages()
    items = items_of(messages)
    made.add(dialect.source_stored(items, "previous_response_id"))
    assert as_texts([message.body for message in made.messages]) == as_texts(messages)
    assert [source.body for source in made.items] == items and made.ignored == []
    opened(request(input=items))


@given(text=st.text(), cut=st.integers(0, 40))
def test_encoded_reasoning_is_read_and_that_of_others_is_not(text: str, cut: int) -> None:
    encoded = encode_reasoning(text)
    assert encoded.isascii() and decode_reasoning(encoded) == text
    assert decode_reasoning("gAAAA" + encoded) is None
    assert decode_reasoning(encoded[:cut]) != text or text == "" or cut >= len(encoded)


def test_reasoning_comes_from_the_encoded_content_where_there_is_no_other() -> None:
    said = {"role": "assistant", "content": "It was"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("Hm")}
    exchange = opened(request(input=[SAY, thought, said, SAY]))
    assert "<think>\nHm\n</think>" in str(exchange.prompts[0].prompt)
    assert exchange.ignored_fields == ()
    other = {**thought, "encrypted_content": "gAAAA"}
    exchange = opened(request(input=[SAY, other, said, SAY]))
    assert exchange.ignored_fields == ("input[1].encrypted_content",)
    empty = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    assert opened(request(input=[SAY, empty, said, SAY])).ignored_fields == ()


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
    frame = numbered_events()
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


def reassembled(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client makes of the events before the last, which each must fit."""
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


@settings(max_examples=60)
@given(
    thought=THOUGHTS,
    said=SAYINGS,
    calls=CALLS,
    cuts=st.lists(st.integers(0, 300), max_size=30),
    is_cut=st.booleans(),
)
def test_events_are_the_whole_response_whatever_the_cut(
    thought: str, said: str, calls: list[str], cuts: list[int], is_cut: bool
) -> None:
    """Also as OpenAI's own client reads them."""
    text = thought + said + "".join("\n" + call for call in calls)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    texts = [text[start:stop] for start, stop in zip(places, places[1:], strict=False)] or [""]
    reason = "length" if is_cut else "stop"
    body = request(
        tools=[LOOK, PATCH], include=["reasoning.encrypted_content"], metadata={"a": "b"}
    )
    events = events_of(opened({**body, "stream": True}), texts, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == ("incomplete" if is_cut else "completed")
    final = events[-1]["response"]
    assert reassembled(events) == final["output"]
    exchange = opened(body)
    whole = exchange.whole([output(exchange, [Scripted([text], reason)])])
    assert without_ids(whole["output"]) == without_ids(final["output"])
    assert whole.keys() == final.keys() and whole["usage"]["input_tokens"] > 0
    names_of_items = [item["type"] for item in whole["output"]]
    assert names_of_items.count("function_call") == sum("look" in call for call in calls)
    assert names_of_items.count("custom_tool_call") == sum("patch" in call for call in calls)
    for item in final["output"]:
        if item["type"] == "reasoning":
            assert decode_reasoning(item["encrypted_content"]) == item["content"][0]["text"]
    assert {item["status"] for item in final["output"][:-1]} <= {"completed"}
    assert final["output"][-1]["status"] == final["status"]
    state: Any = ResponseStreamState(input_tools=[LOOK, PATCH], text_format=openai.omit)
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
    again = opened({**body, "input": [SAY, *final["output"], *results, SAY]})
    assert again.ignored_fields == ()


def test_a_response_says_what_was_requested() -> None:
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
    exchange = opened(body)
    answer = exchange.whole([output(exchange, [Scripted(["Well"])])])
    assert answer["tools"] == body["tools"] and answer["tool_choice"] == choice
    assert answer["parallel_tool_calls"] is False and answer["store"] is False
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert answer["truncation"] == "auto" and answer["prompt_cache_key"] == "key"
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    exchange = opened(request())
    answer = exchange.whole([output(exchange, [Scripted(["Well"])])])
    assert (answer["tools"], answer["tool_choice"]) == ([], "auto")
    assert answer["parallel_tool_calls"] is True and answer["truncation"] == "disabled"
    (item,) = answer["output"]
    assert item["id"].startswith("msg_") and "encrypted_content" not in item


# Agents


@pytest.mark.parametrize("path", sorted(REQUESTS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_request_of_an_agent_is_answered(path: Path, is_strict: bool) -> None:
    if not path.stem.startswith(("codex", "openai_agents")):
        pytest.skip("the request of another API")
    body = json.loads(path.read_text())
    known = context(
        tokenizer=with_template(TEMPLATE),
        tool_parser="auto",
        reasoning_parser="auto",
        max_model_len=8192,
        strict_requests=is_strict,
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
