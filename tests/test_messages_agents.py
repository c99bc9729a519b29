"""Anthropic's Messages as coding agents send them: tools, results, thinking, and the requests of
Claude Code.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.serving.dialects.messages import DIALECT, count_tokens, open_message
from jaxpage.serving.dialects.messages_body import translate
from jaxpage.serving.dialects.messages_fields import CountTokensRequest
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.reading import read
from tests.support.chat_templates import STRICT_QWEN
from tests.support.wire import Scripted, context, deltas, output, tokenizer, with_template
from tests.test_agent_dialects import as_messages, conversations

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
REQUESTS = Path(__file__).parent / "support" / "agent_requests"


@functools.cache
def qwen(*, strict: bool = False) -> ModelContext:
    return context(
        tokenizer=with_template(STRICT_QWEN),
        tool_parser="auto",
        reasoning_parser="auto",
        max_model_len=8192,
        strict_requests=strict,
    )


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 64, "messages": [USER], **fields}


def translation_of(**fields: Any) -> Any:
    request, _ = read({"model": "demo", "messages": [USER], **fields}, CountTokensRequest, qwen())
    return translate(request, qwen())


def use(call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": call_id, "name": "weather", "input": {"place": "Oslo"}}
    return {**call, **fields}


def result(call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def assistant_message(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user_message(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def system(words: str) -> dict[str, Any]:
    return {"role": "system", "content": words}


THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "abc"}


def call(call_id: str, arguments: str = '{"place": "Oslo"}') -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


# Histories, and the messages of the chat that they are.
HISTORIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a call and its result": (
        {"messages": [USER, assistant_message(THOUGHT, text("I look."), use()),
                      user_message(result(content="3 degrees"))]},
        [
            USER,
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm",
             "tool_calls": [call("toolu_1")]},
            tool_message("toolu_1", "3 degrees"),
        ],
    ),
    "two calls, results of parts and of nothing, and text": (
        {
            "system": [text("Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"}),
                       text("Now.")],
            "messages": [
                USER,
                assistant_message(use("a"), use("b", input={})),
                user_message(
                    text("First this."),
                    result("b"),
                    result("a", content=[text("3"), text("degrees")],
                           cache_control={"type": "ephemeral"}),
                    text("Go on."),
                ),
            ],
        },
        [
            {"role": "system", "content": "Be brief.\nNow."},
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b", "{}")]},
            tool_message("b", ""),
            tool_message("a", "3\ndegrees"),
            {"role": "user", "content": "First this.\nGo on."},
        ],
    ),
    "errors": (
        {
            "messages": [
                USER,
                assistant_message(use("a"), use("b"), use("c"), use("d")),
                user_message(
                    result("a", content="no file", is_error=True),
                    result("b", is_error=True),
                    result("c", content=[text("Error 5")], is_error=True),
                    result("d", content="fine", is_error=False),
                ),
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call(name) for name in "abcd"]},
            tool_message("a", "Error: no file"),
            tool_message("b", "Error"),
            tool_message("c", "Error 5"),
            tool_message("d", "fine"),
        ],
    ),
    "instructions that come later": (
        {
            "system": "Be brief.",
            "messages": [
                *(system("Always."), USER, system("Agents: x"), assistant_message(use())),
                *(user_message(result(content="3")),
                  system("<system-reminder>y</system-reminder>")),
            ],
        },
        [
            {"role": "system", "content": "Be brief.\nAlways."},
            {"role": "user", "content": "Hi\n<system-reminder>\nAgents: x\n</system-reminder>"},
            {"role": "assistant", "content": "", "tool_calls": [call("toolu_1")]},
            tool_message("toolu_1", "3"),
            {"role": "user", "content": "<system-reminder>y</system-reminder>"},
        ],
    ),
    "turns of the user that follow each other": (
        {"messages": [USER, user_message(text("there")), assistant_message(text("Yes?")), USER]},
        [{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Yes?"}, USER],
    ),
    "answers that follow each other": (
        {
            "messages": [
                *(USER, assistant_message(THOUGHT), assistant_message()),
                *(assistant_message(text("I")), assistant_message(text("look."), use())),
                user_message(result()),
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "I\nlook.", "reasoning_content": "Hm",
             "tool_calls": [call("toolu_1")]},
            tool_message("toolu_1", ""),
        ],
    ),
    "a tool that was found": (
        {"messages": [USER, assistant_message(use()),
                      user_message(result(content=[{"type": "tool_reference",
                                                    "tool_name": "weather"}]))]},
        [USER, {"role": "assistant", "content": "", "tool_calls": [call("toolu_1")]},
         tool_message("toolu_1", "weather")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_that_of_the_chat(name):
    fields, messages = HISTORIES[name]
    answer = open_message(message(**fields, tools=[TOOL]), qwen(strict=True))
    function = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    expected = open_chat({"model": "demo", "max_tokens": 64, **chat}, qwen())
    assert answer.prompts == expected.prompts and answer.ignored_fields == ()


def test_what_another_server_ran_is_passed_over_and_named():
    """So are the lines for Anthropic's accounts, with which no prompt would have the prefix of the
    last.
    """
    server_blocks: list[dict[str, Any]] = [
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
    ]
    fields = {
        "system": [text("x-anthropic-billing-header: cch=1;"), text("Be brief.")],
        "messages": [
            USER,
            assistant_message(*server_blocks),
            USER,
            assistant_message(text("Yes?"), server_blocks[0]),
            USER,
        ],
        "tools": [SEARCH, TOOL],
    }
    answer = open_message(message(**fields), qwen())
    plain = {"system": "Be brief.", "messages": [USER, USER, assistant_message(text("Yes?")), USER]}
    assert answer.prompts == open_message(message(**plain, tools=[TOOL]), qwen()).prompts
    passed_over = [
        *(f"messages[1].content[{index}]" for index in range(3)),
        "messages[3].content[1]",
    ]
    assert answer.ignored_fields == ("system[0]", *passed_over, "tools[0]")


# As Mistral's, in which only texts of the user and answers without calls count as turns.
ALTERNATING = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_a_text_after_a_result_is_part_of_it_where_turns_must_alternate():
    known = context(tokenizer=with_template(ALTERNATING))
    turns = [
        USER,
        assistant_message(use("a"), use("b")),
        user_message(result("a", content="3"), result("b", content="4"), text("Go on.")),
    ]
    fields = {"messages": [*turns, system("Agents"), assistant_message(text("Yes.")), USER]}
    (requested,) = open_message(message(**fields), known).prompts
    assert str(requested.prompt).endswith(
        "[tool]3[tool]4\n\nGo on.\n<system-reminder>\nAgents\n</system-reminder>[assistant]Yes.[user]Hi"
    )
    counted = count_tokens({"model": "demo", **fields}, known).body["input_tokens"]
    assert counted == len(tokenizer()(requested.prompt)["input_ids"])
    with pytest.raises(ApiError, match="turns must alternate") as caught:
        open_message(message(messages=[assistant_message(text("Yes.")), *turns]), known)
    assert caught.value.param == "messages"


def test_an_answer_goes_on_from_text_only():
    begun = open_message(message(messages=[USER, assistant_message(text("It was"))]), qwen())
    assert str(begun.prompts[0].prompt).endswith("It was")
    called = open_message(message(messages=[USER, assistant_message(use())], tools=[TOOL]), qwen())
    assert str(called.prompts[0].prompt).endswith("<|im_start|>assistant\n")


ROUND: list[dict[str, Any]] = [USER, assistant_message(use()), user_message(result())]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [*ROUND[:2], user_message(text("x"), result("toolu_2"))]},
     "messages[2].content[1].tool_use_id", "'toolu_2' is the id of no earlier call"),
    ({"messages": [*ROUND, user_message(result())]},
     "messages[3].content[0].tool_use_id", "'toolu_1' is the id of a call with a result"),
    ({"system": "s", "messages": [*ROUND, assistant_message(text("x"), use())]},
     "messages[3].content[1].id", "'toolu_1' is the id of an earlier call"),
    ({"messages": [USER, assistant_message(text("a")), assistant_message(text("b"), use(), use())]},
     "messages[2].content[2].id", "'toolu_1' is the id of an earlier call"),
    ({"messages": [USER, assistant_message(text("x"), use(input="Oslo"))]},
     "messages[1].content[1].input", "must be an object, got 'Oslo'"),
    ({"messages": [USER, assistant_message(use(input=None))]}, "messages[1].content[0].input",
     "must be an object"),
    ({"messages": [USER, assistant_message(use(name="a b"))]}, "messages[1].content[0].name",
     "must match"),
    ({"messages": [USER, assistant_message({"type": "tool_use", "name": "f", "input": {}})]},
     "messages[1].content[0].id", "is required"),
    ({"messages": [USER, assistant_message({"type": "image", "source": {}})]},
     "messages[1].content[0].type", "must be one of 'text', 'thinking', 'tool_use'"),
    ({"messages": [user_message({"type": "image", "source": {}})]},
     "messages[0].content[0].source.type", "is required"),
    ({"messages": [*ROUND[:2], user_message(result(content=[text("x"), {"type": "image"}]))]},
     "messages[2].content[0].content[1].source", "is required"),
    ({"messages": [*ROUND[:2], user_message(result(content=5))]}, "messages[2].content[0].content",
     "must be a string, or a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
     "must be a string, or a list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be one of 'user'"),
    ({"system": [{"type": "image"}]}, "system[0].type", "must be 'text'"),
    ({"tools": [TOOL, {**TOOL, "input_schema": "x"}]}, "tools[1].input_schema", "must be"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "must match"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type",
     "must be 'custom'"),
    ({"tools": [SEARCH, TOOL, TOOL]}, "tools[2].name", "tools has 'weather' twice"),
    ({"tools": [SEARCH, {**TOOL, "input_schema": {"type": "banana"}}],
      "tool_choice": {"type": "any"}},
     "tools[1].input_schema", "banana"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice",
     "names 'f', which is not in tools"),
    ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
     "tool_choice", "tools[1] is passed over: this server has no tools of type 'web_search_20250305'"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "no tool is a function"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", "must be one of"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "must be"),
    ({"thinking": {"type": "on"}}, "thinking.type", "must be one of"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread",
     "is not supported"),
    ({"compaction": {"type": "summarize"}}, "compaction", "is not supported"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "must be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "banana"}}}},
     "output_config.format.schema", "banana"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "banana"}}},
     "output_format.schema", "banana"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "problem"), REFUSED)
def test_an_error_has_the_clients_path(fields, param, problem):
    """The count of tokens has the same."""
    for opens, body in (
        (open_message, message(**fields)),
        (count_tokens, {"model": "demo", "messages": [USER], **fields}),
    ):
        with pytest.raises(ApiError) as caught:
            opens(body, qwen())
        assert (caught.value.status, caught.value.param) == (400, param)
        assert problem in caught.value.message
        is_of_list = " has " in caught.value.message  # two tools have a name
        assert is_of_list or caught.value.message.startswith(param)
        error_body = DIALECT.error(caught.value)
        assert (
            error_body["type"] == "error" and error_body["error"]["type"] == "invalid_request_error"
        )


@pytest.mark.parametrize(
    ("choice", "body"),
    [
        (None, {}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_a_choice_is_that_of_the_chat(choice, body):
    strict = {**TOOL, "type": "custom", "strict": True, "input_examples": [{"place": "Rome"}]}
    chat = translation_of(tools=[SEARCH, strict], tool_choice=choice).body
    assert {
        name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat
    } == body
    function = {**chat["tools"][1]["function"]}
    assert function.pop("parameters") == {**SCHEMA, "examples": [{"place": "Rome"}]}
    assert function == {"name": "weather", "description": "Tells the weather.", "strict": True}
    assert chat["tools"][0] == {"type": "web_search_20250305"}
    answer = open_message(message(tools=[SEARCH, strict], tool_choice=choice), qwen())
    assert ("weather" in str(answer.prompts[0].prompt)) == (choice != {"type": "none"})
    assert answer.ignored_fields == ("tools[0]",)


@pytest.mark.parametrize("kind", [
    "web_search_20250305", "web_fetch_20260318", "bash_20250124", "text_editor_20250728",
    "computer_20251124",
    "computer_toolset_20260801", "memory_20250818", "code_execution_20260521", "mcp_toolset",
    "tool_search_tool_regex_20251119",
])  # fmt: skip
def test_a_tool_of_a_server_is_passed_over(kind):
    answer = open_message(message(tools=[{"type": kind, "name": "x"}]), qwen(strict=True))
    assert answer.ignored_fields == ("tools[0]",)


def test_a_schema_that_nothing_enforces_refuses_no_request():
    """With "auto" the template has it as it is."""
    look_ahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}}
    open_message(message(tools=[{**TOOL, "input_schema": look_ahead}]), qwen(strict=True))


def test_no_tools_ask_for_nothing():
    """Agents send them so for titles and summaries."""
    for choice in (None, {"type": "auto"}, {"type": "none"}):
        answer = open_message(message(tools=[], tool_choice=choice), qwen(strict=True))
        assert answer.prompts == open_message(message(), qwen()).prompts


# Thinking

SWITCH = "<{{ enable_thinking | default('unset') }}>"
WORDS = "<{{ reasoning_effort | default('unset') }}>"
PLAIN = "{{ messages[0].content }}<>"
ON, OFF = {"type": "adaptive", "display": "summarized"}, {"type": "disabled"}
LOW = {"effort": "low"}


@pytest.mark.parametrize(
    ("template", "fields", "shown", "ignored"),
    [
        (SWITCH, {}, "unset", ()),
        (SWITCH, {"thinking": ON}, "True", ()),
        (SWITCH, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, "True", ()),
        (SWITCH, {"thinking": OFF}, "False", ()),
        (SWITCH, {"thinking": {"type": "between_tools"}}, "False", ("thinking",)),
        (SWITCH, {"thinking": OFF, "output_config": LOW}, "False", ()),
        (SWITCH, {"output_config": LOW}, "True", ()),
        (WORDS, {"thinking": ON, "output_config": LOW}, "low", ()),
        (WORDS, {"thinking": OFF}, "low", ("thinking",)),
        (PLAIN, {"thinking": ON}, "", ("thinking",)),
        (PLAIN, {"thinking": OFF}, "", ()),
        (PLAIN, {"output_config": LOW}, "", ("output_config.effort",)),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_thinking_is_what_the_template_knows(template, fields, shown, ignored, is_strict):
    known = context(tokenizer=with_template(template), strict_requests=is_strict)
    answer = open_message(message(**fields), known)
    assert str(answer.prompts[0].prompt).partition("<")[2].startswith(f"{shown}>")
    assert answer.ignored_fields == ignored
    counted = count_tokens({"model": "demo", "messages": [USER], **fields}, known)
    assert counted.ignored_fields == ignored


def test_a_budget_is_that_of_the_chat():
    """The reasoning has a form, without which nothing finds its end."""
    thinking = {"type": "enabled", "budget_tokens": 2048}
    chat = translation_of(thinking=thinking)
    assert chat.body["thinking_token_budget"] == 2048 and chat.ignored == ()
    assert chat.names["thinking_token_budget"] == "thinking.budget_tokens"
    assert "thinking_token_budget" not in translation_of(thinking=ON).body
    known = context(tokenizer=with_template(SWITCH))
    answer = open_message(message(thinking=thinking), known)
    assert answer.ignored_fields == ("thinking.budget_tokens",)


# Counts

words = st.text(st.sampled_from('ab é<|\n"{'), min_size=1, max_size=6)
inputs = st.dictionaries(st.sampled_from(["a", "b"]), st.none() | st.integers() | words)


@given(
    turns=conversations(),
    choice=st.sampled_from(
        [None, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "weather"}]
    ),
    thinking=st.sampled_from([None, OFF, ON]),
)
def test_as_many_tokens_are_counted_as_the_prompt_has(turns, choice, thinking):
    tools = [TOOL, SEARCH, {**TOOL, "name": "look"}]
    fields: dict[str, Any] = {"messages": as_messages(turns), "tools": tools}
    fields |= {"tool_choice": choice, "thinking": thinking}
    fields["system"] = [text("Be brief.", cache_control={"type": "ephemeral"})]
    answer = open_message(message(**fields), qwen())
    counted = count_tokens({"model": "demo", **fields}, qwen())
    prompt = answer.prompts[0].prompt
    assert counted.body == {
        "input_tokens": len(tokenizer()(prompt, add_special_tokens=False)["input_ids"])
    }
    assert counted.ignored_fields == answer.ignored_fields == ("tools[1]",)


# Answers


def stream_events(
    body: dict[str, Any], script: Scripted, known: ModelContext
) -> list[dict[str, Any]]:
    exchange = open_message({**body, "stream": True}, known)
    events = []
    for delta in deltas(output(exchange, [script]), [script]):
        events += exchange.chunks(0, delta)
    return events + exchange.last_chunks()


def whole(body: dict[str, Any], script: Scripted, known: ModelContext) -> dict[str, Any]:
    exchange = open_message(body, known)
    return exchange.whole([output(exchange, [script])])


def reassemble(events: Sequence[Any]) -> dict[str, Any]:
    """Returns the message that Anthropic's client makes of a stream."""
    buffers: dict[int, bytes] = {}
    snapshot: Any = None
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return plain(snapshot.to_dict())


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without what differs between two answers."""
    blocks = [{**block, "id": "toolu_" in block.get("id", "")} for block in message["content"]]
    known = {name: message[name] for name in ("role", "stop_reason", "stop_sequence", "usage")}
    return {**known, "content": blocks}


def cut(text_of_answer: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text_of_answer) + 1) for place in places})
    return [
        text_of_answer[begin:end]
        for begin, end in zip([0, *ends], [*ends, len(text_of_answer)], strict=True)
    ]


written = st.builds(
    lambda arguments: (
        f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    ),
    inputs,
)
prose = st.text(st.sampled_from("ab é\n"), min_size=1, max_size=8)


@given(
    thought=st.none() | prose,
    parts=st.lists(prose | written, max_size=5),
    places=st.lists(st.integers(0, 1000), max_size=12),
    ends=st.sampled_from(["stop", "length"]),
)
def test_a_stream_is_the_whole_answer_to_anthropics_client(thought, parts, places, ends):
    said = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    said += "".join(parts)
    body = message(tools=[TOOL])
    answer = whole(body, Scripted([said], ends), qwen())
    Message.model_validate(answer)
    script = Scripted(cut(said, places), ends, token_ids=[])
    events = stream_events(body, script, qwen())
    again = reassemble(events)
    again["usage"]["output_tokens"] = answer["usage"]["output_tokens"]  # a token for each part
    assert again == plain(answer)
    num_calls = sum(block["type"] == "tool_use" for block in answer["content"])
    assert num_calls == sum(part.startswith("<tool_call>") for part in parts)
    assert answer["stop_reason"] == (
        "max_tokens" if ends == "length" else "tool_use" if num_calls else "end_turn"
    )


def test_a_stream_with_a_call_has_anthropics_events():
    said = '<think>\nHm\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
    events = stream_events(message(tools=[TOOL]), Scripted(list(said)), qwen())
    names = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    assert list(dict.fromkeys(names)) == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["id"].startswith("toolu_") and len(starts[2]["id"]) > 12
    assert {**starts[2], "id": ""} == {"type": "tool_use", "id": "", "name": "weather", "input": {}}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    (signed,) = [event["delta"] for event in events if "signature" in event.get("delta", {})]
    assert signed["signature"]


@pytest.mark.parametrize(
    ("said", "ends", "given_input", "reason"),
    [
        ('{"place": "Oslo"}', "stop", {"place": "Oslo"}, "tool_use"),
        ('{"place": "Oslo", "days": [1, {"a": tr', "length", {"place": "Oslo", "days": [1, {}]},
         "max_tokens"),
        ('{"place": "Os', "length", {}, "max_tokens"),
        ('{"pl', "length", {}, "max_tokens"),
        ("{", "length", {}, "max_tokens"),
        ('{"a": "\\ud83d', "length", {}, "max_tokens"),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_has_what_is_complete(said, ends, given_input, reason):
    """A model without a form of calls writes the arguments alone, so that a cut shows."""
    known = context(tokenizer=with_template("{{ messages[0].content }}"))
    body = message(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    answer = whole(body, Scripted([said], ends), known)
    (block,) = answer["content"]
    assert (block["input"], answer["stop_reason"]) == (given_input, reason)
    again = reassemble(stream_events(body, Scripted(list(said), ends), known))
    assert again["content"] == plain(answer)["content"] and again["stop_reason"] == reason


def test_thinking_may_be_left_out_of_the_answer():
    body = message(thinking={"type": "adaptive", "display": "omitted"})
    said = "<think>\nHm\n</think>\n\nYes."
    answer = whole(body, Scripted([said]), qwen())
    thought, spoken = answer["content"]
    assert thought["thinking"] == "" and thought["signature"] and spoken["text"] == "Yes."
    events = stream_events(body, Scripted(list(said)), qwen())
    assert reassemble(events)["content"] == plain(answer)["content"]
    assert "Hm" not in json.dumps(events)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (429, "rate_limit_error"),
    ],
)
def test_a_stream_that_fails_ends_with_anthropics_error(status, kind):
    (chunk,) = DIALECT.failure_chunks(ApiError(status, "no"), None)
    frame = DIALECT.stream.new_frame()(chunk)
    begin, data = frame.decode().split("\ndata: ")
    assert begin == "event: error"
    assert json.loads(data) == {"type": "error", "error": {"type": kind, "message": "no"}}


# Fields of agents


@pytest.mark.parametrize("fields", [
    {"metadata": {"user_id": "{\"device_id\": \"x\"}"}, "service_tier": "auto", "container": None,
     "speed": "standard"},
    {"context_management": {"edits": []}, "mcp_servers": [], "output_config": {}, "fallbacks": []},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"diagnostics": {"previous_message_id": None}, "system": [],
     "cache_control": {"type": "ephemeral"}},
    {"thinking": None, "output_config": None, "tool_choice": None, "tools": None, "system": ""},
])  # fmt: skip
def test_what_asks_for_nothing_is_accepted(fields):
    answer = open_message(message(**fields), qwen(strict=True))
    assert answer.prompts == open_message(message(), qwen()).prompts
    assert answer.ignored_fields == ()


@pytest.mark.parametrize(("name", "value"), [
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("container", {"skills": []}),
    ("mcp_servers", [{"type": "url", "url": "https://mcp.example", "name": "x"}]),
    ("service_tier", "priority"),
    ("speed", "fast"),
    ("inference_geo", "us"),
    ("diagnostics", {"previous_message_id": "msg_1"}),
    ("fallbacks", [{"model": "x"}]),
])  # fmt: skip
def test_what_only_anthropics_servers_do_is_named(name, value):
    answer = open_message(message(**{name: value}), qwen(strict=True))
    assert answer.ignored_fields == (name,)


def test_an_answer_keeps_to_a_format():
    """Claude Code asks so for titles."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    expected = {"format": {"type": "json_schema", "schema": schema}}
    grammar = open_message(message(output_config=expected), qwen()).prompts[0].params
    older = open_message(message(output_format=expected["format"]), qwen()).prompts[0].params
    json_schema = {"name": "answer", "schema": schema}
    chat = message(response_format={"type": "json_schema", "json_schema": json_schema})
    assert grammar == older == open_chat(chat, qwen()).prompts[0].params
    assert getattr(grammar, "structured_outputs", None) is not None


@pytest.mark.parametrize("name", ["main", "tool_turn", "title", "count_tokens", "compaction"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_request_of_claude_code_is_answered(name, is_strict):
    """The requests are recorded ones, with other texts and names."""
    requested = json.loads((REQUESTS / f"claude_code_{name}.json").read_text())
    body = requested["body"]
    known = qwen(strict=is_strict)
    if name == "count_tokens":
        assert count_tokens(body, known).body["input_tokens"] > 100
        return
    answer = open_message(body, known)
    expected = ["max_tokens"]  # more than the model has room for
    if "system" in body:
        expected.insert(0, "system[0]")
    if name == "compaction":
        expected.insert(1, "messages[4].content[0]")
    assert sorted(answer.ignored_fields) == sorted(expected)
    prompt = str(answer.prompts[0].prompt)
    assert "cch=" not in prompt and prompt.count("<|im_start|>system") == 1
    said_now = "Yes."
    if body["tools"]:
        said_now += '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/x"}}\n</tool_call>'
    events = stream_events(body, Scripted(list(said_now)), known)
    assert reassemble(events)["content"][0]["text"] == "Yes."
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if body["tools"] else "end_turn")
