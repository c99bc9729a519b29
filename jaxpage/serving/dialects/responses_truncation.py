"""Leaves out the oldest messages of a conversation that has no room in the model.

Whole turns go first, then the oldest steps of the last turn. What the conversation begins with
(instructions), the last message of the user and the last step stay, and a result never stays
without its call:

    instructions │ user, answer │ user, call, result, call, result
    kept           goes first     kept  goes next     kept
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxpage.serving.dialects.responses_items import ChatMessage

_INSTRUCTING = ("system", "developer")


def fit_messages(
    messages: Sequence[ChatMessage], has_room: Callable[[list[ChatMessage]], bool]
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Returns the messages that stay, and those that are left out.

    If even the fewest have no room, these are the ones that stay.

    Args:
        messages: All messages.
        has_room: Returns whether the model has room for messages.
    """
    everything = list(range(len(messages)))
    if has_room(list(messages)):
        return list(messages), []
    choices = _choices([message.body for message in messages])
    low = 0
    high = len(choices)
    while low < high:
        middle = (low + high) // 2
        if has_room([messages[index] for index in choices[middle]]):
            high = middle
        else:
            low = middle + 1
    chosen = choices[min(low, len(choices) - 1)] if choices else everything
    dropped = [messages[index] for index in everything if index not in set(chosen)]
    return [messages[index] for index in chosen], dropped


def _choices(messages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Returns the places of the messages that may stay together, fewer from one to the next."""
    roles = [message["role"] for message in messages]
    num_messages = len(roles)
    head = next(
        (index for index, role in enumerate(roles) if role not in _INSTRUCTING), num_messages
    )
    users = [index for index, role in enumerate(roles) if role == "user"]
    # The last messages of the user, which may be several in a row.
    first_user = stop = users[-1] if users else head
    while first_user > head and roles[first_user - 1] == "user":
        first_user -= 1
    stop += bool(users)
    held = set(range(head)) | set(range(first_user, stop))
    choices = []
    for cut in range(head + 1, num_messages):
        begins_turn = roles[cut] == "user" and roles[cut - 1] != "user"
        begins_step = cut >= stop and roles[cut] != "tool"
        is_whole = begins_turn if cut <= first_user else begins_step
        if is_whole and not _parts_a_call(messages, cut):
            choices.append(
                [index for index in range(num_messages) if index in held or index >= cut]
            )
    return [choice for choice in choices if len(choice) < num_messages]


def _parts_a_call(messages: Sequence[dict[str, Any]], cut: int) -> bool:
    """Returns whether a call is before a place, and its result is not."""
    call_ids = {
        call["id"] for message in messages[:cut] for call in message.get("tool_calls") or ()
    }
    return any(message.get("tool_call_id") in call_ids for message in messages[cut:])
