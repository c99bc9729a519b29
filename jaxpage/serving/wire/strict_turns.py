"""Rewrites a conversation for chat templates that take messages in a strict order only.

Agents send several messages of the system, also later ones, and a text of the user after a result:

    system, system      one message
    system later        a text of the user
    user, user          one message
    tool, user          the text follows the result
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpage.images import parts_of_content


def order_strictly(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with all their texts, of which the system's comes first and alone.

    Args:
        messages: The messages as templates expect them.
    """
    ordered: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        last = ordered[-1] if ordered else {"role": "system"}
        if role == "system" and last["role"] != "system":
            role = "user"
        joins = {"system": ("system",), "user": ("user", "tool")}.get(role, ())
        if ordered and last["role"] in joins:
            content = _join(last["content"], message["content"])
            ordered[-1] = {**last, "content": content}
        else:
            ordered.append({**message, "role": role})
    return ordered


def _join(first: Any, second: Any) -> Any:
    """Returns two contents as one; one with pictures is a list of parts."""
    if isinstance(first, list) or isinstance(second, list):
        return [*parts_of_content(first or None), *parts_of_content(second or None)]
    return "\n\n".join(filter(None, (first, second)))
