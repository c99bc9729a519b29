"""Defines the requests of Anthropic's Messages, and describes its routes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallId,
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
    OPTIONAL,
    STRING,
    DialectDocument,
    list_of,
    object_of,
    post,
)
from jaxpage.serving.wire.tool_fields import OtherTool, type_of
from jaxpage.settings.field_table import Field as Line


def _is_list(value: Any) -> str:
    return "blocks" if isinstance(value, list) else "a text"


# The error for a wrong block names the block, and not only the list.
_TEXT_OR_BLOCKS = Discriminator(_is_list)
_Text = Annotated[Annotated[str, one_of("a string, or a list of blocks")], Tag("a text")]


class TextBlock(RequestObject):
    """A block of text in a message."""

    added = frozenset({"citations", "parsed_output"})

    type: Literal["text"]
    text: str
    cache_control: Any = None  # has no effect: prefixes are cached anyway


class Base64Source(RequestObject):
    """A picture as base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(RequestObject):
    """The URL of a picture; only data URLs are supported."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestObject):
    """A block with a picture, in a message of the user or in a result."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Any = None  # has no effect: prefixes are cached anyway


class ToolReference(RequestObject):
    """The name of a tool that a search of tools has found, in a result."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Any = None


class ThinkingBlock(RequestObject):
    """A block with the reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = None  # has no effect: reasoning is taken as it is


class ToolUseBlock(RequestObject):
    """A call of a tool, in a message of the assistant."""

    added = frozenset({"caller", "toolset_name", "cache_control"})

    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: Annotated[dict[str, Any], one_of("an object")]


class ServerBlock(RequestObject):
    """A block that only its vendor's server can read or has made; it is passed over."""

    type: Literal[
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_result",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "fallback",
    ]

    is_passed_over = True


Blocks = Annotated[_Text | Annotated[Items[TextBlock], Tag("blocks")], _TEXT_OR_BLOCKS]


class ToolResultBlock(RequestObject):
    """The result of a call, in a message of the user."""

    added = frozenset({"toolset_name", "cache_control"})

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: (
        Annotated[
            _Text
            | Annotated[
                Items[
                    Annotated[TextBlock | ImageBlock | ToolReference, Field(discriminator="type")]
                ],
                Tag("blocks"),
            ],
            _TEXT_OR_BLOCKS,
        ]
        | None
    ) = None
    is_error: bool | None = None


class SystemTurn(RequestObject):
    """A message with instructions that follow the conversation so far."""

    role: Literal["system"]
    content: Blocks


class UserTurn(RequestObject):
    """A message of the user, in the Messages API."""

    role: Literal["user"]
    content: Annotated[
        _Text
        | Annotated[
            Items[Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]],
            Tag("blocks"),
        ],
        _TEXT_OR_BLOCKS,
    ]


class AssistantTurn(RequestObject):
    """A message of the assistant, in the Messages API."""

    role: Literal["assistant"]
    content: Annotated[
        _Text
        | Annotated[
            Items[
                Annotated[
                    TextBlock | ThinkingBlock | ToolUseBlock | ServerBlock,
                    Field(discriminator="type"),
                ]
            ],
            Tag("blocks"),
        ],
        _TEXT_OR_BLOCKS,
    ]


class OfferedTool(RequestObject):
    """A tool that the client runs."""

    # They say how Anthropic's servers charge for a tool, show it or stream its input.
    added = frozenset(
        {"cache_control", "defer_loading", "eager_input_streaming", "allowed_callers"}
    )

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: list[Any] | None = None


def _kind_of_tool(tool: Any) -> str:
    kind = type_of(tool)
    is_other = isinstance(kind, str) and kind not in ("custom", "function")
    return "another tool" if is_other else "a tool"


_Tool = Annotated[
    Annotated[OfferedTool, Tag("a tool")] | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_kind_of_tool),
]


class ToolChoice(RequestObject):
    """Says whether the answer may or must have calls, or has none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(RequestObject):
    """Names the one tool that the answer must call."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestObject):
    """Says whether the model thinks before it answers."""

    # The first is what Claude Code sends; the model decides in any case how long it thinks.
    known = by_name(Line("budget_tokens", neutral=(0,)))

    type: Literal["adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingWithBudget(RequestObject):
    """Has the model think, for a number of tokens at most."""

    type: Literal["enabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(RequestObject):
    """Asks for an answer that keeps to a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestObject):
    """Says how much effort an answer takes, and its format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


# What asks something of Anthropic's servers that the answer can do without: it is passed over, and
# named to the client. Coding agents send some of these with every request.
PASSED_OVER = (
    "container",
    "context_management",
    "diagnostics",
    "fallbacks",
    "inference_geo",
    "mcp_servers",
    "service_tier",
    "speed",
)


class CountTokensRequest(RequestObject):
    """A request to POST /v1/messages/count_tokens."""

    known = by_name(
        # Without these the answer or the conversation would be another one.
        Line("compaction"),
        Line("thread"),
        Line(
            "context_management",
            neutral=(
                {},
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            ),
        ),
        Line("diagnostics", neutral=({}, {"previous_message_id": None})),
        Line("fallbacks", neutral=([],)),
        Line("mcp_servers", neutral=([],)),
        Line("service_tier", neutral=("auto", "standard_only")),
        Line("speed", neutral=("standard",)),
        Line("system", neutral=("", [])),
    )

    model: ModelName
    messages: Annotated[
        Items[Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    cache_control: Any = None  # has no effect: prefixes are cached anyway
    system: Blocks | None = None
    tools: Annotated[Items[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingConfig | ThinkingWithBudget, Field(discriminator="type")] | None = (
        None
    )
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of output_config.format
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    service_tier: Any = None
    speed: Any = None


class MessagesRequest(with_parameters("messages", CountTokensRequest)):  # type: ignore[misc]
    """A request to POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    receipt: bool | None = None


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
            content=list_of(object_of(type={"enum": ["text", "thinking", "tool_use"]})),
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            stop_sequence=OPTIONAL,
            usage=object_of(input_tokens=INTEGER, output_tokens=INTEGER),
            role={"const": "assistant"},
        ),
        "TokenCount": object_of(input_tokens=INTEGER),
    },
)
