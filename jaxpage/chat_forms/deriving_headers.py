"""Finds the parts of headers where a template writes answers as messages with headers."""

from __future__ import annotations

import re

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.forms import HeaderForm, chunks
from jaxpage.chat_forms.marks import without_suffix

_CHANNEL = re.compile(r"(<[^<>\s]+>)(\w+)(<[^<>\s]+>)")


def derive_headers(form: ChatFormat) -> HeaderForm | None:
    """Returns the form of headers, or None if reasoning, content and calls have no channels.

    Args:
        form: The form of answers as the template writes them.
    """
    tools, reasoning = form.tools, form.reasoning
    if tools is None or tools.payload != "json" or reasoning is None:
        return None
    thought = _CHANNEL.fullmatch(reasoning.open.strip())
    answers = [_CHANNEL.fullmatch(opened.strip()) for opened in form.content.opens]
    end = without_suffix(reasoning.close, reasoning.header)
    opened = chunks(tools.open)
    if thought is None or not end or not reasoning.header.strip() or not opened:
        return None
    channel, word, body = thought.groups()
    if not any(one and (one[1], one[3]) == (channel, body) for one in answers):
        return None
    called = re.search(re.escape(channel) + r"\s*(\w+)", tools.open + tools.mid)
    if called is None or not tools.mid.rstrip().endswith(body):
        return None
    ends = (end, tools.close, *form.content.tails)
    return HeaderForm(
        start=reasoning.header.strip(),
        channel=channel,
        body=body,
        ends=tuple(dict.fromkeys(mark.strip() for mark in ends if mark.strip())),
        recipient=opened[-1],
        reasoning=word,
        commentary=called[1],
    )
