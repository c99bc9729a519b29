"""The official clients, unchanged: OpenAI's reads what `LLM` generates, and those of other APIs
what a chat or completion says.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import numpy as np
import ollama
import openai
import pytest
from safetensors import safe_open

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.ollama import OLLAMA_VERSION, open_ollama_chat
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.derived_forms import choose_form, derive_form
from jaxpage.serving.wire.exchange import open_chat
from tests.support.running import SMALL, Promises, demo_with_template, metrics, running
from tests.support.wire import CHATML, context, with_template

DEMO = resolve_model("demo")
KEY = "a-key-of-this-test"
SYSTEM, USER = (
    {"role": "system", "content": "Tell it."},
    {"role": "user", "content": "The old house"},
)
MESSAGES: Any = [SYSTEM, USER]
SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
RESPONSE: Any = {
    "model": "demo",
    "instructions": "Tell it.",
    "input": "The old house",
    "temperature": 0,
    "max_output_tokens": 12,
}
MESSAGE: Any = {
    "model": "demo",
    "system": "Tell it.",
    "messages": [USER],
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}
OLLAMA: Any = {"model": "demo", "options": {"temperature": 0, "num_predict": 12}}


PROMPT = "Once upon a time there was a"
LONG: Any = {
    "model": "demo",
    "prompt": PROMPT,
    "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}
GREEDY: Any = {"model": "demo", "temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return demo_with_template(tmp_path_factory.mktemp("models") / "demo", CHATML)


@pytest.fixture(scope="module")
def offline(model):
    """Returns what `LLM` makes of the same requests, before the server is there."""
    with LLM(model, **SMALL, use_tqdm=False) as llm:

        def generate(**params: Any) -> list[Any]:
            return llm.generate(PROMPT, llm.default_sampling_params(**params), use_tqdm=False)[
                0
            ].outputs

        return {
            "greedy": generate(temperature=0.0, max_tokens=12, logprobs=3),
            "seeded": generate(n=3, seed=7, max_tokens=12, temperature=0.9, top_p=0.8),
            "defaults": generate(seed=11),
            "extra": generate(
                seed=3,
                max_tokens=12,
                top_k=5,
                min_p=0.01,
                repetition_penalty=1.3,
                min_tokens=3,
                stop_token_ids=[5],
            ),
            "best": generate(n=1, best_of=3, seed=5, max_tokens=8),
            "beams": llm.generate(PROMPT, BeamSearchParams(3, max_tokens=8, n=2), use_tqdm=False)[
                0
            ].outputs,
            "hidden": {
                pooling: llm.embed(
                    [PROMPT, "The old house"], pooling=pooling, normalize=False, use_tqdm=False
                )
                for pooling in ("last", "mean")
            },
            "chat": llm.chat(
                MESSAGES, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False
            )[0],
        }


@pytest.fixture(scope="module")
def server(model, offline):
    config = ServerConfig(tool_parser="hermes", reasoning_parser="think", max_queued_requests=12)
    with running(config, model=model, api_keys=[KEY]) as running_server:
        yield running_server
        assert running_server.errors == []


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(
        base_url=server.address, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def promises(http):
    return Promises(http)


@pytest.fixture
def open_ai(server, promises):
    with openai.OpenAI(
        base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=60
    ) as http_client:
        yield http_client
    promises.check()


@pytest.fixture
def claude(server, promises):
    with anthropic.Anthropic(
        base_url=server.address, api_key=KEY, max_retries=0, timeout=60
    ) as http_client:
        yield http_client
    promises.check()


@pytest.fixture
def llama(server, promises):
    with ollama.Client(
        server.address, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    ) as http_client:
        yield http_client
    promises.check()


@pytest.fixture(scope="module")
def chat(http):
    """Returns the answer of the chat that the requests of this file are translated into."""

    def request(**fields: Any) -> Any:
        body = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return request


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


# What comes to the engine: the prompt and the parameters of a chat. The template shows reasoning,
# too.

THINKING = with_template(
    "{% for message in messages %}<{{ message.role }}>{% if message.reasoning_content %}({{ message.reasoning_content }})"
    "{% endif %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = [*MESSAGES, {"role": "assistant", "content": "It was", "reasoning_content": "Hm"}]
MORE = {"role": "user", "content": "Go on"}
REPORTED = {"role": "assistant", "content": "It was"}


@pytest.mark.parametrize(
    ("opens", "body", "expected"),
    [
        (
            open_response,
            {
                "instructions": "Tell it.",
                "input": [
                    USER,
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "Hm"}],
                    },
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [
                            {
                                "type": "output_text",
                                "text": "It was",
                                "annotations": [],
                                "logprobs": [],
                            }
                        ],
                    },
                    {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
                ],
                "top_p": 0.5,
                "max_output_tokens": 7,
                "user": "me",
                "text": {"format": {"type": "json_schema", "name": "house", "schema": SCHEMA}},
            },
            {
                "messages": [*SAID, MORE],
                **{"top_p": 0.5, "max_tokens": 7, "user": "me"},
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "house", "schema": SCHEMA},
                },
            },
        ),
        (
            open_message,
            {
                "system": [
                    {"type": "text", "text": "Tell it.", "cache_control": {"type": "ephemeral"}}
                ],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm", "signature": ""},
                            {"type": "text", "text": "It was"},
                        ],
                    },
                ],
                "top_k": 3,
                "top_p": 0.5,
                "max_tokens": 7,
                "stop_sequences": ["a", "b"],
            },
            {
                "messages": SAID,
                "continue_final_message": True,
                **{"top_k": 3, "top_p": 0.5, "max_tokens": 7, "stop": ["a", "b"]},
            },
        ),
        (
            open_ollama_chat,
            {
                "messages": [*MESSAGES, {**REPORTED, "thinking": "Hm"}, MORE],
                "stream": False,
                "think": False,
                "keep_alive": "5m",
                "options": {
                    **{
                        "temperature": 0.5,
                        "top_k": 3,
                        "top_p": 0.5,
                        "min_p": 0.1,
                        "seed": 7,
                        "stop": ["a"],
                    },
                    **{
                        "num_predict": 7,
                        "repeat_penalty": 1.5,
                        "presence_penalty": 0.5,
                        "frequency_penalty": 0.25,
                    },
                    **{"num_ctx": 512, "mirostat": 0, "repeat_last_n": -1, "num_gpu": None},
                },
            },
            {
                "messages": [*SAID, MORE],
                **{
                    "temperature": 0.5,
                    "top_k": 3,
                    "top_p": 0.5,
                    "min_p": 0.1,
                    "seed": 7,
                    "stop": ["a"],
                },
                **{
                    "max_tokens": 7,
                    "repetition_penalty": 1.5,
                    "presence_penalty": 0.5,
                    "frequency_penalty": 0.25,
                },
            },
        ),
    ],
    ids=["responses", "messages", "ollama"],
)
def test_a_translated_request_is_that_of_the_chat(opens, body, expected):
    known = context(tokenizer=THINKING, strict_requests=True)
    text, chat = (
        open_({"model": "demo", **fields}, known)
        for open_, fields in ((opens, body), (open_chat, expected))
    )
    assert text.prompts == chat.prompts and "(Hm)" in chat.prompts[0].prompt
    assert (text.stream, text.ignored_fields) == (False, ())


FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "parts")
READS = "{% if m.FIELD %}({{ m.FIELD }}){% endif %}{{ m.content }}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}({{ p.thinking }}){% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
# As gpt-oss, which takes either before a call.
CALLS = (
    "{% if m.tool_calls %}{% if m.content and m.FIELD %}{{ raise_exception('both') }}{% endif %}"
    "<{{ m.content or m.FIELD }}>{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}{% else %}SAID{% endif %}"
)
EACH = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}SAID{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def reads_reasoning(field: str, *, refuses: bool = False) -> Any:
    said = PARTS if field == "parts" else READS
    said = CALLS.replace("SAID", said) if refuses else said
    loaded = with_template(EACH.replace("SAID", said).replace("FIELD", field))
    return context(
        tokenizer=loaded, chat_format=choose_form(derive_form(loaded).form, "none", "none")
    )


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("dialect", ["chat", "vllm", "responses", "messages", "ollama"])
def test_reasoning_that_is_sent_back_reaches_the_template(field, dialect):
    """The template may read it by any name, and so may the dialect."""
    thinking = {"type": "thinking", "thinking": "Hm", "signature": ""}
    said = {
        "chat": {**REPORTED, "reasoning_content": "Hm"},
        "vllm": {**REPORTED, "reasoning": "Hm"},
        "messages": {**REPORTED, "content": [thinking, {"type": "text", "text": "It was"}]},
        "ollama": {**REPORTED, "thinking": "Hm"},
    }
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        name: (open_, {"messages": [USER, said.get(name), MORE], **more})
        for name, open_, more in (
            ("chat", open_chat, {}),
            ("vllm", open_chat, {}),
            ("messages", open_message, {"max_tokens": 12}),
            ("ollama", open_ollama_chat, {}),
        )
    }
    thought = {"type": "reasoning_text", "text": "Hm"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]}
    bodies["responses"] = (open_response, {"input": [USER, reasoning, REPORTED, MORE]})
    opens, body = bodies[dialect]
    (requested,) = opens({"model": "demo", **body}, reads_reasoning(field)).prompts
    assert (
        requested.prompt == "<|user|>The old house<|assistant|>(Hm)It was<|user|>Go on<|assistant|>"
    )


@pytest.mark.parametrize("field", FIELDS[:-1])
@pytest.mark.parametrize("content", ["I look.", "", None, " "])
def test_a_preamble_before_a_call_goes_with_the_reasoning_where_only_one_is_taken(field, content):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": content, "reasoning": "Hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "3"}
    body = {"model": "demo", "messages": [USER, said, result]}
    (requested,) = open_chat(body, reads_reasoning(field, refuses=True)).prompts
    thought = "Hm\n\nI look." if content == "I look." else "Hm"
    assert requested.prompt.endswith(
        f"<|assistant|><{thought}><call>f{{}}</call><|tool|>3<|assistant|>"
    )


# Responses


def test_a_response_is_the_chat(open_ai, chat):
    expected = chat()
    answer = open_ai.responses.create(**RESPONSE)
    assert answer.output_text == text_of(expected) and answer.id.startswith("resp_")
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert [answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens] == [
        expected["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    ]
    with open_ai.responses.stream(**RESPONSE) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for name in names if name != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == answer.output_text
    )
    last = events[-1].response
    assert (
        last.output_text == answer.output_text
        and last.usage.output_tokens == answer.usage.output_tokens
    )


# Messages


def test_a_message_is_the_chat(claude, chat):
    expected = chat()
    answer: Any = claude.messages.create(**MESSAGE)
    assert [(block.type, block.text) for block in answer.content] == [("text", text_of(expected))]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]
    with claude.messages.stream(**MESSAGE) as stream:
        assert "".join(stream.text_stream) == text_of(expected)
        whole = stream.get_final_message()
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == usage.output_tokens
    names = [event.type for event in claude.messages.create(**MESSAGE, stream=True)]
    assert [name for name in names if name != "content_block_delta"] == [
        *(
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        )
    ]


def test_a_message_stops_and_goes_on(claude, chat):
    """A stop sequence is told; a last message of the assistant is gone on with."""
    whole = text_of(chat())
    stop = whole[5:9]
    requested: Any = {
        **MESSAGE,
        "stop_sequences": ["never said", stop],
        "system": [{"type": "text", "text": "Tell it."}],
    }
    cut: Any = claude.messages.create(**requested)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]
    with claude.messages.stream(**requested) as stream:
        streamed: Any = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It was"}]}
    more: Any = claude.messages.create(**{**MESSAGE, "messages": [USER, begun]})
    expected = chat(
        messages=[*MESSAGES, {"role": "assistant", "content": "It was"}],
        continue_final_message=True,
    )
    assert more.content[0].text == text_of(expected)


def test_a_key_may_be_in_the_header_of_messages(server, promises):
    """Older clients send it there. A key in `Authorization` goes before it."""
    body = {name: value for name, value in MESSAGE.items() if name != "extra_body"}
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": KEY, "authorization": "Bearer wrong"}, 401),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = httpx.post(f"{server.address}{path}", json=body, headers=headers, timeout=60)
            assert answer.status_code == status


def test_every_error_below_messages_is_anthropics(http):
    body = {name: value for name, value in MESSAGE.items() if name != "extra_body"}
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
    }
    wrong: list[tuple[str, str, int, dict[str, Any]]] = [
        ("GET", "/v1/messages", 405, {}),
        ("DELETE", "/v1/messages/count_tokens", 405, {}),
        ("POST", "/v1/messages/batches", 404, {"json": body}),
        ("GET", "/v1/messages/batches/b/results", 404, {}),
        ("POST", "/v1/messages?beta=true", 400, {"content": "{"}),
        ("POST", "/v1/messages/count_tokens?beta=true", 400, {"content": ""}),
        ("POST", "/v1/messages", 400, {"json": {**body, "tools": [{"name": "f"}]}}),
        ("POST", "/v1/messages", 404, {"json": {**body, "model": "claude"}}),
        ("POST", "/v1/messages", 413, {"content": b" " * (ServerConfig().max_body_bytes + 1)}),
        ("POST", "/v1/messages", 401, {"json": body, "headers": {"Authorization": "Bearer x"}}),
    ]
    for method, path, status, fields in wrong:
        headers = {"content-type": "application/json", **fields.pop("headers", {})}
        answer = http.request(method, path, headers=headers, **fields)
        assert answer.status_code == status, (path, answer.text)
        message = answer.json()
        assert message["type"] == "error" and message["error"]["type"] == kinds[status], path
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


# Ollama


def test_ollama_chats(llama, chat):
    expected = chat()
    answer = llama.chat(messages=MESSAGES, **OLLAMA)
    assert answer.message.role == "assistant" and answer.message.content == text_of(expected)
    assert (answer.done, answer.done_reason) == (True, "length")
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert answer.eval_count == expected["usage"]["completion_tokens"]
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    *parts, last = llama.chat(messages=MESSAGES, stream=True, **OLLAMA)
    assert len(parts) > 1 and not any(part.done for part in parts)
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", answer.eval_count)


def test_ollama_generates(llama, http, chat):
    """It generates as in a chat, or from the prompt as it is."""
    requested: Any = {**OLLAMA, "prompt": "The old house"}
    assert llama.generate(**requested, system="Tell it.").response == text_of(chat())
    completion = {"model": "demo", "prompt": "The old house", "temperature": 0, "max_tokens": 12}
    expected = http.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    assert llama.generate(**requested, raw=True).response == expected
    assert (
        "".join(part.response or "" for part in llama.generate(**requested, raw=True, stream=True))
        == expected
    )
    formatted = llama.generate(
        **{**requested, "options": {"temperature": 0, "num_predict": 64}}, format=SCHEMA
    )
    jsonschema.validate(json.loads(formatted.response or ""), SCHEMA)
    assert [model.model for model in llama.list().models] == ["demo"]


def test_ollama_clients_find_the_model(llama, http, chat):
    """They ask at their start, with the name that they give a model without a tag."""
    length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert [(model.model, model.context_length) for model in llama.ps().models] == [
        ("demo", length)
    ]
    assert http.get("/api/version").json() == {"version": OLLAMA_VERSION}
    (listed,) = llama.list().models
    assert re.fullmatch("[0-9a-f]{64}", listed.digest or "") and listed.modified_at
    assert listed.details is not None and listed.details.family == "llama"
    assert listed.details.families == ["llama"] and listed.details.format == "safetensors"
    num_layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    with safe_open(DEMO / "model.safetensors", "numpy") as weights:
        # A layer after the last one is a head that drafts.
        stored = [
            weights.get_slice(name)
            for name in weights.keys()  # noqa: SIM118
            if f".layers.{num_layers}." not in name
        ]
    num_parameters = sum(math.prod(tensor.get_shape()) for tensor in stored)
    assert {tensor.get_dtype() for tensor in stored} == {listed.details.quantization_level}
    assert listed.size == 2 * num_parameters  # bfloat16
    assert listed.details.parameter_size == f"{num_parameters / 1e6:.2f}M"
    for name in ("demo", "demo:latest"):
        shown = llama.show(name)
        assert shown.details is not None and shown.details == listed.details
        assert shown.modelinfo == {
            "general.architecture": "llama",
            "general.basename": "demo",
            "general.parameter_count": num_parameters,
            "llama.context_length": length,
        }
        assert shown.template and shown.modified_at == listed.modified_at
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert llama.chat(
            messages=MESSAGES, **{**OLLAMA, "model": name}
        ).message.content == text_of(chat())
        assert llama.generate(prompt="The old", **{**OLLAMA, "model": name}).eval_count == 12
    for name in ("demo:7b", "latest", ":latest", "llama3"):
        with pytest.raises(ollama.ResponseError) as caught:
            llama.show(name)
        assert caught.value.status_code in (400, 404)


def test_ollama_loads_the_model_where_there_is_no_prompt(llama, http):
    for prompt in ({}, {"prompt": ""}):
        answer = llama.generate(model="demo:latest", **prompt)
        assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
        [part] = llama.generate(model="demo", stream=True, **prompt)
        assert (part.response, part.done, part.done_reason) == ("", True, "load")
    chatted = llama.chat(model="demo")
    assert (chatted.message.content, chatted.done, chatted.done_reason) == ("", True, "load")
    assert http.post("/api/chat", json={"model": "demo"}).json()["done_reason"] == "load"
    with pytest.raises(ollama.ResponseError) as caught:
        llama.generate(model="llama3")
    assert caught.value.status_code == 404


def test_ollama_embeds(llama, open_ai):
    texts = ["The old house", "A garden"]
    expected = open_ai.embeddings.create(model="demo", input=texts)
    answer = llama.embed("demo:latest", texts, options={"temperature": 0})
    assert answer.embeddings == [each.embedding for each in expected.data]
    assert answer.prompt_eval_count == expected.usage.prompt_tokens
    assert llama.embed("demo", texts[0]).embeddings == [expected.data[0].embedding]
    for truncate in (None, True):
        assert llama.embed("demo", "x" * 100_000, truncate=truncate).prompt_eval_count == 512
    plain = open_ai.embeddings.create(model="demo", input=texts[0], extra_body={"normalize": False})
    assert llama.embeddings("demo", texts[0]).embedding == plain.data[0].embedding
    for call, status, message in (
        (lambda: llama.embed("demo", "x" * 100_000, truncate=False), 400, "max_model_len=512"),
        (lambda: llama.embeddings("demo", "x" * 100_000), 400, "max_model_len=512"),
        (lambda: llama.embed("demo", texts, dimensions=7), 400, "dimensions=7"),
        (lambda: llama.embed("llama3", texts), 404, "llama3"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status and message in caught.value.error


def test_what_ollama_has_beyond_us_is_refused(llama):
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"options": {"mirostat": 1}}, 400, "options.mirostat is not supported"),
        ({"options": {"num_ctx": 4096}}, 400, "options.num_ctx"),
        ({"options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty"),
        ({"options": {"num_thread": "4"}}, 400, "options.num_thread"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function is required"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "max_model_len"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]},
            400,
            "messages[0].images[0] is a picture, and this model takes text alone",
        ),
        ({"model": "llama3"}, 404, "llama3"),
    ]
    for fields, status, message in wrong:
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError) as caught:
                list(llama.chat(**{**OLLAMA, "messages": MESSAGES, **fields}, stream=stream))
            assert caught.value.status_code == status and message in caught.value.error


# Errors in streams


@pytest.mark.parametrize("kind", ["completions", "responses", "messages", "ollama"])
def test_an_error_within_a_stream_reaches_the_client(
    kind, open_ai, claude, llama, server, monkeypatch
):
    """A step that fails on the device ends the stream as the client expects it.

    The server serves on.
    """
    streams: dict[str, Any] = {
        "completions": lambda: open_ai.completions.create(**LONG, stream=True),
        "responses": lambda: open_ai.responses.create(
            **{**RESPONSE, "max_output_tokens": 400}, stream=True
        ),
        "messages": lambda: claude.messages.create(**{**MESSAGE, "max_tokens": 400}, stream=True),
        "ollama": lambda: llama.chat(model="demo", messages=MESSAGES, stream=True),
    }

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"a device at 0xdead in {__file__}")

    parts = iter(streams[kind]())
    next(parts)
    monkeypatch.setattr(server.loop.engine.runner, "run", failing)
    if kind == "responses":  # its client hands the event on
        *_, error, last = parts
        assert (error.type, error.code) == ("error", "server_error") and error.message
        assert last.type == "response.failed" and last.response.status == "failed"
        last_error = last.response.error
        assert (last_error.code, last_error.message) == (
            error.code,
            error.message,
        ) and "0x" not in last_error.message
        assert last.sequence_number == error.sequence_number + 1
        stored = open_ai.responses.retrieve(last.response.id)
        assert stored.to_dict() == last.response.to_dict() and stored.output_text
    else:
        errors = (openai.APIError, anthropic.APIError, ollama.ResponseError)
        with pytest.raises(errors) as caught:
            list(parts)
        assert "0x" not in str(caught.value)
    monkeypatch.undo()
    server.errors.clear()  # that it failed was logged, and had to be


# Completions and chats of OpenAI's


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def test_a_completion_is_what_llm_generates(open_ai, offline):
    answer = open_ai.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    (choice,), (expected,) = answer.choices, offline["greedy"]
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.logprobs is not None and expected.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        entry[token].logprob
        for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)
    ]
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [3] * len(expected.token_ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (
        answer.model == "demo"
        and answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
    )
    assert answer.system_fingerprint


def test_what_is_not_said_is_the_models_default(open_ai, offline):
    answer = open_ai.completions.create(model="demo", prompt=PROMPT, seed=11)
    assert texts(answer) == [output.text for output in offline["defaults"]]


def test_fields_of_extra_body_reach_the_engine(open_ai, offline):
    extra = {
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "min_tokens": 3,
        "stop_token_ids": [5],
    }
    raw = open_ai.completions.with_raw_response.create(
        model="demo", prompt=PROMPT, seed=3, max_tokens=12, extra_body={**extra, "temprature": 5}
    )
    assert texts(raw.parse()) == [output.text for output in offline["extra"]]
    assert raw.headers["x-jaxpage-ignored-fields"] == "temprature"


def test_best_of_and_beams(open_ai, offline):
    best = open_ai.completions.create(model="demo", prompt=PROMPT, best_of=3, seed=5, max_tokens=8)
    assert texts(best) == [offline["best"][0].text]
    beams = open_ai.completions.create(
        model="demo",
        prompt=PROMPT,
        n=2,
        best_of=3,
        max_tokens=8,
        temperature=0,
        extra_body={"use_beam_search": True},
    )
    assert texts(beams) == [output.text for output in offline["beams"]]


def test_stops_are_cut_and_reported(open_ai, offline):
    whole = offline["greedy"][0].text
    stop = whole[5:9]
    answer = open_ai.completions.create(prompt=PROMPT, stop=[stop, "never said"], **GREEDY)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop
    chunks = list(open_ai.completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_a_streamed_completion_is_the_whole(open_ai, offline):
    requested: Any = {
        "model": "demo",
        "prompt": PROMPT,
        "n": 3,
        "seed": 7,
        "max_tokens": 12,
        "temperature": 0.9,
        "top_p": 0.8,
    }
    chunks = list(
        open_ai.completions.create(**requested, stream=True, stream_options={"include_usage": True})
    )
    *said, last = chunks
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in said:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [output.text for output in offline["seeded"]]
    assert [reasons[index] for index in range(3)] == [
        output.finish_reason for output in offline["seeded"]
    ]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == sum(
        len(output.token_ids) for output in offline["seeded"]
    )
    assert {chunk.id for chunk in chunks} == {last.id}


def test_a_chat_is_what_llm_chats(open_ai, offline):
    answer = open_ai.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    expected = offline["chat"]
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(row.token for row in choice.logprobs.content) == choice.message.content
    for row in choice.logprobs.content:
        assert (
            row.top_logprobs[0].logprob
            == max(top.logprob for top in row.top_logprobs)
            == row.logprob
        )
        assert len(row.top_logprobs) == 2
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_is_the_whole(open_ai, offline):
    """The client's helper raises where an answer was cut off, so this one stops."""
    text = offline["chat"].outputs[0].text
    requested: Any = {"messages": MESSAGES, "stop": text[-6:], **GREEDY}
    with open_ai.chat.completions.stream(
        **requested, stream_options={"include_usage": True}
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text[: text.index(text[-6:])]
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    chunks = list(open_ai.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


# Embeddings and scores


def test_embeddings_are_hidden_states_of_length_one(open_ai, http, offline):
    """The form may be any, and a request may generate between the steps."""
    inputs, texts_of = (
        [PROMPT, "The old house"],
        {"model": "demo", "input": [PROMPT, "The old house"]},
    )
    with open_ai.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        answer = open_ai.embeddings.create(**texts_of)  # type: ignore[arg-type] # the client asks for base64
        assert metrics(http)["jaxpage_num_requests_running"] == 1
    for pooling, hidden in offline["hidden"].items():
        expected = hidden / np.sqrt((hidden.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        requested: Any = {
            **texts_of,
            "encoding_format": "float",
            "extra_body": {"pooling": pooling},
        }
        embeddings = open_ai.embeddings.create(**requested, dimensions=hidden.shape[1])
        np.testing.assert_allclose(
            [each.embedding for each in embeddings.data], expected, atol=1e-6
        )
        raw = open_ai.embeddings.create(
            **{**requested, "extra_body": {"pooling": pooling, "normalize": False}}
        )
        np.testing.assert_array_equal(
            np.array([each.embedding for each in raw.data], np.float32), hidden
        )
        if pooling == "last":
            np.testing.assert_allclose(
                [each.embedding for each in answer.data], expected, atol=1e-6
            )
    token_ids = [http.post("/tokenize", json={"prompt": each}).json()["tokens"] for each in inputs]
    same = open_ai.embeddings.create(model="demo", input=token_ids)
    assert same.data == answer.data and [each.index for each in same.data] == [0, 1]
    assert same.usage.prompt_tokens == same.usage.total_tokens == sum(map(len, token_ids))
    for change, param in (
        ({"dimensions": 7}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": "x " * 600}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            open_ai.embeddings.create(**{**texts_of, **change})
        assert caught.value.param == param


def test_scores_are_the_log_probabilities_of_completions(open_ai, http, offline):
    """The greedy text has those that were reported, and another text those that echo reports."""
    (greedy,) = offline["greedy"]
    requested = {"model": "demo", "prompt": PROMPT, "continuation": [greedy.text, " zebra"]}
    first, second = http.post("/v1/score", json=requested).json()["data"]
    reported = [
        entry[token].logprob for entry, token in zip(greedy.logprobs, greedy.token_ids, strict=True)
    ]
    assert (first["token_ids"], first["is_greedy"]) == (greedy.token_ids, True)
    np.testing.assert_allclose(first["token_logprobs"], reported, atol=1e-5)
    echo = open_ai.completions.create(
        model="demo", prompt=PROMPT + " zebra", echo=True, logprobs=1, max_tokens=0
    )
    logprobs: Any = echo.choices[0].logprobs
    assert echo.choices[0].text == PROMPT + " zebra"
    expected = [
        each
        for each, at in zip(logprobs.token_logprobs, logprobs.text_offset, strict=True)
        if at >= len(PROMPT)
    ]
    assert (second["token_logprobs"], second["is_greedy"]) == (expected, False)
    assert second["score"] == pytest.approx(sum(expected))


# Models, errors, retries


def test_errors_are_those_of_the_client(open_ai):
    for change, param, code in (
        ({"temperature": 3}, "temperature", None),
        ({"prompt": "x " * 600}, "prompt", "context_length_exceeded"),
        ({"stream": True, "max_tokens": -1}, "max_tokens", None),  # before the stream begins
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            open_ai.completions.create(**{**GREEDY, "prompt": PROMPT, **change})
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.type == "invalid_request_error" and caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        open_ai.completions.create(model="gpt-4", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError) as refused:
        open_ai.with_options(api_key=KEY[:-1]).models.list()
    assert refused.value.code == "invalid_api_key"


def retrying(client: openai.OpenAI, relieve: Any) -> tuple[openai.OpenAI, list[int]]:
    """Returns a client that tries again as the official one does.

    With it come the statuses that it got, and what happens after the first.
    """
    statuses: list[int] = []

    def see(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if len(statuses) == 1:
            assert response.headers["retry-after"] == "1"
            relieve()

    http = httpx.Client(event_hooks={"response": [see]}, timeout=60)
    return client.with_options(max_retries=2, http_client=http), statuses


def test_a_full_queue_is_tried_again(open_ai, http):
    """There are 16 places: 4 for requests that run, 12 for those that wait."""
    full = open_ai.completions.create(**{**LONG, "prompt": [PROMPT] * 16, "stream": True})
    next(iter(full))
    with pytest.raises(openai.RateLimitError) as caught:
        open_ai.completions.create(prompt=PROMPT, **GREEDY)
    assert caught.value.code == "rate_limit_exceeded"
    again, statuses = retrying(open_ai, full.close)
    with again:
        assert again.completions.create(prompt=PROMPT, **GREEDY).choices
    assert statuses == [429, 200]
    assert metrics(http)["jaxpage_rejected_total/queue_full"] >= 2


def test_a_server_that_shuts_down_is_tried_again(open_ai, server):
    def open_visitors() -> None:
        server.server.visitors.is_closed = False

    server.server.visitors.is_closed = True
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            open_ai.completions.create(prompt=PROMPT, **GREEDY)
        assert caught.value.status_code == 503
        again, statuses = retrying(open_ai, open_visitors)
        with again:
            assert again.completions.create(prompt=PROMPT, **GREEDY).choices
    finally:
        open_visitors()
    assert statuses == [503, 200]


# What the README says


def readme(language: str) -> str:
    """Returns what is written in that language below "Serving", for the server of this test."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    return text.partition("\n## Serving\n")[2].partition(f"```{language}\n")[2].partition("```")[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_lines_of_the_readme(open_ai, server):
    answers = []
    for line in readme("").splitlines():
        assert line.startswith("curl ")
        command = (
            line.replace("http://127.0.0.1:8000", server.address)
            + f" -sSf -H 'Authorization: Bearer {KEY}'"
        )
        answers.append(
            subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, check=True
            ).stdout
        )
    completion, stream = answers
    assert json.loads(completion)["choices"][0]["text"]
    *events, last = [line.removeprefix("data: ") for line in stream.splitlines() if line[:1] == "d"]
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    assert last == "[DONE]"


def test_the_program_of_the_readme(open_ai, server, capsys):
    program = readme("python").replace("http://127.0.0.1:8000", server.address)
    exec(program.replace('"none"', repr(KEY)), {})
    assert capsys.readouterr().out.strip()
