"""Speaks OpenAI's own API, into which all others are translated."""

from __future__ import annotations

from typing import Any

from jaxpage.serving.dialects.dialect import Dialect, GenerationPath, StreamForm
from jaxpage.serving.wire.encoding import event, plain_events
from jaxpage.serving.wire.exchange import open_chat, open_completion, open_generate
from jaxpage.serving.wire.generate import ROLLOUT, GenerateRequest
from jaxpage.serving.wire.openapi_parts import (
    EVENTS,
    INTEGER,
    OPTIONAL,
    STRING,
    USAGE,
    DialectDocument,
    list_of,
    object_of,
    post,
)
from jaxpage.serving.wire.request_fields import ChatCompletionRequest, CompletionRequest


def _completion(kind: str, **choice: Any) -> dict[str, Any]:
    reason = {"enum": ["stop", "length", "tool_calls"]}
    choices = list_of(
        object_of(
            index=INTEGER, finish_reason=reason, logprobs={"type": ["object", "null"]}, **choice
        )
    )
    return object_of(
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        choices=choices,
        usage=USAGE,
    )


DOCUMENT = DialectDocument(
    (CompletionRequest, ChatCompletionRequest, GenerateRequest),
    {
        "/v1/completions": post(
            "Completes prompts.", ["CompletionRequest"], "Completion", streams=EVENTS
        ),
        "/v1/chat/completions": post(
            "Answers a conversation.",
            ["ChatCompletionRequest"],
            "ChatCompletion",
            streams=EVENTS,
        ),
        "/v1/generate": post(
            "Continues token ids, for trainers: token ids and arrays.",
            ["GenerateRequest"],
            "Rollout",
        ),
    },
    {
        "Completion": _completion("text_completion", text=STRING),
        "ChatCompletion": _completion(
            "chat.completion", message=object_of(role={"const": "assistant"}, content=OPTIONAL)
        ),
        "Rollout": ROLLOUT,
    },
)
DIALECT = Dialect(
    beginnings=("/v1/completions", "/v1/chat/completions", "/v1/generate"),
    stream=StreamForm(new_frame=plain_events, end=event(b"[DONE]")),
    paths={
        "/v1/chat/completions": GenerationPath(open_chat, is_for_batches=True),
        "/v1/completions": GenerationPath(open_completion, "text_completion", is_for_batches=True),
        "/v1/generate": GenerationPath(open_generate, "text_completion"),
    },
    document=DOCUMENT,
)
