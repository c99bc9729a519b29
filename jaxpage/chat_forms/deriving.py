"""Derives the form of a model's answers from its chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.deriving_calls import derive_calls
from jaxpage.chat_forms.deriving_headers import derive_headers
from jaxpage.chat_forms.deriving_instructions import prober_of_instructions
from jaxpage.chat_forms.deriving_text import derive_text
from jaxpage.chat_forms.probes import NAMES, TOOLS, Call, Prober, Render, probers
from jaxpage.chat_forms.proving import PROVING_TOOLS, problem_of


class Derived(NamedTuple):
    """Holds the form that was derived from a template.

    Attributes:
        form: The form of answers.
        problem: The reason why the template's tool calls have no form, in one sentence, or None.
    """

    form: ChatFormat
    problem: str | None


def derive(render: Render, source: str) -> Derived:
    """Derives the form of answers by what a template renders, and proves it.

    Args:
        render: Renders a conversation by the template.
        source: The template.
    """
    problem, has_tools = None, False
    ways = probers(render, TOOLS)
    if not any(map(_renders_calls, ways)):
        by_instructions = prober_of_instructions(ways[0])
        ways = [] if by_instructions is None else [by_instructions]
    for prober in ways:
        text = derive_text(prober, source)
        if text is None or not _renders_calls(prober):
            continue
        has_tools = True
        found = derive_calls(prober, text)
        if found is None:
            problem = problem or "the marks around the name and the arguments of a call are unclear"
            continue
        form = ChatFormat(found[0], text.reasoning, found[1], has_tools=True)
        form = replace(form, headers=derive_headers(form))
        proving = replace(prober, tools=PROVING_TOOLS)
        # Some templates cannot show a tool that has an array.
        unproven = problem_of(form, prober if proving.prompt() is None else proving)
        if unproven is None:
            return Derived(form, None)
        problem = problem or unproven
    for prober in probers(render, None)[:1]:
        text = derive_text(prober, source)
        if text is not None:
            form = ChatFormat(None, text.reasoning, text.content, has_tools=has_tools)
            return Derived(form, problem)
    return Derived(ChatFormat(has_tools=has_tools), problem)


def _renders_calls(prober: Prober) -> bool:
    rendered = prober.body([Call(NAMES[0], {})]) or prober.body([Call(NAMES[0], {"a": "b"})])
    return rendered is not None and NAMES[0] in rendered
