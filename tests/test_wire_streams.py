"""Streams as clients read them: cut anywhere they are the same, and who leaves after any part frees
everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic._streaming
import httpx
import openai._streaming
import pytest

from jaxpage.serving.dialects.messages import open_message
from jaxpage.serving.dialects.ollama import open_ollama_chat
from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.dialects.responses import open_response
from jaxpage.serving.wire.exchange import open_chat, open_completion
from tests.support.running import Promises, demo_engine, serving
from tests.support.wire import Scripted, context, deltas, output

MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = [
    "é\N{PILE OF POO}",
    "\n\ndata: [DONE]\n\n",
    "\u2028\x85\r",
    '"}',
]  # what a reader of lines could take for an end
GREEDY = {"temperature": 0}  # a drawn answer may be too short to be left in its middle
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (open_completion, {"prompt": "Hello", "max_tokens": 8, **GREEDY}),
    "/v1/chat/completions": (open_chat, {"messages": MESSAGES, "max_tokens": 8, **GREEDY}),
    "/v1/responses": (open_response, {"input": "Hello", "max_output_tokens": 8, **GREEDY}),
    "/v1/messages": (open_message, {"messages": MESSAGES, "max_tokens": 8, **GREEDY}),
    "/api/chat": (
        open_ollama_chat,
        # A part is one line here, and tokens that come while the last one is written share a part.
        {"messages": MESSAGES, "options": {"num_predict": 16, **GREEDY}},
    ),
}


class Parts(httpx.SyncByteStream):
    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)


def read(path: str, parts: Sequence[bytes]) -> list[Any]:
    """Returns what the API's official client takes from a stream that comes in these parts."""
    if path.startswith("/api/"):
        lines = httpx.Response(200, stream=Parts(parts)).iter_lines()  # as ollama's client does
        return [json.loads(line) for line in lines if line.strip()]
    streaming: Any = anthropic._streaming if path == "/v1/messages" else openai._streaming
    events = list(streaming.SSEDecoder().iter_bytes(iter(parts)))
    return [(event.event, event.data) for event in events]


def stream_of(path: str) -> tuple[bytes, list[dict[str, Any]]]:
    """Returns the bytes of a stream with comments in it, and the parts that it is of."""
    opens, body = APIS[path]
    dialect = dialect_of(path)
    exchange = opens({"model": "demo", "stream": True, **body}, context())
    script = [Scripted(TEXT)]
    chunks = [
        chunk
        for delta in deltas(output(exchange, script), script)
        for chunk in exchange.chunks(0, delta)
    ]
    chunks += exchange.last_chunks()
    frame = dialect.stream.new_frame()
    return dialect.stream.comment.join(map(frame, chunks)) + dialect.stream.end, chunks


@pytest.mark.parametrize("path", APIS)
def test_a_stream_cut_anywhere_is_the_whole(path):
    data, chunks = stream_of(path)
    whole = read(path, [data])
    message = (
        whole
        if path.startswith("/api/")
        else [json.loads(text) for _, text in whole if text not in ("", "[DONE]")]
    )
    assert [{**each, "sequence_number": 0} for each in message] == [
        {**each, "sequence_number": 0} for each in chunks
    ]
    assert read(path, [data[index : index + 1] for index in range(len(data))]) == whole
    for size in (2, 7, 61):
        parts = [data[index : index + size] for index in range(0, len(data), size)]
        assert read(path, parts) == whole


@pytest.fixture(scope="module")
def server():
    with serving(demo_engine()) as running:
        yield running


@pytest.mark.parametrize("path", APIS)
def test_who_leaves_after_any_part_frees_everything(path, server):
    _, body = APIS[path]
    requested = {"model": "demo", "stream": True, **body}
    with httpx.Client(base_url=server.address, timeout=60) as client:
        promises = Promises(client)
        with client.stream("POST", path, json=requested) as answer:
            num_parts = len(answer.read().splitlines())
        for count in (0, 1, 2, *range(3, num_parts, 5), num_parts - 1):
            with client.stream("POST", path, json=requested) as answer:
                lines = answer.iter_lines()
                for _ in range(count):
                    next(lines, None)
        promises.check()
    assert num_parts > 5 and not server.errors
