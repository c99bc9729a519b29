"""Conversations of agents in all dialects: the prompts are equal, so they share a prefix cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.wire.exchange import open_chat
from tests.support.chat_templates import TEMPLATES
from tests.support.wire import context, with_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"name": "look", "description": "Gives the weather."}
SYSTEM = "You are an agent."


class Called(NamedTuple):
    """A call with its number in the conversation, and its result."""

    number: int
    arguments: dict[str, Any]
    result: str

    @property
    def id(self) -> str:
        """Returns the id that Ollama's dialect gives it."""
        return f"call{self.number:05d}"

    @property
    def text(self) -> str:
        return json.dumps(self.arguments)


class Turn(NamedTuple):
    """A turn is what the user says (`asked`), or an answer with thoughts and calls of tools."""

    requested: str = ""
    thought: str = ""
    said: str = ""
    calls: tuple[Called, ...] = ()


QUESTIONS = st.sampled_from(["Is it warm in Oslo?", "And in <Bern>?", "Go\non."])
ANSWERS = st.sampled_from(["I look.", "It is [warm].", "No\nidea."])
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "at"]), st.sampled_from(["Oslo", "é<"]))


@st.composite
def conversations(draw: st.DrawFn, min_answers: int = 1) -> list[Turn]:
    """Draws questions, each with answers that call tools until one calls none, or the user goes on.

    Messages joins questions that follow each other, so there are none unless `min_answers` is 0.
    """
    turns: list[Turn] = []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        turns.append(Turn(requested=draw(QUESTIONS)))
        for _ in range(draw(st.integers(min_answers, 2))):
            calls = []
            for _ in range(draw(st.integers(0, 2))):
                calls.append(Called(number, draw(ARGUMENTS), draw(ANSWERS)))
                number += 1
            said = draw(ANSWERS) if not calls or draw(st.booleans()) else ""
            turns.append(Turn("", draw(st.sampled_from(["", "I need both."])), said, (*calls,)))
            if not calls:
                break
    return [*turns, Turn(requested=draw(QUESTIONS))]


def as_chat(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.requested:
            messages.append({"role": "user", "content": turn.requested})
            continue
        answer: dict[str, Any] = {"role": "assistant", "content": turn.said or None}
        if turn.thought:
            answer["reasoning_content"] = turn.thought
        if turn.calls:
            answer["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": "look", "arguments": call.text}}
                for call in turn.calls
            ]  # fmt: skip
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.result} for call in turn.calls
        ]
        messages += [answer, *results]
    return messages


def as_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.requested:
            messages.append({"role": "user", "content": turn.requested})
            continue
        blocks: list[dict[str, Any]] = []
        if turn.thought:
            blocks.append({"type": "thinking", "thinking": turn.thought, "signature": "x"})
        if turn.said:
            blocks.append({"type": "text", "text": turn.said})
        results = []
        for call in turn.calls:
            use = {"type": "tool_use", "id": call.id, "name": "look", "input": call.arguments}
            blocks.append(use)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": call.result})
        messages.append({"role": "assistant", "content": blocks})
        if results:
            messages.append({"role": "user", "content": results})
    return messages


def as_items(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for turn in turns:
        if turn.requested:
            items.append({"role": "user", "content": turn.requested})
        if turn.thought:
            thought = {"type": "reasoning_text", "text": turn.thought}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
        if turn.said:
            items.append({"role": "assistant", "content": turn.said})
        for call in turn.calls:
            about = {"call_id": call.id, "name": "look", "arguments": call.text}
            items.append({"type": "function_call", **about})
        for call in turn.calls:
            items.append(
                {"type": "function_call_output", "call_id": call.id, "output": call.result}
            )
    return items


def as_ollama(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn in turns:
        if turn.requested:
            messages.append({"role": "user", "content": turn.requested})
            continue
        calls = [{"function": {"name": "look", "arguments": call.arguments}} for call in turn.calls]
        answer = {"role": "assistant", "content": turn.said, "thinking": turn.thought}
        messages.append({**answer, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_name": "look", "content": call.result} for call in turn.calls
        ]
    return messages


# Others name the tool in its result, which Messages and Responses do not.
KINDS = [
    *("object in tags", "parameters on lines", "keys and values", "name, mark, JSON"),
    *("array behind a mark", "invoke", "channels", "code"),
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(turns=conversations())
def test_a_conversation_has_the_same_prompt_in_every_dialect(kind, turns):
    parsers = {"tool_parser": "auto", "reasoning_parser": "auto", "max_model_len": 4096}
    known = context(tokenizer=with_template(TEMPLATES[kind]), **parsers)
    tool = {"type": "function", "function": {**LOOK, "parameters": SCHEMA}}
    system = {"role": "system", "content": SYSTEM}
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (open_chat, {"tools": [tool], "messages": [system, *as_chat(turns)]}),
        (
            open_message,
            {
                **{"system": SYSTEM, "max_tokens": 9, "messages": as_messages(turns)},
                "tools": [{**LOOK, "input_schema": SCHEMA}],
            },
        ),
        (
            open_response,
            {
                **{"instructions": SYSTEM, "input": as_items(turns)},
                "tools": [{"type": "function", **LOOK, "parameters": SCHEMA}],
            },
        ),
        (open_ollama_chat, {"tools": [tool], "messages": as_ollama(turns)}),
    ]
    exchanges = [opens({"model": "demo", **body}, known) for opens, body in bodies]
    (prompt,) = {exchange.prompts[0].prompt for exchange in exchanges}
    assert not any(exchange.ignored_fields for exchange in exchanges)
    for turn in turns:
        assert turn.requested in prompt and all(call.result in prompt for call in turn.calls)
