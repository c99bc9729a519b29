"""Renders conversations with unusual names and values, which are found again in the text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpage.chat_forms.forms import REASONING_FIELDS
from jaxpage.chat_forms.markers import ARGUMENTS, CALL_ID, KEY, TOOL_NAME, common_prefix

# (messages, tools, add_generation_prompt, variables) -> text; it raises ValueError where the
# template refuses.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool, Mapping[str, Any]], str]

# The words are in no template, and no escaping changes them.
CONTENT, REASONING, QUESTION, RESULT = "zqContent", "zqReasoning", "zqQuestion", "zqResult"
NAMES = ("zqNameA", "zqNameB")
KEYS = ("zqKeyA", "zqKeyB")
TEXTS = ("zqTextA", "zqTextB")
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)
_PATTERNS = {CALL_ID: "zqId0000[A-Z]", TOOL_NAME: "zqName[AB]", KEY: "zqKey[AB]"}


def with_placeholders(text: str) -> str:
    """Returns a rendered text with placeholders for the ids, the names and the keys of probes."""
    for placeholder, pattern in _PATTERNS.items():
        text = re.sub(pattern, placeholder, text)
    return text


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
        render: Renders a conversation, given the arguments of `Render` as JSON; None is a refusal.
        tools: The tools that the conversation has.
        variables: The variables of the template.
        takes_text: True if calls bring their arguments as JSON text.
        named_ids: True if the ids of calls are made of their names, as a template needs that writes
            the id in place of the name.
        example: A call with placeholders, if calls are written into the content in this way.
    """

    render: Callable[[str], str | None]
    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    takes_text: bool = False
    named_ids: bool = False
    example: str = ""

    def prompt(self) -> str | None:
        """Returns the prompt for an answer, or None if the template refuses."""
        return self._render((), True)

    def question(self) -> str | None:
        """Returns the conversation without any answer, or None if the template refuses."""
        return self._render((), False)

    def body(self, calls: Sequence[Call], **fields: Any) -> str | None:
        """Returns an answer without the conversation before it; see `answer`."""
        whole = self.answer(calls, **fields)
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
        message: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Returns the conversation with an answer, or None if the template refuses.

        Args:
            calls: The calls of the answer.
            content: Its text.
            reasoning: Its reasoning.
            is_last: False if another question follows.
            in_parts: True if the content is a list of parts, one of which is the reasoning.
            result: The result of the first call, which follows if there is any.
            message: The fields of the answer in place of its content and reasoning.
        """
        fields: dict[str, Any] = {"role": "assistant", "content": content, **(message or {})}
        if in_parts:
            fields["content"] = [
                {"type": "thinking", "thinking": reasoning},
                {"type": "text", "text": content},
            ]
        elif reasoning:
            # A template reads one of these fields; which one is not known yet.
            fields |= dict.fromkeys(REASONING_FIELDS, reasoning)
        if calls and self.example:
            fields["content"] = "\n".join(filter(None, [content, *map(self._write_call, calls)]))
        elif calls:
            fields["tool_calls"] = [self._call(index, call) for index, call in enumerate(calls)]
        messages = [fields]
        if not is_last:
            messages.append({"role": "user", "content": QUESTION})
        if result:
            call_id, name = self._call(0, calls[0])["id"], calls[0].name
            messages.append(
                {"role": "tool", "tool_call_id": call_id, "name": name, "content": result}
            )
        return self._render(messages, False)

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        arguments: Any = dict(call.arguments)
        if self.takes_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        # Nine letters and digits, as some templates demand.
        call_id = f"zqId0000{chr(ord('A') + index % 26)}"
        if self.named_ids:
            call_id = f"functions.{call.name}:{index}"
        function = {"name": call.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _write_call(self, call: Call) -> str:
        """Returns a call as the example shows it."""
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        name = json.dumps(call.name)[1:-1]
        return self.example.replace(TOOL_NAME, name).replace(ARGUMENTS, arguments)

    def _render(self, messages: Sequence[dict[str, Any]], generates: bool) -> str | None:
        requested = [{"role": "user", "content": QUESTION}, *messages]
        # The arguments are one text because the results are kept by it (`functools.cache`).
        return self.render(
            json.dumps([requested, list(self.tools) or None, generates, dict(self.variables)])
        )


def prober_of(render: Render) -> Prober:
    """Returns a prober that remembers what was rendered, for conversations without tools."""

    @functools.cache
    def render_messages(requested: str) -> str | None:
        try:
            return render(*json.loads(requested))
        except ValueError:
            return None

    return Prober(render_messages)
