"""Says what every client asks the scripted model, the tool that it has, and what must come out.

The drivers import it as a sibling, in environments of their own: it needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

SYSTEM = "You tell the weather."
# One call; two in one answer; four one after the other; one; none: twelve answers of the model.
QUESTIONS = [
    "What is the weather in Paris?",
    "What is the weather in Rome and Oslo?",
    "What is the weather in Lima, then Cairo, then Quito, then Hanoi?",
    "What is the weather in Kyiv?",
    "How many places was that?",
]
_REQUESTED = [["Paris"], ["Rome", "Oslo"], ["Lima", "Cairo", "Quito", "Hanoi"], ["Kyiv"]]
CALLS = [["get_weather", {"city": city}] for cities in _REQUESTED for city in cities]


def report(city: str) -> str:
    """Returns the weather of a city."""
    return f"{city}: sunny and {10 + len(city)} degrees"


TEXTS = [
    *(f"Voilà: {'; '.join(map(report, cities))} ✓" for cities in _REQUESTED),
    "Voilà: 8 places ✓",
]
REASONING = [
    *("Paris first.", "I have them all.", "Rome and Oslo first.", "I have them all."),
    *("Lima first.", "Cairo first.", "Quito first.", "Hanoi first.", "I have them all."),
    *("Kyiv first.", "I have them all.", "I count them."),
]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city."}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "Returns the weather of a city."
FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}


class Weather:
    """The tool, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a call of the model."""
        self.calls.append([name, arguments])
        assert name == "get_weather", name
        return report(arguments["city"])

    def get_weather(self, city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: The name of the city.
        """
        return self.call("get_weather", {"city": city})


def main(converse: Callable[[str, str, bool, Weather], dict[str, Any]]) -> None:
    """Runs the conversation without and with streaming, and prints a line of JSON for each.

    The command line has the server's address and the route, such as "chat" or "messages".

    Args:
        converse: Gets both, whether to stream, and the tool. It returns "texts", the last text
            of each question, and may return "reasoning", all thoughts in order.
    """
    address, route = sys.argv[1:]
    for stream in (False, True):
        tool = Weather()
        outcome: dict[str, Any] = {"stream": stream}
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some agents show what they do
                outcome |= converse(address, route, stream, tool)
        except BaseException:
            outcome["error"] = traceback.format_exc()
        print(json.dumps({**outcome, "calls": tool.calls}), flush=True)
