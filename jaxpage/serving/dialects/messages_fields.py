"""Defines the requests of Anthropic's Messages, and describes its routes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    Count,
    Items,
    ModelName,
    RequestObject,
    by_name,
    one_of,
    with_parameters,
)
from jaxpage.serving.wire.openapi_parts import (
    EVENTS,
    INTEGER,
    OPTIONAL,
    STRING,
    DialectDocument,
    list_of,
    object_of,
    post,
)
from jaxpage.settings.field_table import Field as Line


class TextBlock(RequestObject):
    """A block of text in a message."""

    added = frozenset({"citations", "parsed_output"})

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # has no effect: prefixes are cached anyway


class ThinkingBlock(RequestObject):
    """A block with the reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Blocks = Annotated[
    str | Items[TextBlock],
    one_of("a string, or a list of blocks of type 'text'", kinds=("text",)),
]


class UserTurn(RequestObject):
    """A message of the user, in the Messages API."""

    role: Literal["user"]
    content: Blocks


class AssistantTurn(RequestObject):
    """A message of the assistant, in the Messages API."""

    role: Literal["assistant"]
    content: Annotated[
        str | Items[Annotated[TextBlock | ThinkingBlock, Field(discriminator="type")]],
        one_of(
            "a string, or a list of blocks of type 'text' or 'thinking'",
            kinds=("text", "thinking"),
        ),
    ]


class CountTokensRequest(RequestObject):
    """A request to POST /v1/messages/count_tokens."""

    known = by_name(
        Line("container"),
        Line("context_management"),
        Line("diagnostics"),
        Line("inference_geo"),
        Line("mcp_servers", neutral=([],)),
        Line("output_config", neutral=({},)),
        Line("output_format"),
        Line("service_tier", neutral=("auto", "standard_only")),
        Line("speed", neutral=("standard",)),
        Line("thinking", neutral=({"type": "disabled"},)),
        Line("tool_choice", neutral=({"type": "none"},)),
        Line("tools", neutral=([],)),
    )

    model: ModelName
    messages: Annotated[
        Items[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    cache_control: dict[str, Any] | None = None  # has no effect: prefixes are cached anyway
    system: Blocks | None = None


class MessagesRequest(with_parameters("messages", CountTokensRequest)):  # type: ignore[misc]
    """A request to POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None


DOCUMENT = DialectDocument(
    (MessagesRequest, CountTokensRequest),
    {
        "/v1/messages": post(
            "Answers a conversation: Anthropic's Messages.",
            ["MessagesRequest"],
            "Message",
            streams=EVENTS,
            error="MessagesError",
        ),
        "/v1/messages/count_tokens": post(
            "The tokens of a message's prompt.",
            ["CountTokensRequest"],
            "TokenCount",
            error="MessagesError",
        ),
    },
    {
        "MessagesError": object_of(
            type={"const": "error"}, error=object_of(type=STRING, message=STRING)
        ),
        "Message": object_of(
            id=STRING,
            type={"const": "message"},
            model=STRING,
            content=list_of(object_of(type={"enum": ["text", "thinking"]})),
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence"]},
            stop_sequence=OPTIONAL,
            usage=object_of(input_tokens=INTEGER, output_tokens=INTEGER),
            role={"const": "assistant"},
        ),
        "TokenCount": object_of(input_tokens=INTEGER),
    },
)
