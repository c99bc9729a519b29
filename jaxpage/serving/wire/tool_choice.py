"""Decides which tools an answer may or must call.

It also decides what the prompt says about the tools, and which grammar the answer keeps to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.pieces import PieceParser, Plain
from jaxpage.serving.wire.request_fields import ChatCompletionRequest, NamedTool, TextFormat, Tool
from jaxpage.serving.wire.schemas import admits_object, check_schema
from jaxpage.serving.wire.templates import parameters_of, template_of
from jaxpage.serving.wire.tools import (
    MARKS,
    TOOL_PARSERS,
    NamedCall,
    named_schema,
    required,
    required_schema,
)
from jaxpage.settings.argument_checks import shown


class ToolUse(NamedTuple):
    """Holds what the tools of a request mean for its answer.

    Attributes:
        new_parser: Makes the parser of an answer's text.
        shown: The tools that the prompt shows to the model.
        structured_outputs: The grammar of the answer; None if the tools demand none.
        parameter: The field that the structured outputs come from, or None.
        is_named: True if the request names the tool to call.
        keeps_special_tokens: True if special tokens stay in the text, because the parser's marks
            are among them.
    """

    new_parser: Callable[[], PieceParser] = Plain
    shown: list[Tool] = []  # noqa: RUF012
    structured_outputs: dict[str, Any] | None = None
    parameter: str | None = None
    is_named: bool = False
    keeps_special_tokens: bool = False


def tool_use(request: ChatCompletionRequest, context: ModelContext) -> ToolUse:
    """Returns what the tools of a request mean for its answer.

    Raises:
        ApiError: The server cannot honour the tools or the choice.
    """
    tools = request.tools or []
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none") and not (choice == "auto" and request.tools is not None):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return ToolUse()
    _check(tools)
    if choice == "none":
        return ToolUse()
    if request.structured_outputs is not None or not isinstance(
        request.response_format, TextFormat | None
    ):
        message = (
            "response_format and structured_outputs are not supported with tools that may be called"
        )
        raise ApiError(400, message, param="response_format")
    if isinstance(choice, NamedTool):
        return _named(tools, choice.function.name)
    if context.tool_parser is None:
        message = f"tool_choice {choice or 'auto'!r} is not supported: the server was started without --tool-parser"
        raise ApiError(400, message, param="tool_choice")
    names = frozenset(tool.function.name for tool in tools)
    if choice == "required":
        schemas = [(tool.function.name, parameters_of(tool)) for tool in tools]
        schema = required_schema(schemas, several=request.parallel_tool_calls is not False)
        parameter = "tools[0].function.parameters" if len(tools) == 1 else "tools"
        return ToolUse(lambda: required(names), tools, {"json": schema}, parameter)
    if "tools" not in template_of(context, tools):
        raise ApiError(400, "The model's chat template does not support tools", param="tools")
    new_parser = TOOL_PARSERS[context.tool_parser]
    return ToolUse(
        lambda: new_parser(names), tools, keeps_special_tokens=_has_special_marks(context)
    )


def _check(tools: list[Tool]) -> None:
    names = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise ApiError(
                400,
                f"tools has {shown(tool.function.name)} twice",
                param=f"tools[{index}].function.name",
            )
        names.add(tool.function.name)
        param = f"tools[{index}].function.parameters"
        check_schema(parameters_of(tool), param)
        if not admits_object(parameters_of(tool)):
            raise ApiError(
                400,
                f"{param}: it must allow an object, because the arguments of a call are an object",
                param=param,
            )


def _named(tools: list[Tool], name: str) -> ToolUse:
    index = next((index for index, tool in enumerate(tools) if tool.function.name == name), None)
    if index is None:
        raise ApiError(
            400, f"tool_choice names {shown(name)}, which is not in tools", param="tool_choice"
        )
    schema = named_schema(parameters_of(tools[index]))
    parameter = f"tools[{index}].function.parameters"
    return ToolUse(lambda: NamedCall(name), tools, {"json": schema}, parameter, is_named=True)


def _has_special_marks(context: ModelContext) -> bool:
    """Returns whether removing special tokens would remove the parser's marks."""
    special = set(getattr(context.tokenizer, "all_special_tokens", ()))
    special |= {
        str(token)
        for token in getattr(context.tokenizer, "added_tokens_decoder", {}).values()
        if token.special
    }
    return not special.isdisjoint(MARKS[context.tool_parser or ""])
