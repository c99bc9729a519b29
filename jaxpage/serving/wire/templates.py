"""Conversations as text, through the model's own chat template and no other: a request brings no template of its own."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.fields import (
    AssistantMessage,
    ConversationFields,
    Fields,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
)
from jaxpage.serving.wire.rendering import RENDERERS
from jaxpage.settings.argument_checks import shown

# What the renderer itself gives a template.
_GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
}
_MAX_NUMBER, _MAX_TEXT = 10_000, 1_000  # of a variable: a template may count up to it
_MAX_VARIABLES = 64
RENDER_SECONDS = 2.0  # of the processor
RENDER_BYTES = 256 << 20


def render(request: ConversationFields, context: ModelContext, tools: list[Tool]) -> str:
    """The prompt. May take a while: for a worker thread.

    Raises:
        ApiError: 400; there is no template, it refuses the messages or fails on them, or a variable is none of its own.
    """
    template = template_of(context, tools)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    if continues and not isinstance(request.messages[-1], AssistantMessage):
        message = "continue_final_message needs a last message of the assistant"
        raise ApiError(400, message, param="continue_final_message")
    messages = [
        _message(message, f"messages[{index}]") for index, message in enumerate(request.messages)
    ]
    variables = _variables(request.chat_template_kwargs or {}, template, context)
    asked = {
        "template": template,
        "special_tokens": context.tokenizer.special_tokens_map,  # type: ignore[union-attr]  # it has a template
        "messages": messages,
        "tools": [_tool(tool) for tool in tools] or None,
        "add_generation_prompt": not continues
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        "continue_final_message": continues,
        "variables": variables,
    }
    try:
        return RENDERERS.rendered(asked, RENDER_SECONDS, RENDER_BYTES)
    except ValueError as error:
        raise ApiError(
            400, f"The model's chat template refuses these messages: {error}", param="messages"
        ) from None


def template_of(context: ModelContext, tools: list[Tool]) -> str:
    """The source of the model's chat template; some models have another one for tools. Raises ApiError if there is none."""
    if context.tokenizer is None or not getattr(context.tokenizer, "chat_template", None):
        raise ApiError(400, "The model has no chat template; use /v1/completions", param="messages")
    try:
        return str(context.tokenizer.get_chat_template(tools=[{}] if tools else None))
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema that the model is shown, and held to where a grammar holds it."""
    return tool.function.parameters or {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def _message(message: Fields, path: str) -> dict[str, Any]:
    """As templates expect it: content as one text, the arguments of calls as objects."""
    content = getattr(message, "content", None)
    if isinstance(content, list):
        content = "\n".join(part.text for part in content if isinstance(part, TextPart))
    role = str(getattr(message, "role", ""))
    fields: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if (name := getattr(message, "name", None)) is not None:
        fields["name"] = name
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if content is None and not message.tool_calls:
            raise ApiError(
                400, f"{path}.content is required without tool_calls", param=f"{path}.content"
            )
        reasoning = (
            message.reasoning if message.reasoning_content is None else message.reasoning_content
        )
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if message.tool_calls:
            fields["content"] = content or ""
            fields["tool_calls"] = [
                _call(call, f"{path}.tool_calls[{index}]")
                for index, call in enumerate(message.tool_calls)
            ]
    return fields


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    param = f"{path}.function.arguments"
    try:
        # clients send back what they were sent
        arguments = json.loads(call.function.arguments.strip() or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            400,
            f"{param} must be the text of a JSON object, got {shown(call.function.arguments)}",
            param=param,
        )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.function.name,
            "description": tool.function.description or "",
            "parameters": parameters_of(tool),
        },
    }


def _variables(given: dict[str, Any], template: str, context: ModelContext) -> dict[str, Any]:
    """The variables of a request for a template: only those that it has, and nothing that could make it long.

    Never an argument of the renderer itself, such as `chat_template`, whatever a template calls its variables.
    """
    if not given:
        return given
    arguments = inspect.signature(context.tokenizer.apply_chat_template).parameters  # type: ignore[union-attr]
    known = variables_of(template) - arguments.keys()
    param = "chat_template_kwargs"
    for name, value in given.items():
        if name not in known:
            own = sorted(known)[:_MAX_VARIABLES]
            raise ApiError(
                400,
                f"{param}: {shown(name)} is not a variable of the model's template, which has {own}",
                param=param,
            )
        is_small = value is None or isinstance(value, bool)
        is_small = is_small or (isinstance(value, int | float) and abs(value) <= _MAX_NUMBER)
        if not is_small and not (isinstance(value, str) and len(value) <= _MAX_TEXT):
            wanted = f"true, false, a number up to {_MAX_NUMBER} or a text of at most {_MAX_TEXT} characters"
            raise ApiError(
                400, f"{param}: {shown(name)} must be {wanted}, got {shown(value)}", param=param
            )
    return given


@functools.lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """What a template reads and does not set, but for what the renderer gives it and the names of special tokens."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(
        name
        for name in names - _GIVEN - environment.globals.keys()
        if not name.endswith(("_token", "_now", "_tokens"))
    )


class _Generation(Extension):
    """transformers' `{% generation %}`, which marks what the assistant says: here only so that such templates can be read."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
