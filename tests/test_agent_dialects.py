"""One conversation of an agent in all dialects: the prompts are equal, so they share a prefix cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.requests.response_store import KEEPS_NOTHING
from jaxpage.serving.wire.exchange import open_chat
from tests.support.chat_templates import TEMPLATES
from tests.support.wire import context, with_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = "Gives the weather."
INSTRUCTIONS, QUESTION, THOUGHT, SAID, RESULT, ANSWER = (
    *("You are an agent.", "Is it warm in Oslo or in Bern?", "I need both."),
    *("I look.", "4 degrees", "In Bern."),
)
CITIES = {"call00000": "Oslo", "call00001": "Bern"}


def as_chat() -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "look", "arguments": json.dumps({"city": city})}}
        for call_id, city in CITIES.items()
    ]  # fmt: skip
    return {
        "tools": [{"type": "function", "function": {"name": "look", "description": ABOUT, "parameters": SCHEMA}}],
        "messages": [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call_id, "content": RESULT} for call_id in CITIES),
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": QUESTION},
        ],
    }  # fmt: skip


def as_messages() -> dict[str, Any]:
    uses = [
        {"type": "tool_use", "id": call_id, "name": "look", "input": {"city": city}}
        for call_id, city in CITIES.items()
    ]
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": "x"}
    results = [
        {"type": "tool_result", "tool_use_id": call_id, "content": RESULT} for call_id in CITIES
    ]
    return {
        "max_tokens": 100,
        "system": INSTRUCTIONS,
        "tools": [{"name": "look", "description": ABOUT, "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [thought, {"type": "text", "text": SAID}, *uses]},
            {"role": "user", "content": results},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": QUESTION},
        ],
    }


def as_response() -> dict[str, Any]:
    return {
        "instructions": INSTRUCTIONS,
        "tools": [{"type": "function", "name": "look", "description": ABOUT, "parameters": SCHEMA}],
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
            {"role": "assistant", "content": SAID},
            *(
                {"type": "function_call", "call_id": call_id, "name": "look", "arguments": json.dumps({"city": city})}
                for call_id, city in CITIES.items()
            ),
            *({"type": "function_call_output", "call_id": call_id, "output": RESULT} for call_id in CITIES),
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": QUESTION},
        ],
    }  # fmt: skip


def as_ollama() -> dict[str, Any]:
    calls = [
        {"function": {"name": "look", "arguments": {"city": city}}} for city in CITIES.values()
    ]
    return {
        **as_chat(),
        "messages": [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": SAID, "thinking": THOUGHT, "tool_calls": calls},
            *({"role": "tool", "tool_name": "look", "content": RESULT} for _ in CITIES),
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": QUESTION},
        ],
    }


OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "messages": (open_message, as_messages()),
    "responses": (lambda body, known: open_response(body, known, KEEPS_NOTHING), as_response()),
    "ollama": (open_ollama_chat, as_ollama()),
}
# Others name the tool in its result, which Messages and Responses do not.
KINDS = [
    *("object in tags", "parameters on lines", "keys and values", "name, mark, JSON"),
    *("array behind a mark", "invoke", "channels", "code"),
]


@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_has_the_same_prompt_in_every_dialect(kind, dialect):
    known = context(
        tokenizer=with_template(TEMPLATES[kind]), tool_parser="auto", reasoning_parser="auto"
    )
    opens, body = OTHERS[dialect]
    prompt = str(open_chat({"model": "demo", **as_chat()}, known).prompts[0].prompt)
    assert opens({"model": "demo", **body}, known).prompts[0].prompt == prompt
    for text in (INSTRUCTIONS, QUESTION, *CITIES.values(), RESULT, ANSWER):
        assert text in prompt
