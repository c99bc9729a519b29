"""Proves a form: what the template renders of other calls is read back, whole and cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.marks import common_prefix
from jaxpage.chat_forms.probes import Call, Prober, tool_of

_TYPES = {
    "city": {"type": "string"},
    "when": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "metric": {"type": "boolean"},
    "nothing": {"type": "null"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object"},
}
PROVING_TOOLS = [tool_of("look_up", _TYPES), tool_of("send-2", _TYPES)]
# Each of these is one proof. A template that cannot render a value, or renders it as it renders
# another, proves nothing by it.
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Oslo", "when": "on Monday"},
    {"city": "3", "days": 3},
    {"share": -0.5, "metric": False, "city": "true"},
    {"metric": True, "days": 0},
    {"nothing": None, "city": "x"},
    {"tags": ["a", "b c"], "city": "Rome"},
    {"deep": {"k": 1, "l": {"m": "n"}}, "city": "Rome"},
    {"city": 'a "quoted" \'text\'\nwith <lines> & {"b": [1]}\n  and \\ signs,'},
    {},
)
_NEEDED = 4  # The first proofs must succeed; the others may fail where nothing better can be read.


@dataclass(frozen=True)
class _Proof:
    calls: tuple[Call, ...] = ()
    content: str = ""
    reasoning: str = ""


def _proofs() -> Iterator[_Proof]:
    for arguments in _ARGUMENTS:
        yield _Proof((Call("look_up", arguments),))
    two = (Call("send-2", _ARGUMENTS[0]), Call("look_up", _ARGUMENTS[1]))
    yield _Proof(two)
    yield _Proof((two[0], Call("send-2", _ARGUMENTS[2])), content="I look. It's [1] < 2 {ok}.")
    yield _Proof(two[:1], reasoning="First this,\nthen that.")


def problem_of(form: ChatFormat, prober: Prober) -> str | None:
    """Returns the first proof of a form that fails, in one sentence, or None.

    Args:
        form: The form of answers, with one of tool calls.
        prober: Renders answers with `PROVING_TOOLS`.
    """
    num_proven = 0
    for proof in _proofs():
        written = prober.answer(proof.calls, content=proof.content, reasoning=proof.reasoning)
        if written is None:
            continue
        prompt, text = _divided(written, form, prober)
        message = read(form, [text], prompt)
        if read(form, text, prompt) != message:
            return f"what it renders of {_shown(proof)} reads otherwise when it comes in pieces"
        if _calls(message) == list(proof.calls):
            num_proven += 1
        elif not proof.content + proof.reasoning and prober.answer(_calls(message)) != written:
            return f"what it renders of {_shown(proof)} reads as {message['tool_calls']}"
    return None if num_proven >= _NEEDED else "it renders too few calls that can be read back"


def _divided(written: str, form: ChatFormat, prober: Prober) -> tuple[str, str]:
    """Returns the prompt of a rendered conversation, and the answer that continues it."""
    begin = prober.begin()
    prompt = prober.prompt() or ""
    if written.startswith(prompt) and not form.is_open(prompt):
        return prompt, written[len(prompt) :]
    header = form.reasoning.header if form.reasoning is not None else ""
    if not header or not written.startswith(header, begin):
        header = common_prefix(prompt[begin:], written[begin:])
    begin += len(header)
    return written[:begin], written[begin:]


def read(form: ChatFormat, texts: Iterable[str], prompt: str) -> dict[str, Any]:
    """Returns the message that an answer is read as, which comes in these pieces."""
    reader = form.reader(PROVING_TOOLS, prompt)
    for text in texts:
        reader.feed(text)
    return reader.finish()


def _calls(message: dict[str, Any]) -> Sequence[Call]:
    return [Call(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]


def _shown(proof: _Proof) -> str:
    return ", ".join(f"{call.name}({json.dumps(call.arguments)})" for call in proof.calls)
