"""Agents that speak Ollama's API: tools, calls, results, and what clients ask about a model."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import ollama
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxpage.chat_forms import ChatFormat
from jaxpage.checkpoints.embedding_files import EmbeddingFiles
from jaxpage.engine.texts import (
    TextEmbedding,
)
from jaxpage.serving.dialects.dialect import ListedModel, ModelList, VersionPath
from jaxpage.serving.dialects.ollama import DIALECT, open_ollama_chat, show_ollama
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.derived_forms import choose_form, derive_form
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.model_card import ModelCard
from tests.support.chat_templates import NO_TOOLS, TEMPLATES
from tests.support.wire import Scripted, context, deltas, output, with_template

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "Weather?"}


def write_call(name: str, arguments: str) -> str:
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@functools.cache
def reads_calls(template: str = TEMPLATE) -> ModelContext:
    loaded = with_template(template)
    form = choose_form(derive_form(loaded).form, "auto", "auto")
    return context(tokenizer=loaded, chat_format=form, max_model_len=4096)


def test_tools_are_those_of_the_chat():
    """Fields that clients leave out are put in, and others go to the template as they are."""
    nullable = {"type": ["string", "null"], "enum": ["a", None]}
    function = {"name": "f", "description": "d"}
    schema = {"type": ["object"], "properties": {"p": nullable}, "required": ["p"], "$defs": {}}
    known = reads_calls()
    for tool, usual in (
        ({"type": "function", "function": {**function, "parameters": schema}}, None),
        ({"function": function}, {"type": "function", "function": function}),
        (
            {"type": "", "items": None, "function": {**function, "parameters": {"required": None}}},
            {
                "type": "function",
                "function": {
                    **function,
                    "parameters": {"type": "object", "properties": {}, "required": None},
                },
            },
        ),
        (
            {"type": "function", "function": {**function, "parameters": {}}},
            {"type": "function", "function": function},
        ),
        (
            {"type": "function", "function": {"name": "f", "description": None}},
            {"type": "function", "function": {"name": "f"}},
        ),
    ):
        body = {"model": "demo", "messages": [USER]}
        exchange = open_ollama_chat({**body, "tools": [tool], "stream": False}, known)
        chat = open_chat({**body, "tools": [usual or tool]}, known)
        assert exchange.prompts == chat.prompts and exchange.ignored_fields == ()


def call_of(name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {} if arguments is None else arguments}, **more}


def assistant_message(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def result(**fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": "r", **fields}


F, G = call_of("f"), call_of("g")
RESULTS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "in their order": ([assistant_message(F, G), result(), result()],
                       ["f call00000", "g call00001"]),
    "by name": (
        [assistant_message(F, G, F), result(tool_name="g"), result(tool_name="f"),
         result(tool_name="f")],
        ["g call00001", "f call00000", "f call00002"],
    ),
    "by id": (
        [assistant_message({**F, "id": "a"}, {**F, "id": "b"}),
         *(result(tool_call_id=name) for name in "ba")],
        ["f b", "f a"],
    ),
    "by an id that the call lacks": (
        [assistant_message(F, G), result(tool_call_id="x", tool_name="g"),
         result(tool_call_id="y")],
        ["g call00001", "f call00000"],
    ),
    "of the latest calls first": (
        [assistant_message(F), assistant_message(F, G), result(tool_name="f"), result(), result()],
        ["f call00001", "g call00002", "f call00000"],
    ),
    "of calls with an id and without one": (
        [assistant_message({**F, "id": "call00000"}, {**G, "id": ""}), result(),
         result(tool_call_id="call00000")],
        ["g call00001", "f call00000"],
    ),
    "without content": ([assistant_message(F), {"role": "tool", "tool_name": ""}], ["f call00000"]),
}  # fmt: skip
RESULTS["of calls with an id and without one"][0][1]["tool_name"] = "g"


@pytest.mark.parametrize("case", RESULTS)
def test_a_result_finds_its_call(case):
    messages, expected = RESULTS[case]
    (requested,) = open_ollama_chat(
        {"model": "demo", "messages": [USER, *messages]}, reads_calls()
    ).prompts
    assert re.findall(r"\|>\((.*?)\)", str(requested.prompt)) == expected


@given(st.data())
def test_results_in_any_order_find_the_calls_of_their_names(data):
    """The oracle is a chat with the same calls, and the ids that its client would give."""
    names = data.draw(st.lists(st.sampled_from("fgh"), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(names))))
    # Of two calls of one name the first result is that of the first one.
    first = sorted(order, key=lambda place: (order.index(names.index(names[place])), place))
    messages = [
        assistant_message(*map(call_of, names)),
        *(result(tool_name=names[place]) for place in first),
    ]
    ids = [f"call{index:05d}" for index in range(len(names))]
    calls = [
        {"id": ids[index], "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "content": "r", "tool_call_id": ids[place], "name": names[place]}
        for place in first
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    (requested,) = open_ollama_chat(
        {"model": "demo", "messages": [USER, *messages]}, reads_calls()
    ).prompts
    (usual,) = open_chat(
        {"model": "demo", "messages": [USER, said, *results]}, reads_calls()
    ).prompts
    assert requested.prompt == usual.prompt


@pytest.mark.parametrize("text", ['{"a": 1}', "", " {} "])
def test_arguments_may_be_the_text_of_an_object(text):
    objects = json.loads(text or "{}")
    prompts = [
        open_ollama_chat(
            {"model": "demo", "messages": [assistant_message(call_of("f", value))]}, reads_calls()
        )
        .prompts[0]
        .prompt
        for value in (text, objects)
    ]
    assert prompts[0] == prompts[1] and write_call("f", json.dumps(objects)) in str(prompts[0])


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([assistant_message(), result()],
     "messages[1] is a result, and no call before it waits for one"),
    ([result(tool_name="f")], "messages[0].tool_name 'f' is the tool of no earlier call"),
    ([assistant_message(F), result(tool_name="g")],
     "messages[1].tool_name 'g' is the tool of no earlier call"),
    (
        [assistant_message({**F, "id": "a"}), result(tool_call_id="b")],
        "messages[1].tool_call_id 'b' is the id of no earlier call",
    ),
    (
        [assistant_message({**F, "id": "a"}), result(tool_call_id="a"), result(tool_call_id="a")],
        "messages[2].tool_call_id 'a' is the id of a call with a result",
    ),
    (
        [assistant_message({**F, "id": "a"}, {**F, "id": "a"})],
        "messages[0].tool_calls[1].id 'a' is the id of an earlier call",
    ),
    (
        [{**USER, "tool_calls": [F]}],
        "messages[0].tool_calls is only for the role 'assistant', got 'user'",
    ),
    ([assistant_message(call_of("f", "[1]"))],
     "messages[0].tool_calls[0].function.arguments must be"),
    ([assistant_message(call_of("f", [1]))],
     "messages[0].tool_calls[0].function.arguments must be an object"),
    ([assistant_message({"function": {"arguments": {}}})],
     "messages[0].tool_calls[0].function.name is required"),
    ([{**USER, "role": "function"}], "messages[0].role must be"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "problem"), WRONG)
def test_a_wrong_history_is_refused_by_the_path_of_the_client(messages, problem):
    with pytest.raises(ApiError) as caught:
        open_ollama_chat({"model": "demo", "messages": messages}, reads_calls())
    assert caught.value.message.startswith(problem) and caught.value.status == 400
    assert caught.value.param and problem.startswith(caught.value.param)


def test_tools_that_cannot_be_called_are_refused_or_passed_over():
    tool = {"type": "function", "function": {"name": "f"}}
    search = {"type": "web_search"}
    body = {"model": "demo", "messages": [USER], "tools": [search, tool], "stream": False}
    assert open_ollama_chat(body, reads_calls()).ignored_fields == ("tools[0]",)
    mute = context()
    assert open_ollama_chat({**body, "tools": [search]}, mute).ignored_fields == ("tools[0]",)
    held = open_ollama_chat({**body, "format": "json"}, reads_calls()).prompts[0].params
    assert held.structured_outputs[0] == "grammar"
    for known, fields, problem in (
        # Clients look for "does not support tools".
        (mute, {}, "'demo' does not support tools: its chat template writes no calls"),
        (reads_calls(), {"tools": [tool, tool]}, "tools has 'f' twice"),
        (reads_calls(), {"tools": [{"name": "f"}]}, "tools[0].function is required"),
        (reads_calls(), {"tools": ["f"]}, "tools[0] must be"),
    ):
        with pytest.raises(ApiError) as caught:
            open_ollama_chat({**body, **fields}, known)
        assert caught.value.message.startswith(problem) and caught.value.status == 400


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (write_call("f", '{"a": "b')[: -len("}\n</tool_call>")], "length"),
        (write_call("f", "[1]"), "stop"),
        (write_call("f", '{"a": "\\ud800"}'), "stop"),  # which UTF-8 cannot express
    ],
)
def test_a_call_that_is_no_object_is_content(cut, reason):
    body = {"model": "demo", "messages": [USER], "tools": [{"function": {"name": "f"}}]}
    for stream in (False, True):
        exchange = open_ollama_chat({**body, "stream": stream}, reads_calls())
        parts = parts_of(exchange, ["I ", "see", write_call("f", '{"a": 1}'), cut], reason)
        said = join(parts)
        assert parts[-1]["done_reason"] == reason
        assert said["content"].startswith("I see") and len(said["content"]) > len("I see")
        (called,) = said["tool_calls"]
        assert called["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}
        assert re.fullmatch("call_[0-9a-f]{24}", called["id"])
        assert any(text in said["content"] for text in ("[1]", '{"a": "'))


def parts_of(exchange: Any, texts: Sequence[str], reason: str = "stop") -> list[dict[str, Any]]:
    """Returns the lines of an answer, of which there is one without a stream."""
    scripts = [Scripted(texts, reason)]
    whole = output(exchange, scripts)
    if not exchange.stream:
        return [exchange.whole([whole])]
    lines = [part for delta in deltas(whole, scripts) for part in exchange.chunks(0, delta)]
    return [*lines, *exchange.last_chunks()]


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client puts together of lines."""
    message: dict[str, Any] = {}
    for part in parts:
        # As every client reads it: there is a content, and a call comes in one line.
        assert isinstance(part["message"]["content"], str)
        ollama.ChatResponse.model_validate(part)
        for name, value in part["message"].items():
            message[name] = message[name] + value if name in message and name != "role" else value
    return message


MARKS = [
    *("<think>\n", "\n</think>\n\n", "I see ", "\n<tool_call>\n", "\n</tool_call>", '{"name": "f"'),
    *(', "arguments": ', '{"a": "\\ud800"}', '{"a": [1.5, null]}', "}", '{"a": 1e999}', "é\u2028"),
    *(write_call("f", "{}"), write_call("f", '{"a": {"b": "<tool_call>"}}'), write_call("g", "[]")),
]


@given(
    st.lists(st.sampled_from(MARKS), max_size=8).map("".join),
    st.lists(st.integers(0, 120), max_size=6),
    st.sampled_from(["stop", "length"]),
)
@example(2 * write_call("f", '{"city": "Par\\u00ees", "days": 2}'), [3, 40, 41, 90], "stop")
@example(write_call("f", '{"a": "\\ud800"}'), [], "stop")
@example("<think>\nHm", [9], "length")
@example("", [], "stop")
def test_the_lines_of_a_stream_are_the_answer_wherever_they_are_cut(text, cuts, reason):
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    texts = [text[start:stop] for start, stop in itertools.pairwise(edges)] or [""]
    body = {"model": "demo", "messages": [USER], "tools": [{"function": {"name": "f"}}]}
    answers = []
    for stream in (False, True):
        parts = parts_of(open_ollama_chat({**body, "stream": stream}, reads_calls()), texts, reason)
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        message = join(parts)
        for index, call in enumerate(message.get("tool_calls", [])):
            assert call.pop("id") and call["function"]["index"] == index
        answers.append((message, parts[-1]["done_reason"], parts[-1]["eval_count"]))
        DIALECT.stream.new_frame()(parts[-1])
    assert answers[0] == answers[1]
    assert answers[0][1] == reason


def test_clients_learn_what_a_model_can_do():
    card = ModelCard(family="llama", num_parameters=1_500_000, modified_at=86_400.0)
    known = context(
        tokenizer=reads_calls().tokenizer, chat_format=reads_calls().chat_format, card=card
    )
    body = show_ollama({"model": "demo:latest"}, known).body
    shown = ollama.ShowResponse.model_validate(body)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == TEMPLATE
    assert shown.modified_at and shown.modified_at.isoformat() == "1970-01-02T00:00:00+00:00"
    assert shown.modelinfo == {
        "general.architecture": "llama",
        "general.basename": "demo",
        "general.parameter_count": 1_500_000,
        "llama.context_length": 512,
    }
    listed = ListedModel("demo", card, 5.0, 512, context=known)
    for model_list in DIALECT.paths_of(ModelList).values():
        (entry,) = model_list.write([listed])["models"]
        assert entry["capabilities"] == shown.capabilities
        (entry,) = model_list.write([listed._replace(context=None)])["models"]
        assert "capabilities" not in entry
    assert (
        ollama.ListResponse.model_validate(DIALECT.paths_of(ModelList)["/api/tags"].write([listed]))
        .models[0]
        .modified_at
        == shown.modified_at
    )


@pytest.mark.parametrize(
    ("template", "parsers", "expected"),
    [
        (NO_TOOLS, ("auto", "auto"), ["completion"]),
        ("{{ messages[0].content }}", ("hermes", "auto"), ["completion"]),
        (TEMPLATE, ("none", "auto"), ["completion", "thinking"]),
        (TEMPLATES["array in tags"], ("auto", "auto"), ["completion", "tools", "thinking"]),
        (TEMPLATES["code"], ("auto", "auto"), ["completion", "tools"]),
    ],
)
def test_capabilities_are_those_of_the_template(template, parsers, expected):
    """A tool is refused by a model that does not say "tools"."""
    loaded = with_template(template)
    form: ChatFormat = choose_form(derive_form(loaded).form, *parsers)
    known = context(tokenizer=loaded, chat_format=form)
    assert show_ollama({"model": "demo"}, known).body["capabilities"] == expected
    body = {"model": "demo", "messages": [USER], "tools": [{"function": {"name": "f"}}]}
    if "tools" in expected:
        assert open_ollama_chat(body, known).prompts
    else:
        with pytest.raises(ApiError, match="not support tools"):
            open_ollama_chat(body, known)


def test_a_model_for_embeddings_says_so():
    embedding = TextEmbedding(EmbeddingFiles(is_stated=True))
    for known in (context(embedding=embedding, tokenizer=None), context(embedding=embedding)):
        body = show_ollama({"model": "demo"}, known).body
        assert body["capabilities"] == ["completion", "embedding"]


def test_clients_that_ask_for_a_version_of_ollama_are_served():
    """VS Code demands 0.6.4 and Codex 0.13.4, for the paths that are here."""
    ((version,),) = DIALECT.paths_of(VersionPath).values()
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
