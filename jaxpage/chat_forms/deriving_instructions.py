"""Finds the form of tool calls in the instructions of a template that renders no calls itself.

The instructions come with the tools, and show a call with words in the place of values:

    <tool_call>
    {"name": <function-name>, "arguments": <args-json-object>}
    </tool_call>
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpage.chat_forms.forms import ARGUMENTS, SAME_NAME
from jaxpage.chat_forms.marks import TAG, mirrors
from jaxpage.chat_forms.probes import KEYS, NAMES, Prober, Render

_MAX_EXAMPLE = 500  # characters of an object
# Each mark is tried, because a list of tools may begin as an example does.
_EXAMPLE = re.compile(
    rf"(?=({TAG.pattern})(\s*)(\{{.{{1,{_MAX_EXAMPLE}}}?\}})(\s*)({TAG.pattern}))", re.DOTALL
)
_INNER = re.compile(r"\{[^{}]*\}")
_KEY = r'\s*"(\w+)"\s*:\s*'
_PAIR = re.compile(rf"\{{({_KEY})(.+?)(\s*,{_KEY})(.+?)(\s*)\}}", re.DOTALL)
_NAME_HOLE = f'"{SAME_NAME}"'


def prober_of_instructions(prober: Prober) -> Prober | None:
    """Returns a prober that writes calls into the content of a message, as the instructions show.

    It is None if the instructions do not show one form, or if the template changes such content.

    Args:
        prober: Renders answers by a template that passes over the calls of a message.
    """
    shown, alone = prober.question() or "", replace(prober, tools=None).question() or ""
    if NAMES[0] not in shown:
        return None
    found = [each.groups() for each in _EXAMPLE.finditer(shown)]
    examples = [_with_holes(*parts) for parts in found if "".join(parts) not in alone]
    calls = {"".join(call.split()): call for call in examples if call is not None}
    if len(calls) != 1:
        return None
    (call,) = calls.values()
    example = call.replace(SAME_NAME, NAMES[0]).replace(ARGUMENTS, "{}")
    if example not in (prober.answer(content=example) or ""):
        return None
    return replace(prober, render=functools.partial(_render, prober.render, call))


def _with_holes(opened: str, space: str, text: str, more_space: str, close: str) -> str | None:
    """Returns a call with holes for its name and its arguments, or None if a text is no example.

    An object of a tool or of another call than any is none, nor is one with further keys.
    """
    if close == opened or not mirrors(re.sub(r"_?(start|begin)\b", "", opened), close):
        return None
    if any(name in text for name in (*NAMES, *KEYS)):
        return None
    inner = text[1:-1]
    while (shorter := _INNER.sub("...", inner)) != inner:
        inner = shorter
    pair = _PAIR.fullmatch(f"{{{inner}}}")
    if pair is None or re.search(_KEY, pair[6]):
        return None
    first, second = _hole(pair[2]), _hole(pair[5])
    if {first, second} != {_NAME_HOLE, ARGUMENTS}:
        return None
    body = f"{{{pair[1]}{first}{pair[4]}{second}{pair[7]}}}"
    return opened + space + body + more_space + close


def _hole(key: str) -> str:
    """Returns the hole for the value of a key, which is empty if the key says nothing."""
    if re.search("arg|param|input", key):
        return ARGUMENTS
    return _NAME_HOLE if re.search("name|function|tool", key) else ""


def _render(
    render: Render,
    call: str,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generates: bool,
    variables: Mapping[str, Any],
) -> str:
    said = [_as_content(message, call) for message in messages]
    return render(said, tools, generates, variables)


def _as_content(message: dict[str, Any], call: str) -> dict[str, Any]:
    """Returns a message whose calls stand in its content."""
    if "tool_calls" not in message:
        return message
    parts = [message["content"]]
    for function in (each["function"] for each in message["tool_calls"]):
        name = json.dumps(function["name"])[1:-1]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        parts.append(call.replace(SAME_NAME, name).replace(ARGUMENTS, arguments))
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, parts))}
