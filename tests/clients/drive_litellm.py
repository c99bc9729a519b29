"""litellm, by its routes to servers of OpenAI's, Anthropic's and Ollama's API."""

from __future__ import annotations

import json
import os
from typing import Any

from conversation import FUNCTION, QUESTIONS, SYSTEM, Weather, main

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm

ROUTES = {
    "chat": ("openai/demo", "/v1"),
    "messages": ("anthropic/demo", ""),
    "ollama": ("ollama_chat/demo", ""),
}


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    model, path = ROUTES[route]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    texts = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer: Any = litellm.completion(
                model=model,
                api_base=address + path,
                api_key="none",
                messages=messages,
                tools=[{"type": "function", "function": FUNCTION}],
                stream=stream,
                num_retries=0,
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = tool.call(call.function.name, json.loads(call.function.arguments))
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "name": call.function.name,
                        "content": result,
                    }
                )
        texts.append(message.content)
    return {"texts": texts}


main(converse)
