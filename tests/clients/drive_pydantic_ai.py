"""Pydantic AI, with its models for OpenAI's two APIs and for Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any

from conversation import QUESTIONS, SYSTEM, Weather, main
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def model_of(address: str, route: str) -> Any:
    """Returns the model of a route."""
    if route == "messages":
        provider = AnthropicProvider(base_url=address, api_key="none")
        return AnthropicModel("demo", provider=provider)
    kind = OpenAIChatModel if route == "chat" else OpenAIResponsesModel
    return kind("demo", provider=OpenAIProvider(base_url=f"{address}/v1", api_key="none"))


async def run(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    agent: Any = Agent(model_of(address, route), system_prompt=SYSTEM, tools=[tool.get_weather])

    async def read(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    history: Any = None
    texts = []
    for question in QUESTIONS:
        result = await agent.run(
            question, message_history=history, event_stream_handler=read if stream else None
        )
        history = result.all_messages()
        texts.append(result.output)
    return {"texts": texts}


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    return asyncio.run(run(address, route, stream, tool))


main(converse)
