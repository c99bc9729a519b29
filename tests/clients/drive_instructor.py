"""instructor, which makes a forced call of a class: each place of the conversation, one answer
each.
"""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from conversation import CALLS, SYSTEM, Weather, main
from pydantic import BaseModel


class get_weather(BaseModel):  # the class names the tool
    """Returns the weather of a city."""

    city: str


def client_of(address: str, route: str) -> Any:
    """Returns the client of a route."""
    if route == "messages":
        return instructor.from_anthropic(
            anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        )
    modes = {"chat": instructor.Mode.TOOLS, "responses": instructor.Mode.RESPONSES_TOOLS}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=modes[route])


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""
    client = client_of(address, route)
    limits = {} if route == "responses" else {"max_tokens": 1000}
    for _, arguments in CALLS:
        requested: Any = {
            "model": "demo",
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What is the weather in {arguments['city']}?"},
            ],
            "response_model": get_weather,
            "max_retries": 0,
            **limits,
        }
        if stream:
            *_, call = client.create_partial(**requested)
        else:
            call = client.create(**requested)
        tool.call("get_weather", call.model_dump())
    return {"texts": []}


main(converse)
