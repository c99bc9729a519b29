"""Finds how a template takes the reasoning of an earlier answer, which clients send back."""

from __future__ import annotations

from dataclasses import replace

from jaxpage.chat_forms.forms import REASONING_FIELDS, SentReasoning
from jaxpage.chat_forms.probes import (
    CONTENT,
    KEYS,
    NAMES,
    REASONING,
    TEXTS,
    VARIABLES,
    Call,
    Prober,
)

_CALLS = [Call(NAMES[0], {KEYS[0]: TEXTS[0]})]


def derive_sent_reasoning(prober: Prober) -> SentReasoning:
    """Returns how a template takes reasoning; the usual way if it renders none in any way.

    Args:
        prober: Renders answers, with calls if the template has a form of them.
    """
    usual = SentReasoning()
    for variables in VARIABLES[:2]:
        requested = replace(prober, variables=variables)
        ways = [*map(SentReasoning, REASONING_FIELDS), SentReasoning(None)]
        # Some templates render reasoning only with calls, and some in two ways.
        counts = [_num_rendered(requested, way) for way in ways]
        if max(counts):
            usual = ways[counts.index(max(counts))]
            return replace(usual, takes_content=_takes_content(requested, usual))
    return usual


def _render(prober: Prober, way: SentReasoning | None, content: str, *, calls: bool) -> str:
    """Returns an answer, without reasoning if there is no way; it is empty if refused."""
    message = {"content": content} if way is None else way.fields(REASONING, content)
    return prober.body(_CALLS if calls else (), message=message) or ""


def _num_rendered(prober: Prober, way: SentReasoning) -> int:
    """Returns in how many of two answers a template renders reasoning: with content, with calls."""
    texts = [_render(prober, way, CONTENT, calls=False), _render(prober, way, "", calls=True)]
    return sum(
        # In quotes it is a part of a printed list, and not rendered as reasoning.
        text.count(REASONING) == 1 and text[text.index(REASONING) - 1 :][:1] not in ("'", '"')
        for text in texts
    )


def _takes_content(prober: Prober, way: SentReasoning) -> bool:
    """Returns whether a template renders content and reasoning of an answer with calls.

    It does not if it refuses both together, or drops one of them, and renders each alone.
    """
    if REASONING not in _render(prober, way, "", calls=True):
        return True
    if CONTENT not in _render(prober, None, CONTENT, calls=True):
        return True
    text = _render(prober, way, CONTENT, calls=True)
    return REASONING in text and CONTENT in text
