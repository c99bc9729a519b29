"""Finds what a template writes around the reasoning and the content of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxpage.chat_forms.forms import ContentForm, ReasoningForm
from jaxpage.chat_forms.markers import TAG, common_prefix, is_pair, tokens, without_suffix
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
_PAIRS = re.compile(r"<(\w+)></\1>")
_SPLITS = re.compile(r"""split\(\s*(?:'([^']+)'|"([^"]+)")""")


@dataclass(frozen=True)
class TextForms:
    """Holds what was found around the text of answers.

    Attributes:
        header: What comes between the question and an answer, without any marker of the answer.
        before: What an answer without reasoning begins with, where a template writes that it has
            none.
        reasoning: The form of reasoning, or None.
        content: The markers around content.
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
    reasoning, header = _derive_rendered_reasoning(prober, _header(prober, begin, before, prompt))
    reasoning = (
        reasoning
        or _before_calls(prober, header)
        or _derive_dropped_reasoning(prober, source, header)
    )
    if reasoning is None and (tags := _derive_from_words(prober, header)) is not None:
        reasoning, content = tags
        return TextForms(header, "", reasoning, replace(content, tails=(after,)))
    if reasoning is not None:
        opened = header.rstrip()
        if opened.endswith(reasoning.open.strip()) and opened != reasoning.open.strip():
            header = header[: opened.rindex(reasoning.open.strip())]
    following = before.removeprefix(header)
    if reasoning is not None and reasoning.open.strip() in following:
        opened_content = _after_closing(reasoning)
    else:
        opened_content = following
    prompted = prompt[begin + len(header) :]
    if prompted.strip() and opened_content.startswith(prompted):
        opened_content = opened_content[len(prompted) :]
    if reasoning is not None:
        close = without_suffix(reasoning.close, opened_content) or ""
        if not opened_content.strip() or not close.strip():
            # Nothing else than the marker before the content ends the reasoning.
            close = reasoning.close
        reasoning = replace(reasoning, close=close, header=header)
    opens = (opened_content,) if opened_content else ()
    return TextForms(header, following, reasoning, ContentForm(opens, (), (after,)))


def _header(prober: Prober, begin: int, before: str, prompt: str) -> str:
    """Returns what comes before an answer, where the prompt and an earlier answer agree on it."""
    header = common_prefix(prompt[begin:], before)
    earlier = prober.answer(content=CONTENT, is_last=False)
    if earlier is not None and CONTENT in earlier:
        header = common_prefix(earlier[begin : earlier.index(CONTENT)], header)
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
    match = re.search(r"user(\W(?:.|\n){0,15})$", before, re.IGNORECASE)
    if match is None:
        return None
    role = re.compile(r"\w+" + re.escape(match[1]))
    for matched in reversed(list(role.finditer(prompt, begin, begin + _MAX_HEADER))):
        if before[: match.start()].endswith(prompt[begin : matched.start()]):
            return prompt[begin : matched.end()]
    return None


def _derive_rendered_reasoning(prober: Prober, header: str) -> tuple[ReasoningForm | None, str]:
    """Returns the markers of reasoning that a template renders, and the header without them."""
    for variables in VARIABLES[:2]:
        for in_parts in (False, True):
            reasoner = replace(prober, variables=variables)
            text = reasoner.body((), content=CONTENT, reasoning=REASONING, in_parts=in_parts)
            if text is not None and _has_reasoning(text, CONTENT):
                return _around_reasoning(reasoner, text, header)
    return None, header


def _around_reasoning(prober: Prober, text: str, header: str) -> tuple[ReasoningForm | None, str]:
    """Returns the markers around the reasoning of an answer, and the header without them."""
    opened, _, following = text.partition(REASONING)
    close = following.partition(CONTENT)[0]
    if not close.strip():
        return None, header
    marker = opened.removeprefix(header)
    if marker.strip():
        return ReasoningForm(marker, close), header
    # The prompt opens the reasoning, so the marker is in the header, or the question ends with it.
    before = opened or (prober.question() or "")[: prober.begin()]
    tags = [tag for tag in tokens(before.rstrip()) if tag.strip()]
    if not tags or not is_pair(tags[-1], close):
        return None, header
    position = before.rindex(tags[-1])
    return ReasoningForm(before[position:], close), opened[:position] if opened else header


def _has_reasoning(text: str, after: str) -> bool:
    """Returns whether a text has the reasoning once, with something else after it.

    A template that prints the parts of a content as a list has them in quotes.
    """
    if text.count(REASONING) != 1 or after not in text:
        return False
    position = text.index(REASONING)
    return position < text.index(after) and text[position - 1 : position] not in ("'", '"')


def _after_closing(form: ReasoningForm) -> str:
    """Returns the marker before the content, if the marker after reasoning ends with it."""
    for tag in TAG.finditer(form.close):
        if is_pair(form.open, tag[0]):
            following = form.close[tag.end() :]
            return following if following.strip() else ""
    return ""


def _before_calls(prober: Prober, header: str) -> ReasoningForm | None:
    """Returns the markers of reasoning that a template renders with calls only, or None."""
    text = prober.body([Call(NAMES[0], {KEYS[0]: TEXTS[0]})], reasoning=REASONING)
    if text is None or not _has_reasoning(text, NAMES[0]):
        return None
    opened, _, following = text.partition(REASONING)
    close = next((marker for marker in tokens(following) if marker.strip()), "")
    opened = opened.removeprefix(header)
    return ReasoningForm(opened, close) if opened.strip() and TAG.fullmatch(close) else None


def _derive_dropped_reasoning(prober: Prober, source: str, header: str) -> ReasoningForm | None:
    """Returns the markers of reasoning that a template does not render, or None.

    A prompt has them, which opens or skips the reasoning; or the template removes from a content
    what is between them.
    """
    requested = [replace(prober, variables=variables).prompt() for variables in VARIABLES]
    prompts = [prompt for prompt in requested if prompt is not None]
    in_prompts = list(_in_prompts(prompts, header))
    for opened, close in (*in_prompts, *_in_source(prompts[0], source, header)):
        text = f"{opened}{REASONING}{close}\n\n{CONTENT}"
        rendered = [prober.answer(content=text), prober.answer(content=text, is_last=False)]
        if any(
            answer is not None and REASONING not in answer and CONTENT in answer
            for answer in rendered
        ):
            return ReasoningForm(opened, close)
    for opened, close in in_prompts:
        is_written = close in source or any(close in prompt for prompt in prompts)
        begun = header + opened
        if is_written or (header and any(prompt.rstrip().endswith(begun) for prompt in prompts)):
            return ReasoningForm(opened, close)
    return None


def _derive_from_words(prober: Prober, header: str) -> tuple[ReasoningForm, ContentForm] | None:
    """Returns the markers of reasoning and content that a prompt tells the model to write.

    It does so if it is asked for reasoning: "Think within <think></think>, and answer within
    <response></response>".
    """
    requested = replace(prober, variables=VARIABLES[1]).prompt() or ""
    plain = prober.prompt() or ""
    pairs = [pair for pair in _PAIRS.finditer(requested) if pair[0] not in plain]
    tags = list(dict.fromkeys(pair[1] for pair in pairs))
    if len(tags) != 2:
        return None
    (opened, close), (content, end) = ((f"<{tag}>", f"</{tag}>") for tag in tags)
    return ReasoningForm(opened, close, header), ContentForm((content,), (end,))


def _in_prompts(prompts: Sequence[str], header: str) -> Iterator[tuple[str, str]]:
    """Yields markers around reasoning that prompts may end with: both, or the opening one."""
    for prompt in prompts:
        tail = _after_header(prompt, header)
        # Where the header is unknown, a tag further back may belong to the question.
        tags = list(TAG.finditer(tail if header else prompt[-40:]))
        if len(tags) >= 2 and header:
            yield tail[: tags[-1].start()].rstrip("\n"), tags[-1][0]
        if tags and not tags[-1][0].startswith(("</", "[/")):
            yield tags[-1][0], tags[-1][0][0] + "/" + tags[-1][0][1:]


def _in_source(prompt: str, source: str, header: str) -> Iterator[tuple[str, str]]:
    """Yields markers around reasoning, where a template splits a content at the closing one."""
    tail = _after_header(prompt, header)
    for close in dict.fromkeys(first or second for first, second in _SPLITS.findall(source)):
        if close[1:2] == "/" and TAG.fullmatch(close):
            yield close[0] + close[2:], close
        elif tail.strip() and len(close) > 2:
            yield tail, close


def _after_header(prompt: str, header: str) -> str:
    """Returns what a prompt has of an answer after its header; empty if that is unknown."""
    return prompt.rpartition(header)[2] if header and header in prompt else ""
