"""Derives the form of a model's answers from its tokenizer's chat template."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpage.chat_forms import (
    CONTENT_FORMS,
    REASONING_FORMS,
    TOOL_FORMS,
    ChatFormat,
    Derived,
    derive,
)
from jaxpage.errors import JaxpageError
from jaxpage.serving.wire.rendering import RENDERERS
from jaxpage.serving.wire.templates import RENDER_BYTES, RENDER_SECONDS

# For all that is rendered of one template: a second, or a minute on a machine that is busy.
_DERIVE_SECONDS = 90.0


def derive_form(tokenizer: Any | None) -> Derived:
    """Returns what is derived from the chat template of a tokenizer, which may be None.

    It renders the template many times, in a process with limits, which takes about a second.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return Derived(ChatFormat(), None)
    try:
        source = str(tokenizer.get_chat_template(tools=[{}]))
    except ValueError as error:
        return Derived(ChatFormat(), str(error))
    derived = derive_from(source, tokenizer.special_tokens_map)
    template = getattr(tokenizer, "response_template", None)
    if derived.form.tools is not None or not template:
        return derived

    def declare(tools: Sequence[Mapping[str, Any]], prompt: str) -> Any:
        return tokenizer.get_response_parser(prefix=prompt, tools=list(tools))

    return Derived(replace(derived.form, declared=declare), None)


def derive_from(source: str, special_tokens: Mapping[str, Any]) -> Derived:
    """Returns what is derived from a chat template; the last ones are remembered.

    Args:
        source: The template.
        special_tokens: The special tokens by the names that templates have for them.
    """
    return _derive_from(source, json.dumps(dict(special_tokens), default=str))


@functools.lru_cache(maxsize=8)
def _derive_from(source: str, special_tokens: str) -> Derived:
    end = time.monotonic() + _DERIVE_SECONDS
    tokens = json.loads(special_tokens)

    def render(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        generates: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if time.monotonic() > end:
            raise ValueError(f"the template takes longer than {_DERIVE_SECONDS:g} s")
        requested = {
            "template": source,
            "special_tokens": tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": generates,
            "continue_final_message": False,
            "variables": dict(variables),
        }
        try:
            return RENDERERS.render(requested, RENDER_SECONDS, RENDER_BYTES)
        except JaxpageError as error:
            raise ValueError(str(error)) from None

    return derive(render, source)


def choose_form(derived: ChatFormat, tool_parser: str, reasoning_parser: str) -> ChatFormat:
    """Returns the form of answers that settings choose.

    Args:
        derived: What was derived from the template.
        tool_parser: "auto" for what was derived, "none", or the name of a form.
        reasoning_parser: The same for reasoning.
    """
    tools = TOOL_FORMS.get(tool_parser)
    reasoning = REASONING_FORMS.get(reasoning_parser)
    is_derived = "auto" in (tool_parser, reasoning_parser)
    is_fixed = tools is not None or reasoning is not None
    return ChatFormat(
        derived.tools if tool_parser == "auto" else tools,
        derived.reasoning if reasoning_parser == "auto" else reasoning,
        CONTENT_FORMS.get(
            reasoning_parser, derived.content if is_derived else ChatFormat().content
        ),
        has_tools=derived.has_tools,
        declared=derived.declared if tool_parser == "auto" else None,
        headers=derived.headers if is_derived and not is_fixed else None,
        sent=derived.sent,
    )
