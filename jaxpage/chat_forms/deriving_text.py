"""Finds what a template writes around the reasoning and the content of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxpage.chat_forms.forms import ContentForm, ReasoningForm
from jaxpage.chat_forms.marks import TAG, common_prefix, mirrors, tokens, without_suffix
from jaxpage.chat_forms.probes import (
    CONTENT,
    KEYS,
    NAMES,
    QUESTION,
    REASONING,
    TEXTS,
    VARIABLES,
    Call,
    Prober,
)

_MAX_HEADER = 100  # characters
_SPLITS = re.compile(r"""split\(\s*(?:'([^']+)'|"([^"]+)")""")


@dataclass(frozen=True)
class TextForms:
    """Holds what was found around the text of answers.

    Attributes:
        header: What comes between the question and an answer, without any mark of the answer.
        before: What an answer without reasoning begins with, where a template writes that it has
            none.
        reasoning: The form of reasoning, or None.
        content: The marks around content.
    """

    header: str
    before: str
    reasoning: ReasoningForm | None
    content: ContentForm


def derive_text(prober: Prober, source: str) -> TextForms | None:
    """Returns what a template writes around the text of answers, or None if it renders none."""
    plain = prober.answer(content=CONTENT)
    prompt = prober.prompt()
    if plain is None or prompt is None or CONTENT not in plain:
        return None
    begin = prober.begin()
    before, _, after = plain[begin:].partition(CONTENT)
    reasoned, thinking = _reasoned(prober)
    header = _header(prober, begin, before, prompt)
    reasoning = None
    if reasoned is not None:
        reasoning, header = _rendered_reasoning(reasoned, thinking, header)
    reasoning = (
        reasoning or _before_calls(prober, header) or _dropped_reasoning(prober, source, header)
    )
    if reasoning is not None:
        opened = header.rstrip()
        if opened.endswith(reasoning.open.strip()) and opened != reasoning.open.strip():
            header = header[: opened.rindex(reasoning.open.strip())]
    rest = before.removeprefix(header)
    if reasoning is not None and reasoning.open.strip() in rest:
        opened_content = _after_mirror(reasoning)
    else:
        opened_content = rest
    prompted = prompt[begin + len(header) :]
    if prompted.strip() and opened_content.startswith(prompted):
        opened_content = opened_content[len(prompted) :]
    if reasoning is not None:
        close = reasoning.close
        if opened_content.strip():
            close = without_suffix(close, opened_content) or close
        reasoning = replace(reasoning, close=close, header=header)
    opens = (opened_content,) if opened_content else ()
    return TextForms(header, rest, reasoning, ContentForm(opens, (), (after,)))


def _header(prober: Prober, begin: int, before: str, prompt: str) -> str:
    """Returns what comes before an answer, as far as the prompt and another answer agree on it."""
    header = common_prefix(prompt[begin:], before)
    earlier = prober.answer(content=CONTENT, is_last=False)
    if earlier is not None and CONTENT in earlier:
        shorter = common_prefix(earlier[begin : earlier.index(CONTENT)], header)
        header = shorter if len(shorter) < len(header) else header
    if (role := _as_role(prompt, begin)) is not None and header.startswith(role):
        header = role
    return header


def _as_role(prompt: str, begin: int) -> str | None:
    r"""Returns the header of an answer that is written as that of the question is, or None.

    <|im_start|>user\n  question  <|im_end|>\n  <|im_start|>assistant\n
    """
    if QUESTION not in prompt[:begin]:
        return None
    before = prompt[: prompt.rindex(QUESTION, 0, begin)]
    found = re.search(r"user(\W(?:.|\n){0,15})$", before, re.IGNORECASE)
    if found is None:
        return None
    role = re.compile(r"\w+" + re.escape(found[1]))
    for matched in reversed(list(role.finditer(prompt, begin, begin + _MAX_HEADER))):
        if before[: found.start()].endswith(prompt[begin : matched.start()]):
            return prompt[begin : matched.end()]
    return None


def _reasoned(prober: Prober) -> tuple[str | None, Prober]:
    """Returns an answer with reasoning, and the prober that rendered it."""
    for variables in VARIABLES[:2]:
        thinking = replace(prober, variables=variables)
        for in_parts in (False, True):
            found = thinking.body((), content=CONTENT, reasoning=REASONING, in_parts=in_parts)
            if found is not None and _is_between(found, REASONING, CONTENT):
                return found, thinking
    return None, prober


def _is_between(text: str, reasoning: str, after: str) -> bool:
    """Returns whether a text has the reasoning once, with something else after it.

    A template that prints the parts of a content as a list has them in quotes.
    """
    if text.count(reasoning) != 1 or after not in text:
        return False
    place = text.index(reasoning)
    return place < text.index(after) and text[place - 1 : place] not in ("'", '"')


def _after_mirror(form: ReasoningForm) -> str:
    """Returns the mark before the content, where the mark after reasoning is found to have it."""
    for tag in TAG.finditer(form.close):
        if mirrors(form.open, tag[0]):
            rest = form.close[tag.end() :]
            return rest if rest.strip() else ""
    return ""


def _before_calls(prober: Prober, header: str) -> ReasoningForm | None:
    """Returns the marks of reasoning that a template renders with calls only, or None."""
    text = prober.body([Call(NAMES[0], {KEYS[0]: TEXTS[0]})], reasoning=REASONING)
    if text is None or not _is_between(text, REASONING, NAMES[0]):
        return None
    opened, _, rest = text.partition(REASONING)
    close = next((mark for mark in tokens(rest) if mark.strip()), "")
    opened = opened.removeprefix(header)
    return ReasoningForm(opened, close) if opened.strip() and TAG.fullmatch(close) else None


def _rendered_reasoning(
    reasoned: str, prober: Prober, header: str
) -> tuple[ReasoningForm | None, str]:
    """Returns the marks of reasoning that a template renders, and the header without them."""
    opened, _, rest = reasoned.partition(REASONING)
    close = rest.partition(CONTENT)[0]
    mark = opened.removeprefix(header)
    if not close.strip():
        return None, header
    if mark.strip():
        return ReasoningForm(mark, close), header
    # The prompt opens the reasoning, so the mark is in the header, or the question ends with it.
    before = opened or (prober.question() or "")[: prober.begin()]
    tags = [tag for tag in tokens(before.rstrip()) if tag.strip()]
    if not tags or not mirrors(tags[-1], close):
        return None, header
    place = before.rindex(tags[-1])
    return ReasoningForm(before[place:], close), opened[:place] if opened else header


def _dropped_reasoning(prober: Prober, source: str, header: str) -> ReasoningForm | None:
    """Returns the marks of reasoning that a template does not render, or None.

    A prompt has them, which opens or skips the reasoning; or the template removes from a content
    what stands between them.
    """
    for opened, close in _candidates(prober, source, header):
        text = f"{opened}{REASONING}{close}\n\n{CONTENT}"
        rendered = [prober.answer(content=text), prober.answer(content=text, is_last=False)]
        if any(one is not None and REASONING not in one and CONTENT in one for one in rendered):
            return ReasoningForm(opened, close)
    prompts = [prompt for prompt in _prompts(prober) if prompt is not None]
    for opened, close in _candidates(prober, source, header, by_prompt=True):
        is_written = close in source or any(close in prompt for prompt in prompts)
        begun = header + opened
        if is_written or (header and any(prompt.rstrip().endswith(begun) for prompt in prompts)):
            return ReasoningForm(opened, close)
    return None


def _prompts(prober: Prober) -> list[str | None]:
    return [replace(prober, variables=variables).prompt() for variables in VARIABLES]


def _candidates(
    prober: Prober, source: str, header: str, *, by_prompt: bool = False
) -> Iterator[tuple[str, str]]:
    for prompt in _prompts(prober):
        if prompt is None:
            continue
        tail = prompt[prompt.rindex(header) + len(header) :] if header in prompt else ""
        marks = list(TAG.finditer(tail if header else prompt[-40:]))
        if len(marks) >= 2 and header:
            yield tail[: marks[-1].start()].rstrip("\n"), marks[-1][0]
        if marks and not marks[-1][0].startswith(("</", "[/")):
            yield marks[-1][0], marks[-1][0][0] + "/" + marks[-1][0][1:]
    if by_prompt:
        return
    prompt = prober.prompt() or ""
    tail = prompt[prompt.rindex(header) + len(header) :] if header and header in prompt else ""
    for mark in dict.fromkeys(first or second for first, second in _SPLITS.findall(source)):
        if mark[1:2] == "/" and TAG.fullmatch(mark):
            yield mark[0] + mark[2:], mark
        elif tail.strip() and len(mark) > 2:
            yield tail, mark
