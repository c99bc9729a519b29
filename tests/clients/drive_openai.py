"""OpenAI's client: chat completions, responses with the history as input, and responses that the
server keeps.
"""

from __future__ import annotations

import json
from typing import Any

from conversation import FUNCTION, QUESTIONS, SYSTEM, Weather, main
from openai import OpenAI


def chat(client: OpenAI, stream: bool, tool: Weather) -> dict[str, Any]:
    """Asks for chat completions, with the helper of the client that gathers a stream."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts, reasoning = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            requested: Any = {
                "model": "demo",
                "messages": messages,
                "tools": [{"type": "function", "function": FUNCTION}],
            }
            if stream:
                with client.chat.completions.stream(**requested) as events:
                    answer = events.get_final_completion().choices[0]
            else:
                answer = client.chat.completions.create(**requested).choices[0]
            message = answer.message
            reasoning.append(message.model_extra["reasoning_content"])
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if answer.finish_reason != "tool_calls":
                break
            for call in message.tool_calls:
                result = tool.call(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        texts.append(message.content)
    return {"texts": texts, "reasoning": reasoning}


def responses(client: OpenAI, stream: bool, tool: Weather, *, stored: bool) -> dict[str, Any]:
    """Asks for responses; `stored`: only what is new is sent, after the id of the last response."""
    history: list[Any] = []
    texts, reasoning = [], []
    last: str | None = None
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        while True:
            requested: Any = {
                "model": "demo",
                "instructions": SYSTEM,
                "input": history,
                "tools": [{"type": "function", "strict": False, **FUNCTION}],
                "reasoning": {"effort": "medium"},
                "store": stored,
            }
            if stored:
                requested["previous_response_id"] = last
            else:
                requested["include"] = ["reasoning.encrypted_content"]
            if stream:
                with client.responses.stream(**requested) as events:
                    said = [
                        event.delta
                        for event in events
                        if event.type == "response.output_text.delta"
                    ]
                    answer = events.get_final_response()
                assert "".join(said) == answer.output_text
            else:
                answer = client.responses.create(**requested)
            assert answer.status == "completed", answer
            last = answer.id
            history = [] if stored else [*history, *answer.output]
            for item in answer.output:
                if item.type == "reasoning":
                    reasoning += [part.text for part in item.content or item.summary]
            calls = [item for item in answer.output if item.type == "function_call"]
            for call in calls:
                result = tool.call(call.name, json.loads(call.arguments))
                history.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                )
            if not calls:
                break
        texts.append(answer.output_text)
    return {"texts": texts, "reasoning": reasoning}


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    if route == "chat":
        return chat(client, stream, tool)
    return responses(client, stream, tool, stored=route == "responses-stored")


main(converse)
