"""LangChain's agent, with its models for OpenAI's two APIs, Anthropic's and Ollama's."""

from __future__ import annotations

from typing import Any

from conversation import QUESTIONS, SYSTEM, Weather, main
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool as as_tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI


def model_of(address: str, route: str) -> Any:
    """Returns the model of a route."""
    if route == "messages":
        return ChatAnthropic(model="demo", base_url=address, api_key="none", max_retries=0)
    if route == "ollama":
        return ChatOllama(model="demo", base_url=address)
    return ChatOpenAI(
        model="demo",
        base_url=f"{address}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=route == "responses",
    )


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    agent = create_agent(
        model_of(address, route), tools=[as_tool(tool.get_weather)], system_prompt=SYSTEM
    )
    messages: list[Any] = []
    texts = []
    for question in QUESTIONS:
        state: Any = {"messages": [*messages, {"role": "user", "content": question}]}
        if stream:
            for mode, part in agent.stream(state, stream_mode=["messages", "values"]):
                if mode == "values":
                    state = part
        else:
            state = agent.invoke(state)
        messages = state["messages"]
        texts.append(messages[-1].text)
    return {"texts": texts}


main(converse)
