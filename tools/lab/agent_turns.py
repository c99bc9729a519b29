"""Measures how much of an agent's next prompt is in the prefix cache, turn by turn.

    python -m tools.lab.agent_turns                                     # by kinds of templates
    python -m tools.lab.agent_turns --url http://127.0.0.1:8000         # what a server reports
    python -m tools.lab.agent_turns --url http://127.0.0.1:8000 --api messages

Without a server nothing is generated: the prompts of a conversation of twelve turns are rendered
and tokenized as the server does it, and answers are what the template renders of them, in several
styles. The share of a turn is the part of the prompt and the answer before that its prompt begins
with; the prefix cache holds that part, up to a block. With `--url` an agent asks for a call in each
turn, and the shares are those of the cached tokens in the answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Lets the program run where jaxpage is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.chat_templates import TEMPLATES, THOUGHT
from tests.support.wire import context, prompt_of, with_template

NUM_TURNS = 12
NEW_QUESTION = 6  # the turn in which the user asks again; the others begin with a tool's result
WORDS = "The agent reads files, writes files and runs tests before it answers a question. "
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads lines of a file.",
        "parameters": {
            "type": "object",
            # The bounds end the call of a model that writes at random.
            "properties": {
                "path": {"type": "string", "maxLength": 32},
                "lines": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["path", "lines"],
        },
    },
}
_LAST_QUESTION = (
    "{% set asked = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
)
# As templates do that drop the reasoning of answers before the last question.
DROPS = THOUGHT.replace(
    "m.reasoning_content %}", "m.reasoning_content and loop.index0 > asked.last %}", 1
)
KINDS = {
    "JSON in tags": TEMPLATES["object in tags"],
    "JSON in tags, earlier reasoning dropped": _LAST_QUESTION
    + TEMPLATES["object in tags"].replace(THOUGHT, DROPS),
    "tagged arguments": TEMPLATES["parameters on lines"],
    "keys and values": TEMPLATES["keys and values"],
    "an array after a mark": TEMPLATES["array behind a mark"],
    "name, mark, JSON": TEMPLATES["name, mark, JSON"],
    "wrapper and tagged arguments": TEMPLATES["invoke"],
    "channels": TEMPLATES["channels"],
    "code": TEMPLATES["code"],
}


class Style(NamedTuple):
    """Says how a model writes, and what a client sends back.

    Attributes:
        change: Changes the text of an answer, as models write it otherwise than the template.
        reasoning: The reasoning of an answer.
        is_sent: True if the client sends the reasoning back.
    """

    change: Callable[[str], str] = str
    reasoning: str = ""
    is_sent: bool = True


STYLES = {
    "as the template": Style(),
    "JSON without spaces": Style(lambda text: text.replace('": ', '":').replace(', "', ',"')),
    "thinks, sent back": Style(reasoning="I need that file. " * 5),
    "thinks, not sent back": Style(reasoning="I need that file. " * 5, is_sent=False),
}


def first_messages(num_words: int) -> list[dict[str, Any]]:
    """Returns the messages that an agent begins with, of about `num_words` words."""
    instructions = WORDS * (num_words // len(WORDS.split()))
    return [{"role": "user", "content": instructions + "\nWhat do the tests need?"}]


def next_messages(turn: int, call_id: str) -> list[dict[str, Any]]:
    """Returns what an agent sends after a call."""
    result = {"role": "tool", "tool_call_id": call_id, "content": f"line {turn}: " + WORDS * 4}
    if turn != NEW_QUESTION:
        return [result]
    answer = {"role": "assistant", "content": "The tests need a file."}
    return [result, answer, {"role": "user", "content": "And which one?"}]


def answer_of(messages: Sequence[dict[str, Any]], message: dict[str, Any], served: Any) -> str:
    """Returns what a template renders of an answer, without the prompt before it."""
    prompt = prompt_of(messages, [TOOL], served)
    answered = prompt_of(
        [*messages, message, next_messages(0, message["tool_calls"][0]["id"])[0]], [TOOL], served
    )
    begin = num_shared(prompt, answered)
    path = json.loads(message["tool_calls"][0]["function"]["arguments"])["path"]
    end = answered.index(path, begin)
    form = served.chat_format.tools
    close = (form.close.strip() or form.end.strip()) if form is not None else ""
    end = answered.index(close or "}", end) + len(close or "}")
    return answered[begin:end]


def shares_of(template: str, style: Style, num_words: int) -> list[float]:
    """Returns the share of each turn but the first, see the module."""
    served = context(
        tokenizer=with_template(template),
        tool_parser="auto",
        reasoning_parser="auto",
        max_model_len=1 << 20,
    )
    assert served.tokenizer is not None
    tokens = served.tokenizer.backend_tokenizer
    messages = first_messages(num_words)
    before: list[int] = []
    shares: list[float] = []
    for turn in range(NUM_TURNS):
        prompt = prompt_of(messages, [TOOL], served)
        ids = tokens.encode(prompt, add_special_tokens=False).ids
        if before:
            shares.append(num_shared(before, ids) / len(before))
        call_id = f"abcdef{turn:03}"
        arguments = json.dumps({"path": f"src/part_{turn}.py", "lines": turn}, ensure_ascii=False)
        function = {"name": "read_file", "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        thought = {**message, "reasoning_content": style.reasoning} if style.reasoning else message
        text = style.change(answer_of(messages, thought, served))
        before = ids + tokens.encode(text, add_special_tokens=False).ids
        messages += [thought if style.is_sent else message, *next_messages(turn, call_id)]
    return shares


def num_shared(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many characters or tokens two texts have in common before they differ."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))


class Turn(NamedTuple):
    """Holds what a server says of one turn.

    Attributes:
        num_prompt: The tokens of the prompt.
        num_cached: Those of them that were in the prefix cache.
        num_total: The tokens of prompt and answer.
        call_id: The id of the call in the answer.
        said: The answer, as the next request of the API has it.
    """

    num_prompt: int
    num_cached: int
    num_total: int
    call_id: str
    said: list[dict[str, Any]]


def read_chat(answer: dict[str, Any]) -> Turn:
    """Returns a turn of chat completions."""
    usage, message = answer["usage"], answer["choices"][0]["message"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    call_id = message["tool_calls"][0]["id"]
    return Turn(usage["prompt_tokens"], cached, usage["total_tokens"], call_id, [message])


def read_message(answer: dict[str, Any]) -> Turn:
    """Returns a turn of Messages, which count cached tokens apart."""
    usage, content = answer["usage"], answer["content"]
    cached = usage["cache_read_input_tokens"]
    num_prompt = usage["input_tokens"] + cached
    (call_id,) = [block["id"] for block in content if block["type"] == "tool_use"]
    messages = [{"role": "assistant", "content": content}]
    return Turn(num_prompt, cached, num_prompt + usage["output_tokens"], call_id, messages)


def read_response(answer: dict[str, Any]) -> Turn:
    """Returns a turn of Responses, whose answer is an item for each part."""
    usage, items = answer["usage"], answer["output"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    (call_id,) = [item["call_id"] for item in items if item["type"] == "function_call"]
    return Turn(usage["input_tokens"], cached, usage["total_tokens"], call_id, items)


class Api(NamedTuple):
    """Says how an API asks for one call.

    Attributes:
        path: The path.
        history: The field with the messages.
        body: The other fields.
        read: Reads an answer.
        result: Writes the result of a call, from the one of a chat.
    """

    path: str
    history: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any]], Turn]
    result: Callable[[dict[str, Any]], dict[str, Any]]


_FUNCTION = TOOL["function"]
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        "messages",
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 200,
        },
        read_chat,
        dict,
    ),
    "messages": Api(
        "/v1/messages",
        "messages",
        {
            "tools": [
                {
                    "name": _FUNCTION["name"],
                    "description": _FUNCTION["description"],
                    "input_schema": _FUNCTION["parameters"],
                }
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 200,
        },
        read_message,
        lambda result: {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": result["tool_call_id"],
                    "content": result["content"],
                }
            ],
        },
    ),
    "responses": Api(
        "/v1/responses",
        "input",
        {
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
        },
        read_response,
        lambda result: {
            "type": "function_call_output",
            "call_id": result["tool_call_id"],
            "output": result["content"],
        },
    ),
}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of a server."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def measure_server(url: str, api: Api, num_words: int) -> None:
    """Prints what a server reports of twelve turns."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    history = first_messages(num_words)
    # The same prompts by another API are in the prefix cache already.
    history[0]["content"] = f"{api.path}\n{history[0]['content']}"
    before, total, cached = 0, 0, 0
    for number in range(NUM_TURNS):
        body = {"model": model, "temperature": 0, **api.body, api.history: history}
        turn = api.read(ask(url + api.path, body))
        share = f"{turn.num_cached / before:.3f}" if before else "-"
        print(f"| {number + 1} | {turn.num_prompt:,} | {turn.num_cached:,} | {share} |", flush=True)
        if before:
            total, cached = total + before, cached + turn.num_cached
        before = turn.num_total
        result, *others = next_messages(number, turn.call_id)
        history = [*history, *turn.said, api.result(result), *others]
    print(f"all turns after the first: {cached:,} of {total:,} tokens, {cached / total:.3f}")


def main() -> None:
    """Prints a table of shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a server; without it prompts are only rendered")
    parser.add_argument(
        "--api", choices=APIS, default="chat", help="by which API a server is asked"
    )
    parser.add_argument("--words", type=int, default=6_000, help="words before the first question")
    arguments = parser.parse_args()
    if arguments.url:
        measure_server(arguments.url.rstrip("/"), APIS[arguments.api], arguments.words)
        return
    print("| template | " + " | ".join(STYLES) + " |\n|---|" + "---|" * len(STYLES))
    for name, template in KINDS.items():
        cells = []
        for style in STYLES.values():
            shares = shares_of(template, style, arguments.words)
            cells.append(f"{sum(shares) / len(shares):.3f} (least {min(shares):.3f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
