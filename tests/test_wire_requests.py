"""Requests: what is accepted comes to the engine as it was meant.

What is not is refused with the field's name (RELIABILITY 4.2 to 4.5).
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxpage.errors import CapacityError, CheckpointError, UnsupportedError
from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.scheduling import Scheduler
from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.messages_fields import MessagesRequest
from jaxpage.serving.dialects.ollama import (
    open_ollama_chat,
    open_ollama_embed,
    open_ollama_embeddings,
    open_ollama_generate,
)
from jaxpage.serving.dialects.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.dialects.responses_fields import ResponsesRequest
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.context import RequestLimits
from jaxpage.serving.wire.embeddings import open_embeddings
from jaxpage.serving.wire.errors import INTERNAL, ApiError, as_api_error, quotes
from jaxpage.serving.wire.exchange import (
    detokenize,
    open_chat,
    open_completion,
    open_score,
    tokenize,
)
from jaxpage.serving.wire.fields import LABELS
from jaxpage.serving.wire.reading import neutral_values
from jaxpage.serving.wire.request_fields import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from jaxpage.serving.wire.rerank import open_rerank
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.limits import StepLimits
from tests.support.fake_device import make_group
from tests.support.field_bounds import (
    NEEDS,
    fields_at_bounds,
    fields_beyond,
)
from tests.support.raw_http import OF_THE_MACHINE
from tests.support.sweeps import examples
from tests.support.walks import walk, within
from tests.support.wire import VOCAB_SIZE, Scripted, context, output, tokenizer, with_template

NAN, INF = float("nan"), float("inf")
USER = {"role": "user", "content": "Hello"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "Hello", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER], **fields}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "f"}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


COMMON_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "must be a valid string"),
    ({"model": 5}, "model", "must be"),
    *[({"max_tokens": value}, "max_tokens", "must be") for value in (-1, 0, 1.5, 2**63, "5", True)],
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens"),
    *[({"logit_bias": value}, "logit_bias", "must be") for value in ([], "x", 1)],
    ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias", "at most 1024"),
    *[
        (
            {"logit_bias": {key: 1}},
            "(a name that cannot be shown)"
            if key in ("+1", " 1", "1\n", "\u0661")
            else f"logit_bias.{key}",
            "must match",
        )
        for key in ("x", "-1", "1.5", "+1", " 1", "1\n", "\u0661")
    ],
    ({"logit_bias": {"1": 5, "01": 6}}, "logit_bias", "the same token id twice"),
    *[
        ({"logit_bias": {"1": value}}, "logit_bias.1", "must be")
        for value in (NAN, "1", 101, -100.5, True)
    ],
    (
        {"bad_words": ["x" * 256] * 257},
        "bad_words",
        "must be at most 65536 characters together (65792 are given)",
    ),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "is not supported with stream"),
    ({"stream": "yes"}, "stream", "must be"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream"),
    (
        {"stream": True, "stream_options": {"what": 1}},
        "stream_options.what",
        "is not a known field",
    ),
    (
        {"stream": True, "stream_options": {"include_usage": "x"}},
        "stream_options.include_usage",
        "must be",
    ),
    ({"cache_salt": "a\0b"}, "cache_salt", "NUL"),
    ({"early_stopping": True}, "early_stopping", "only for use_beam_search"),
    ({"length_penalty": 2.0}, "length_penalty", "only for use_beam_search"),
    (
        {"use_beam_search": True, "early_stopping": "soon"},
        "early_stopping",
        "true, false or 'never'",
    ),
    ({"use_beam_search": True, "stream": True}, "stream", "is not supported with use_beam_search"),
    (
        {"use_beam_search": True, "temperature": 0.5},
        "temperature",
        "is not supported with use_beam_search",
    ),
    ({"use_beam_search": True, "stop": "x"}, "stop", "is not supported with use_beam_search"),
    (
        {"use_beam_search": True, "response_format": {"type": "json_object"}},
        "response_format",
        "is not supported",
    ),
    *[
        ({name: {"a": 1}}, name, "is not supported")
        for name in (
            "logits_processors",
            "chat_template",
            "guided_decoding_backend",
            "lora",
        )
    ],
    *[
        ({name: "x"}, name, "is not supported")
        for name in ("kv_transfer_params", "mm_processor_kwargs", "guided_regex")
    ],
    ({"response_format": "json"}, "response_format", "must"),
    ({"response_format": {}}, "response_format.type", "is required"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "one of 'text', 'json_object', 'json_schema'",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "req",
    ),
    ({"response_format": schema_format("x")}, "response_format.json_schema.schema", "must be"),
    ({"response_format": schema_format(False)}, "response_format.json_schema.schema", "must be"),
    (
        {"response_format": schema_format({"type": "banana"})},
        "response_format.json_schema.schema",
        "'banana'",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "cannot be used together",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "x" * 10**6}}, "structured_outputs", "at most 65536"),
]
# Refused before their items are looked at: there are a million of them, and the last ones are
# wrong.
TOO_LONG = [
    *[
        ({name: [7] * 2048 + [[]]}, name, "has 2049 entries; the model has 2048 token ids")
        for name in ("stop_token_ids", "allowed_token_ids")
    ],
    ({"prompt": [7] * 512 + [[]]}, "prompt", "has 513 tokens, and max_model_len is 512"),
    ({"prompt": [[7], [7] * 512 + [[]]]}, "prompt", "has 513 tokens, and max_model_len is 512"),
]

COMPLETION_REFUSED = [
    *TOO_LONG,
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt_embeds": 3}, "prompt_embeds", "must be a string or a list of strings"),
    *[
        ({"prompt": value}, "prompt", "must be a string, a list of strings")
        for value in ({}, 5, [1, "a"], [1.0], [True], [[1], ["a"]], [[[1]]], [-1], [2**31], [None])
    ],
    ({"prompt": []}, "prompt", "must be 1 to 256 prompts"),
    ({"prompt": ["x"] * 10_000}, "prompt", "must be 1 to 256 prompts"),
    ({"prompt": ["x"] * 200, "n": 100}, "n", "more than 1024"),
    ({"prompt": "x" * 10**6}, "prompt", "1000000 characters"),
    ({"best_of": 2, "n": 3}, "best_of", "must be"),
    ({"best_of": 2, "stream": True}, "best_of", "is not supported with stream"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    *[
        ({name: value}, name, "is not supported by this endpoint")
        for name, value in (
            *(("store", True), ("reasoning_effort", "low"), ("verbosity", "low")),
            *(("reasoning", {"max_tokens": 5}), ("thinking", {"type": "enabled"})),
        )
    ],
    ({"messages": [USER]}, "messages", "is not supported by this endpoint"),
    ({"tools": [tool()]}, "tools", "is not supported by this endpoint"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "is not supported by this endpoint"),
    (
        {"max_tokens": 0, "echo": True, "best_of": 2},
        "max_tokens",
        "best_of is not supported with max_tokens=0",
    ),
    ({"use_beam_search": True, "logprobs": 1}, "logprobs", "is not supported with use_beam_search"),
]
CHAT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *[({"messages": value}, "messages", "must") for value in (None, {}, "hi", [])],
    ({"messages": ["hi"]}, "messages[0]", "must"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
    *[
        ({"messages": [USER, {"role": role, "content": "x"}]}, "messages[1].role",
         "one of 'system', 'developer', 'user', 'assistant'")
        for role in ("robot", 5, None, [], "function")
    ],
    ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content",
     "must be a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content",
     "is required without tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is required"),
    *[
        (
            {"messages": [{"role": "user",
                           "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
            "messages[0].content[0]",
            "takes text alone",
        )
        for url in ("http://localhost/x.png", "file:///etc/passwd", "data:image/png;base64,AAAA")
    ],
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content",
     "'text', not 'input_audio'"),
    ({"messages": [USER] * 10_000}, "messages", "at most 4096"),
    ({"messages": [{"role": "user", "content": "x" * 4 * 2**20}]}, "messages", "characters"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
        "the text of a JSON object",
    ),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
     "exclude"),
    ({"continue_final_message": True}, "continue_final_message", "of the assistant"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs",
     "'chat_template' is not a variable"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs",
     "'tokenize' is not a variable"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs",
     "'messages' is not a variable"),
    ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs",
     "'conversation' is not a variable"),
    ({"chat_template_kwargs": {"enable_thinking": 10**9}}, "chat_template_kwargs",
     "a number up to"),
    ({"chat_template_kwargs": {"enable_thinking": ["x"]}}, "chat_template_kwargs", "must be true"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
    ({"top_logprobs": 1}, "top_logprobs", "only for logprobs"),
    *[({"reasoning_effort": value}, "reasoning_effort", "must be")
      for value in ("some", 1, True, "")],
    *[({"reasoning": {name: value}}, f"reasoning.{name}", "must be")
      for name, value in (("effort", "some"), ("max_tokens", -1), ("max_tokens", 1.5), ("enabled", 1), ("exclude", "yes"))],
    *[({"thinking": {"type": "enabled", "budget_tokens": value}}, "thinking.budget_tokens",
       "must be") for value in (-1, "5")],
    ({"thinking": {"budget_tokens": 5}}, "thinking.type", "is required"),
    ({"thinking": {"type": "on"}}, "thinking.type", "must be"),
    ({"thinking": True}, "thinking", "must be"),
    ({"reasoning": "high"}, "reasoning", "must be"),
    ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens",
     "differ"),
    ({"reasoning": {"max_tokens": 6}, "thinking": {"type": "enabled", "budget_tokens": 5}},
     "thinking.budget_tokens", "differ"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort", "differ"),
    ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning.enabled", "differ"),
    ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "thinking.type", "differ"),
    ({"reasoning": {"max_tokens": 5}, "use_beam_search": True}, "reasoning.max_tokens",
     "is not supported with use_beam_search"),
    *[({"verbosity": value}, "verbosity", "must be") for value in ("loud", 1)],
    ({"store": "yes"}, "store", "must be"),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]},
     "messages[0].content", "must be"),
    ({"messages": [{"role": "assistant", "refusal": 5}]}, "messages[0].refusal", "must be"),
    ({"prompt": "x"}, "prompt", "is not supported by this endpoint"),
    ({"best_of": 2}, "best_of", "is not supported by this endpoint"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [tool()]}, "tool_choice", "--tool-parser"),
    ({"tools": [tool()], "tool_choice": "required"}, "tool_choice", "--tool-parser"),
    ({"tools": [tool()], "tool_choice": "some"}, "tool_choice", "must be"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "twice"),
    ({"tools": [tool()] * 513}, "tools", "at most 512"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "must match"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice", "not in tools"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}},
      "structured_outputs": {"regex": "a"}},
     "structured_outputs", "not supported with tools"),
    *[
        ({"tools": [tool(), tool("g", parameters=schema)],
          "tool_choice": {"type": "function", "function": {"name": "g"}}},
         f"tools[1].function.parameters{path}", message)
        for schema, path, message in (
            ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
             ".properties.a.pattern",
             "is not a valid regular expression"),
            ({"patternProperties": {"a[": {}}}, "", "is not a valid regular expression"),
            ({"pattern": "(?P<n>a)(?P=n)"}, "", "looks around or back"),
            ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ".properties.a.$ref",
             "external references are not fetched"),
            ({"properties": {"a b": 5}}, '.properties["a b"]', "is not a JSON schema"),
            ({"description": "x" * 70_000}, "", "at most 65536 characters"),
        )
    ],
]  # fmt: skip


def refusal_of(opens: Any, body: dict[str, Any], **settings: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        opens(body, context(**settings))
    error = caught.value.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not OF_THE_MACHINE.search(error["message"])
    assert len(json.dumps(error)) < 1500
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    COMMON_REFUSED + COMPLETION_REFUSED,
    ids=lambda value: f"{value!r:.50}",
)
def test_a_bad_completion_is_refused(fields, param, message):
    error = refusal_of(open_completion, completion(**fields))
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert message in error.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    COMMON_REFUSED + CHAT_REFUSED,
    ids=lambda value: f"{value!r:.50}",
)
def test_a_bad_chat_is_refused(fields, param, message):
    error = refusal_of(open_chat, chat(**fields))
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert message in error.message


@pytest.mark.parametrize(
    "pattern", [r"\\1", r"a\\\\2", "[(?=]", r"[\](?!]", r"\(?=", "[?](a)", r"[\1]", r"\[(a)\]"]
)
def test_a_pattern_that_only_looks_as_if_it_looked_around_is_taken(pattern):
    re.compile(pattern)
    assert open_completion(
        completion(response_format=schema_format({"type": "string", "pattern": pattern})), context()
    ).prompts


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", r"(a)\\\1", "[a](?=b)", r"\[(?!b)", r"(?<n>a)\k<n>", "(?<=a)b"]
)
def test_a_pattern_that_looks_around_or_back_is_refused(pattern):
    error = refusal_of(
        open_completion,
        completion(response_format=schema_format({"type": "string", "pattern": pattern})),
    )
    assert "looks around or back" in error.message


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_what_is_missing_is_named(missing):
    body = completion()
    del body[missing]
    assert refusal_of(open_completion, body).message == f"{missing} is required"


@pytest.mark.parametrize("name", ["../../etc", "gpt-4", "Demo", "d", "d" * 256, "", "d" * 257])
def test_another_model_is_not_found(name):
    for opens, body in (
        (open_completion, completion()),
        (open_chat, chat()),
        (open_embeddings, {"input": "x"}),
        (open_score, {"prompt": "x", "continuation": "y"}),
    ):
        error = refusal_of(opens, {**body, "model": name})
        if 1 <= len(name) <= 256:
            assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
        else:
            assert (error.status, error.param) == (400, "model")
    assert open_completion(completion(model="other-name"), context()).prompts


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n": 1, "temperature": 1.0, "seed": None}),
    *[({"temperature": value}, {"temperature": 0.0}) for value in (0, -0.0, 5e-324, 1e-7)],
    ({"temperature": None}, {"temperature": 1.0}),
    *[({"top_k": value}, {"top_k": max(value, 0)}) for value in (0, -1, VOCAB_SIZE + 5)],
    ({"n": None}, {"n": 1}),
    ({"n": 128}, {"n": 128}),
    *[({"seed": value}, {"seed": value % 2**64}) for value in (0, -1, 2**63 - 1, -(2**63))],
    ({"stop": "ab"}, {"stop": ("ab",)}),
    ({"stop": ["ab", "abc"]}, {"stop": ("ab", "abc")}),
    ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": ((5, -100.0), (7, 1.5))}),
    ({"stop_token_ids": [0], "ignore_eos": True, "min_tokens": 1},
     {"stop_token_ids": (0,), "ignore_eos": True, "min_tokens": 1}),
    ({"cache_salt": "salt", "priority": 0, "user": "me"}, {"cache_salt": "salt", "user": "me"}),
    ({"user": ""}, {"user": None}),
    ({"response_format": {"type": "text"}}, {"structured_outputs": None}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": ("json_object", "true")}),
    ({"response_format": schema_format({"type": "null"})},
     {"structured_outputs": ("json", '{"type": "null"}')}),
    ({"structured_outputs": {"choice": ["a", "b"]}},
     {"structured_outputs": ("choice", '["a", "b"]')}),
    ({"suffix": None, "store": False, "modalities": ["text"], "metadata": {"a": "b"}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), ACCEPTED, ids=lambda value: f"{value!r:.50}")
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_what_is_accepted_comes_to_the_engine(kind, fields, expected):
    exchange = (
        open_completion(completion(**fields), context())
        if kind == "completion"
        else open_chat(chat(**fields), context())
    )
    (prompt_request,) = exchange.prompts
    assert {name: getattr(prompt_request.params, name) for name in expected} == expected
    assert exchange.ignored_fields == ()


def test_every_field_of_a_request_has_a_test_that_refuses_a_value():
    """A field whose type or bound nobody looks at would let anything through."""
    tested = {
        name
        for table in (COMMON_REFUSED, COMPLETION_REFUSED, CHAT_REFUSED)
        for fields, *_ in table
        for name in fields
    }
    for kind in ("completions", "chats"):  # those of the table of fields have a test of their own
        tested |= {name for name, *_ in fields_beyond(kind)}
    only_flags = {
        "add_special_tokens",
        "return_token_ids",
        "return_progress",
        "receipt",
        "parallel_tool_calls",
    }
    names = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    assert names - tested - {"echo"} == only_flags
    for name in only_flags | {"echo"}:
        opens, body = (
            (open_chat, chat())
            if name in ("return_progress", "parallel_tool_calls")
            else (open_completion, completion())
        )
        assert refusal_of(opens, {**body, name: "yes"}).param == name


INT32 = 2**31 - 1
# The numbers that are no parameters of the table.
BOUNDS: list[tuple[Any, dict[str, Any], dict[str, tuple[int, int]]]] = [
    (ChatCompletionRequest, chat(), {"max_completion_tokens": (1, INT32)}),
    (ResponsesRequest, {"model": "demo", "input": "a"}, {"max_output_tokens": (1, INT32)}),
    (MessagesRequest, chat(max_tokens=1), {"max_tokens": (1, INT32)}),
    (OllamaOptions, {}, {"num_predict": (-2, INT32)}),
]


@pytest.mark.parametrize(
    ("model", "body", "name", "minimum", "maximum"),
    [
        (model, body, name, *bounds)
        for model, body, fields in BOUNDS
        for name, bounds in fields.items()
    ],
)
def test_a_number_is_taken_at_its_bounds_and_refused_beyond(model, body, name, minimum, maximum):
    for value in (minimum, maximum):
        model.model_validate({**body, name: value})
    for value in (minimum - 1, maximum + 1):
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**body, name: value})


def test_metadata_are_taken_at_their_bound_and_refused_beyond():
    for length, fits in ((16, True), (17, False)):
        metadata = dict.fromkeys(map(str, range(length)), "x")
        with contextlib.nullcontext() if fits else pytest.raises(ValidationError, match="metadata"):
            ResponsesRequest.model_validate({"model": "demo", "input": "a", "metadata": metadata})


def test_the_models_defaults_stand_after_the_request():
    defaults = {"temperature": 0.7, "top_p": 0.9}
    params = (
        open_completion(completion(top_p=0.5), context(sampling_defaults=defaults))
        .prompts[0]
        .params
    )
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_p) == (0.7, 0.5)


def test_lengths_when_nothing_is_said():
    assert open_completion(completion(), context()).prompts[0].params.max_tokens == 16
    assert open_chat(chat(), context()).prompts[0].params.max_tokens is None
    assert open_chat(chat(max_tokens=7), context()).prompts[0].params.max_tokens == 7
    assert (
        open_chat(chat(max_tokens=7, max_completion_tokens=7), context())
        .prompts[0]
        .params.max_tokens
        == 7
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([0, 0, 0], [(0, 0, 0)]),
        ("<|im_end|><|endoftext|>", ["<|im_end|><|endoftext|>"]),
    ],
)
def test_every_form_of_prompt(prompt, prompts):
    exchange = open_completion(completion(prompt=prompt, add_special_tokens=False), context())
    assert [prompt_request.prompt for prompt_request in exchange.prompts] == prompts
    assert not any(prompt_request.add_special_tokens for prompt_request in exchange.prompts)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_as_many_sequences_as_there_may_be_and_no_more(name):
    """Prompts times the samples that are drawn for each, which best_of raises above n."""
    limits = RequestLimits(max_sequences=6)
    taken = open_completion(completion(prompt=["a", "b"], **{name: 3}), context(limits=limits))
    assert len(taken.prompts) == 2
    for prompts, expected in ((["a", "b"], 4), (["a", "b", "c"], 3)):
        with pytest.raises(ApiError, match="more than 6 sequences at once"):
            open_completion(completion(prompt=prompts, **{name: expected}), context(limits=limits))


def test_an_input_of_a_vector_may_fill_the_model():
    """Nothing is generated after it."""
    body = {"model": "demo", "input": [[1] * 512]}
    assert open_embeddings(body, context()).prompts[0].prompt == (1,) * 512
    with pytest.raises(ApiError, match="has 513 tokens"):
        open_embeddings({**body, "input": [[1] * 513]}, context())


def test_a_beam_search_is_as_wide_as_best_of():
    body = completion(
        use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=True, max_tokens=9
    )
    expected = BeamSearchParams(4, max_tokens=9, length_penalty=0.5, early_stopping=True, n=2)
    assert (
        open_completion({**body, "temperature": 0.0, "seed": 5}, context()).prompts[0].params
        == expected
    )
    assert open_chat(chat(use_beam_search=True, n=3), context()).prompts[
        0
    ].params == BeamSearchParams(3, n=3, max_tokens=None)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_beyond_the_context_is_cut_and_reported(name):
    for length, notes in ((512, ()), (513, (name,))):
        assert open_chat(chat(**{name: length}), context()).ignored_fields == notes
        if name == "max_tokens":
            assert open_completion(completion(max_tokens=length), context()).ignored_fields == notes


def test_sets_are_reported():
    """pydantic writes them, no grammar keeps an array to them, and strict requests are refused by
    its compiler.
    """
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"const": 1}}},
    }
    for field, path in (
        (
            {"response_format": schema_format(schema)},
            "response_format.json_schema.schema.uniqueItems",
        ),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json.uniqueItems"),
    ):
        for is_strict in (False, True):
            exchange = open_chat(chat(**field), context(strict_requests=is_strict))
            assert exchange.ignored_fields == (() if is_strict else (path,))
            _, text = exchange.prompts[0].params.structured_outputs
            assert ("uniqueItems" in text) == is_strict
    assert schema["properties"]["a"]["uniqueItems"] is True


def test_the_defaults_of_vllms_structured_outputs_ask_for_nothing():
    others = dict.fromkeys(
        (
            "json_object",
            "disable_fallback",
            "disable_any_whitespace",
            "disable_additional_properties",
        ),
        False,
    )
    fields = {
        "regex": "a",
        "json": None,
        "choice": None,
        "whitespace_pattern": None,
        "_backend": None,
        **others,
    }
    exchange = open_chat(chat(structured_outputs=fields), context(strict_requests=True))
    assert exchange.prompts[0].params.structured_outputs == ("regex", '"a"')
    for name in others:
        with pytest.raises(ApiError, match="structured_outputs"):
            open_chat(chat(structured_outputs={**fields, name: True}), context())


def test_no_tools_leave_nothing_to_choose_from():
    assert open_chat(chat(tools=[], tool_choice="auto"), context(strict_requests=True)).prompts
    with pytest.raises(ApiError, match="tool_choice needs tools"):
        open_chat(chat(tools=[], tool_choice="required"), context())


def test_errors_of_a_grammar_are_in_the_clients_terms():
    """Fields that were once its own tell their successor."""
    exchange = open_chat(chat(response_format=schema_format({"type": "object"})), context())
    for shown in (
        "{'json': {'a': ' is refused: '}}",
        "{'json': {'items': {'const': 90071...",
        "a dict too large to print",
    ):
        error = exchange.refusal(
            ValueError(f"structured_outputs={shown} is refused: it is too large")
        )
        assert error.param == "response_format" and error.message.startswith("response_format")
        assert "structured_outputs" not in error.message and error.message.endswith(
            "it is too large"
        )
    failed = output(exchange, [Scripted(["{"], "error", "structured_outputs: no token continues")])
    with pytest.raises(ApiError, match="Generation failed: response_format: no token continues"):
        exchange.whole([failed])
    for field, kind in (("guided_json", "json"), ("guided_choice", "choice"), ("ebnf", "grammar")):
        with pytest.raises(
            ApiError, match=f"{field} is not supported.*structured_outputs=.'{kind}'"
        ):
            open_chat(chat(**{field: {}}), context())


def test_a_chat_is_opened_in_few_stays():
    """It reads: parse, render, params, answer. `tools/lab/walks.py --list` shows each of them."""
    model = context()
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    open_chat(body, model)  # the first one starts the renderer
    stays = within(walk(lambda: open_chat(body, model)), "serving/wire/")
    assert 10 < len(stays) <= 17, "\n".join(map(str, stays))


def test_unknown_fields_are_reported_and_refused_where_that_is_wanted():
    body = chat(temprature=1, **{"x\r\nEvil: 1": 2})
    body["messages"] = [{**USER, "mood": "good", "audio": None}]
    exchange = open_chat(body, context())
    assert exchange.ignored_fields == (
        "temprature",
        "(a name that cannot be shown)",
        "messages[0].mood",
    )
    error = refusal_of(open_chat, chat(temprature=1), strict_requests=True)
    assert error.message == "Unknown parameter: 'temprature'. Did you mean 'temperature'?"
    assert error.param == "temprature"
    many = open_chat(chat(**{f"field{index}": 1 for index in range(1000)}), context())
    assert len(",".join(many.ignored_fields)) < 4096


# What vllm-router and SGLang's router make of the smallest request there is: their own defaults are
# in it (SCALE.md).
ROUTED = {
    **{"stream": False, "ignore_eos": False, "no_stop_trim": False, "return_hidden_states": False},
    **{
        "echo": False,
        "logprobs": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
    },
    **{"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True},
}
NOTHING_REQUESTED: list[dict[str, Any]] = [  # in completions and in chat
    ROUTED,
    *[{name: value} for name, value in ROUTED.items()],
    {"logprobs": False, "top_logprobs": 0},
    *[{"best_of": 1}, {"best_of": 1, "n": 2}, {"best_of": 1, "stream": True}],
    *[{"length_penalty": 1.0}, {"length_penalty": 1}, {"early_stopping": False}],
    {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    *[
        {"functions": []},
        {"functions": [], "function_call": "none"},
        {"tools": []},
        {"vllm_xargs": {}},
    ],
    *[{"tool_choice": "none"}, {"chat_template_kwargs": {}}, {"parallel_tool_calls": True}],
    {
        "a_field_of_others": None,
        "audio": None,
        "temperature": None,
        "stream_options": None,
        "store": None,
    },
    {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
]


@pytest.mark.parametrize("fields", NOTHING_REQUESTED, ids=lambda value: f"{value!r:.60}")
@pytest.mark.parametrize(("opens", "new"), [(open_completion, completion), (open_chat, chat)])
def test_what_asks_for_nothing_passes_where_nothing_unknown_does(opens, new, fields):
    exchange = opens(new(**fields), context(strict_requests=True))
    requested = {name: fields[name] for name in ("n", "stream") if name in fields}
    assert exchange.ignored_fields == ()
    assert exchange.prompts == opens(new(**requested), context()).prompts


def test_an_empty_prompt_after_an_echo_has_nothing_to_choose_the_best_of():
    assert open_completion(
        completion(max_tokens=0, echo=True, best_of=1), context(strict_requests=True)
    ).prompts


ENDPOINTS = [
    (CompletionRequest, open_completion, completion()),
    (ChatCompletionRequest, open_chat, chat()),
    (TokenizeRequest, tokenize, {"prompt": "x"}),
    (TokenizeChatRequest, tokenize, {"messages": [USER]}),
    (DetokenizeRequest, detokenize, {"tokens": [5]}),
    (EmbeddingRequest, open_embeddings, {"model": "demo", "input": "x"}),
    (ScoreRequest, open_score, {"model": "demo", "prompt": "x", "continuation": "y"}),
    (RerankRequest, open_rerank, {"model": "demo", "query": "x", "documents": ["y"]}),
    (ResponsesRequest, open_response, {"model": "demo", "input": "x"}),
    (MessagesRequest, open_message, {"model": "demo", "messages": [USER], "max_tokens": 5}),
    (OllamaChatRequest, open_ollama_chat, {"model": "demo", "messages": [USER]}),
    (OllamaEmbedRequest, open_ollama_embed, {"model": "demo", "input": "x"}),
    (OllamaEmbeddingsRequest, open_ollama_embeddings, {"model": "demo", "prompt": "x"}),
    (OllamaGenerateRequest, open_ollama_generate, {"model": "demo", "prompt": "x"}),
]


def with_options(**options: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [USER], "options": options}


BOUNDED = [
    ("completions", open_completion, completion),
    ("chats", open_chat, chat),
    ("scores", open_score, lambda **fields: completion(continuation=" upon", **fields)),
    ("vectors", open_embeddings, lambda **fields: {"model": "demo", "input": "x", **fields}),
    (
        "rankings",
        open_rerank,
        lambda **fields: {"model": "demo", "query": "x", "documents": ["y"], **fields},
    ),
    ("responses", open_response, lambda **fields: {"model": "demo", "input": "x", **fields}),
    ("messages", open_message, lambda **fields: chat(**{"max_tokens": 5, **fields})),
    ("ollama", open_ollama_chat, with_options),
]


@pytest.mark.parametrize(("request_kind", "opens", "new"), BOUNDED)
def test_every_parameter_is_taken_at_its_bounds_and_refused_beyond(request_kind, opens, new):
    """Each API has its own name for it, and the engine gets the value."""
    for field, name, value in fields_at_bounds(request_kind):
        needs = NEEDS.get((request_kind, name), {})
        exchange = opens(new(**{**needs, name: value}), context())
        generates = request_kind not in ("vectors", "rankings")
        if generates and field.engine and value not in field.neutral:
            params = exchange.prompts[0].params
            expected = SamplingParams(**{"max_tokens": None, field.name: field.engine(value)})
            assert getattr(params, field.name) == getattr(expected, field.name), (name, value)
    for name, value, param in fields_beyond(request_kind):
        error = refusal_of(opens, new(**{name: value}))
        param = f"options.{param}" if new is with_options else param
        assert (error.status, error.param) == (400, param), (name, value)
        assert error.message.startswith(f"{param} must "), error.message


@pytest.mark.parametrize(("model", "opens", "body"), ENDPOINTS)
@pytest.mark.parametrize("is_strict", [False, True])
def test_another_value_of_a_field_that_is_not_honoured_is_refused(model, opens, body, is_strict):
    """It is refused by name, and a value that Python only takes for the same is another one."""
    for name in model.known:
        values = neutral_values(model, name)
        if name not in model.model_fields:
            for other in ("other", {"a": 1}, [None], True, False, 0, 1, 1.5):
                if not any(type(other) is type(value) and other == value for value in values):
                    error = refusal_of(opens, {**body, name: other}, strict_requests=is_strict)
                    assert (error.status, error.param) == (400, name)
                    assert error.message.startswith(f"{name} is not supported")


@pytest.mark.parametrize(("model", "opens", "body"), ENDPOINTS)
def test_a_field_that_is_null_counts_as_left_out(model, opens, body):
    nulls = dict.fromkeys([*model.model_fields, *model.known, "x"])
    params = opens({**nulls, **body}, context(strict_requests=True))
    assert params.ignored_fields == ()


def test_the_document_says_what_asks_for_nothing():
    document = (
        (Path(__file__).parents[1] / "docs" / "reference" / "wire-format.md")
        .read_text()
        .replace("\n", " ")
    )
    endpoints = {"completions": CompletionRequest, "chat": ChatCompletionRequest}

    def cell(name: str, model: Any) -> str:
        said = [f"`{json.dumps(value)}`" for value in neutral_values(model, name)]
        return ", ".join([*said, *(["honoured"] if name in model.model_fields else [])]) or "null"

    rows, nothing_but_null = ["| field | completions | chat |", "|---|---|---|"], []
    for name in sorted(CompletionRequest.known):
        cells = [cell(name, model) for model in endpoints.values()]
        if set(cells) == {"null"}:
            nothing_but_null.append(f"`{name}`")
        elif set(cells) != {"honoured"}:
            rows.append(f"| `{name}` | {' | '.join(cells)} |")
    for expected in (
        "\n".join(rows),
        ", ".join(nothing_but_null),
        ", ".join(f"`{name}`" for name in sorted(LABELS)),
    ):
        assert expected.replace("\n", " ") in document, expected


def test_a_model_without_tokenizer_takes_token_ids():
    bare = context(tokenizer=None)
    assert open_completion(completion(prompt=[1, 2]), bare).prompts[0].prompt == (1, 2)
    for body in (completion(), completion(prompt=[1], echo=True)):
        with pytest.raises(ApiError, match="no tokenizer"):
            open_completion(body, bare)
    with pytest.raises(ApiError, match="no chat template") as caught:
        open_chat(chat(), bare)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("reason", "said"),
    [(None, "writes none or --tool-parser is none"), ("the template has two forms", "two forms")],
)
def test_a_server_that_reads_no_calls_says_why(reason, said):
    body = chat(tools=[tool()], tool_choice="required")
    error = refusal_of(open_chat, body, no_form=reason)
    assert error.status == 400 and error.param == "tool_choice"
    assert error.message.startswith("tool_choice 'required' is not supported: ")
    assert error.message.endswith(said)


def test_the_template_renders_what_was_said():
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "<|assistant|>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert open_chat(chat(messages=messages), context()).prompts[0].prompt == (
        '<|system|>Be\nkind<|user|><|assistant|><|assistant|>f({"a": 1})<|tool|>2<|assistant|>'
    )
    for nothing in ("", " \n", "{}"):
        call["function"]["arguments"] = nothing
        assert (
            "<|assistant|>f({})" in open_chat(chat(messages=messages), context()).prompts[0].prompt
        )
    thinks = chat(chat_template_kwargs={"enable_thinking": True})
    assert open_chat(thinks, context()).prompts[0].prompt == "<|user|>Hello<|assistant|><think>\n"
    goes_on = chat(
        messages=[USER, {"role": "assistant", "content": "He"}], continue_final_message=True
    )
    assert open_chat(goes_on, context()).prompts[0].prompt == "<|user|>Hello<|assistant|>He"


def test_a_template_that_reads_a_variable_does_not_lend_the_renderers_arguments():
    lends = with_template("{{ chat_template }}{{ tokenize }}{{ bos_token }}{{ mood }}")
    for name in ("chat_template", "tokenize", "bos_token", "sanitize_control_tokens"):
        error = refusal_of(open_chat, chat(chat_template_kwargs={name: "evil"}), tokenizer=lends)
        assert "is not a variable" in error.message
    assert (
        open_chat(chat(chat_template_kwargs={"mood": "good"}), context(tokenizer=lends))
        .prompts[0]
        .prompt
        == "good"
    )


def test_a_surrogate_that_only_the_template_lays_open_is_refused():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    parse_object(json.dumps(body).encode())
    for function in (open_chat, tokenize):
        assert (
            refusal_of(function, body).message
            == "messages contains invalid Unicode: a lone surrogate"
        )


@pytest.mark.parametrize(
    "name",
    ["prompt", "messages", "tools", "stop_token_ids", "allowed_token_ids", "bad_words", "stop"],
)
@pytest.mark.parametrize("item", [{}, None, [[]]])
def test_a_million_wrong_items_are_not_a_million_errors(name, item):
    kind = ChatCompletionRequest if name in ("messages", "tools") else CompletionRequest
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(
            {**(chat() if kind is ChatCompletionRequest else completion()), name: [item] * 1000}
        )
    assert caught.value.error_count() <= 2, "those of one item"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"continuation": ["a", "b", "c"], "prompt": ["x", "y"]},
            "continuation",
            "2 prompts and 3",
        ),
        ({"continuation": ""}, "continuation", "at least one token"),
        ({"continuation": []}, "continuation", "1 to 256"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": [1], "continuation": "x"}, "continuation", "both be text"),
        ({"prompt": [1], "continuation": [-1]}, "continuation", "must be"),
        ({"prompt": "x " * 9999}, "prompt", "cannot fit"),
        ({"temperature": 0.5}, "temperature", "Unknown"),
        ({"cache_salt": "a\0b"}, "cache_salt", "NUL"),
    ],
)
def test_scores_that_are_refused(fields, param, text):
    body = {"model": "demo", "prompt": "Once", "continuation": " upon", **fields}
    error = refusal_of(open_score, body, strict_requests=True)
    assert (error.status, error.param) == (400, param) and text in error.message


def test_a_prompt_and_its_continuation_are_encoded_together():
    """lm-eval does so: the space between them belongs to the second word."""
    spelled = tokenizer()("Once upon a time")["input_ids"]
    for prompt, continuation in (("Once upon", " a time"), ("Once upon ", "a time")):
        opened_score = open_score(
            {"model": "demo", "prompt": prompt, "continuation": [continuation] * 2}, context()
        )
        assert [each.prompt for each in opened_score.prompts] == [tuple(spelled)] * 2
        assert opened_score._num_prompt_tokens == [len(tokenizer()("Once upon")["input_ids"])] * 2


def test_errors_of_the_engine_in_the_clients_terms():
    exchange = open_completion(completion(response_format={"type": "json_object"}), context())
    error = exchange.refusal(
        ValueError("structured_outputs={'json_object': True} is refused: too large")
    )
    assert (error.status, error.param) == (400, "response_format")
    assert (
        exchange.refusal(
            ValueError("prompt_token_ids has 9999, but the model's token ids are 0 to 9")
        ).param
        == "prompt"
    )
    long = ValueError(
        "The prompt has 600 tokens, which leaves no room to generate: max_model_len is 512, "
        "prompt and output together"
    )
    assert (exchange.refusal(long).param, exchange.refusal(long).code) == (
        "prompt",
        "context_length_exceeded",
    )
    assert open_chat(chat(), context()).refusal(long).param == "messages"
    assert exchange.refusal(ValueError("stop_token_ids has 9999, but")).param == "stop_token_ids"


@pytest.mark.parametrize(("opens", "param"), [(open_completion, "prompt"), (open_chat, "messages")])
def test_a_request_that_never_fits_is_reported_by_its_parameter(opens, param):
    """The words are those of the engine's roster, which has no parameters."""
    exchange = opens(completion() if opens is open_completion else chat(), context())
    scheduler = Scheduler(
        StepLimits(2, 16, 2, mixed=False),
        BlockManager([BlockTables(BlockPool(5), 4)]),
        max_num_seqs=2,
    )
    for group, name, message in (
        (
            make_group("long", 0, range(10), max_tokens=8),
            param,
            f"{param} and what may follow it need 5 KV blocks (1 x 18 tokens",
        ),
        (
            make_group("wide", 1, range(1), max_tokens=1, n=3),
            "n",
            "n asks for 3 sequences at once; max_num_seqs is 2",
        ),
    ):
        with pytest.raises(CapacityError) as caught:
            scheduler.add(group)
        error = exchange.refusal(caught.value)
        assert (error.status, error.param) == (400, name)
        assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("n must be an integer"), 400),
        (UnsupportedError("priority=1 needs scheduling_policy='priority'"), 400),
        (CapacityError("the request needs 99 blocks"), 400),
        (TimeoutError("others"), 503),
        (RuntimeError("secret"), 500),
        (CheckpointError("secret"), 500),
        (KeyError("secret"), 500),
        (UnicodeDecodeError("utf-8", b"secret", 0, 1, "secret"), 500),
        (MemoryError(), 500),
    ],
)
def test_any_error_has_a_status(error, status):
    api_error = as_api_error(error)
    assert api_error.status == status
    assert "secret" not in api_error.message
    if status == 500:
        assert api_error.message == INTERNAL
    if status == 503:
        assert "Retry-After" in api_error.headers


def test_messages_show_nothing_of_the_machine():
    raw = f"at 0x7f00ab in {pytest.__file__} <jaxpage.Engine object at 0x12> Traceback"
    assert not re.search(r"0x|pytest|site-packages|object at|Traceback", ApiError(400, raw).message)
    assert ApiError(400, "use /v1/completions").message == "use /v1/completions"


PATHS = [
    "../../etc",
    "/etc/passwd",
    "and/or",
    "see /a/b/c, or a/b",
    "0xdead",
    "<x.Engine object at 0x12>",
    "Traceback",
    "C:/x/y",
]


@pytest.mark.parametrize("path", PATHS)
def test_what_the_client_said_is_reported_as_it_said_it(path):
    for opens, body in (
        (open_completion, completion(model=path)),
        (open_completion, completion(response_format={"type": path})),
        (open_completion, completion(cache_salt=path + "\0")),
        (open_chat, chat(messages=[{"role": path, "content": "x"}])),
        (open_chat, chat(tools=[tool(parameters={"$ref": path})], tool_choice=NAMED)),
        (tokenize, {"prompt": [path]}),
        (detokenize, {"tokens": [path]}),
        (lambda body, _: parse_object(body), json.dumps([path]).encode()),
        (
            lambda body, _: parse_object(body),
            b'{"x/y": 1, %b: 1, %b: 1}' % ((json.dumps(path).encode(),) * 2),
        ),
    ):
        with pytest.raises(ApiError) as caught:
            quotes(opens)(body, context())
        assert path in caught.value.message and path in str(caught.value)
    long = completion(cache_salt=f"/{path}/" * 100)
    assert refuse_as_it_is(open_completion, long).count(f"/{path}/") >= 1


def refuse_as_it_is(opens: Any, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        quotes(opens)(body, context())
    return caught.value.message


def test_what_the_client_said_stands_beside_what_it_is_not_told():
    said = "/a/b/("
    machine = f"at 0x7f00ab in {pytest.__file__} <jaxpage.Engine object at 0x12> Traceback /a/bc/("
    for opens, body in (
        (open_completion, completion(structured_outputs={"regex": said})),
        (open_chat, chat(structured_outputs={"regex": said})),
    ):
        exchange = opens(body, context())
        for message in (
            exchange.refusal(
                ValueError(f"structured_outputs={{'regex': '{said}'}} is refused {machine}")
            ).message,
            exchange_fails(exchange, f"structured_outputs: '{said}' {machine}"),
        ):
            assert said in message
            assert not re.search(r"0x|pytest|site-packages|object at|Traceback|bc", message)
    template = with_template(
        "{{ raise_exception('no ' ~ messages[0].content ~ ' " + machine + "') }}"
    )
    message = refuse_as_it_is(
        lambda body, _: open_chat(body, context(tokenizer=template)),
        chat(messages=[{**USER, "content": said}]),
    )
    assert said in message and not re.search(
        r"0x|pytest|site-packages|object at|Traceback|bc", message
    )


def exchange_fails(exchange: Any, reason: str) -> str:
    with pytest.raises(ApiError) as caught:
        exchange.whole([output(exchange, [Scripted(["a"], "error", reason)])])
    return caught.value.message


def test_tokens_and_back():
    text = "Once upon a time, é"
    body = tokenize({"model": "demo", "prompt": text, "return_token_strs": True}, context()).body
    assert body["tokens"] == tokenizer()(text)["input_ids"]
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert detokenize({"tokens": body["tokens"]}, context()).body == {"prompt": text}
    conversation = tokenize({"messages": [USER]}, context()).body
    assert (
        conversation["tokens"]
        == tokenizer()("<|user|>Hello<|assistant|>", add_special_tokens=False)["input_ids"]
    )


def test_a_text_to_tokenize_is_no_longer_than_a_prompt():
    max_length = context().max_prompt_characters
    assert tokenize({"prompt": "x" * max_length}, context()).body["count"]
    for body, param in (
        ({"prompt": "x" * (max_length + 1)}, "prompt"),
        (chat(messages=[{**USER, "content": "x" * max_length}]), "messages"),
    ):
        error = refusal_of(tokenize, body)
        assert (error.param, error.code) == (param, "context_length_exceeded")


def test_unknown_fields_of_the_small_endpoints_are_reported():
    assert tokenize({"prompt": "x", "mood": 1}, context()).ignored_fields == ("mood",)
    assert tokenize({"messages": [{**USER, "mood": 1}]}, context()).ignored_fields == (
        "messages[0].mood",
    )
    assert detokenize({"tokens": [5], "mood": 1}, context()).ignored_fields == ("mood",)
    assert detokenize({"tokens": [5]}, context()).ignored_fields == ()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS
    | st.sampled_from(
        ["auto", "user", "json_schema", "function", 2**31, 10**30, "#/$defs/a", [USER], [tool()]]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "name", "json", "schema", "function", "regex"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
FIELDS = sorted(
    CompletionRequest.model_fields.keys()
    | ChatCompletionRequest.model_fields.keys()
    | {"suffix", "lora", "x", "tokens"}
)


@examples(120)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), st.booleans())
def test_any_body_is_understood_or_refused(fields, is_strict):
    raw = json.dumps({**completion(), **fields}).encode()
    server = context(tool_parser="hermes", reasoning_parser="think", strict_requests=is_strict)
    for function in (open_completion, open_chat, tokenize, detokenize):
        body = parse_object(raw)
        if function is open_chat and "prompt" not in fields:
            del body["prompt"]
            body.setdefault("messages", [USER])
        try:
            function(body, server)
        except ApiError as error:
            assert 400 <= error.status < 500
            json.dumps(error.body()).encode()
