"""Counts the tokens of a sequence's reasoning, and forces its end where a budget is used up.

With a budget of 3 tokens and the marker `</think>`, which is three tokens of this model:

    <think>  a  b  c  </  think  >  d ...        the model would go on; the marker is forced
    <think>  a  b  </  think  >  d ...           the model ends it; nothing is forced
    <think>  a  b  </  think  >  d ...           `</` was the third token; the remainder is forced

What has come is compared as bytes, because a model may write a marker with other tokens than the
tokenizer. A place depends on the tokens of the sequence alone, so drafts, preemption and replays
change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.step.thinking import ThinkingBudget


class ReasoningPlace(NamedTuple):
    """Says where a sequence is in its reasoning.

    Attributes:
        is_open: True within the reasoning.
        num_tokens: The tokens of reasoning so far.
        tail: The last bytes, as far as a marker may begin in them.
        forced: The tokens that must come next; empty if any token may come.
        is_over: True if no reasoning can follow any more.
    """

    is_open: bool = False
    num_tokens: int = 0
    tail: bytes = b""
    forced: tuple[int, ...] = ()
    is_over: bool = False


_OVER = ReasoningPlace(is_over=True)


def start(budget: ThinkingBudget) -> ReasoningPlace:
    """Returns the place before the first token of an answer."""
    return _force_if_spent(budget, ReasoningPlace(is_open=budget.is_open))


def follow(budget: ThinkingBudget, place: ReasoningPlace, token_id: int) -> ReasoningPlace:
    """Returns the place after one more token.

    A token in place of the forced one says that a grammar does not admit the marker. Then the
    budget has no effect from there on.
    """
    if place.is_over:
        return place
    if place.forced:
        if token_id != place.forced[0]:
            return _OVER
        remaining = place.forced[1:]
        return place._replace(forced=remaining) if remaining else _close(budget, place)
    text = place.tail + budget.bytes_of(token_id)
    if place.is_open:
        return _read(budget, place._replace(num_tokens=place.num_tokens + 1), text)
    return _seek(budget, place, text)


def may_force(budget: ThinkingBudget, place: ReasoningPlace, num_drafts: int) -> bool:
    """Returns whether a token may be forced after so many more tokens."""
    if place.is_over:
        return False
    return bool(place.forced) or place.num_tokens + num_drafts >= budget.num_tokens


def _read(budget: ThinkingBudget, place: ReasoningPlace, text: bytes) -> ReasoningPlace:
    """Returns the place in the reasoning, after `text`."""
    if budget.close in text:
        return _close(budget, place)
    num_kept = len(budget.close) - 1
    tail = text[-num_kept:] if num_kept else b""
    return _force_if_spent(budget, place._replace(is_open=True, tail=tail))


def _seek(budget: ThinkingBudget, place: ReasoningPlace, text: bytes) -> ReasoningPlace:
    """Returns the place before the reasoning, after `text`."""
    if budget.again:
        _, marker, after = text.partition(budget.open)
        if not marker:
            num_kept = len(budget.open) - 1
            return place._replace(tail=text[-num_kept:] if num_kept else b"")
        return _read(budget, place, after)
    text = text.lstrip()
    if text.startswith(budget.open):
        return _read(budget, place, text[len(budget.open) :])
    return place._replace(tail=text) if budget.open.startswith(text) else _OVER


def _force_if_spent(budget: ThinkingBudget, place: ReasoningPlace) -> ReasoningPlace:
    if not place.is_open or place.num_tokens < budget.num_tokens:
        return place
    lengths = range(len(place.tail), 0, -1)
    num_there = next((n for n in lengths if budget.close.startswith(place.tail[-n:])), 0)
    return place._replace(forced=budget.endings[num_there])


def _close(budget: ThinkingBudget, place: ReasoningPlace) -> ReasoningPlace:
    return ReasoningPlace(num_tokens=place.num_tokens) if budget.again else _OVER
