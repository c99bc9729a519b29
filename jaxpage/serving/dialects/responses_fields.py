"""Defines the requests of OpenAI's Responses, and describes its routes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    Count,
    Items,
    ModelName,
    Name,
    RequestObject,
    by_name,
    one_of,
    with_parameters,
)
from jaxpage.serving.wire.openapi_parts import (
    EVENTS,
    INTEGER,
    STRING,
    DialectDocument,
    list_of,
    object_of,
    post,
)
from jaxpage.serving.wire.request_fields import JsonObjectFormat
from jaxpage.serving.wire.tool_fields import TextFormat
from jaxpage.settings.field_table import Field as Line


class ResponsesPart(RequestObject):
    """A part of a message's content; only text is supported."""

    added = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["input_text", "output_text"]
    text: str


class ResponsesMessage(RequestObject):
    """A message of a conversation, in the Responses API."""

    added = frozenset({"id", "phase", "status"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ResponsesPart]


class ReasoningText(RequestObject):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ResponsesReasoning(RequestObject):
    """The reasoning of an earlier answer; it belongs to the message that follows it."""

    added = frozenset({"encrypted_content", "id", "status", "summary"})

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None


class ResponsesSchemaFormat(RequestObject):
    """Asks for JSON that keeps to a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponsesText(RequestObject):
    """Holds the options of the text of a response."""

    model_config = ConfigDict(extra="forbid")

    format: (
        Annotated[
            TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(RequestObject):
    """Holds the options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Literal[False] | None = None


ResponsesItem = Annotated[
    ResponsesMessage | ResponsesReasoning,
    one_of(
        "a message of text with the role user, assistant, system or developer, or reasoning; others are not supported"
    ),
]


class ResponsesRequest(with_parameters("responses", RequestObject)):  # type: ignore[misc]
    """A request to POST /v1/responses."""

    known = by_name(
        Line("access_programs"),
        Line("background", neutral=(False,)),
        Line("background_options"),
        Line("context_management", neutral=([],)),
        Line("conversation"),
        Line("image"),
        Line("include", neutral=([],)),
        Line("max_tool_calls"),
        Line("moderation"),
        Line("parallel_tool_calls", neutral=(True, False)),
        Line("previous_response_id"),
        Line("prompt"),
        Line("prompt_cache_options"),
        Line("prompt_cache_retention"),
        Line("reasoning", neutral=({},)),
        Line("service_tier", neutral=("auto", "default")),
        # Routers send true; the response answers false.
        Line("store", neutral=(False, True)),
        Line("tool_choice", neutral=("auto", "none")),
        Line("tools", neutral=([],)),
        Line("top_logprobs", neutral=(0,)),
        Line("truncation", neutral=("disabled",)),
    )

    model: ModelName
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[
            Items[ResponsesItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")
        ],
        # The kind is chosen before the items are read, so that their errors have an index.
        Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: ResponsesText | None = None


DOCUMENT = DialectDocument(
    (ResponsesRequest,),
    {
        "/v1/responses": post(
            "Answers a conversation: OpenAI's Responses.",
            ["ResponsesRequest"],
            "Response",
            streams=EVENTS,
        ),
    },
    {
        "Response": object_of(
            id=STRING,
            object={"const": "response"},
            created_at=INTEGER,
            status={"enum": ["completed", "incomplete"]},
            model=STRING,
            output=list_of(
                object_of(
                    id=STRING,
                    type={"enum": ["message", "reasoning"]},
                    content=list_of({"type": "object"}),
                )
            ),
            usage=object_of(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
        ),
    },
)
