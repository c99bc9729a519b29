"""Finds how a template writes tool calls, by what differs between answers with other calls."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from jaxpage.chat_forms.deriving_items import derive_items
from jaxpage.chat_forms.deriving_text import TextForms
from jaxpage.chat_forms.finding_calls import CALLS, Written, render_calls, same, shape_of
from jaxpage.chat_forms.forms import ANY_ID, ContentForm, ToolForm
from jaxpage.chat_forms.marks import (
    TAG,
    common_prefix,
    common_suffix,
    mirrors,
    numbered,
    split_list,
    without_prefix,
    without_suffix,
)
from jaxpage.chat_forms.probes import CONTENT, IDS, RESULT, Prober


def derive_calls(prober: Prober, text: TextForms) -> tuple[ToolForm, ContentForm] | None:
    """Returns the form of calls and the marks around content, or None; neither is proven."""
    one = render_calls(prober, CALLS[:1])
    if one is None:
        return None
    calls = render_calls(prober, CALLS) or one
    payload = _payload(prober, calls)
    if payload is None:
        return None
    form, item_close = payload
    alone = one.before.removeprefix(text.header)
    opening, content = _opening(prober, text, alone)
    content, after = _ended(content, calls.after)
    form = replace(form, first=_first(prober, text, alone, opening))
    opening = same(opening, 0)
    after = without_prefix(same(after, len(calls.found) - 1), item_close)
    if calls.between is not None:
        between = same(calls.between, 0).replace(IDS[1], ANY_ID)
        opening, between = numbered(opening, without_prefix(between, item_close))
        split = split_list(opening, between, after)
        form = replace(form, begin=split.begin, open=split.open, close=split.close)
        form = replace(form, between=split.between, end=split.end)
    elif opening.rstrip().endswith("[") and after.lstrip().startswith("]"):
        form = replace(form, begin=opening, between=",", end=after)
    else:
        form = replace(form, open=opening, close=after)
    content = replace(content, responses=_responses(prober, form, item_close, content))
    if form.end.strip() in content.responses:
        form = replace(form, end="")
    return replace(form, name=_name(form)), content


def _payload(prober: Prober, calls: Written) -> tuple[ToolForm, str] | None:
    """Returns a form with what a call is between its marks, or None.

    With it comes the mark after the last value, which is none of the call's own marks.
    """
    first = calls.found[0]
    form = ToolForm("", "object", is_code=first.is_code)
    if not first.is_json:
        items = derive_items(prober)
        if items is None:
            return None
        form = replace(form, payload="items", arguments=items.arguments)
        form = replace(form, array=items.array, object=items.object, is_code=items.is_code)
        return form, items.close
    if first.name_path is None:
        mid = same(first.mid, 0)
        for second in calls.found[1:]:
            mid = numbered(mid, same(second.mid, 1))[0]
        return replace(form, payload="json", mid=mid), ""
    text = calls.text[first.begin : first.end]
    if first.is_code:
        text = json.dumps(first.value, ensure_ascii=False)
    form = replace(form, name_path=first.name_path, arguments_path=first.arguments_path)
    return replace(form, arguments_as_text=first.as_text, shape=shape_of(text)), ""


def _ended(content: ContentForm, after: str) -> tuple[ContentForm, str]:
    """Returns the marks around the content, and what comes after the last call without them.

    Args:
        content: What is known of the marks around the content.
        after: What comes after the last call of an answer.
    """
    (alone_tail,) = content.tails
    tail = common_suffix(alone_tail, after)
    tails = dict.fromkeys(mark for mark in (alone_tail, tail) if mark.strip())
    content = replace(content, tails=tuple(tails))
    if not content.closes and (close := without_suffix(alone_tail, tail) or "").strip():
        content = replace(content, closes=(close,))
    return content, without_suffix(after, tail) or ""


def _first(prober: Prober, text: TextForms, alone: str, opening: str) -> str | None:
    """Returns the mark before the first call of an answer, if the prompt has the rest of it.

    Args:
        prober: Renders answers.
        text: What is known of the text around content.
        alone: What comes between the header and the first call of an answer without content.
        opening: The mark before the first call.
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
    """Returns the marks around a tool's response, where it follows the call in the same answer.

    open CALL close  MARK  response  MARK

    Args:
        prober: Renders answers.
        form: The form of calls.
        item_close: The mark after the last value, which belongs to it.
        content: The marks around the content, one of which ends an answer otherwise.
    """
    calls = render_calls(prober, CALLS[:1], result=RESULT)
    follows, is_there, rest = ("", "", "") if calls is None else calls.after.partition(RESULT)
    if not is_there or any(mark.strip() in follows for mark in content.tails):
        return ()
    follows = without_prefix(without_prefix(same(follows, 0), item_close), form.close)
    opened = TAG.search(follows)
    if opened is None:
        return ()
    closes = [mark[0] for mark in TAG.finditer(rest) if mirrors(opened[0], mark[0])]
    return (opened[0], *closes[:1])


def _name(form: ToolForm) -> str:
    """Returns a short name for people: the kind of the call and the first words of its mark."""
    words = re.findall(r"\w+", form.begin + form.open)
    kind = {"object": "json", "json": "name-json", "items": "name-items"}[form.payload]
    if form.payload == "object" and form.begin.rstrip().endswith("["):
        kind = "json-array"
    return "-".join([kind, *[word for word in words if not word.isdigit()][:2]])


def _opening(prober: Prober, text: TextForms, alone: str) -> tuple[str, ContentForm]:
    """Returns the mark before the first call, and the marks around the content.

    Args:
        prober: Renders answers.
        text: What is known of the text around content.
        alone: What comes between the header and the first call of an answer without content.
    """
    content = text.content
    calls = render_calls(prober, CALLS[:1], content=CONTENT)
    if calls is None or CONTENT not in calls.before:
        return _without_thought(alone, text), content
    before, _, follows = calls.before.partition(CONTENT)
    close = common_prefix(follows, content.tails[0])
    close = close if close.strip() else ""
    shared = common_suffix(alone, follows)
    if not shared.strip() and not _without_thought(alone, text).strip():
        shared = follows
    opening = shared[len(close) :] if close and shared.startswith(close) else shared
    junk = follows[: len(follows) - len(opening)]
    before = before.removeprefix(text.header).removeprefix(text.before)
    if before.strip() and (text.reasoning is None or text.reasoning.open.strip() not in before):
        content = replace(content, opens=tuple(dict.fromkeys((*content.opens, before))))
    return opening, replace(content, closes=(junk,) if junk.strip() else ())


def _without_thought(alone: str, text: TextForms) -> str:
    """Returns what comes before a call without the marks of reasoning that is empty."""
    rest = alone.removeprefix(text.before)
    if text.reasoning is None:
        return rest
    opened, close = text.reasoning.open.strip(), text.reasoning.close.strip()
    before, there, after = rest.partition(close)
    return after if there and before.strip() == opened else rest
