"""Ollama's client, which makes a tool of a function, with thinking."""

from __future__ import annotations

from typing import Any

from conversation import QUESTIONS, SYSTEM, Weather, main
from ollama import Client


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    client = Client(address)
    model = client.list().models[0]
    assert "tools" in (client.show(model.model).capabilities or [])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts, reasoning = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            requested: Any = {
                "model": model.model,
                "messages": messages,
                "tools": [tool.get_weather],
                "think": True,
            }
            if stream:
                parts = [part.message for part in client.chat(**requested, stream=True)]
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": "".join(part.content or "" for part in parts),
                    "thinking": "".join(part.thinking or "" for part in parts),
                    "tool_calls": [call for part in parts for call in part.tool_calls or []],
                }
            else:
                message = dict(client.chat(**requested).message)
            messages.append(message)
            reasoning.append(message["thinking"])
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                name, arguments = call.function.name, dict(call.function.arguments)
                messages.append(
                    {"role": "tool", "tool_name": name, "content": tool.call(name, arguments)}
                )
        texts.append(message["content"])
    return {"texts": texts, "reasoning": reasoning}


main(converse)
