"""Tries a form: other calls are rendered by the template and read back, whole and cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.markers import common_prefix
from jaxpage.chat_forms.probes import Call, Prober, tool_of

_TYPES = {
    "city": {"type": "string"},
    "when": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "metric": {"type": "boolean"},
    "nothing": {"type": "null"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object"},
}
ROUND_TRIP_TOOLS = [tool_of("look_up", _TYPES), tool_of("send-2", _TYPES)]
# A template that cannot render a value, or renders it as it renders another, shows nothing by it.
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Oslo", "when": "on Monday"},
    {"city": "3", "days": 3},
    {"share": -0.5, "metric": False, "city": "true"},
    {"metric": True, "days": 0},
    {"nothing": None, "city": "x"},
    {"tags": ["a", "b c"], "city": "Rome"},
    {"deep": {"k": 1, "l": {"m": "n"}}, "city": "Rome"},
    {"city": 'a "quoted" \'text\'\nwith <lines> & {"b": [1]}\n  and \\ signs,'},
    {},
)
_NEEDED = 4  # answers that must be read back; others may fail where nothing better can be read


@dataclass(frozen=True)
class _Answer:
    calls: tuple[Call, ...]
    content: str = ""
    reasoning: str = ""


_TWO = (Call("send-2", _ARGUMENTS[0]), Call("look_up", _ARGUMENTS[1]))
_ANSWERS = (
    *(_Answer((Call("look_up", arguments),)) for arguments in _ARGUMENTS),
    _Answer(_TWO),
    _Answer((_TWO[0], Call("send-2", _ARGUMENTS[2])), content="I look. It's [1] < 2 {ok}."),
    _Answer(_TWO[:1], reasoning="First this,\nthen that."),
)


def problem_of(form: ChatFormat, prober: Prober) -> str | None:
    """Returns what is read otherwise than it was written, in one sentence, or None.

    Args:
        form: The form of answers, with one of tool calls.
        prober: Renders answers with `ROUND_TRIP_TOOLS`.
    """
    num_read = 0
    for answer in _ANSWERS:
        written = prober.answer(answer.calls, content=answer.content, reasoning=answer.reasoning)
        if written is None:
            continue
        prompt, text = _split_answer(written, form, prober)
        message = _read(form, [text], prompt)
        calls = [
            Call(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]
        ]
        shown = ", ".join(f"{call.name}({json.dumps(call.arguments)})" for call in answer.calls)
        if _read(form, text, prompt) != message:
            return f"what it renders of {shown} reads otherwise when it comes in pieces"
        if calls == list(answer.calls):
            num_read += 1
        elif not answer.content + answer.reasoning and prober.answer(calls) != written:
            return f"what it renders of {shown} reads as {message['tool_calls']}"
    return None if num_read >= _NEEDED else "it renders too few calls that can be read back"


def _split_answer(written: str, form: ChatFormat, prober: Prober) -> tuple[str, str]:
    """Returns the prompt of a rendered conversation, and the answer that continues it."""
    begin = prober.begin()
    prompt = prober.prompt() or ""
    if written.startswith(prompt) and not form.is_open(prompt):
        return prompt, written[len(prompt) :]
    header = form.reasoning.header if form.reasoning is not None else ""
    if not header or not written.startswith(header, begin):
        header = common_prefix(prompt[begin:], written[begin:])
    begin += len(header)
    return written[:begin], written[begin:]


def _read(form: ChatFormat, texts: Iterable[str], prompt: str) -> dict[str, Any]:
    """Returns the message that an answer is read as, which comes in these texts."""
    reader = form.reader(ROUND_TRIP_TOOLS, prompt)
    for text in texts:
        reader.feed(text)
    return reader.finish()
