"""Renders conversations with unusual names and values, which are found again in the text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.chat_forms.marks import common_prefix

# (messages, tools, add_generation_prompt, variables) -> text; it raises ValueError where the
# template refuses.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool, Mapping[str, Any]], str]

CONTENT, REASONING, QUESTION, RESULT = "zqContent", "zqReasoning", "zqQuestion", "zqResult"
NAMES = ("zqNameA", "zqNameB")
KEYS = ("zqKeyA", "zqKeyB", "zqKeyC")
TEXTS = ("zqTextA", "zqTextB", "zqTextC")
IDS = ("zqId0000A", "zqId0000B")  # of nine letters and digits, as some templates demand
# Templates name what a model thought in these ways.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


def tool_of(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in the form that templates expect."""
    parameters = {"type": "object", "properties": dict(properties), "required": []}
    function = {"name": name, "description": "zqDescription", "parameters": parameters}
    return {"type": "function", "function": function}


_PROPERTIES = {key: {"type": "string", "description": "zqDescription"} for key in KEYS}
TOOLS = [tool_of(name, _PROPERTIES) for name in NAMES]


@dataclass(frozen=True)
class Call:
    """A tool call of a probe."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Prober:
    """Renders answers of the assistant by a template.

    Attributes:
        render: Renders a conversation.
        variables: The variables of the template.
        takes_text: True if calls bring their arguments as JSON text.
        named_ids: True if the ids of calls are made of their names, as a template needs that writes
            the id in place of the name.
        tools: The tools that the conversation has.
    """

    render: Render
    variables: Mapping[str, Any]
    takes_text: bool = False
    named_ids: bool = False
    tools: Sequence[dict[str, Any]] | None = None

    def prompt(self) -> str | None:
        """Returns the prompt for an answer, or None if the template refuses."""
        return self._rendered((), True)

    def question(self) -> str | None:
        """Returns the conversation without any answer, or None if the template refuses."""
        return self._rendered((), False)

    def body(self, calls: Sequence[Call], **said: Any) -> str | None:
        """Returns an answer without the conversation before it; see `answer`."""
        whole = self.answer(calls, **said)
        return None if whole is None else whole[self.begin() :]

    def begin(self) -> int:
        """Returns the number of characters of the conversation before an answer."""
        plain = self.answer(content=CONTENT) or ""
        return len(common_prefix(self.question() or "", plain))

    def answer(
        self,
        calls: Sequence[Call] = (),
        *,
        content: str = "",
        reasoning: str = "",
        is_last: bool = True,
        in_parts: bool = False,
        result: str = "",
    ) -> str | None:
        """Returns the conversation with an answer, or None if the template refuses.

        Args:
            calls: The calls of the answer.
            content: Its text.
            reasoning: Its reasoning.
            is_last: False if another question follows.
            in_parts: True if the content is a list of parts, one of which is the reasoning.
            result: The result of the first call, which follows if there is any.
        """
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if in_parts:
            message["content"] = [
                {"type": "thinking", "thinking": reasoning},
                {"type": "text", "text": content},
            ]
        elif reasoning:
            message |= dict.fromkeys(_THOUGHTS, reasoning)
        if calls:
            message["tool_calls"] = [self._call(index, call) for index, call in enumerate(calls)]
        after = [] if is_last else [{"role": "user", "content": QUESTION}]
        if result:
            called = {"tool_call_id": message["tool_calls"][0]["id"], "name": calls[0].name}
            after.append({"role": "tool", **called, "content": result})
        return self._rendered((message, *after), False)

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        arguments: Any = dict(call.arguments)
        if self.takes_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_id = f"functions.{call.name}:{index}" if self.named_ids else IDS[index]
        function = {"name": call.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _rendered(self, messages: Sequence[dict[str, Any]], generates: bool) -> str | None:
        asked = [{"role": "user", "content": QUESTION}, *messages]
        try:
            return self.render(asked, list(self.tools or []) or None, generates, self.variables)
        except ValueError:
            return None


def probers(render: Render, tools: Sequence[dict[str, Any]] | None) -> list[Prober]:
    """Returns a prober for each way in which templates take calls, the usual one first."""
    cached = _cached(render)
    first = Prober(cached, VARIABLES[0], tools=tools)
    ways = [(False, False), (True, False), (False, True), (True, True)]
    return [
        replace(first, takes_text=takes_text, named_ids=named_ids) for takes_text, named_ids in ways
    ]


def _cached(render: Render) -> Render:
    known: dict[str, str] = {}

    @functools.wraps(render)
    def rendered(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        generates: bool,
        variables: Mapping[str, Any],
    ) -> str:
        key = json.dumps([messages, tools, generates, dict(variables)])
        if key not in known:
            known[key] = render(messages, tools, generates, variables)
        return known[key]

    return rendered
