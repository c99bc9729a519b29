"""Derives the form of a model's answers from its chat template.

The template renders answers with unusual names and values (`probes`). What stays the same around
them are the markers: those of reasoning and content (`deriving_text`), those of calls
(`deriving_calls`, `deriving_items`) and those of headers. Other answers are then rendered and read
back (`round_trips`), and a form that reads them otherwise is not used.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.deriving_calls import derive_calls
from jaxpage.chat_forms.deriving_history import derive_sent_reasoning
from jaxpage.chat_forms.deriving_instructions import prober_of_instructions
from jaxpage.chat_forms.deriving_text import TextForms, derive_text
from jaxpage.chat_forms.forms import HINTS, ContentForm, HeaderForm, ToolForm
from jaxpage.chat_forms.markers import PLACEHOLDER, chunks, without_suffix
from jaxpage.chat_forms.probes import CONTENT, NAMES, TOOLS, Call, Prober, Render, prober_of
from jaxpage.chat_forms.round_trips import ROUND_TRIP_TOOLS, problem_of

_CHANNEL = re.compile(r"(<[^<>\s]+>)(\w+)(<[^<>\s]+>)")


class Derived(NamedTuple):
    """Holds the form that was derived from a template.

    Attributes:
        form: The form of answers.
        problem: The reason why the template's tool calls have no form, in one sentence, or None.
    """

    form: ChatFormat
    problem: str | None


def derive(render: Render, source: str) -> Derived:
    """Derives the form of answers by what a template renders, and tries it.

    Args:
        render: Renders a conversation by the template.
        source: The template.
    """
    plain = prober_of(render)
    prober = replace(plain, tools=TOOLS)
    # Templates take the arguments as an object or as text, and some write the id for the name.
    ways = [
        replace(prober, takes_text=takes_text, named_ids=named_ids)
        for named_ids in (False, True)
        for takes_text in (False, True)
    ]
    if not any(map(_renders_calls, ways)):
        instructed = prober_of_instructions(prober)
        ways = [] if instructed is None else [instructed]
    sent = derive_sent_reasoning(next(filter(_renders_calls, ways), plain))
    problem, has_tools = None, False
    for way in filter(_renders_calls, ways):
        text = derive_text(way, source)
        if text is None:
            continue
        has_tools = True
        calls = derive_calls(way, text)
        if calls is None:
            problem = (
                problem or "the markers around the name and the arguments of a call are unclear"
            )
            continue
        form = ChatFormat(calls[0], text.reasoning, calls[1], has_tools=True, sent=sent)
        form = replace(form, headers=_headers(form))
        if form.headers is None:
            form = replace(form, content=_with_stray(way, replace(text, content=calls[1])))
        other_tools = replace(way, tools=ROUND_TRIP_TOOLS)
        # Some templates cannot show a tool that has an array.
        failure = problem_of(form, way if other_tools.prompt() is None else other_tools)
        if failure is None:
            return Derived(form, None)
        problem = problem or failure
    hinted = None if ways else _find_by_hint(prober, source)
    form = ChatFormat(hinted, has_tools=has_tools or hinted is not None, sent=sent)
    if (text := derive_text(plain, source)) is not None:
        form = replace(form, reasoning=text.reasoning, content=_with_stray(plain, text))
    return Derived(form, problem)


def _find_by_hint(prober: Prober, source: str) -> ToolForm | None:
    """Returns the form that a template tells by a marker, where it shows tools and no calls."""
    shown = prober.question() or ""
    if NAMES[0] not in shown:
        return None
    return next((form for hint, form in HINTS.items() if hint in source), None)


def _with_stray(prober: Prober, text: TextForms) -> ContentForm:
    """Returns the markers around content, with that after reasoning if templates drop it there.

    A model may write it at the end of an answer though there was no reasoning. A template that
    drops it from the end of an earlier answer says that it is no content.
    """
    content = text.content
    close = "" if text.reasoning is None else text.reasoning.close.strip()
    if not close or PLACEHOLDER.search(close):
        return content
    rendered = [
        prober.answer(content=CONTENT + close, is_last=is_last) for is_last in (True, False)
    ]
    clean = [prober.answer(content=CONTENT, is_last=is_last) for is_last in (True, False)]
    if rendered != clean or None in clean or not all(CONTENT in (answer or "") for answer in clean):
        return content
    return replace(content, closes=tuple(dict.fromkeys((*content.closes, close))))


def _renders_calls(prober: Prober) -> bool:
    rendered = prober.body([Call(NAMES[0], {})]) or prober.body([Call(NAMES[0], {"a": "b"})])
    return rendered is not None and NAMES[0] in rendered


def _headers(form: ChatFormat) -> HeaderForm | None:
    """Returns the form of headers, or None if reasoning, content and calls have no channels.

    Args:
        form: The form of answers as the template writes them.
    """
    tools, reasoning = form.tools, form.reasoning
    if tools is None or tools.payload != "json" or reasoning is None:
        return None
    opened = _CHANNEL.fullmatch(reasoning.open.strip())
    answers = [_CHANNEL.fullmatch(marker.strip()) for marker in form.content.opens]
    end = without_suffix(reasoning.close, reasoning.header)
    recipients = chunks(tools.open)
    if opened is None or not end or not reasoning.header.strip() or not recipients:
        return None
    channel, word, body = opened.groups()
    if not any(header and (header[1], header[3]) == (channel, body) for header in answers):
        return None
    called = re.search(re.escape(channel) + r"\s*(\w+)", tools.open + tools.mid)
    if called is None or not tools.mid.rstrip().endswith(body):
        return None
    ends = (end, tools.close, *form.content.tails)
    return HeaderForm(
        start=reasoning.header.strip(),
        channel=channel,
        body=body,
        ends=tuple(dict.fromkeys(marker.strip() for marker in ends if marker.strip())),
        recipient=recipients[-1],
        reasoning=word,
        commentary=called[1],
    )
