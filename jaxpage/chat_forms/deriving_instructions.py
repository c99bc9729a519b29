"""Finds the form of tool calls in the instructions of a template that renders no calls itself.

The instructions come with the tools, and show a call with words instead of values:

    <tool_call>
    {"name": <function-name>, "arguments": <args-json-object>}
    </tool_call>
"""

from __future__ import annotations

import re
from dataclasses import replace

from jaxpage.chat_forms.markers import ARGUMENTS, TAG, TOOL_NAME, is_pair
from jaxpage.chat_forms.probes import KEYS, NAMES, Prober

_MAX_EXAMPLE = 500  # characters of an object
# Each marker is tried, because a list of tools may begin as an example does.
_EXAMPLE = re.compile(
    rf"(?=({TAG.pattern})(\s*)(\{{.{{1,{_MAX_EXAMPLE}}}?\}})(\s*)({TAG.pattern}))", re.DOTALL
)
_INNER = re.compile(r"\{[^{}]*\}")
_KEY = r'\s*"(\w+)"\s*:\s*'
_PAIR = re.compile(rf"\{{({_KEY})(.+?)(\s*,{_KEY})(.+?)(\s*)\}}", re.DOTALL)
_NAME_PLACEHOLDER = f'"{TOOL_NAME}"'


def prober_of_instructions(prober: Prober) -> Prober | None:
    """Returns a prober that writes calls into the content of a message, as the instructions show.

    It is None if the instructions do not show one form, or if the template changes such content.

    Args:
        prober: Renders answers by a template that passes over the calls of a message.
    """
    shown = prober.question() or ""
    without_tools = replace(prober, tools=()).question() or ""
    if NAMES[0] not in shown:
        return None
    matches = [each.groups() for each in _EXAMPLE.finditer(shown)]
    examples = [_call_of(*parts) for parts in matches if "".join(parts) not in without_tools]
    calls = {"".join(call.split()): call for call in examples if call is not None}
    if len(calls) != 1:
        return None
    (call,) = calls.values()
    example = call.replace(TOOL_NAME, NAMES[0]).replace(ARGUMENTS, "{}")
    if example not in (prober.answer(content=example) or ""):
        return None
    return replace(prober, example=call)


def _call_of(opened: str, space: str, text: str, more_space: str, close: str) -> str | None:
    """Returns a call with placeholders for name and arguments, or None if a text is no example.

    An object of a tool or of another call than any is none, nor is one with further keys.
    """
    # Such as <|tool_call_start|> and <|tool_call_end|>.
    if close == opened or not is_pair(re.sub(r"_?(start|begin)\b", "", opened), close):
        return None
    if any(name in text for name in (*NAMES, *KEYS)):
        return None
    inner = text[1:-1]
    while (shorter := _INNER.sub("...", inner)) != inner:
        inner = shorter
    pair = _PAIR.fullmatch(f"{{{inner}}}")
    if pair is None or re.search(_KEY, pair[6]):
        return None
    first, second = _placeholder(pair[2]), _placeholder(pair[5])
    if {first, second} != {_NAME_PLACEHOLDER, ARGUMENTS}:
        return None
    body = f"{{{pair[1]}{first}{pair[4]}{second}{pair[7]}}}"
    return opened + space + body + more_space + close


def _placeholder(key: str) -> str:
    """Returns the placeholder for the value of a key, which is empty if the key says nothing."""
    if re.search("arg|param|input", key):
        return ARGUMENTS
    return _NAME_PLACEHOLDER if re.search("name|function|tool", key) else ""
