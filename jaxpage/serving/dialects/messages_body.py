"""Translates requests of Anthropic's Messages into the bodies of chats."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.serving.dialects.messages_fields import (
    PASSED_OVER,
    CountTokensRequest,
    NamedToolChoice,
    OfferedTool,
    ThinkingWithBudget,
)
from jaxpage.serving.dialects.messages_turns import TurnsOfChat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.relaxing import name_paths
from jaxpage.serving.wire.templates import may_reason
from jaxpage.settings.argument_checks import show
from jaxpage.settings.field_table import names_in

# The names of parameters in this API, by their names in chats.
NAMES = names_in("messages")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Translation(NamedTuple):
    """Holds what a request is as a chat.

    Attributes:
        body: Fields of the chat.
        names: The client's paths, by the chat's.
        ignored: The client's paths of what the chat has nothing for.
    """

    body: dict[str, Any]
    names: dict[str, str] = {}  # noqa: RUF012
    ignored: tuple[str, ...] = ()


def translate(request: CountTokensRequest, context: ModelContext) -> Translation:
    """Returns the chat of which the answer is that of a request, with all fields but its lengths.

    Raises:
        ApiError: The request names a tool that is passed over, or there is no chat template.
    """
    conversation = TurnsOfChat(request.system, request.messages)
    parts = (
        Translation(
            {
                "messages": conversation.messages,
                "continue_final_message": conversation.is_to_be_continued,
            },
            {"prompt": "messages", **conversation.names},
            name_paths(tuple(conversation.ignored)),
        ),
        _translate_tools(request),
        _translate_thinking(request, context),
        _translate_format(request),
        Translation({}, ignored=tuple(name for name in PASSED_OVER if getattr(request, name))),
    )
    body: dict[str, Any] = {}
    names: dict[str, str] = dict(NAMES)
    ignored: tuple[str, ...] = ()
    for part in parts:
        body |= part.body
        names |= part.names
        ignored += part.ignored
    return Translation(body, names, ignored)


def _translate_tools(request: CountTokensRequest) -> Translation:
    tools = request.tools or []
    body: dict[str, Any] = {}
    names = {"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
    if tools:
        # The places are the same in both, so that a tool that is passed over has its path.
        body["tools"] = [_translate_tool(tool) for tool in tools]
        for index in range(len(tools)):
            function = f"tools[{index}].function"
            names[function] = f"tools[{index}]"
            names[f"{function}.parameters"] = f"tools[{index}].input_schema"
    choice = request.tool_choice
    if choice is None or (not tools and choice.type in ("auto", "none")):
        return Translation(body, names)
    if choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    if isinstance(choice, NamedToolChoice):
        _check_choice(choice, tools)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        body["tool_choice"] = _CHOICES[choice.type]
    return Translation(body, names)


def _translate_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, OfferedTool):
        return {"type": tool.type}
    schema = tool.input_schema
    if tool.input_examples and "examples" not in schema:
        schema = {**schema, "examples": tool.input_examples}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _check_choice(choice: NamedToolChoice, tools: list[Any]) -> None:
    """Raises ApiError if the tool that a choice names runs on another vendor's server."""
    for index, tool in enumerate(tools):
        is_passed_over = not isinstance(tool, OfferedTool)
        if is_passed_over and (tool.model_extra or {}).get("name") == choice.name:
            message = (
                f"tool_choice names {show(choice.name)}, and tools[{index}] is passed over: "
                f"this server has no tools of type {show(tool.type)}"
            )
            raise ApiError(400, message, param="tool_choice")


def _translate_thinking(request: CountTokensRequest, context: ModelContext) -> Translation:
    effort = request.output_config.effort if request.output_config else None
    thinking = request.thinking
    efforts = {"reasoning_effort": "output_config.effort"}
    body: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinking is None:
        return Translation(body, efforts)
    can_think = may_reason(context)
    if thinking.type in ("disabled", "between_tools"):
        # Templates turn thinking on or off for a whole answer; Anthropic's models that cannot think
        # between calls alone do not think either.
        off: dict[str, Any] = {"thinking": {"type": "disabled"}} if can_think else {}
        ignored = ("thinking",) if thinking.type == "between_tools" else ()
        return Translation(off, {"thinking.type": "thinking"}, ignored)
    if not can_think:
        return Translation(body, efforts, ("thinking",))
    names = {
        **efforts,
        "thinking.type": "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    body["thinking"] = {"type": "enabled"}
    ignored = ()
    if isinstance(thinking, ThinkingWithBudget) and thinking.budget_tokens is not None:
        # Only the end of reasoning that has a form can be found.
        if context.chat_format.reasoning is not None:
            body["thinking_token_budget"] = thinking.budget_tokens
        else:
            ignored = ("thinking.budget_tokens",)
    return Translation(body, names, ignored)


def _translate_format(request: CountTokensRequest) -> Translation:
    config = request.output_config
    path = "output_config.format"
    answer_format = config.format if config else None
    if answer_format is None:
        path = "output_format"
        answer_format = request.output_format
    if answer_format is None:
        return Translation({})
    json_schema = {"name": "answer", "schema": answer_format.schema_}
    names = {"response_format": path, "response_format.json_schema.schema": f"{path}.schema"}
    body = {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    return Translation(body, names)
