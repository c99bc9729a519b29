"""The wire format on top of an engine: what a stream says is what the whole says, and what an
engine refuses has the client's names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from jaxpage import LLM
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange, PromptRequest, open_chat, open_completion
from tests.support.chat_templates import TEMPLATES
from tests.support.engines import invariants
from tests.support.running import SMALL, demo_with_template
from tests.support.tokenizers import END, write_tokenizer
from tests.support.wire import context
from tests.test_wire_answers import join

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", use_tqdm=False, **SMALL) as built:
        yield built
        invariants(built)


@pytest.fixture(scope="module")
def server(llm):
    return context(max_model_len=256, tokenizer=llm.tokenizer, tool_parser="hermes")


def prompt_of(llm: LLM, prompt_request: PromptRequest) -> Any:
    if not isinstance(prompt_request.prompt, str):
        return list(prompt_request.prompt)
    ids = llm.tokenizer(
        prompt_request.prompt, add_special_tokens=prompt_request.add_special_tokens
    )["input_ids"]
    return {"prompt": prompt_request.prompt, "prompt_token_ids": ids}


def generate(llm: LLM, exchange: Exchange, **held: Any) -> dict[str, Any]:
    """Returns the whole answer.

    `held` changes parameters, as no client can.
    """
    prompts = [prompt_of(llm, prompt_request) for prompt_request in exchange.prompts]
    params = [replace(prompt_request.params, **held) for prompt_request in exchange.prompts]
    return exchange.whole(llm.generate(prompts, params, use_tqdm=False))


def stream_answer(llm: LLM, exchange: Exchange, **held: Any) -> list[dict[str, Any]]:
    """Returns the chunks of the same answer as a stream."""
    (prompt_request,) = exchange.prompts
    deltas = llm.stream(prompt_of(llm, prompt_request), replace(prompt_request.params, **held))
    chunks = [chunk for delta in deltas for chunk in exchange.chunks(0, delta)]
    return chunks + exchange.last_chunks()


def open_exchange(server: ModelContext, fields: dict[str, Any]) -> Exchange:
    opens: Any = open_chat if "messages" in fields else open_completion
    return opens({"model": "demo", "temperature": 0.0, **fields}, server)


STREAMS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 8, "stop": ["lived a", "zz"]},
    {"prompt": "Once upon a time", "temperature": 0.8, "seed": -1, "max_tokens": 8, "n": 2,
     "echo": True, "logprobs": 2},
    {"prompt": [300, 301, 302], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, "n": 2,
     "temperature": 1.0, "seed": 4},
    {"messages": MESSAGES, "max_tokens": 40,
     "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"messages": MESSAGES, "max_tokens": 120, "tools": TOOLS,
     "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"messages": MESSAGES, "max_tokens": 200, "tools": TOOLS, "tool_choice": "required",
     "parallel_tool_calls": False},
]  # fmt: skip


@pytest.mark.parametrize("fields", STREAMS, ids=lambda value: f"{value!r:.60}")
def test_what_is_streamed_is_the_whole(llm, server, fields):
    whole = generate(llm, open_exchange(server, fields))
    stream = open_exchange(
        server, {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = stream_answer(llm, stream)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # what was cached differs
    assert [chunks[-1]["usage"][name] for name in counts] == [
        whole["usage"][name] for name in counts
    ]
    joint = join(chunks)
    for choice in whole["choices"]:
        said = joint[choice["index"]]
        assert said["finish_reason"] == choice["finish_reason"]
        assert said["logprobs"] == choice["logprobs"]
        if "text" in choice:
            assert said["text"] == choice["text"]
        else:
            assert said["delta"]["content"] == (choice["message"]["content"] or "")
            functions = [
                [call["function"] for call in calls.get("tool_calls", [])]
                for calls in (said["delta"], choice["message"])
            ]
            assert functions[0] == functions[1]


def test_what_a_grammar_makes_the_model_write(llm, server):
    formatted, named, required = [
        generate(llm, open_exchange(server, fields))["choices"][0] for fields in STREAMS[-3:]
    ]
    jsonschema.validate(json.loads(formatted["message"]["content"]), SCHEMA)
    (call,) = named["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert (call["function"]["name"], named["finish_reason"]) == ("f", "stop")
    (call,) = required["message"]["tool_calls"]
    assert call["function"]["name"] in ("f", "g") and required["finish_reason"] == "tool_calls"


HARMONY = (
    "<|return|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Yields the packaged model with harmony's marks as special tokens, of which two end a text."""
    directory = Path(demo_with_template(tmp_path_factory.mktemp("models") / "demo", ""))
    write_tokenizer(directory, HARMONY, TEMPLATES["channels"])
    call_id = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|call|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, call_id]}))
    with LLM(str(directory), use_tqdm=False, **SMALL) as built:
        yield built
        invariants(built)


def of_gpt_oss(llm: LLM, fields: dict[str, Any], **parsers: str) -> Exchange:
    read = {"tool_parser": "auto", "reasoning_parser": "auto", **parsers}
    requested = {"messages": MESSAGES, "tools": TOOLS[:1], "max_tokens": 200, **fields}
    return open_exchange(context(tokenizer=llm.tokenizer, **read), requested)


def test_marks_that_are_special_tokens_are_read(gpt_oss):
    """Decoding leaves special tokens out otherwise. A grammar holds the model to these tokens."""
    text = (
        "<|channel|>analysis<|message|>Is <it> {so}?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": true}'
    )
    token_ids = gpt_oss.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = " ".join(f"<[{token_id}]>" for token_id in token_ids)
    held = {"structured_outputs": {"grammar": f"start: {tokens}"}}
    (choice,) = generate(gpt_oss, of_gpt_oss(gpt_oss, {}), **held)["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Is <it> {so}?", "I look.")
    ((call,), reason) = message["tool_calls"], choice["finish_reason"]
    assert (call["function"], reason) == ({"name": "f", "arguments": '{"a": true}'}, "tool_calls")
    said = join(stream_answer(gpt_oss, of_gpt_oss(gpt_oss, {"stream": True}), **held))[0]
    for name in ("reasoning_content", "content"):
        assert said["delta"][name] == message[name]
    assert [each["function"] for each in said["delta"]["tool_calls"]] == [call["function"]]
    plain = of_gpt_oss(gpt_oss, {"tools": []}, tool_parser="none", reasoning_parser="none")
    bare = generate(gpt_oss, plain, **held)["choices"][0]["message"]["content"]
    assert bare.startswith("analysisIs <it>") and not any(mark in bare for mark in HARMONY)


@pytest.mark.parametrize("reasoning_parser", ["auto", "none"])
def test_a_required_call_may_end_with_a_token_that_ends_the_text(gpt_oss, reasoning_parser):
    """`<|call|>` of gpt-oss does so, which a grammar can therefore not demand."""
    call_on = gpt_oss.tokenizer(" to", add_special_tokens=False)["input_ids"]
    fields = {"tool_choice": "required", "logit_bias": {str(each): 100 for each in call_on}}
    exchange = of_gpt_oss(gpt_oss, fields, reasoning_parser=reasoning_parser)
    (choice,) = generate(gpt_oss, exchange)["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_request_that_leaves_no_token_is_the_clients_fault(llm, server):
    with pytest.raises(ApiError, match="leave no token") as caught:
        generate(
            llm,
            open_exchange(
                server,
                {"prompt": "x", "allowed_token_ids": [0], "structured_outputs": {"regex": "a+"}},
            ),
        )
    assert caught.value.status == 400
