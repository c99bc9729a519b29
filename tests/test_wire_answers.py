"""Answers: as the official client reads them, and a stream put together again is the whole."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jaxpage.engine import StreamDetokenizer, token_bytes
from jaxpage.outputs import Logprob, RequestOutput
from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange, open_chat, open_completion
from jaxpage.serving.wire.logprobs import TextOffsets, TokenTexts, completion_logprobs
from jaxpage.step.strategy import NO_TOKEN_LEFT
from tests.support.chat_templates import TEMPLATES
from tests.support.sweeps import examples
from tests.support.wire import Scripted, context, deltas, output, tokenizer, with_template

USER = {"role": "user", "content": "Hello"}
PROMPT = "Once upon a time"


def completion(**fields: Any) -> Exchange:
    return open_completion({"model": "demo", "prompt": PROMPT, **fields}, context())


def chat(settings: dict[str, Any] | None = None, **fields: Any) -> Exchange:
    return open_chat({"model": "demo", "messages": [USER], **fields}, context(**(settings or {})))


def read(kind: Any, response: dict[str, Any]) -> Any:
    """Reads it strictly as the client's own types have it, after a way through JSON that knows no
    infinity.
    """
    sent = json.loads(json.dumps(response, allow_nan=False))
    # what OpenAI sends and its own types leave out: no number for the first token of an echo
    if kind is Completion:
        checked = copy.deepcopy(sent)
        for choice in checked["choices"]:
            if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"]["token_logprobs"][0] = 0.0
                if choice["logprobs"]["top_logprobs"]:
                    choice["logprobs"]["top_logprobs"][0] = {}
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in chunks
        return kind.model_validate_json(json.dumps(checked), strict=True)
    return kind.model_validate_json(json.dumps(sent), strict=True)


def stream_of_chat(
    exchange: Exchange, outputs: Sequence[RequestOutput], scripts: Sequence[Sequence[Scripted]]
) -> list[dict[str, Any]]:
    """Returns all chunks.

    The prompt_requests take turns, as in an engine.
    """
    running = [deltas(whole, script) for whole, script in zip(outputs, scripts, strict=True)]
    chunks = []
    while running:
        for index, each in enumerate(running):
            if each is not None and (delta := next(each, None)) is not None:
                chunks += exchange.chunks(index, delta)
            else:
                running[index] = None  # type: ignore[call-overload]
        if all(each is None for each in running):
            break
    return chunks + exchange.last_chunks()


def join(chunks: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the choices that the chunks of a stream say, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice_so_far = choices.setdefault(
                choice["index"], {"delta": {}, "text": "", "logprobs": None, "token_ids": []}
            )
            assert choice_so_far.get("finish_reason") is None, (
                "nothing comes after the end of a choice"
            )
            choice_so_far["text"] += choice.get("text", "")
            choice_so_far["token_ids"] += choice.get("token_ids", [])
            merge(choice_so_far["delta"], choice.get("delta", {}))
            if choice["logprobs"] is not None:
                choice_so_far["logprobs"] = choice_so_far["logprobs"] or {}
                for name, values in choice["logprobs"].items():
                    choice_so_far["logprobs"][name] = (
                        None
                        if values is None
                        else (choice_so_far["logprobs"].get(name) or []) + values
                    )
            choice_so_far |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    return choices


def merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Joins chunks as clients do: texts are joined, calls by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append(copy.deepcopy(call))
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        elif name == "role":
            assert "role" not in message
            message[name] = value
        else:
            message[name] = message.get(name, "") + value


TEXTS = [" there", " was", "", " é", "\n", "."]
COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("ids", {"prompt": [5, 6, 7]}),
    ("several prompts", {"prompt": [PROMPT, "The"], "n": 2}),
    ("logprobs", {"logprobs": 3}),
    ("logprobs of the token alone", {"logprobs": 0}),
    ("echo", {"echo": True}),
    ("echo of ids", {"echo": True, "prompt": [[5, 6, 7], [8]]}),
    ("echo with logprobs", {"echo": True, "logprobs": 2, "n": 2}),
    ("token ids", {"return_token_ids": True}),
    ("the prompt alone", {"echo": True, "logprobs": 1, "max_tokens": 0}),
]


@pytest.mark.parametrize(("name", "fields"), COMPLETIONS, ids=[name for name, _ in COMPLETIONS])
def test_a_streamed_completion_is_the_whole(name, fields):
    num_choices = fields.get("n", 1)
    exchange = completion(**fields)
    scripts = [
        [
            Scripted(TEXTS[: 6 - index], "length" if index else "stop", None if index else "x")
            for index in range(num_choices)
        ]
        for _ in exchange.prompts
    ]
    outputs = [output(exchange, script, prompt=prompt) for prompt, script in enumerate(scripts)]
    whole = exchange.whole(outputs)
    read(Completion, whole)
    stream = completion(**fields, stream=True, stream_options={"include_usage": True})
    chunks = stream_of_chat(stream, outputs, scripts)
    for chunk in chunks:
        read(Completion, chunk)
    assert {chunk["id"] for chunk in chunks} == {stream.id} and stream.id.startswith("cmpl-")
    assert len(whole["choices"]) == num_choices * len(exchange.prompts)
    joint = join(chunks)
    for choice in whole["choices"]:
        assert {**joint[choice["index"]], "index": choice["index"], "delta": None}.items() >= {
            "text": choice["text"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "token_ids": choice.get("token_ids", []),
        }.items()
    if not {"logprobs", "return_token_ids"} & fields.keys():
        streamed_choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all(choice["text"] or choice["finish_reason"] for choice in streamed_choices)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_what_a_completion_says():
    exchange = completion(prompt=["ab", "c"], n=2, echo=True)
    scripts = [
        [Scripted(["x", "y"]), Scripted(["z"], "length")],
        [Scripted(["u"], stop_reason="!"), Scripted(["v"])],
    ]
    whole = read(
        Completion,
        exchange.whole(
            [output(exchange, script, prompt=prompt) for prompt, script in enumerate(scripts)]
        ),
    )
    assert [choice.text for choice in whole.choices] == ["abxy", "abz", "cu", "cv"]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length", "stop", "stop"]
    assert [choice.stop_reason for choice in whole.choices] == [None, None, "!", None]
    num_prompt = len(tokenizer()("ab")["input_ids"]) + len(tokenizer()("c")["input_ids"])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, 5)
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    assert (whole.object, whole.model, whole.system_fingerprint) == (
        "text_completion",
        "demo",
        "fp_0",
    )


def test_the_columns_of_an_echo_with_log_probabilities():
    """lm-eval's local-completions reads a number for every token but the first, and offsets into
    the text.
    """
    exchange = completion(prompt=[300, 301, 302], echo=True, logprobs=2)
    script = [Scripted([tokenizer().decode([400])], "length", token_ids=[400])]
    choice = exchange.whole([output(exchange, script)])["choices"][0]
    columns = choice["logprobs"]
    assert columns["tokens"] == [
        tokenizer().decode([token_id]) for token_id in (300, 301, 302, 400)
    ]
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1:] == [-3.301, -3.302, -3.4]
    for token, offset, top in zip(
        columns["tokens"], columns["text_offset"], columns["top_logprobs"], strict=True
    ):
        assert choice["text"][offset:].startswith(token)
        assert top is None or (len(top) == 3 and token in top)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"skip_special_tokens": False},
        {"echo": True},
        {"echo": True, "prompt": "<|endoftext|>ab"},
    ],
)
def test_a_special_token_that_is_not_shown_takes_no_place(fields):
    """It may be among the generated ones, or in front of an echoed prompt, where the tokenizer puts
    one. A user may write one that is shown.
    """
    special, letter = (
        tokenizer().convert_tokens_to_ids("<|endoftext|>"),
        tokenizer()("x")["input_ids"][-1],
    )
    requested = {"prompt": "ab", "logprobs": 0, **fields}
    exchange = completion(**requested)
    shown = (
        [letter, special, letter, letter]
        if fields.get("skip_special_tokens") is False
        else [letter] * 3
    )
    result = output(
        exchange,
        [Scripted([tokenizer().decode(shown)], token_ids=[letter, special, letter, letter])],
    )
    if fields.get("echo") and not requested["prompt"].startswith("<"):
        result.prompt_token_ids.insert(0, special)
        first = result.prompt_token_ids[1]
        result.prompt_logprobs.insert(1, {first: Logprob(-1.0, 1, tokenizer().decode([first]))})
    choice = exchange.whole([result])["choices"][0]
    columns = choice["logprobs"]
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert token == "<|endoftext|>" or choice["text"][offset:].startswith(token)
    assert columns["text_offset"][-1] == len(choice["text"]) - len(columns["tokens"][-1])


def test_nothing_but_the_prompt():
    exchange = completion(prompt=[300, 301], echo=True, logprobs=1, max_tokens=0)
    assert exchange.prompts[0].params.max_tokens == 1
    whole = exchange.whole([output(exchange, [Scripted(["x"])])])
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer().decode([300, 301]), "length")
    assert len(choice["logprobs"]["tokens"]) == 2
    assert whole["usage"]["completion_tokens"] == 0


def test_the_probabilities_of_a_prompt():
    exchange = completion(prompt=[300, 301, 302], prompt_logprobs=1)
    choice = exchange.whole([output(exchange, [Scripted(["x"])])])["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["301"] == {
        "logprob": -3.301,
        "rank": 3,
        "decoded_token": tokenizer().decode([301]),
    }
    assert len(choice["prompt_logprobs"][2]) == 2 and choice["logprobs"] is None
    chatted = chat(prompt_logprobs=0)
    assert len(chatted.whole([output(chatted, [Scripted(["x"])])])["prompt_logprobs"][1]) == 1


def test_infinity_has_a_number():
    exchange = completion(logprobs=1)
    whole = output(exchange, [Scripted(["x"])])
    ((token_id, entry),) = list(whole.outputs[0].logprobs[0].items())[:1]
    whole.outputs[0].logprobs[0][token_id] = type(entry)(float("-inf"), 3, "x")
    columns = read(Completion, exchange.whole([whole])).choices[0].logprobs
    assert columns.token_logprobs == [-9999.0]


CHATS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("n", {"n": 3}),
    ("logprobs", {"logprobs": True}),
    ("top logprobs", {"logprobs": True, "top_logprobs": 4, "n": 2}),
    ("token ids", {"return_token_ids": True}),
]


@pytest.mark.parametrize(("name", "fields"), CHATS, ids=[name for name, _ in CHATS])
def test_a_streamed_chat_is_the_whole(name, fields):
    scripts = [
        [
            Scripted(TEXTS[: 6 - index], "length" if index else "stop")
            for index in range(fields.get("n", 1))
        ]
    ]
    exchange = chat(**fields)
    outputs = [output(exchange, scripts[0])]
    whole = exchange.whole(outputs)
    read(ChatCompletion, whole)
    stream = chat(
        **fields,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    chunks = stream_of_chat(stream, outputs, scripts)
    for chunk in chunks:
        read(ChatCompletionChunk, chunk)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    joint = join(chunks)
    for choice in whole["choices"]:
        said = joint[choice["index"]]
        assert said["delta"] == {"role": "assistant", "content": choice["message"]["content"]}
        assert said["finish_reason"] == choice["finish_reason"]
        assert (
            said["logprobs"] is None or said["logprobs"]["content"] == choice["logprobs"]["content"]
        )
    assert chunks[-1]["usage"] == whole["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_the_rows_of_a_chats_log_probabilities():
    exchange = chat(logprobs=True, top_logprobs=2)
    whole = read(
        ChatCompletion,
        exchange.whole([output(exchange, [Scripted(["a", "b"], token_ids=[300, 5])])]),
    )
    first = whole.choices[0].logprobs.content[0]
    assert (first.token, first.logprob) == (tokenizer().decode([300]), -3.3)
    assert bytes(first.bytes).decode() == first.token
    assert [top.logprob for top in first.top_logprobs] == [-1.0, -2.0]
    pieces = [token_id for token_id in range(300) if "\ufffd" in tokenizer().decode([token_id])]
    character = tokenizer()("\N{PILE OF POO}", add_special_tokens=False)["input_ids"]
    assert len(character) == 4 and set(character) <= set(pieces)
    broken = exchange.whole([output(exchange, [Scripted(["a"] * 4, token_ids=character)])])
    text_bytes = [
        byte for row in broken["choices"][0]["logprobs"]["content"] for byte in row["bytes"]
    ]
    assert bytes(text_bytes).decode() == "\N{PILE OF POO}"


HERMES = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": "]"}}\n</tool_call>'
NAMED_F = {"type": "function", "function": {"name": "f"}}
TOOL_CHATS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("hermes", {"tool_parser": "hermes"}, {"tools": TOOLS}, HERMES),
    ("one at most", {"tool_parser": "hermes"}, {"tools": TOOLS, "parallel_tool_calls": False},
     HERMES),
    ("llama", {"tool_parser": "llama3_json"}, {"tools": TOOLS},
     '<|python_tag|>{"name": "f", "parameters": {"a": "{"}}; {"name": "g"}'),
    ("required", {"tool_parser": "hermes"}, {"tools": TOOLS, "tool_choice": "required"}, CALL_F),
    ("named in its form", {"tool_parser": "hermes"}, {"tools": TOOLS, "tool_choice": NAMED_F},
     CALL_F),
    ("derived", {"tool_parser": "auto", "reasoning_parser": "auto"}, {"tools": TOOLS},
     'f({"a": "é("})'),
    ("named", {}, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
     '{"a": "b"}'),
    ("none", {}, {"tools": TOOLS, "tool_choice": "none"}, HERMES),
    ("thinking", {"reasoning_parser": "think", "tool_parser": "hermes"}, {"tools": TOOLS},
     "<think>\nHm <tool_call>.</think>" + HERMES),
    ("thinking on", {"reasoning_parser": "think"},
     {"chat_template_kwargs": {"enable_thinking": True}}, "Hm.</think>\n\nYes <think>"),
    ("json", {"reasoning_parser": "think"}, {"response_format": {"type": "json_object"}}, "{}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "fields", "text"), TOOL_CHATS, ids=[name for name, *_ in TOOL_CHATS]
)
@examples(8)
@given(data=st.data())
def test_a_stream_with_tools_is_the_whole(name, settings, fields, text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=30)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    exchange, script = chat(settings, **fields), [Scripted(pieces)]
    whole = exchange.whole([output(exchange, script)])
    read(ChatCompletion, whole)
    chunks = stream_of_chat(
        chat(settings, **fields, stream=True), [output(exchange, script)], [script]
    )
    for chunk in chunks:
        read(ChatCompletionChunk, chunk)
    (choice,), joint = whole["choices"], join(chunks)[0]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    assert without_ids(joint["delta"]) == without_ids({"content": "", **message})
    assert joint["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("name", "settings", "fields", "text"), TOOL_CHATS, ids=[name for name, *_ in TOOL_CHATS]
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_official_client_sees_each_call_end(name, settings, fields, text, is_cut):
    """Its stream tells of a call that is complete when another begins, or when the answer ends in a
    chunk of its own.
    """
    exchange, script = chat(settings, **fields), [Scripted([*text] if is_cut else [text])]
    message = exchange.whole([output(exchange, script)])["choices"][0]["message"]
    state = ChatCompletionStreamState(input_tools=fields.get("tools", []))
    chunks = stream_of_chat(
        chat(settings, **fields, stream=True), [output(exchange, script)], [script]
    )
    events = [
        event for chunk in chunks for event in state.handle_chunk(read(ChatCompletionChunk, chunk))
    ]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    calls = message.get("tool_calls", [])
    assert [(event.name, event.arguments) for event in done] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    contents = [event.content for event in events if event.type == "content.done"]
    assert contents[-1:] == [message["content"] or ""] or (calls and not message["content"])


THOUGHT_IN = {
    # For each template what comes before the thought, and what comes after it.
    "object in tags": ("<think>\n", "\n</think>\n\n"),
    "channels": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
WORDS = st.sampled_from(
    ["a", "We ", "think", ". ", "\n", "é", "\U0001f600", "</", "<|", " the fox"]
)


@functools.cache
def thinking(template: str) -> Any:
    served = with_template(TEMPLATES[template])
    return context(tokenizer=served, tool_parser="auto", reasoning_parser="auto")


def tokens_of(text: str, cuts: Sequence[int]) -> list[int]:
    """Returns the tokens of a text that a model writes: not those that a tokenizer makes of the
    whole.
    """
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:stop] for start, stop in itertools.pairwise(places)]
    return [token for part in parts for token in tokenizer()(part)["input_ids"]]


def begins_of(token_ids: Sequence[int]) -> list[int]:
    """Returns where each token begins, from the bytes of each: at the character that has its first
    byte.
    """
    pieces = [token_bytes(tokenizer(), token_id) or b"" for token_id in token_ids]
    bytes_before = itertools.accumulate((len(piece) for piece in pieces), initial=0)
    written = b"".join(pieces)
    return [len(written[:place].decode(errors="ignore")) for place in bytes_before][:-1]


@examples(20)
@given(
    template=st.sampled_from(sorted(THOUGHT_IN)),
    words=st.lists(WORDS, max_size=12),
    said=st.lists(WORDS, max_size=4).map("".join),
    is_cut=st.booleans(),
    tail=st.sampled_from(["", "<", "</thi", "<|en"]),
    cuts=st.lists(st.integers(0, 80), max_size=12),
    num_choices=st.integers(1, 2),
)
def test_tokens_of_reasoning_are_those_that_begin_between_its_markers(
    template, words, said, is_cut, tail, cuts, num_choices
):
    """They are so whole and streamed, whatever the tokens are, also in the events of Responses."""
    before, after = THOUGHT_IN[template]
    thought = "".join(words)
    text = f"{before}{thought}" + (tail if is_cut else f"{after}{said}")
    token_ids = tokens_of(text, cuts)
    body = {"model": "demo", "messages": [USER], "n": num_choices}
    whole = open_chat(body, thinking(template))
    # A text is what its tokens say, also where a character has several.
    stream = StreamDetokenizer(tokenizer(), (), skip_special_tokens=False)
    texts = [stream.push(token_id) for token_id in token_ids]
    texts[-1] += stream.flush()
    assert "".join(texts) == text
    scripts = num_choices * [Scripted(texts, token_ids=token_ids)]
    response = whole.whole([output(whole, scripts)])
    message = response["choices"][0]["message"]
    reasoning = message.get("reasoning_content", "")
    begin = len(before.rstrip())
    end = len(text) if is_cut else text.index(after.split("|>")[0].strip(), begin)
    assert text[begin:end].strip() == reasoning.strip()
    inside = range(begin, end)
    expected = num_choices * sum(place in inside for place in begins_of(token_ids))
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    read(ChatCompletion, response)
    options = {"include_usage": True, "continuous_usage_stats": True}
    exchange = open_chat({**body, "stream": True, "stream_options": options}, thinking(template))
    made = output(exchange, scripts)
    chunks = [c for delta in deltas(made, scripts) for c in exchange.chunks(0, delta)]
    chunks += exchange.last_chunks()
    numbers = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert numbers == sorted(numbers) and numbers[-1] == expected
    assert chunks[-1]["usage"] == response["usage"]
    if num_choices == 1:
        request = {"model": "demo", "input": "Hello"}
        answer = open_response(request, thinking(template))
        usage = answer.whole([output(answer, scripts)])["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": expected}
        events = open_response({**request, "stream": True}, thinking(template))
        for delta in deltas(output(events, scripts), scripts):
            events.chunks(0, delta)
        assert events.last_chunks()[-1]["response"]["usage"] == usage


@pytest.mark.parametrize(
    ("name", "settings", "fields", "text"), TOOL_CHATS, ids=[name for name, *_ in TOOL_CHATS]
)
def test_an_answer_can_be_sent_back_as_it_came(name, settings, fields, text):
    """OpenAI's client gives it as JSON and joins a stream, where no unknown field passes."""
    exchange, script = chat(settings, **fields), [Scripted([text[:9], text[9:]])]
    whole = exchange.whole([output(exchange, script)])
    state = ChatCompletionStreamState()
    stream = stream_of_chat(
        chat(settings, **fields, stream=True), [output(exchange, script)], [script]
    )
    for chunk in stream:
        state.handle_chunk(read(ChatCompletionChunk, chunk))
    parsed = state.get_final_completion().choices[0].message.model_dump()
    of_client = read(ChatCompletion, whole).choices[0].message.model_dump()
    raw = whole["choices"][0]["message"]
    by_router = {
        "reasoning" if name == "reasoning_content" else name: value for name, value in raw.items()
    }
    delta = join(stream)[0]["delta"]  # with the indices of calls
    prompts = set()
    for message in (raw, of_client, {**of_client, "annotations": []}, parsed, delta, by_router):
        exchange = chat(
            {**settings, "strict_requests": True, "tokenizer": RECALLING}, messages=[USER, message]
        )
        assert exchange.ignored_fields == ()
        prompts.add(exchange.prompts[0].prompt)
    (prompt,) = {re.sub(r"call_\w+", "call", str(prompt)) for prompt in prompts}
    assert ("Hm" in prompt) == ("thinking" in name)


RECALLING = with_template(
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)


def test_what_comes_back_with_an_answer_and_is_not_of_it_is_reported():
    message = {
        "role": "assistant",
        "content": "x",
        "annotations": [{"type": "url_citation"}],
        "mood": "good",
    }
    assert chat(messages=[USER, message]).ignored_fields == (
        "messages[1].annotations",
        "messages[1].mood",
    )
    with pytest.raises(ApiError, match=r"messages\[1\].annotations"):
        chat({"strict_requests": True}, messages=[USER, message])


@pytest.mark.parametrize(("opens", "num_chunks"), [(completion, 2), (chat, 4)])
def test_usage_in_every_chunk_needs_no_chunk_of_its_own(opens, num_chunks):
    stream, script = (
        opens(stream=True, stream_options={"continuous_usage_stats": True}),
        [Scripted(["a", "b"])],
    )
    chunks = stream_of_chat(stream, [output(stream, script)], [script])
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * num_chunks
    assert (
        [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2][-num_chunks:]
        if opens is chat
        else [1, 2]
    )


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize(
    ("name", "reason", "content", "calls"),
    [
        ("hermes", "tool_calls", "Well.", [("f", {"a": "é<"}), ("g", {})]),
        ("one at most", "tool_calls", "Well.", [("f", {"a": "é<"})]),
        ("llama", "tool_calls", None, [("f", {"a": "{"}), ("g", {})]),
        ("required", "tool_calls", None, [("f", {"a": "]"})]),
        ("named", "stop", None, [("f", {"a": "b"})]),
        ("named in its form", "stop", None, [("f", {"a": "]"})]),
        ("derived", "tool_calls", None, [("f", {"a": "é("})]),
        ("none", "stop", HERMES, []),
        ("thinking", "tool_calls", "Well.", [("f", {"a": "é<"}), ("g", {})]),
        ("thinking on", "stop", "\n\nYes <think>", []),
        ("json", "stop", "{}", []),
    ],
)
def test_what_an_answer_with_tools_says(name, reason, content, calls):
    settings, fields, text = next(others for known, *others in TOOL_CHATS if known == name)
    exchange = chat(settings, **fields)
    choice = read(ChatCompletion, exchange.whole([output(exchange, [Scripted([text])])])).choices[0]
    chats = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]
    assert (choice.finish_reason, choice.message.content, chats) == (reason, content, calls)
    reasoning = {"thinking": "\nHm <tool_call>.", "thinking on": "Hm."}.get(name)
    assert getattr(choice.message, "reasoning_content", None) == reasoning
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "status", "message"),
    [
        ("error", None, 500, "The server failed"),
        ("error", "RuntimeError: at x.py, line 3", 500, "The server failed"),
        ("error", "the model's logits are not finite", 500, "The server failed"),
        ("error", NO_TOKEN_LEFT, 400, "leave no token"),
        ("error", "structured_outputs: the grammar is too costly", 400, "too costly"),
        ("abort", None, 503, "was aborted"),
    ],
)
def test_a_failed_generation_is_an_error(reason, stop_reason, status, message):
    script = [Scripted(["a", "b"], reason, stop_reason)]
    for opens in (completion, chat):
        exchange = opens()
        with pytest.raises(ApiError, match=message) as caught:
            exchange.whole([output(exchange, script)])
        assert caught.value.status == status
        stream = opens(stream=True)
        first, last = deltas(output(stream, script), script)
        assert stream.chunks(0, first)
        with pytest.raises(ApiError, match=message):
            stream.chunks(0, last)


def test_a_stream_tells_the_tokens_of_its_prompt_once():
    for opens in (completion, chat):
        stream = opens(stream=True, n=2, return_token_ids=True)
        script = [Scripted(["a", "b"]), Scripted(["c", "d"])]
        expected = output(stream, script)
        chunks = [chunk for delta in deltas(expected, script) for chunk in stream.chunks(0, delta)]
        first_chunks = (
            chunks[:1] if opens is chat else [chunk["choices"][0] for chunk in chunks[:2]]
        )
        assert [each.pop("prompt_token_ids") for each in first_chunks] == [
            expected.prompt_token_ids
        ] * len(first_chunks)
        assert "prompt_token_ids" not in json.dumps(chunks)


def test_a_sequence_that_has_ended_says_nothing_more():
    stream = completion(stream=True, n=2)
    script = [Scripted(["a"]), Scripted(["b", "c", "d"])]
    chunks = [stream.chunks(0, delta) for delta in deltas(output(stream, script), script)]
    assert [
        [choice["index"] for chunk in step for choice in chunk["choices"]] for step in chunks
    ] == [[0, 1], [1], [1]]
    assert not stream.last_chunks()


def test_a_part_of_a_stream_is_one_line_for_everybody():
    """Clients of lines (ollama's, LiteLLM's) end one wherever Unicode does."""
    for text in ("".join(map(chr, range(0x3000))), "a\x85b", "a\u2028b", "a\u2029b"):
        check_lines(text)


def check_lines(text: str) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        part = dialect_of(path).stream.new_frame()({"type": "t", "text": text}).decode()
        ends = [line for line in part.splitlines() if line]
        assert len(ends) == part.strip().count("\n") + 1
        assert json.loads(ends[-1].removeprefix("data: "))["text"] == text


def test_tokens_with_one_text_are_all_reported():
    """Pieces of characters look alike; the likeliest must not hide behind the chosen one."""
    entry = {5: Logprob(-2.0, 2, "\ufffd"), 6: Logprob(-1.0, 1, "\ufffd")}
    entries = completion_logprobs([5], [entry], 2, TextOffsets(None), TokenTexts(None))
    assert entries["top_logprobs"] == [{"\ufffd": -2.0, "token_id:6": -1.0}]
