"""Defines the parts of a request that describe tools, choose among them, and call them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxpage.serving.wire.field_types import (
    MAX_TOOLS,
    CallId,
    Items,
    Name,
    RequestObject,
    one_of,
)


class TextFormat(RequestObject):
    """Asks for text without a grammar."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


def type_of(part: Any) -> Any:
    """Returns the field `type` of a part of a request, whether it was read already or not."""
    return part.get("type") if isinstance(part, dict) else getattr(part, "type", None)


class CalledFunction(RequestObject):
    """Holds the name and the arguments of a call."""

    added = frozenset({"parsed_arguments"})

    name: Name
    arguments: str  # a JSON object


class FunctionCall(RequestObject):
    """A call of a function, in a message of the assistant."""

    added = frozenset({"index"})

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustomTool(RequestObject):
    """Holds the name and the input of a call of a custom tool."""

    name: Name
    input: str


class CustomCall(RequestObject):
    """A call of a custom tool, in a message of the assistant."""

    added = frozenset({"index"})

    id: CallId
    type: Literal["custom"]
    custom: CalledCustomTool


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("a function")] | Annotated[CustomCall, Tag("a custom tool")],
    Discriminator(lambda call: "a custom tool" if type_of(call) == "custom" else "a function"),
]


class Function(RequestObject):
    """Describes a function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any] | bool, one_of("a JSON schema")] | None = None
    strict: bool | None = None


class FunctionTool(RequestObject):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class GrammarDefinition(RequestObject):
    """Holds a grammar that the input of a custom tool keeps to."""

    model_config = ConfigDict(extra="forbid")

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class CustomGrammarFormat(RequestObject):
    """Asks for an input that keeps to a grammar."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["grammar"]
    grammar: GrammarDefinition


class Custom(RequestObject):
    """Describes a tool whose input is a text."""

    name: Name
    description: str | None = None
    format: Annotated[TextFormat | CustomGrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(RequestObject):
    """A tool that the model may call with a text, which may have to keep to a grammar."""

    type: Literal["custom"]
    custom: Custom


class OtherTool(RequestObject):
    """A tool that runs on another vendor's server, such as a web search; it is passed over."""

    is_passed_over = True

    type: str


def kind_of_tool(tool: Any) -> str:
    """Returns the tag of a tool, or of the name of one, in a union."""
    kind = type_of(tool)
    if kind == "custom":
        return "a custom tool"
    return "another tool" if isinstance(kind, str) and kind != "function" else "a function"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom tool")]
    | Annotated[OtherTool, Tag("another tool")],
    Discriminator(kind_of_tool),
]


class ToolName(RequestObject):
    """Names a tool."""

    model_config = ConfigDict(extra="forbid")

    name: Name


class NamedFunction(RequestObject):
    """Names the one function that the model must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: ToolName

    @property
    def name(self) -> str:
        """Returns the name of the function."""
        return self.function.name


class NamedCustomTool(RequestObject):
    """Names the one custom tool that the model must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        """Returns the name of the tool."""
        return self.custom.name


NamedTool = Annotated[NamedFunction | NamedCustomTool, Field(discriminator="type")]


class AllowedTools(RequestObject):
    """Holds the tools that the model may call, or of which it must call one."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    # Those of other types are passed over, as in `tools`.
    tools: Annotated[
        Items[
            Annotated[
                Annotated[NamedFunction, Tag("a function")]
                | Annotated[NamedCustomTool, Tag("a custom tool")]
                | Annotated[OtherTool, Tag("another tool")],
                Discriminator(kind_of_tool),
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


class AllowedToolsChoice(RequestObject):
    """Restricts the choice to some of the tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
