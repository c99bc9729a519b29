"""Anthropic's client: a loop over messages, with thinking."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from conversation import DESCRIPTION, PARAMETERS, QUESTIONS, SYSTEM, Weather, main

TOOL: Any = {"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    client = Anthropic(base_url=address, api_key="none", max_retries=0)
    messages: list[Any] = []
    texts, reasoning = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            requested: Any = {
                "model": "demo",
                "max_tokens": 4096,
                "system": [
                    {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
                ],
                "messages": messages,
                "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
                "thinking": {"type": "adaptive"},
            }
            if stream:
                with client.messages.stream(**requested) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**requested)
            messages.append({"role": "assistant", "content": answer.content})
            reasoning += [block.thinking for block in answer.content if block.type == "thinking"]
            if answer.stop_reason != "tool_use":
                break
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": tool.call(call.name, call.input),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        texts.append("".join(block.text for block in answer.content if block.type == "text"))
    counted = client.messages.count_tokens(
        model="demo", system=SYSTEM, messages=messages, tools=[TOOL]
    )
    assert counted.input_tokens > 300, counted
    return {"texts": texts, "reasoning": reasoning}


main(converse)
