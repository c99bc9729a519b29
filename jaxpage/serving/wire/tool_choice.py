"""Decides which tools an answer may or must call.

It also decides what the prompt says about the tools, and which grammar the answer keeps to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpage.chat_forms import PieceParser, Plain, Tools, grammar_of
from jaxpage.decoding import json_rule
from jaxpage.serving.wire.closed_objects import close_schema
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.relaxing import name_paths, relax_schema
from jaxpage.serving.wire.request_fields import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    NamedTool,
    TextFormat,
    Tool,
)
from jaxpage.serving.wire.schemas import admits_object, check_schema
from jaxpage.serving.wire.templates import parameters_of, template_of
from jaxpage.serving.wire.tools import NamedCall, make_named_schema
from jaxpage.settings.argument_checks import show


class ToolUse(NamedTuple):
    """Holds what the tools of a request mean for its answer.

    Attributes:
        shown: The tools that the prompt shows to the model.
        callable: The tools that the answer may call; empty if calls are content.
        must_call: True if the answer is nothing but calls.
        several: True if it may have more than one call.
        name: The tool that the request names, or None.
        parameter: The field that the answer's grammar comes from, or None.
        schemas: The schemas to which a grammar holds the arguments of calls, by the tools' names.
        ignored: The paths of what was left out of these schemas.
    """

    shown: list[Tool] = []  # noqa: RUF012
    callable: list[Tool] = []  # noqa: RUF012
    must_call: bool = False
    several: bool = True
    name: str | None = None
    parameter: str | None = None
    schemas: Mapping[str, dict[str, Any]] = {}
    ignored: tuple[str, ...] = ()

    def make_structured_outputs(self, context: ModelContext, prompt: str) -> dict[str, Any] | None:
        """Returns the grammar that the answer keeps to, or None if the tools demand none.

        Args:
            context: The served model.
            prompt: The prompt of the answer.

        Raises:
            ApiError: A grammar cannot hold the model's form of calls to the tool's schema.
        """
        if not self.must_call:
            return None
        form = context.chat_format
        if form.tools is None:
            return {"json": next(iter(self.schemas.values()))}
        try:
            grammar = grammar_of(
                form,
                self.schemas,
                lambda schema: json_rule(json.dumps(schema)),
                several=self.several,
                is_open=form.is_open(prompt),
                special_tokens=context.special_tokens,
            )
        except ValueError as error:
            raise ApiError(400, f"{self.parameter}: {error}", param=self.parameter) from None
        return {"grammar": grammar}

    def changes(self, context: ModelContext, prompt: str) -> dict[str, Any]:
        """Returns the parameters of the engine that the tools demand of an answer.

        Args:
            context: The served model.
            prompt: The prompt of the answer.

        Raises:
            ApiError: A grammar cannot hold the model's form of calls to the tool's schema.
        """
        values: dict[str, Any] = {}
        if (grammar := self.make_structured_outputs(context, prompt)) is not None:
            values["structured_outputs"] = grammar
        marks = context.chat_format.markers(with_tools=bool(self.callable))
        if context.has_special_marks(marks):
            values["skip_special_tokens"] = False
        return values

    def parser(self, context: ModelContext, prompt: str, *, is_held: bool) -> PieceParser:
        """Returns the parser of an answer's text.

        Args:
            context: The served model.
            prompt: The prompt of the answer.
            is_held: True if the answer keeps to a grammar of the request itself.
        """
        if is_held:
            # Such a grammar leaves no room for reasoning and calls.
            return Plain()
        if self.must_call and context.chat_format.tools is None:
            return NamedCall(self.callable[0].function.name)
        schemas = {tool.function.name: parameters_of(tool) for tool in self.callable}
        return context.chat_format.parser(Tools(schemas) if schemas else None, prompt)


def tool_use(request: ChatCompletionRequest, context: ModelContext) -> ToolUse:
    """Returns what the tools of a request mean for its answer.

    Schemas matter only where a grammar enforces them: with "auto" they go to the chat template as
    they are.

    Raises:
        ApiError: The server cannot honour the tools or the choice.
    """
    tools = request.tools or []
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none") and not (choice == "auto" and request.tools is not None):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return ToolUse()
    _check_names(tools)
    if choice == "none":
        return ToolUse()
    if request.structured_outputs is not None or not isinstance(
        request.response_format, TextFormat | None
    ):
        message = (
            "response_format and structured_outputs are not supported with tools that may be called"
        )
        raise ApiError(400, message, param="response_format")
    several = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        index = _index_of(tools, choice.function.name)
        return _enforce(
            ToolUse(tools, [tools[index]], True, False, choice.function.name), [index], context
        )
    indices = list(range(len(tools)))
    if isinstance(choice, AllowedToolsChoice):
        allowed = {
            _index_of(tools, allowed_tool.function.name)
            for allowed_tool in choice.allowed_tools.tools
        }
        indices = sorted(allowed)
        choice = choice.allowed_tools.mode
    if context.chat_format.tool_form is None or (
        choice == "required" and context.chat_format.tools is None
    ):
        raise ApiError(400, _no_form(choice or "auto", context), param="tool_choice")
    callable_tools = [tools[index] for index in indices]
    if choice == "required":
        return _enforce(ToolUse(tools, callable_tools, True, several), indices, context)
    if "tools" not in template_of(context, tools):
        raise ApiError(400, "The model's chat template does not support tools", param="tools")
    # Nothing keeps the model from calling what the prompt shows.
    return ToolUse(callable_tools, callable_tools, several=several)


def _enforce(use: ToolUse, indices: list[int], context: ModelContext) -> ToolUse:
    """Returns the use with the schemas to which a grammar holds the calls.

    Args:
        use: The use, which has the tools.
        indices: The places of these tools in the request.
        context: The served model and the server's settings.

    Raises:
        ApiError: A schema is refused.
    """
    schemas = {}
    ignored: tuple[str, ...] = ()
    for index, tool in zip(indices, use.callable, strict=True):
        parameter = f"tools[{index}].function.parameters"
        schema: Any = parameters_of(tool)
        if not context.strict_requests:
            schema, removed = relax_schema(schema, parameter)
            ignored += removed
        check_schema(schema, parameter)
        if not admits_object(schema):
            raise ApiError(
                400,
                f"{parameter}: it must allow an object, because the arguments of a call are an object",
                param=parameter,
            )
        schemas[tool.function.name] = make_named_schema(close_schema(schema))
    return use._replace(
        parameter=f"tools[{indices[0]}].function.parameters" if len(indices) == 1 else "tools",
        schemas=schemas,
        ignored=name_paths(ignored),
    )


def _no_form(choice: str, context: ModelContext) -> str:
    """Returns why calls cannot be read, with what the server's owner can do."""
    refused = f"tool_choice {choice!r} is not supported"
    if context.no_form is not None:
        return f"{refused}: {context.no_form}"
    return f"{refused}: the server reads no tool calls, because its model's chat template writes none or --tool-parser is none"


def _check_names(tools: list[Tool]) -> None:
    names = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise ApiError(
                400,
                f"tools has {show(tool.function.name)} twice",
                param=f"tools[{index}].function.name",
            )
        names.add(tool.function.name)


def _index_of(tools: list[Tool], name: str) -> int:
    index = next((index for index, tool in enumerate(tools) if tool.function.name == name), None)
    if index is None:
        raise ApiError(
            400, f"tool_choice names {show(name)}, which is not in tools", param="tool_choice"
        )
    return index
