"""Translates the tools and the messages of Ollama's API into those of a chat.

Ollama's calls need no ids: a result names the tool that it is of, or follows the calls in their
order. A chat has an id for each call, so a call without one gets one by its place:

    assistant   call f, call g         call00000, call00001
    tool        of g                   call00001
    tool                               call00000, the first call without a result
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.serving.dialects.ollama_fields import OllamaCall, OllamaMessage
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show


def tools_of(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools of a chat, each at its place in the request."""
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with what Ollama's clients leave out and chat templates read."""
    tool = {"type": "function", **{name: value for name, value in tool.items() if value}}
    if isinstance(function := tool.get("function"), dict):
        function = {name: value for name, value in function.items() if value is not None}
        if isinstance(parameters := function.get("parameters"), dict) and parameters:
            function["parameters"] = {"type": "object", "properties": {}, **parameters}
        tool["function"] = function
    return tool


def messages_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns the messages of a chat, each at its place in the request.

    Raises:
        ApiError: A message has calls and is not of the assistant, or a result is of no call.
    """
    calls = _Calls(messages)
    return [_message(message, index, calls) for index, message in enumerate(messages)]


def _message(message: OllamaMessage, index: int, calls: _Calls) -> dict[str, Any]:
    chat_message: dict[str, Any] = {
        "role": message.role,
        "content": content_of(message.content or "", message.images),
    }
    if message.images and message.role not in ("user", "tool"):
        path = f"messages[{index}].images"
        text = f"{path} is only for the roles 'user' and 'tool', got {show(message.role)}"
        raise ApiError(400, text, param=path)
    if message.role == "tool":
        call = calls.call_of(message, index)
        return {
            **chat_message,
            "tool_call_id": call.id,
            **({"name": call.name} if call.name else {}),
        }
    if message.role == "assistant":
        if message.thinking:
            chat_message["reasoning_content"] = message.thinking
        if message.tool_calls:
            chat_message["tool_calls"] = calls.add(message.tool_calls)
    elif message.tool_calls:
        path = f"messages[{index}].tool_calls"
        text = f"{path} is only for the role 'assistant', got {show(message.role)}"
        raise ApiError(400, text, param=path)
    return chat_message


def content_of(text: str, pictures: Sequence[str] | None) -> Any:
    """Returns the content of a message of a chat; its pictures come first, as in Ollama."""
    if not pictures:
        return text
    urls = [
        picture if picture[:5].lower() == "data:" else f"data:;base64,{picture}"
        for picture in pictures
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def names_of_pictures(pictures: Sequence[str] | None, index: int, path: str) -> dict[str, str]:
    """Returns the client's paths of the pictures of a message, by those of the chat.

    Args:
        pictures: The pictures.
        index: The index of the message in the chat.
        path: The client's path of the list of pictures.
    """
    names: dict[str, str] = {}
    for number in range(len(pictures or ())):
        place = f"messages[{index}].content[{number}]"
        names |= dict.fromkeys((place, f"{place}.image_url.url"), f"{path}[{number}]")
    return names


@dataclass
class _Call:
    """A call of the conversation so far.

    Attributes:
        id: The client's id of it, or a new one.
        name: The name of the tool.
        is_numbered: True if the id is a new one.
        has_result: True if a result of it was read.
    """

    id: str
    name: str
    is_numbered: bool = False
    has_result: bool = False


class _Calls:
    """The calls of the conversation so far, and the ids of those that have none."""

    def __init__(self, messages: Sequence[OllamaMessage]) -> None:
        self._turns: list[list[_Call]] = []  # for each message with calls
        taken = {call.id for message in messages for call in message.tool_calls or ()}
        # Some templates demand nine letters and digits.
        ids = (f"call{number:05d}" for number in itertools.count())
        self._new_ids = (call_id for call_id in ids if call_id not in taken)

    def add(self, calls: Sequence[OllamaCall]) -> list[dict[str, Any]]:
        """Adds the calls of a message, and returns them as a chat has them."""
        turn = [
            _Call(call.id or next(self._new_ids), call.function.name, is_numbered=not call.id)
            for call in calls
        ]
        self._turns.append(turn)
        return [
            {
                "id": added.id,
                "type": "function",
                "function": {"name": added.name, "arguments": _text_of(call.function.arguments)},
            }
            for added, call in zip(turn, calls, strict=True)
        ]

    def call_of(self, message: OllamaMessage, index: int) -> _Call:
        """Returns the call that a result is of, which has one then.

        A client that leaves out the ids of calls may still give those of results, so an id that is
        not known is that of a call without one.

        Raises:
            ApiError: There is no such call.
        """
        name = message.tool_name
        call_id = message.tool_call_id
        call = next((call for call in self._latest_first() if call.id == call_id), None)
        if call is None:
            call = next(
                (
                    call
                    for call in self._latest_first()
                    if not call.has_result
                    and name in (None, "", call.name)
                    and (call.is_numbered or not call_id)
                ),
                None,
            )
        if call is None and call_id:
            return _Call(call_id, name or "")  # which the chat refuses
        if call is None:
            path = f"messages[{index}]"
            text = f"{path} is a result, and no call before it waits for one"
            if name:
                path += ".tool_name"
                text = f"{path} {show(name)} is the tool of no earlier call without a result"
            raise ApiError(400, text, param=path)
        call.has_result = True
        return call

    def _latest_first(self) -> Iterator[_Call]:
        """Yields the calls, those of the latest message first."""
        return itertools.chain.from_iterable(reversed(self._turns))


def _text_of(arguments: dict[str, Any] | str | None) -> str:
    return arguments or "{}" if isinstance(arguments, str | None) else json.dumps(arguments)
