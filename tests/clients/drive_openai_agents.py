"""The Agents SDK of OpenAI, by chat completions and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conversation import QUESTIONS, SYSTEM, Weather, main
from openai import AsyncOpenAI

MODELS: Any = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def run(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="weather",
        instructions=SYSTEM,
        model=MODELS[route](model="demo", openai_client=client),
        tools=[function_tool(tool.get_weather)],
    )
    history: list[Any] = []
    texts = []
    for question in QUESTIONS:
        requested = [*history, {"role": "user", "content": question}]
        if stream:
            result: Any = Runner.run_streamed(agent, requested)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, requested)
        history = result.to_input_list()
        texts.append(result.final_output)
    return {"texts": texts}


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    return asyncio.run(run(address, route, stream, tool))


main(converse)
