"""Decides which tools an answer may or must call.

It also decides what the prompt says about the tools, and which grammar the answer keeps to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpage.chat_forms import PieceParser, Plain, Tools, grammar_of, grammar_of_text
from jaxpage.decoding import json_rule
from jaxpage.serving.wire.closed_objects import close_schema
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.custom_tools import CustomCalls, as_function, grammar_of_input
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.relaxing import name_paths, relax_schema
from jaxpage.serving.wire.request_fields import ChatCompletionRequest
from jaxpage.serving.wire.sampling_request import read_structured_outputs
from jaxpage.serving.wire.schemas import admits_object, check_schema
from jaxpage.serving.wire.templates import parameters_of, template_of
from jaxpage.serving.wire.thinking import chat_budget
from jaxpage.serving.wire.tool_fields import (
    AllowedToolsChoice,
    AnyTool,
    CustomTool,
    FunctionTool,
    NamedCustomTool,
    NamedFunction,
    OtherTool,
    TextFormat,
)
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
        ignored: The paths of the tools that are passed over, and of what was left out of the
            schemas.
        custom: The names of the tools whose calls have an input in place of arguments.
        is_input: True if the answer is nothing but the input of one custom tool.
        input_grammar: The `structured_outputs` that this input keeps to, or None for any text.
        text_format: The `structured_outputs` that the text of an answer without calls keeps to, or
            None for any text.
    """

    shown: list[FunctionTool] = []  # noqa: RUF012
    callable: list[FunctionTool] = []  # noqa: RUF012
    must_call: bool = False
    several: bool = True
    name: str | None = None
    parameter: str | None = None
    schemas: Mapping[str, dict[str, Any]] = {}
    ignored: tuple[str, ...] = ()
    custom: frozenset[str] = frozenset()
    is_input: bool = False
    input_grammar: dict[str, Any] | None = None
    text_format: dict[str, Any] | None = None

    @property
    def holds_answer(self) -> bool:
        """Returns whether the grammar of the answer, if it has one, is that of the tools."""
        return self.must_call or self.text_format is not None

    def make_structured_outputs(self, context: ModelContext, prompt: str) -> dict[str, Any] | None:
        """Returns the grammar that the answer keeps to, or None if the tools demand none.

        Args:
            context: The served model.
            prompt: The prompt of the answer.

        Raises:
            ApiError: A grammar cannot hold the model's form of calls to the tool's schema.
        """
        if not self.holds_answer:
            return None
        if self.is_input:
            return self.input_grammar
        form = context.chat_format
        if form.tools is None:
            return {"json": next(iter(self.schemas.values()))}
        is_open, special = form.is_open(prompt), context.special_tokens
        try:
            if self.text_format is not None:
                rule = json_rule(json.dumps(self.text_format.get("json", {"type": "object"})))
                grammar = grammar_of_text(form, rule, is_open=is_open, special_tokens=special)
            else:
                grammar = grammar_of(
                    form,
                    self.schemas,
                    lambda schema: json_rule(json.dumps(schema)),
                    several=self.several,
                    is_open=is_open,
                    special_tokens=special,
                )
        except ValueError as error:
            raise ApiError(400, f"{self.parameter}: {error}", param=self.parameter) from None
        return {"grammar": grammar}

    def leaves_reasoning(self, context: ModelContext) -> bool:
        """Returns whether reasoning may come before the calls or the text of an answer."""
        return not self.is_input and not (self.must_call and context.chat_format.tools is None)

    def changes(
        self, request: ChatCompletionRequest, context: ModelContext, prompt: str
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the parameters of the engine that tools and reasoning demand of an answer.

        Args:
            request: The chat.
            context: The served model.
            prompt: The prompt of the answer.

        Returns:
            The parameters, and the path of a field about reasoning that has no effect.

        Raises:
            ApiError: A grammar cannot hold the model's form of calls to the tool's schema, or two
                fields ask for different budgets.
        """
        budget, idle = chat_budget(
            request,
            context,
            prompt,
            leaves_room=self.leaves_reasoning(context),
            has_own_grammar=self.holds_answer,
        )
        values: dict[str, Any] = {}
        if (grammar := self.make_structured_outputs(context, prompt)) is not None:
            values["structured_outputs"] = grammar
        if context.has_special_marks[bool(self.callable)]:
            values["skip_special_tokens"] = False
        return values | budget, idle

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
        if not self.leaves_reasoning(context):
            return NamedCall(self.callable[0].function.name)
        schemas = {tool.function.name: parameters_of(tool) for tool in self.callable}
        parser = context.chat_format.parser(Tools(schemas) if schemas else None, prompt)
        return CustomCalls(parser, self.custom) if self.custom else parser


def tool_use(request: ChatCompletionRequest, context: ModelContext) -> ToolUse:
    """Returns what the tools of a request mean for its answer.

    Schemas matter only where a grammar enforces them: with "auto" they go to the chat template as
    they are. Tools that run on another vendor's server are passed over.

    Raises:
        ApiError: The server cannot honour the tools or the choice.
    """
    tools = request.tools or []
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none") and not (choice == "auto" and request.tools is not None):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return ToolUse()
    functions = functions_of(tools)
    use = ToolUse(ignored=name_passed_over(tools))
    _check_names(tools, functions)
    if choice == "none":
        return use
    if not functions:
        if choice in (None, "auto") or (
            isinstance(choice, AllowedToolsChoice) and choice.allowed_tools.mode == "auto"
        ):
            return use
        message = (
            "tool_choice demands a call, and no tool is a function: tools[0].type is "
            f"{show(tools[0].type)}"
        )
        raise ApiError(400, message, param="tool_choice")
    if request.structured_outputs is not None:
        message = "structured_outputs is not supported with tools that may be called"
        raise ApiError(400, message, param="structured_outputs")
    use = use._replace(
        shown=list(functions.values()),
        several=request.parallel_tool_calls is not False,
        custom=frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool)),
    )
    if isinstance(choice, NamedFunction | NamedCustomTool):
        use = _pass_over_format(use, request)
        return _name(use, choice, tools, functions, context)
    if isinstance(choice, AllowedToolsChoice):
        allowed = {
            _index_of(tools, functions, tool)
            for tool in choice.allowed_tools.tools
            if not isinstance(tool, OtherTool)
        }
        functions = {index: functions[index] for index in sorted(allowed)}
        choice = choice.allowed_tools.mode
    if context.chat_format.tool_form is None or (
        choice == "required" and context.chat_format.tools is None
    ):
        raise ApiError(400, _no_form(choice or "auto", context), param="tool_choice")
    use = use._replace(callable=list(functions.values()))
    if choice == "required":
        return _require(_pass_over_format(use, request), tools, functions, context)
    if "tools" not in template_of(context, use.callable):
        raise ApiError(400, "The model's chat template does not support tools", param="tools")
    # Nothing keeps the model from calling what the prompt shows.
    use = use._replace(shown=use.callable)
    text_format = read_structured_outputs(request.response_format, None)
    if text_format is None or not functions:
        return use
    if context.chat_format.tools is None:
        message = (
            "response_format is not supported with tools that may be called: the model has no "
            "form of calls that a grammar holds"
        )
        raise ApiError(400, message, param="response_format")
    return use._replace(text_format=text_format, parameter=request.format_parameter)


def _require(
    use: ToolUse, tools: list[AnyTool], functions: dict[int, FunctionTool], context: ModelContext
) -> ToolUse:
    """Returns the use of tools of which one or more must be called."""
    if not functions:
        message = "tool_choice demands a call of tools of which none is a function"
        raise ApiError(400, message, param="tool_choice")
    for index in functions:
        if grammar_of_input(tools[index]) is not None:
            message = (
                f"tools[{index}].custom.format: a grammar is enforced only where tool_choice "
                "names the tool"
            )
            raise ApiError(400, message, param=f"tools[{index}].custom.format")
    return _enforce(use._replace(must_call=True), functions, context)


def _pass_over_format(use: ToolUse, request: ChatCompletionRequest) -> ToolUse:
    """Returns the use for an answer that is nothing but calls, which have no format of text."""
    if isinstance(request.response_format, TextFormat | None):
        return use
    return use._replace(ignored=(*use.ignored, "response_format"))


def functions_of(tools: list[AnyTool]) -> dict[int, FunctionTool]:
    """Returns the tools that the model may call, as functions, by their places in the request."""
    functions = {index: as_function(tool) for index, tool in enumerate(tools)}
    return {index: tool for index, tool in functions.items() if tool is not None}


def name_passed_over(tools: list[AnyTool]) -> tuple[str, ...]:
    """Returns the paths of the tools that run on another vendor's server."""
    paths = (f"tools[{index}]" for index, tool in enumerate(tools) if isinstance(tool, OtherTool))
    return name_paths(tuple(paths))


def _name(
    use: ToolUse,
    choice: NamedFunction | NamedCustomTool,
    tools: list[AnyTool],
    functions: dict[int, FunctionTool],
    context: ModelContext,
) -> ToolUse:
    """Returns the use of the one tool that the request names."""
    index = _index_of(tools, functions, choice)
    function = functions[index]
    use = use._replace(callable=[function], must_call=True, several=False, name=choice.name)
    grammar = grammar_of_input(tools[index])
    is_input = grammar is not None or context.chat_format.tools is None
    if isinstance(choice, NamedCustomTool) and is_input:
        parameter = f"tools[{index}].custom.format.grammar.definition"
        return use._replace(is_input=True, input_grammar=grammar, parameter=parameter)
    return _enforce(use, {index: function}, context)


def _enforce(use: ToolUse, functions: dict[int, FunctionTool], context: ModelContext) -> ToolUse:
    """Returns the use with the schemas to which a grammar holds the calls.

    Args:
        use: The use.
        functions: The tools that may be called, by their places in the request.
        context: The served model and the server's settings.

    Raises:
        ApiError: A schema is refused.
    """
    schemas = {}
    ignored: tuple[str, ...] = ()
    for index, tool in functions.items():
        parameter = f"tools[{index}].function.parameters"
        schema: Any = parameters_of(tool)
        if not context.strict_requests:
            schema, removed = relax_schema(schema, parameter)
            ignored += removed
        check_schema(schema, parameter)
        if not admits_object(schema):
            raise ApiError(
                400,
                f"{parameter}: it must allow an object, because the arguments of a call are "
                "an object",
                param=parameter,
            )
        schemas[tool.function.name] = make_named_schema(close_schema(schema))
    parameter = "tools"
    if len(functions) == 1:
        parameter = f"tools[{next(iter(functions))}].function.parameters"
    return use._replace(
        parameter=parameter, schemas=schemas, ignored=use.ignored + name_paths(ignored)
    )


def _no_form(choice: str, context: ModelContext) -> str:
    """Returns why calls cannot be read, with what the server's owner can do."""
    refused = f"tool_choice {choice!r} is not supported"
    if context.no_form is not None:
        return f"{refused}: {context.no_form}"
    return (
        f"{refused}: the server reads no tool calls, because its model's chat template writes "
        "none or --tool-parser is none"
    )


def _check_names(tools: list[AnyTool], functions: dict[int, FunctionTool]) -> None:
    names = set()
    for index, tool in functions.items():
        name = tool.function.name
        if name in names:
            raise ApiError(
                400,
                f"tools has {show(name)} twice",
                param=f"tools[{index}].{tools[index].type}.name",
            )
        names.add(name)


def _index_of(
    tools: list[AnyTool],
    functions: dict[int, FunctionTool],
    choice: NamedFunction | NamedCustomTool,
) -> int:
    """Returns the place of the tool that a choice names."""
    for index, tool in functions.items():
        if (tools[index].type, tool.function.name) == (choice.type, choice.name):
            return index
    raise ApiError(
        400, f"tool_choice names {show(choice.name)}, which is not in tools", param="tool_choice"
    )
