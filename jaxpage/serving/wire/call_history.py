"""Checks that the calls and the results of a conversation belong together."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.request_fields import AssistantMessage, Message, ToolMessage
from jaxpage.settings.argument_checks import show


def check_calls(messages: Sequence[Message]) -> None:
    """Raises ApiError for a call whose id is not new, and for a result without a call of its own.

    A call without a result is accepted: a client may have been interrupted.
    """
    has_result: dict[str, bool] = {}  # by the ids of the calls so far
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            for place, call in enumerate(message.tool_calls or []):
                if call.id in has_result:
                    path = f"messages[{index}].tool_calls[{place}].id"
                    raise _refusal(path, call.id, "is the id of an earlier call")
                has_result[call.id] = False
        if isinstance(message, ToolMessage):
            path = f"messages[{index}].tool_call_id"
            if message.tool_call_id not in has_result:
                raise _refusal(path, message.tool_call_id, "is the id of no earlier call")
            if has_result[message.tool_call_id]:
                raise _refusal(path, message.tool_call_id, "is the id of a call with a result")
            has_result[message.tool_call_id] = True


def _refusal(path: str, call_id: str, problem: str) -> ApiError:
    return ApiError(400, f"{path} {show(call_id)} {problem}", param=path)
