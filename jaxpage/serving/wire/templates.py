"""Renders conversations as text by the model's own chat template.

A request cannot bring a template of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpage.images import parts_of_content, takes_parts_alone
from jaxpage.serving.wire.body import JsonReader
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.custom_tools import arguments_with
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import RequestObject
from jaxpage.serving.wire.pictures import (
    RequestedPictures,
    SentPicture,
    read_picture,
    request_pictures,
)
from jaxpage.serving.wire.rendering import RENDERERS
from jaxpage.serving.wire.request_fields import (
    AssistantMessage,
    ConversationFields,
    ImagePart,
    Message,
    RefusalPart,
    ToolMessage,
)
from jaxpage.serving.wire.strict_turns import order_strictly
from jaxpage.serving.wire.template_source import variables_of
from jaxpage.serving.wire.thinking import has_variables, variables_of_request
from jaxpage.serving.wire.tool_fields import CustomCall, FunctionTool, ToolCall
from jaxpage.settings.argument_checks import show

_MAX_NUMBER = 10_000  # a template may count up to a variable
_MAX_TEXT = 1_000
_MAX_VARIABLES = 64
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
RENDER_SECONDS = 2.0  # processor time
RENDER_BYTES = 256 << 20


class Rendered(NamedTuple):
    """Holds the prompt of a conversation.

    Attributes:
        text: The prompt, with a marker for each picture.
        ignored_fields: The fields of the request that the template has nothing for.
        pictures: The pictures of the conversation, if it has any.
    """

    text: str
    ignored_fields: tuple[str, ...]
    pictures: RequestedPictures | None = None


def render(
    request: ConversationFields, context: ModelContext, tools: list[FunctionTool]
) -> Rendered:
    """Returns the prompt of a conversation.

    This may take a while, so it belongs on a worker thread.

    Args:
        request: The conversation.
        context: The served model and the server's settings.
        tools: The tools that the prompt shows to the model.

    Raises:
        ApiError: The status is 400: there is no template, it refuses the messages or fails on them,
            a result belongs to no call, a picture is refused, or the request has a variable that
            the template does not have.
    """
    template = template_of(context, tools)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    if continues and not isinstance(request.messages[-1], AssistantMessage):
        message = "continue_final_message needs a last message of the assistant"
        raise ApiError(400, message, param="continue_final_message")
    _check_calls(request.messages)
    # One for all calls, because it counts the containers of the request as a whole.
    reader = JsonReader()
    pictures: list[SentPicture] = []
    messages = [
        _message(message, f"messages[{index}]", context, reader, pictures)
        for index, message in enumerate(request.messages)
    ]
    if context.pictures is not None and takes_parts_alone(template):
        messages = [
            {**message, "content": parts_of_content(message["content"])} for message in messages
        ]
    wished = variables_of_request(request, template)
    variables = _variables(request.chat_template_kwargs or {}, template, context)
    requested = {
        "template": template,
        "special_tokens": context.tokenizer.special_tokens_map,  # type: ignore[union-attr]  # it has a template
        "messages": messages,
        "tools": [_tool(tool) for tool in tools] or None,
        "add_generation_prompt": not continues
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        "continue_final_message": continues,
        "variables": {**wished.values, **variables},
    }
    text = _render_in_order(requested)
    ignored = wished.ignored
    if wished.switch and not may_reason(context):
        ignored += (wished.switch,)
    return Rendered(text, ignored, request_pictures(context, pictures) if pictures else None)


def _render_in_order(requested: dict[str, Any]) -> str:
    """Returns the text of the messages as they are, or in a strict order if the template wants it.

    Raises:
        ApiError: The template refuses the messages in both orders, or fails on them.
    """
    try:
        return RENDERERS.render(requested, RENDER_SECONDS, RENDER_BYTES)
    except ValueError as error:
        problem = f"The model's chat template refuses these messages: {error}"
        refusal = ApiError(400, problem, param="messages")
        # Templates of some models want the roles in turns, which agents do not keep.
        ordered = order_strictly(requested["messages"])
        if ordered == requested["messages"]:
            raise refusal from None
    try:
        return RENDERERS.render({**requested, "messages": ordered}, RENDER_SECONDS, RENDER_BYTES)
    except ValueError:
        raise refusal from None


def template_of(context: ModelContext, tools: Sequence[object]) -> str:
    """Returns the source of the model's chat template; some models have another one for tools.

    Raises:
        ApiError: The model has no chat template.
    """
    if context.tokenizer is None or not getattr(context.tokenizer, "chat_template", None):
        raise ApiError(400, "The model has no chat template; use /v1/completions", param="messages")
    try:
        return str(context.tokenizer.get_chat_template(tools=[{}] if tools else None))
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None


def may_reason(context: ModelContext) -> bool:
    """Returns whether a model reasons, or its chat template has a variable that says how much."""
    if context.chat_format.reasoning is not None:
        return True
    has_template = bool(getattr(context.tokenizer, "chat_template", None))
    return has_template and has_variables(template_of(context, []))


def parameters_of(tool: FunctionTool) -> Any:
    """Returns the schema of a tool's arguments, which the prompt shows and grammars demand."""
    parameters = tool.function.parameters
    return NO_PARAMETERS if parameters is None or parameters == {} else parameters


def _check_calls(messages: Sequence[Message]) -> None:
    """Raises ApiError for a call whose id is not new, and for a result without a call of its own.

    A call without a result is accepted: a client may have been interrupted.
    """
    has_result: dict[str, bool] = {}  # by the ids of the calls so far
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            for number, call in enumerate(message.tool_calls or []):
                if call.id in has_result:
                    path = f"messages[{index}].tool_calls[{number}].id"
                    raise _refuse_call(path, call.id, "is the id of an earlier call")
                has_result[call.id] = False
        if isinstance(message, ToolMessage):
            path = f"messages[{index}].tool_call_id"
            if message.tool_call_id not in has_result:
                raise _refuse_call(path, message.tool_call_id, "is the id of no earlier call")
            if has_result[message.tool_call_id]:
                raise _refuse_call(path, message.tool_call_id, "is the id of a call with a result")
            has_result[message.tool_call_id] = True


def _refuse_call(path: str, call_id: str, problem: str) -> ApiError:
    return ApiError(400, f"{path} {show(call_id)} {problem}", param=path)


def _message(
    message: RequestObject,
    path: str,
    context: ModelContext,
    reader: JsonReader,
    pictures: list[SentPicture],
) -> dict[str, Any]:
    """Returns a message in the form that templates expect.

    Its content is one text, or parts if it has a picture; the arguments of its calls are objects,
    and its reasoning stands where the template reads it.

    Args:
        message: The message.
        path: Its path in the request.
        context: The model; the form of its answers knows where its template reads reasoning.
        reader: Reads the arguments of all calls of the request.
        pictures: Collects the pictures of the request.
    """
    content = _content(getattr(message, "content", None), f"{path}.content", context, pictures)
    role = str(getattr(message, "role", ""))
    fields: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if (name := getattr(message, "name", None)) is not None:
        fields["name"] = name
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.refusal:
            # What the assistant said in place of an answer is its text.
            content = fields["content"] = "\n".join(filter(None, (content, message.refusal)))
        if content is None and not message.tool_calls:
            raise ApiError(
                400, f"{path}.content is required without tool_calls", param=f"{path}.content"
            )
        reasoning = (
            message.reasoning if message.reasoning_content is None else message.reasoning_content
        )
        if message.tool_calls:
            fields["content"] = content or ""
        if reasoning is not None:
            has_calls = bool(message.tool_calls)
            fields |= context.chat_format.sent.fields(reasoning, content or "", has_calls=has_calls)
        if message.tool_calls:
            fields["tool_calls"] = [
                _call(call, f"{path}.tool_calls[{index}]", reader)
                for index, call in enumerate(message.tool_calls)
            ]
    return fields


def _content(content: Any, path: str, context: ModelContext, pictures: list[SentPicture]) -> Any:
    """Returns the content of a message: a text, or parts if one of them is a picture."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, ImagePart):
            picture = read_picture(part.image_url.url, f"{path}[{index}]", context, len(pictures))
            pictures.append(picture)
            parts.append({"type": "image"})
        else:
            text = part.refusal if isinstance(part, RefusalPart) else part.text
            parts.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _call(call: ToolCall, path: str, reader: JsonReader) -> dict[str, Any]:
    if isinstance(call, CustomCall):
        arguments: Any = arguments_with(call.custom.input)
        return _function_call(call.id, call.custom.name, arguments)
    param = f"{path}.function.arguments"
    # An answer may have had empty arguments, and clients send back what they received.
    arguments = reader.read(call.function.arguments.strip() or "{}", param)
    if not isinstance(arguments, dict):
        raise ApiError(
            400,
            f"{param} must be the text of a JSON object, got {show(call.function.arguments)}",
            param=param,
        )
    return _function_call(call.id, call.function.name, arguments)


def _function_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.function.name,
            "description": tool.function.description or "",
            "parameters": parameters_of(tool),
        },
    }


def _variables(variables: dict[str, Any], template: str, context: ModelContext) -> dict[str, Any]:
    """Returns the request's variables for the template.

    A variable must be one that the template reads, and small, so that the prompt does not become
    long. It is never an argument of the renderer, such as `chat_template`, even if the template
    has a variable of that name.

    Raises:
        ApiError: A variable is refused.
    """
    if not variables:
        return variables
    # A variable of such a name would be taken for the argument.
    arguments = inspect.signature(context.tokenizer.apply_chat_template).parameters  # type: ignore[union-attr]
    known = variables_of(template) - arguments.keys()
    param = "chat_template_kwargs"
    for name, value in variables.items():
        if name not in known:
            names = sorted(known)[:_MAX_VARIABLES]
            raise ApiError(
                400,
                f"{param}: {show(name)} is not a variable of the model's template, which has "
                f"{names}",
                param=param,
            )
        is_small = value is None or isinstance(value, bool)
        is_small = is_small or (isinstance(value, int | float) and abs(value) <= _MAX_NUMBER)
        if not is_small and not (isinstance(value, str) and len(value) <= _MAX_TEXT):
            expected = (
                f"true, false, a number up to {_MAX_NUMBER} or a text of at most {_MAX_TEXT} "
                "characters"
            )
            raise ApiError(
                400, f"{param}: {show(name)} must be {expected}, got {show(value)}", param=param
            )
    return variables
