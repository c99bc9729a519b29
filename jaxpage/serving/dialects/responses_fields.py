"""Defines the requests of OpenAI's Responses, and describes its routes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxpage.serving.dialects.responses_items import ResponsesCompaction, ResponsesItem
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Count,
    Effort,
    Items,
    ModelName,
    Name,
    RequestObject,
    by_name,
    with_parameters,
)
from jaxpage.serving.wire.openapi_parts import (
    EVENTS,
    INTEGER,
    STRING,
    DialectDocument,
    get,
    list_of,
    object_of,
    post,
)
from jaxpage.serving.wire.request_fields import JsonObjectFormat
from jaxpage.serving.wire.tool_fields import (
    Function,
    GrammarDefinition,
    OtherTool,
    TextFormat,
    kind_of_tool,
    type_of,
)
from jaxpage.settings.argument_checks import INT32_MAX, show
from jaxpage.settings.field_table import Field as Line


class ResponsesFunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesGrammarFormat(GrammarDefinition):
    """Asks for an input of a custom tool that keeps to a grammar."""

    type: Literal["grammar"]


class ResponsesCustomTool(RequestObject):
    """A tool that the model may call with a text, which may have to keep to a grammar."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextFormat | ResponsesGrammarFormat, Field(discriminator="type")] | None = (
        None
    )


ResponsesTool = Annotated[
    Annotated[ResponsesFunctionTool, Tag("a function")]
    | Annotated[ResponsesCustomTool, Tag("a custom tool")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(kind_of_tool),
]


class ResponsesToolName(RequestObject):
    """Names a function or a custom tool."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function", "custom"]
    name: Name


def _kind_of_name(tool: Any) -> str:
    kind = kind_of_tool(tool)
    return "a function" if kind == "a custom tool" else kind


class ResponsesAllowedTools(RequestObject):
    """Restricts the choice to some of the tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    # Those of other types are passed over, as in `tools`.
    tools: Annotated[
        Items[
            Annotated[
                Annotated[ResponsesToolName, Tag("a function")]
                | Annotated[OtherTool, Tag("another tool")],
                Discriminator(_kind_of_name),
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "a word"
    kind = type_of(choice)
    return "allowed tools" if kind == "allowed_tools" else _kind_of_name(choice)


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[ResponsesToolName, Tag("a function")]
    | Annotated[ResponsesAllowedTools, Tag("allowed tools")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_kind_of_choice),
]


class ResponsesThinking(RequestObject):
    """Says how much the model reasons."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    # The reasoning is returned as it is, so there is no summary of it.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


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
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(RequestObject):
    """Holds the options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Literal[False] | None = None


# What of an answer may be asked for; there is nothing of tools that run elsewhere.
Included = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
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
        Line("prompt"),
        Line("prompt_cache_options"),
        Line("prompt_cache_retention", neutral=("in_memory",)),
        Line("reasoning", neutral=({},)),
        Line("tools", neutral=([],)),
        Line("top_logprobs", neutral=(0,)),
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
    include: Annotated[Items[Included], Field(max_length=16)] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reasoning: ResponsesThinking | None = None
    receipt: bool | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    store: bool | None = None  # true if it is left out, as at OpenAI
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: ResponsesText | None = None
    tool_choice: ResponsesToolChoice | None = None
    tools: Annotated[Items[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        if isinstance(self.tool_choice, OtherTool):
            kind = show(self.tool_choice.type)
            message = f"tool_choice names a tool of type {kind}, which does not run on this server"
            raise ApiError(400, message, param="tool_choice")
        if isinstance(self.input, str):
            return
        for index, item in enumerate(self.input):
            if isinstance(item, ResponsesCompaction):
                path = f"input[{index}].type"
                message = (
                    f"{path} {item.type!r} is not supported: only the server that made it can "
                    "read it"
                )
                raise ApiError(400, message, param=path)


_RESPONSE_ID = {"name": "response_id", "in": "path", "required": True, "schema": STRING}
DOCUMENT = DialectDocument(
    (ResponsesRequest,),
    {
        "/v1/responses": post(
            "Answers a conversation: OpenAI's Responses.",
            ["ResponsesRequest"],
            "Response",
            streams=EVENTS,
        ),
        "/v1/responses/{response_id}": {
            **get("A response that the server keeps.", "Response", 404),
            "delete": get("Deletes a response.", "DeletedResponse", 404)["get"],
            "parameters": [_RESPONSE_ID],
        },
        "/v1/responses/{response_id}/input_items": {
            **get("What a response answers.", "ResponseInput", 400, 404),
            "parameters": [_RESPONSE_ID],
        },
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
                    type={"enum": ["message", "reasoning", "function_call", "custom_tool_call"]},
                )
            ),
            store={"type": "boolean"},
            usage=object_of(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
        ),
        "DeletedResponse": object_of(
            id=STRING, object={"const": "response"}, deleted={"const": True}
        ),
        "ResponseInput": object_of(
            object={"const": "list"}, data=list_of(object_of(id=STRING, type=STRING))
        ),
    },
)
