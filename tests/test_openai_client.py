"""The official client of OpenAI against a server over the demo model, unchanged: what it sends is understood, what it reads is right."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.serving.config import ServerConfig
from tests.support.running import (
    SMALL,
    Promises,
    demo_with_template,
    metrics,
    running,
)
from tests.support.wire import CHATML

PROMPT = "Once upon a time there was a"
MESSAGES: Any = [
    {"role": "system", "content": "Tell it."},
    {"role": "user", "content": "The old house"},
]
KEY = "a-key-of-this-test"
LONG: Any = {
    "model": "demo",
    "prompt": PROMPT,
    "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "meet", "description": "Somebody", "parameters": SCHEMA},
}
GREEDY: Any = {"model": "demo", "temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return demo_with_template(tmp_path_factory.mktemp("models") / "demo", CHATML)


@pytest.fixture(scope="module")
def offline(model):
    """What `LLM` makes of the same requests, before the server is there."""
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
    with running(config, model=model, api_keys=[KEY]) as found:
        yield found
        assert found.errors == []


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
def client(server, promises):
    """After each test the server is as it was."""
    with openai.OpenAI(
        base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=60
    ) as found:
        yield found
    promises.check()


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


# Completions


def test_a_completion_is_what_llm_generates(client, offline):
    answer = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    (choice,), (wanted,) = answer.choices, offline["greedy"]
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert choice.logprobs is not None and wanted.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        entry[token].logprob for token, entry in zip(wanted.token_ids, wanted.logprobs, strict=True)
    ]
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [3] * len(wanted.token_ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (
        answer.model == "demo"
        and answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
    )
    assert answer.system_fingerprint


def test_what_is_not_said_is_the_models_default(client, offline):
    answer = client.completions.create(model="demo", prompt=PROMPT, seed=11)
    assert texts(answer) == [output.text for output in offline["defaults"]]


def test_fields_of_extra_body_reach_the_engine(client, offline):
    extra = {
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "min_tokens": 3,
        "stop_token_ids": [5],
    }
    raw = client.completions.with_raw_response.create(
        model="demo", prompt=PROMPT, seed=3, max_tokens=12, extra_body={**extra, "temprature": 5}
    )
    assert texts(raw.parse()) == [output.text for output in offline["extra"]]
    assert raw.headers["x-jaxpage-ignored-fields"] == "temprature"


def test_best_of_and_beams(client, offline):
    best = client.completions.create(model="demo", prompt=PROMPT, best_of=3, seed=5, max_tokens=8)
    assert texts(best) == [offline["best"][0].text]
    beams = client.completions.create(
        model="demo",
        prompt=PROMPT,
        n=2,
        best_of=3,
        max_tokens=8,
        temperature=0,
        extra_body={"use_beam_search": True},
    )
    assert texts(beams) == [output.text for output in offline["beams"]]


def test_stops_are_cut_and_told(client, offline):
    whole = offline["greedy"][0].text
    stop = whole[5:9]
    answer = client.completions.create(prompt=PROMPT, stop=[stop, "never said"], **GREEDY)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop
    chunks = list(client.completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_a_streamed_completion_is_the_whole(client, offline):
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
        client.completions.create(**requested, stream=True, stream_options={"include_usage": True})
    )
    *said, last = chunks
    found, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in said:
        assert chunk.usage is None
        for choice in chunk.choices:
            found[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert list(found.values()) == [output.text for output in offline["seeded"]]
    assert [reasons[index] for index in range(3)] == [
        output.finish_reason for output in offline["seeded"]
    ]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == sum(
        len(output.token_ids) for output in offline["seeded"]
    )
    assert {chunk.id for chunk in chunks} == {last.id}


# Chat


def test_a_chat_is_what_llm_chats(client, offline):
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    wanted = offline["chat"]
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == wanted.outputs[0].text
    assert choice.finish_reason == wanted.outputs[0].finish_reason
    assert answer.usage is not None and answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
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


def test_a_streamed_chat_is_the_whole(client, offline):
    """The client's helper raises where an answer was cut off, so this one stops."""
    text = offline["chat"].outputs[0].text
    requested: Any = {"messages": MESSAGES, "stop": text[-6:], **GREEDY}
    with client.chat.completions.stream(
        **requested, stream_options={"include_usage": True}
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text[: text.index(text[-6:])]
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "meet"}}], ids=["any", "named"]
)
def test_a_tool_is_called_with_arguments_that_fit(client, choice):
    requested: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "seed": 2,
        "max_tokens": 100,
    }
    requested["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**requested).choices[0]
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.message.tool_calls is not None and len(answer.message.tool_calls) == 1
    called: Any = answer.message.tool_calls[0]
    assert called.function.name == "meet"
    jsonschema.validate(json.loads(called.function.arguments), SCHEMA)
    with client.chat.completions.stream(**requested) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in streamed] == [
        (called.function.name, called.function.arguments)
    ]
    answered = [
        *MESSAGES,
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "content": "Met.", "tool_call_id": called.id},
    ]
    assert client.chat.completions.create(
        **{**GREEDY, "messages": answered, "tools": [TOOL]}
    ).choices


def test_reasoning_is_told_apart(client):
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = (
        client.chat.completions.create(messages=MESSAGES, extra_body=extra, **GREEDY)
        .choices[0]
        .message
    )
    assert (
        message.content == ""
        and message.model_extra is not None
        and message.model_extra["reasoning_content"]
    )
    chunks = client.chat.completions.create(
        messages=MESSAGES, extra_body=extra, stream=True, **GREEDY
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.content for delta in deltas)
    reasoning = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(reasoning) == message.model_extra["reasoning_content"]


# Embeddings and scores


def test_embeddings_are_hidden_states_of_length_one(client, http, offline):
    """Whatever the form, and between the steps of a request that generates."""
    inputs, texts_of = (
        [PROMPT, "The old house"],
        {"model": "demo", "input": [PROMPT, "The old house"]},
    )
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        answer = client.embeddings.create(**texts_of)  # type: ignore[arg-type] # the client asks for base64
        assert metrics(http)["jaxpage_num_requests_running"] == 1
    for pooling, hidden in offline["hidden"].items():
        wanted = hidden / np.sqrt((hidden.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        requested: Any = {
            **texts_of,
            "encoding_format": "float",
            "extra_body": {"pooling": pooling},
        }
        found = client.embeddings.create(**requested, dimensions=hidden.shape[1])
        np.testing.assert_allclose([one.embedding for one in found.data], wanted, atol=1e-6)
        raw = client.embeddings.create(
            **{**requested, "extra_body": {"pooling": pooling, "normalize": False}}
        )
        np.testing.assert_array_equal(
            np.array([one.embedding for one in raw.data], np.float32), hidden
        )
        if pooling == "last":
            np.testing.assert_allclose([one.embedding for one in answer.data], wanted, atol=1e-6)
    token_ids = [http.post("/tokenize", json={"prompt": one}).json()["tokens"] for one in inputs]
    same = client.embeddings.create(model="demo", input=token_ids)
    assert same.data == answer.data and [one.index for one in same.data] == [0, 1]
    assert same.usage.prompt_tokens == same.usage.total_tokens == sum(map(len, token_ids))
    for change, param in (
        ({"dimensions": 7}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": "x " * 600}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**{**texts_of, **change})
        assert caught.value.param == param


def test_scores_are_the_log_probabilities_of_completions(client, http, offline):
    """Of the greedy text as it was reported, and of another as echo reports it."""
    (greedy,) = offline["greedy"]
    requested = {"model": "demo", "prompt": PROMPT, "continuation": [greedy.text, " zebra"]}
    first, second = http.post("/v1/score", json=requested).json()["data"]
    reported = [
        entry[token].logprob for entry, token in zip(greedy.logprobs, greedy.token_ids, strict=True)
    ]
    assert (first["token_ids"], first["is_greedy"]) == (greedy.token_ids, True)
    np.testing.assert_allclose(first["token_logprobs"], reported, atol=1e-5)
    echo = client.completions.create(
        model="demo", prompt=PROMPT + " zebra", echo=True, logprobs=1, max_tokens=0
    )
    logprobs: Any = echo.choices[0].logprobs
    assert echo.choices[0].text == PROMPT + " zebra"
    wanted = [
        one
        for one, at in zip(logprobs.token_logprobs, logprobs.text_offset, strict=True)
        if at >= len(PROMPT)
    ]
    assert (second["token_logprobs"], second["is_greedy"]) == (wanted, False)
    assert second["score"] == pytest.approx(sum(wanted))


# Models, errors, retries


def test_errors_are_those_of_the_client(client, server):
    for change, param, code in (
        ({"temperature": 3}, "temperature", None),
        ({"prompt": "x " * 600}, "prompt", "context_length_exceeded"),
        ({"logit_bias": {"2048": 1}}, "logit_bias", None),
        ({"suffix": "x"}, "suffix", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{**GREEDY, "prompt": PROMPT, **change})
        assert (caught.value.param, caught.value.code, caught.value.type) == (
            param,
            code,
            "invalid_request_error",
        )
        assert caught.value.request_id
    with pytest.raises(openai.BadRequestError):  # of a stream, before it begins
        client.completions.create(**{**GREEDY, "prompt": PROMPT, "stream": True, "max_tokens": -1})
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for key in ("wrong", KEY + "x", KEY[:-1]):
        stranger = client.with_options(api_key=key)
        for call in (
            stranger.models.list,
            lambda one=stranger: one.completions.create(prompt=PROMPT, **GREEDY),
        ):
            with pytest.raises(openai.AuthenticationError) as refused:
                call()
            assert refused.value.code == "invalid_api_key"


def retrying(client: openai.OpenAI, relieve: Any) -> tuple[openai.OpenAI, list[int]]:
    """A client that tries again as the official one does, the statuses that it got, and what happens after the first."""
    statuses: list[int] = []

    def see(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if len(statuses) == 1:
            assert response.headers["retry-after"] == "1"
            relieve()

    http = httpx.Client(event_hooks={"response": [see]}, timeout=60)
    return client.with_options(max_retries=2, http_client=http), statuses


def test_a_full_queue_is_tried_again(client, http):
    """16 places: 4 that run, 12 that wait."""
    full = client.completions.create(**{**LONG, "prompt": [PROMPT] * 16, "stream": True})
    next(iter(full))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(prompt=PROMPT, **GREEDY)
    assert caught.value.code == "rate_limit_exceeded"
    again, statuses = retrying(client, full.close)
    with again:
        assert again.completions.create(prompt=PROMPT, **GREEDY).choices
    assert statuses == [429, 200]
    assert metrics(http)["jaxpage_rejected_total/queue_full"] >= 2


def test_a_server_that_shuts_down_is_tried_again(client, server):
    def opened() -> None:
        server.server.visitors.is_closed = False

    server.server.visitors.is_closed = True
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(prompt=PROMPT, **GREEDY)
        assert caught.value.status_code == 503
        again, statuses = retrying(client, opened)
        with again:
            assert again.completions.create(prompt=PROMPT, **GREEDY).choices
    finally:
        opened()
    assert statuses == [503, 200]


def test_an_error_within_a_stream_reaches_the_client(client, server, monkeypatch):
    """A step that fails on the device ends the stream with an event that the client raises; the server serves on."""
    runner = server.loop.engine.runner
    stream = client.completions.create(**LONG, stream=True)
    chunks = iter(stream)
    next(chunks)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a device at 0xdead in /home/somebody")

    with pytest.raises(openai.APIError) as caught:
        monkeypatch.setattr(runner, "run", failing)
        for _ in chunks:
            pass
    monkeypatch.undo()
    assert "0x" not in caught.value.message and "home" not in caught.value.message
    server.errors.clear()  # that it failed was logged, and had to be


# What the README says


def readme(language: str) -> str:
    """What is written in that language below "Serving", for the server of this test."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    return text.partition("\n## Serving\n")[2].partition(f"```{language}\n")[2].partition("```")[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_lines_of_the_readme(client, server):
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


def test_the_program_of_the_readme(client, server, capsys):
    program = readme("python").replace("http://127.0.0.1:8000", server.address)
    exec(program.replace('"none"', repr(KEY)), {})
    assert capsys.readouterr().out.strip()
