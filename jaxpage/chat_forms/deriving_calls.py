"""Finds how a template writes tool calls, by what differs between answers with other calls."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from jaxpage.chat_forms.deriving_items import derive_items
from jaxpage.chat_forms.deriving_text import TextForms
from jaxpage.chat_forms.finding_calls import CALLS, RenderedAnswer, render_calls, shape_of
from jaxpage.chat_forms.forms import ARGUMENT_KEYS, ContentForm, ToolForm
from jaxpage.chat_forms.markers import (
    TAG,
    common_prefix,
    common_suffix,
    is_pair,
    split_list,
    with_call_index,
    without_prefix,
    without_suffix,
)
from jaxpage.chat_forms.probes import CONTENT, RESULT, Prober, with_placeholders


def derive_calls(prober: Prober, text: TextForms) -> tuple[ToolForm, ContentForm] | None:
    """Returns the form of calls and the markers around content, or None; neither is tried yet."""
    single = render_calls(prober, CALLS[:1])
    if single is None:
        return None
    answer = render_calls(prober, CALLS) or single
    payload = _payload(prober, answer)
    if payload is None:
        return None
    form, item_close = payload
    alone = single.before.removeprefix(text.header)
    opening, content = _opening(prober, text, alone)
    content, after = _split_end(content, answer.after)
    form = replace(form, first=_first(prober, text, alone, opening))
    opening = with_placeholders(opening)
    after = without_prefix(with_placeholders(after), item_close)
    if answer.between is not None:
        between = without_prefix(with_placeholders(answer.between), item_close)
        begin, opened, close, between, end = split_list(*with_call_index(opening, between), after)
        form = replace(form, begin=begin, open=opened, close=close, between=between, end=end)
    elif opening.rstrip().endswith("[") and after.lstrip().startswith("]"):
        # The template writes a list of one call in JSON, in which a comma would come before
        # another.
        form = replace(form, begin=opening, between=",", end=after)
    else:
        form = replace(form, open=opening, close=after)
    content = replace(content, responses=_responses(prober, form, item_close, content))
    if form.end.strip() in content.responses:
        form = replace(form, end="")
    return replace(form, name=_name(form)), content


def _payload(prober: Prober, answer: RenderedAnswer) -> tuple[ToolForm, str] | None:
    """Returns the form of the text between a call's markers, or None if none can be derived.

    The second value is the marker after the last argument. It belongs to the arguments and not to
    the call.
    """
    first = answer.calls[0]
    form = ToolForm("", first.payload, is_code=first.is_code)
    if first.payload == "items":
        items = derive_items(prober)
        if items is None:
            return None
        form = replace(form, arguments=items.arguments, array=items.array, object=items.object)
        return replace(form, is_code=items.is_code), items.close
    if first.payload == "json":
        mid = with_placeholders(first.mid)
        for second in answer.calls[1:]:
            mid, _ = with_call_index(mid, with_placeholders(second.mid))
        return replace(form, mid=mid), ""
    text = answer.text[first.begin : first.end]
    if first.is_code:
        text = json.dumps(first.value, ensure_ascii=False)
    form = replace(form, name_path=first.name_path, arguments_path=first.arguments_path)
    keys = first.arguments_path[-1:]
    others = tuple(key for key in ARGUMENT_KEYS if key not in keys) if keys else ()
    form = replace(form, arguments_as_text=first.as_text, other_keys=others)
    return replace(form, shape=shape_of(text)), ""


def _split_end(content: ContentForm, after: str) -> tuple[ContentForm, str]:
    """Returns the markers around the content, and what comes after the last call without them.

    Args:
        content: What is known of the markers around the content.
        after: What comes after the last call of an answer.
    """
    (alone_tail,) = content.tails
    tail = common_suffix(alone_tail, after)
    tails = dict.fromkeys(marker for marker in (alone_tail, tail) if marker.strip())
    content = replace(content, tails=tuple(tails))
    if not content.closes and (close := without_suffix(alone_tail, tail) or "").strip():
        content = replace(content, closes=(close,))
    return content, without_suffix(after, tail) or ""


def _first(prober: Prober, text: TextForms, alone: str, opening: str) -> str | None:
    """Returns the part of the first call's opening marker that the model has to write.

    A prompt may end with the beginning of that marker; the answer then has only the remainder.

    Args:
        prober: Renders answers.
        text: What is known of the text around content.
        alone: What comes between the header and the first call of an answer without content.
        opening: The marker before the first call.
    """
    prompted = (prober.prompt() or "")[prober.begin() + len(text.header) :]
    if prompted.strip() and opening.startswith(prompted):
        return opening[len(prompted) :]
    if opening.strip() and not alone.removeprefix(text.before).strip():
        return ""
    return None


def _responses(
    prober: Prober, form: ToolForm, item_close: str, content: ContentForm
) -> tuple[str, ...]:
    """Returns the markers around a tool's response, if it follows the call in the same answer.

    open CALL close  MARKER  response  MARKER

    Args:
        prober: Renders answers.
        form: The form of calls.
        item_close: The marker after the last value, which belongs to it.
        content: The markers around the content, one of which ends an answer otherwise.
    """
    answer = render_calls(prober, CALLS[:1], result=RESULT)
    follows, is_there, after_result = (
        ("", "", "") if answer is None else answer.after.partition(RESULT)
    )
    if not is_there or any(marker.strip() in follows for marker in content.tails):
        return ()
    follows = without_prefix(without_prefix(with_placeholders(follows), item_close), form.close)
    opened = TAG.search(follows)
    if opened is None:
        return ()
    closes = [marker[0] for marker in TAG.finditer(after_result) if is_pair(opened[0], marker[0])]
    return (opened[0], *closes[:1])


def _name(form: ToolForm) -> str:
    """Returns a short name for people: the kind of the call and the first words of its marker."""
    words = re.findall(r"\w+", form.opening)
    kind = {"object": "json", "json": "name-json", "items": "name-items"}[form.payload]
    if form.payload == "object" and form.begin.rstrip().endswith("["):
        kind = "json-array"
    return "-".join([kind, *[word for word in words if not word.isdigit()][:2]])


def _opening(prober: Prober, text: TextForms, alone: str) -> tuple[str, ContentForm]:
    """Returns the marker before the first call, and the markers around the content.

    Args:
        prober: Renders answers.
        text: What is known of the text around content.
        alone: What comes between the header and the first call of an answer without content.
    """
    content = text.content
    answer = render_calls(prober, CALLS[:1], content=CONTENT)
    if answer is None or CONTENT not in answer.before:
        return _without_reasoning(alone, text), content
    before, _, follows = answer.before.partition(CONTENT)
    close = common_prefix(follows, content.tails[0])
    close = close if close.strip() else ""
    shared = common_suffix(alone, follows)
    if not shared.strip() and not _without_reasoning(alone, text).strip():
        shared = follows
    opening = shared.removeprefix(close)
    close = follows[: len(follows) - len(opening)]
    before = before.removeprefix(text.header).removeprefix(text.before)
    if before.strip() and (text.reasoning is None or text.reasoning.open.strip() not in before):
        content = replace(content, opens=tuple(dict.fromkeys((*content.opens, before))))
    return opening, replace(content, closes=(close,) if close.strip() else ())


def _without_reasoning(alone: str, text: TextForms) -> str:
    """Returns what comes before a call without the markers of reasoning that is empty."""
    answer = alone.removeprefix(text.before)
    if text.reasoning is None:
        return answer
    opened, close = text.reasoning.open.strip(), text.reasoning.close.strip()
    before, marker, after = answer.partition(close)
    return after if marker and before.strip() == opened else answer
