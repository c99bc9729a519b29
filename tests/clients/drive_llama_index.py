"""LlamaIndex's agent, with its models for OpenAI's, Anthropic's and Ollama's API."""

from __future__ import annotations

import asyncio
from typing import Any

from conversation import QUESTIONS, SYSTEM, Weather, main
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer


def model_of(address: str, route: str) -> Any:
    """Returns the model of a route."""
    if route == "messages":
        from llama_index.llms.anthropic import Anthropic

        # It knows the size of a model by its name: the server has one of these, too.
        return Anthropic(model="claude-sonnet-4-5", base_url=address, api_key="none", max_retries=0)
    if route == "ollama":
        from llama_index.llms.ollama import Ollama

        return Ollama(model="demo", base_url=address, context_window=16_000)
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="demo",
        api_base=f"{address}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=16_000,
        max_retries=0,
    )


async def run(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    agent = FunctionAgent(
        tools=[tool.get_weather],
        llm=model_of(address, route),
        system_prompt=SYSTEM,
        streaming=stream,
    )
    memory = ChatMemoryBuffer.from_defaults(token_limit=12_000)
    return {
        "texts": [
            (await agent.run(user_msg=question, memory=memory)).response.content
            for question in QUESTIONS
        ]
    }


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    return asyncio.run(run(address, route, stream, tool))


main(converse)
