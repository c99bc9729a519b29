"""smolagents' agent that calls tools: it requires a call in each answer, and has the last text as a
call, too.
"""

from __future__ import annotations

from typing import Any

from conversation import QUESTIONS, SYSTEM, Weather, main
from smolagents import OpenAIModel, Tool, ToolCallingAgent


def converse(address: str, route: str, stream: bool, tool: Weather) -> dict[str, Any]:
    """Runs the conversation."""

    class WeatherTool(Tool):
        name = "get_weather"
        description = "Returns the weather of a city."
        inputs = {"city": {"type": "string", "description": "The name of the city."}}  # noqa: RUF012
        output_type = "string"

        def forward(self, city: str) -> str:
            return tool.get_weather(city)

    model = OpenAIModel(model_id="demo", api_base=f"{address}/v1", api_key="none")
    agent = ToolCallingAgent(
        tools=[WeatherTool()],
        model=model,
        instructions=SYSTEM,
        stream_outputs=stream,
        max_tool_threads=1,
        verbosity_level=0,
    )
    return {"texts": [agent.run(question, reset=False) for question in QUESTIONS]}


main(converse)
