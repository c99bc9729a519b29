"""One request does not stop others: the work of each turn, call and thread is counted, and no time
is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from jaxpage.driver import async_driver
from jaxpage.engine import Reporter
from jaxpage.engine.texts import (
    YesNo,
)
from jaxpage.errors import QueueFull
from jaxpage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from jaxpage.serving.batches import store
from jaxpage.serving.batches.lines import Line, write_answer
from jaxpage.serving.batches.output_file import LARGE_LINE_BYTES, outline
from jaxpage.serving.batches.store import Store
from jaxpage.serving.batches.uploads import read_form
from jaxpage.serving.http import connection, loop_turns
from jaxpage.serving.http.pages import page_of
from jaxpage.serving.http.parser import HTTPParser
from jaxpage.serving.requests.preparing import LARGE_ANSWER_VALUES, LARGE_SIZE, Preparing
from jaxpage.serving.requests.shared_answers import OpenApiDocument, Shared
from jaxpage.serving.wire import encoding
from jaxpage.serving.wire.body import MAX_BODY_DEPTH, MAX_CONTAINERS, JsonReader
from jaxpage.serving.wire.context import RequestLimits
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat, open_completion, open_score
from jaxpage.serving.wire.openapi import openapi
from jaxpage.serving.wire.rerank import open_rerank
from jaxpage.step.request import Sequence
from tests.support.fake_device import make_group
from tests.support.raw_http import answer_of, ask
from tests.support.running import WAIT_SECONDS, demo_engine, serving, wait_until
from tests.support.sweeps import few
from tests.support.wire import chatml, context

COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("batches")
    with serving(demo_engine(), batch_directory=str(directory)) as running:
        yield running


def refusal_of(function: Any, *arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        function(*arguments)
    return caught.value


# Outputs are made in pieces.


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def __init__(self) -> None:
        self.num_calls = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_calls += 1
        return "".join(f"<{token_id}>" for token_id in token_ids)


def draw(sequence: Sequence, token_id: int, text: str, expected: int | None) -> None:
    """Does with a token what `scheduling/committing.py` does."""
    sequence.token_ids.append(token_id)
    sequence.text += text
    sequence.text_ends.append(len(sequence.text))
    if expected is not None:
        others = tuple(range(token_id + 1, token_id + 1 + expected))
        sequence.logprobs.append(TokenLogprobs(token_id, -1.0, 1, others, (-2.0,) * expected))


def entries_of(output: RequestOutput) -> int:
    return sum(
        len(each.token_ids) + sum(len(entry or ()) for entry in each.logprobs or ())
        for each in output.outputs
    )


@given(data=st.data())
def test_deltas_of_a_bounded_size_are_the_whole(data):
    n = data.draw(st.integers(1, 5))
    expected = data.draw(st.none() | st.integers(0, 4))
    group = make_group("r", 0, [1, 2], n=n, max_tokens=64, logprobs=expected)
    group.sequences = [Sequence(index, index, 2, [1, 2]) for index in range(n)]
    reporter = Reporter(group, RequestMetrics(arrival_time=0.0), Numbers())
    reporter.max_entries = data.draw(st.integers(8, 40))
    deltas: list[RequestOutput] = []
    for _ in range(data.draw(st.integers(1, 6))):
        for sequence in group.sequences:
            for _ in range(data.draw(st.integers(0, 12))):
                draw(
                    sequence,
                    len(sequence.token_ids),
                    data.draw(st.text("ab", max_size=2)),
                    expected,
                )
        if data.draw(st.booleans()):
            deltas.append(reporter.delta())
    for sequence in group.sequences:
        sequence.text += "held back"
        sequence.finish_reason = "length"
    while not deltas or not deltas[-1].finished:
        deltas.append(reporter.delta())
    assert max(map(entries_of, deltas)) <= reporter.max_entries
    assert not reporter.has_unsent
    for index, sequence in enumerate(group.sequences):
        parts = [delta.outputs[index] for delta in deltas]
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        assert token_ids == sequence.output_token_ids
        assert "".join(part.text for part in parts) == sequence.text
        ends = [part.finish_reason for part in parts]
        place = ends.index("length")
        assert not any(ends[:place]) and not any(part.token_ids for part in parts[place + 1 :])
        if expected is not None:
            entries = [entry for part in parts for entry in part.logprobs or ()]
            assert [next(iter(entry or ())) for entry in entries] == sequence.output_token_ids
        shown = 0
        text = ""
        for part in parts[:place]:  # the text of a part is that of its tokens
            shown += len(part.token_ids)
            text += part.text
            assert len(text) == (sequence.text_ends[shown - 1] if shown else 0)


def test_a_large_whole_is_brief_until_another_thread_completes_it():
    def make(max_entries: int | None) -> tuple[RequestOutput, Reporter]:
        group = make_group("r", 0, range(20), max_tokens=64, logprobs=2, prompt_logprobs=1)
        group.prompt_logprobs = [
            TokenLogprobs(each, -1.0, 1, (each,), (-1.0,)) for each in range(1, 20)
        ]
        for token_id in range(10):
            draw(group.sequences[0], token_id, "a", 2)
        group.sequences[0].finish_reason = "length"
        reporter = Reporter(group, RequestMetrics(arrival_time=0.0), Numbers())
        reporter.max_entries = max_entries
        return reporter.whole(), reporter

    expected, unbounded = make(None)
    assert not unbounded.is_brief and make(1000)[0] == expected
    brief, reporter = make(30)
    assert reporter.is_brief and not reporter._texts
    assert brief.prompt_logprobs is None and brief.outputs[0].logprobs is None
    assert brief.outputs[0].token_ids == expected.outputs[0].token_ids
    assert reporter.add_logprobs(brief, is_delta=False) == expected
    # Prompt log probabilities come with the first delta, and alone.
    delta = make(30)[1].delta()
    assert delta.prompt_logprobs is None
    _, streamed = make(30)
    assert (
        streamed.add_logprobs(streamed.delta(), is_delta=True).prompt_logprobs
        == expected.prompt_logprobs
    )


def test_the_text_of_a_token_is_decoded_once_for_a_request():
    group = make_group("r", 0, [1], max_tokens=64, logprobs=4)
    for _ in range(50):
        draw(group.sequences[0], 7, "a", 4)
    tokenizer = Numbers()
    Reporter(group, RequestMetrics(arrival_time=0.0), tokenizer).whole()
    assert tokenizer.num_calls == 5


DIALECTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["The old house"] * 2, "max_tokens": 50, "n": 2, "logprobs": 5},
    "/v1/chat/completions": {
        "messages": [USER],
        "max_tokens": 50,
        "n": 4,
        "logprobs": True,
        "top_logprobs": 20,
    },
    "/v1/responses": {"input": "The old house", "max_output_tokens": 300},
    "/v1/messages": {"messages": [USER], "max_tokens": 300},
    "/api/generate": {"prompt": "The old house", "options": {"num_predict": 300}},
}


@pytest.mark.parametrize("path", few(DIALECTS, [COMPLETIONS, "/v1/chat/completions"]))
def test_what_a_reader_has_missed_comes_in_bounded_pieces(path, server, monkeypatch):
    from jaxpage.serving.requests import generating

    monkeypatch.setattr(async_driver, "MAX_ENTRIES", 24)
    monkeypatch.setattr(async_driver, "_MIN_ENTRIES", 24)
    monkeypatch.setattr(loop_turns, "MAX_ENTRIES", 24)
    pieces: list[int] = []
    usual = generating._events

    def count(exchange: Any, deltas: Any, frame: Any) -> bytes:
        pieces.append(sum(entries_of(delta) for _, delta in deltas))
        return usual(exchange, deltas, frame)

    monkeypatch.setattr(generating, "_events", count)
    streamed = {**DIALECTS[path], "stream": True, "model": "demo"}
    if path.startswith("/v1/c"):
        streamed["ignore_eos"] = True
    goes_on = threading.Event()
    arrived = async_driver.AwaitedHandle.next_delta

    def late(self: Any) -> Any:
        """Asks for the first delta when everything is drawn."""
        if not goes_on.is_set():
            wait_until(
                lambda: self.reporter is not None and not server.engine.has_unfinished,
                "all is drawn",
            )
            goes_on.set()
        return arrived(self)

    monkeypatch.setattr(async_driver.AwaitedHandle, "next_delta", late)
    status, _, body = ask(server, "POST", path, streamed)
    assert status == 200 and not server.errors
    assert len(pieces) > 2 and max(pieces) <= 24
    if path == "/v1/chat/completions":
        rows: Counter[int] = Counter()
        for event in re.findall(rb"data: (\{.*\})\n", body):
            (choice,) = json.loads(event)["choices"]
            rows[choice["index"]] += len((choice["logprobs"] or {}).get("content", ()))
        assert rows == dict.fromkeys(range(4), 50)


def test_large_answers_are_made_on_threads_of_their_own(server, monkeypatch):
    threads: list[str] = []
    row = Reporter._logprobs
    whole = encoding.encode

    def make(self: Any, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return row(self, *arguments)

    def encode_here(value: Any) -> bytes:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return whole(value)

    monkeypatch.setattr(Reporter, "_logprobs", make)
    monkeypatch.setattr(encoding, "encode", encode_here)
    monkeypatch.setattr("jaxpage.serving.requests.preparing.LARGE_ANSWER_VALUES", 100)
    monkeypatch.setattr(async_driver, "MAX_ENTRIES", 100)
    body = {"model": "demo", "prompt": "The old house", "max_tokens": 40, "logprobs": 5}
    status, _, answer = ask(server, "POST", COMPLETIONS, {**body, "ignore_eos": True, "n": 2})
    assert status == 200 and len(json.loads(answer)["choices"][1]["logprobs"]["tokens"]) == 40
    assert set(threads) == {"jaxpage-outputs", "jaxpage-answers"}


# The event loop.


def test_a_turn_of_the_loop_encodes_a_bounded_number_of_entries():
    async def main() -> None:
        shares = loop_turns.LoopTurns()
        loop = asyncio.get_running_loop()
        turn = 0
        per_turn: Counter[int] = Counter()

        def tick() -> None:
            nonlocal turn
            turn += 1
            if turn < 1000:
                loop.call_soon(tick)

        async def stream(number: int, times: int) -> None:
            for _ in range(times):
                await shares.take(number)
                per_turn[turn] += number

        tick()
        maximum = loop_turns.MAX_ENTRIES
        sizes = [maximum // 2, maximum // 3, 1, 7, maximum - 1, 2 * maximum]
        await asyncio.gather(*(stream(size, 5) for size in sizes * 3))
        assert sum(per_turn.values()) == 3 * 5 * sum(sizes)
        # The next turn begins in the middle of a tick, so two turns may count as one.
        assert max(per_turn.values()) <= 2 * maximum
        assert len(per_turn) >= sum(per_turn.values()) // (2 * maximum)

    asyncio.run(main())


@given(sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 6)), max_size=12))
def test_deltas_of_many_prompts_are_divided(sizes):
    deltas = []
    for index, (count, expected) in enumerate(sizes):
        entry = {token_id: Logprob(-1.0, 1) for token_id in range(1 + expected)}
        completion = CompletionOutput(
            index=0, text="", token_ids=[0] * count, logprobs=[entry] * count
        )
        output = RequestOutput(
            request_id="", prompt=None, prompt_token_ids=[], outputs=[completion], finished=False
        )
        deltas.append((index, output))
    groups = list(loop_turns.portions(deltas))
    assert [completion for _, group in groups for completion in group] == deltas
    for number, group in groups:
        assert number == sum(1 + entries_of(delta) for _, delta in group)
        assert len(group) == 1 or number <= loop_turns.MAX_ENTRIES


def test_a_connection_parses_a_bounded_number_of_bytes_at_a_time(server, monkeypatch):
    sizes: list[int] = []
    receive = HTTPParser.receive_data

    def count(self: Any, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(HTTPParser, "receive_data", count)
    body = json.dumps({"model": "demo", "prompt": "A", "max_tokens": 1, "user": "a" * 200}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    for padding in (b"", b" " * 100_000):
        with server.connect() as client:
            padded = b"".join(b"1\r\n%c\r\n" % byte for byte in padding)
            client.sendall(head.encode() + padded + chunks)
            assert answer_of(client)[0] == 200
    assert sum(sizes) > 600_000 and max(sizes) <= connection.MAX_BYTES_PER_TURN


def test_shared_answers_are_true_and_few():
    async def main() -> None:
        now = 0
        begun: list[int] = []

        async def make() -> int:
            begun.append(now)
            value = now
            for _ in range(5):
                await asyncio.sleep(0)
            return value

        shared = Shared(make, 0.0)

        async def ask_at(time: int) -> None:
            requested = now
            assert await shared.answer() >= requested == time

        async def ask_all() -> None:
            nonlocal now
            asking = []
            for now in range(300):
                asking.append(asyncio.ensure_future(ask_at(now)))
                await asyncio.sleep(0)
            asking[-1].cancel()  # a client that leaves takes no answer from others
            await asyncio.gather(*asking[:-1])

        await ask_all()
        assert len(begun) < 100
        many = asyncio.gather(*(shared.answer() for _ in range(100)))
        before = len(begun)
        await many
        assert len(begun) <= before + 1

    asyncio.run(main())


def test_the_document_is_made_anew_for_other_names(monkeypatch):
    async def main() -> None:
        adapters: dict[str, Any] = {}
        document = OpenApiDocument(context(adapters=adapters))
        bodies = await asyncio.gather(*(document.body() for _ in range(20)))
        assert len(made) == 1 and len(set(bodies)) == 1
        adapters["new"] = None
        assert b'"new"' in await document.body() and len(made) == 2

    made: list[str] = []
    usual = openapi

    def count(context: Any, documents: Any) -> Any:
        made.append(threading.current_thread().name)
        return usual(context, documents)

    monkeypatch.setattr("jaxpage.serving.requests.shared_answers.openapi", count)
    asyncio.run(main())
    assert threading.main_thread().name not in made


# JSON in pieces.


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=4) | st.sampled_from(["\u2028", "\x85", '"\\']),
        lambda inner: st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=5),
        max_leaves=60,
    )
)  # fmt: skip
def test_parts_of_an_answer_are_the_answer(value):
    usual = encoding.MAX_VALUES, encoding.PART_BYTES
    encoding.MAX_VALUES, encoding.PART_BYTES = 5, 16
    try:
        parts = encoding.encode_parts(value)
    finally:
        encoding.MAX_VALUES, encoding.PART_BYTES = usual
    assert b"".join(parts) == encoding.encode(value) and all(len(each) >= 16 for each in parts[:-1])


def test_no_call_encodes_many_values(monkeypatch):
    def num_values(value: Any) -> int:
        items = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(num_values, items)) if isinstance(value, dict | list) else 1

    calls: list[int] = []
    dumps = json.dumps

    def count(value: Any, **how: Any) -> str:
        calls.append(num_values(value))
        return dumps(value, **how)

    monkeypatch.setattr("jaxpage.serving.wire.encoding.json.dumps", count)
    rows = [{"token": "a", "top": [{"token": "b", "bytes": [1, 2]}] * 20}] * 500
    answers = [
        {"choices": [{"logprobs": {"content": rows}}] * 4},
        {"data": [{"embedding": np.arange(576.0).tolist()}] * 300},
        {"data": [{"embedding": np.arange(9000.0).tolist()}] * 3},
        {"tokens": list(range(50_000))},
    ]
    for answer in answers:
        parts = encoding.encode_parts(answer)
        maximum, number = max(calls), len(calls)
        assert number > 4 and maximum <= encoding.MAX_VALUES + 2
        calls.clear()
        assert b"".join(parts) == encoding.encode(answer)
        calls.clear()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoding.encode_parts([[0.0] * 5000, float("nan")])


# Reading.


class Counted:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._usual = chatml()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def __call__(self, text: str, **how: Any) -> Any:
        self.texts.append(text)
        return self._usual(text, **how)


def test_a_score_encodes_its_prompt_once_and_refuses_early(server, monkeypatch):
    tokenizer = Counted()
    requested = {
        "model": "demo",
        "prompt": "Once upon a time ",
        "continuation": [f"c{n}" for n in range(256)],
    }
    answer = open_score(requested, context(tokenizer=tokenizer))
    assert len(answer.prompts) == 256 and len(tokenizer.texts) == 257
    assert tokenizer.texts.count("Once upon a time") == 1
    tokenizer.texts.clear()
    error = refusal_of(
        open_score, {**requested, "prompt": "a b " * 800}, context(tokenizer=tokenizer)
    )
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert len(tokenizer.texts) == 1
    tokenizer.texts.clear()
    few = context(tokenizer=tokenizer, limits=RequestLimits(max_score_characters=100))
    assert "counted once for each continuation" in refusal_of(open_score, requested, few).message
    assert not tokenizer.texts
    threads: list[str] = []
    usual = type(server.context.tokenizer).__call__

    def call(self: Any, *texts: Any, **how: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return usual(self, *texts, **how)

    monkeypatch.setattr(type(server.context.tokenizer), "__call__", call)
    status, _, _ = ask(server, "POST", "/v1/score", {**requested, "continuation": ["a", "b"]})
    assert status == 200 and threads == ["jaxpage-aside"] * 3


def test_a_query_counts_once_for_each_document_that_it_is_read_with():
    limits = RequestLimits(max_score_characters=1000)
    requested = {"model": "demo", "query": "q" * 99, "documents": ["d"] * 10}
    ranking = context(limits=limits, reranker=YesNo(1, 2))
    assert len(open_rerank(requested, ranking).prompts) == 10
    error = refusal_of(open_rerank, {**requested, "documents": ["d"] * 11}, ranking)
    assert error.param == "documents" and "1100 characters" in error.message
    assert open_rerank({**requested, "documents": ["d"] * 11}, context(limits=limits))


def test_large_requests_and_long_texts_are_read_aside(server):
    """A small request is read while a large one is being read."""

    async def main() -> None:
        preparing = Preparing(server.engine, 4)
        begun, goes_on = threading.Event(), threading.Event()

        def slow() -> str:
            begun.set()
            goes_on.wait()
            return threading.current_thread().name

        large = [asyncio.ensure_future(preparing.run(slow, LARGE_SIZE + 1)) for _ in range(3)]
        answer = asyncio.ensure_future(preparing.answer(slow, LARGE_ANSWER_VALUES + 1))
        await asyncio.to_thread(begun.wait)
        small = preparing.run(lambda: threading.current_thread().name, LARGE_SIZE)
        try:
            name = await asyncio.wait_for(small, WAIT_SECONDS)
        except TimeoutError:
            goes_on.set()
            raise
        assert name.startswith("jaxpage-reading_")
        assert await preparing.answer(lambda: 1, LARGE_ANSWER_VALUES) == 1
        others = [asyncio.ensure_future(preparing.run(slow, LARGE_SIZE + 1)) for _ in range(9)]
        refusals = await asyncio.wait(others, timeout=0)
        goes_on.set()
        names = await asyncio.gather(*large, answer, *others, return_exceptions=True)
        prefixes = {str(each).rpartition("_")[0] for each in names if isinstance(each, str)}
        assert prefixes == {"jaxpage-reading-large", "jaxpage-answers"}
        assert any(isinstance(each, QueueFull) for each in names) and refusals
        preparing.close()

    asyncio.run(main())


DEEP = "[" * (MAX_BODY_DEPTH + 1) + "]" * (MAX_BODY_DEPTH + 1)
WIDE = "[" + "[]," * MAX_CONTAINERS + "[]]"
BAD_JSON: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not valid JSON"),
    "NaN": ('{"a": NaN}', "NaN"),
    "infinity": ('{"a": -Infinity}', "Infinity"),
    "beyond a float": ('{"a": [1e999]}', "1e999"),
    "twins": ('{"b": {"a": 1, "a": 2}}', "'a' twice"),
    "deep": (f'{{"a": {DEEP}}}', f"more than {MAX_BODY_DEPTH} deep"),
    "wide": (f'{{"a": {WIDE}}}', f"more than {MAX_CONTAINERS} arrays"),
    "strings": ('{"a": [' + '"",' * 270_000 + '""]}', "strings"),
    "digits": ('{"a": 1' + "0" * 5000 + "}", "too many digits"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_json_in_a_text_is_read_as_bodies_are(kind):
    text, message = BAD_JSON[kind]
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1.5}'}}
    other = {"id": "2", "function": {"name": "f", "arguments": text}}
    messages = [USER, {"role": "assistant", "tool_calls": [call, other]}]
    for opens in (open_chat, _tokenize):
        error = refusal_of(opens, {"model": "demo", "messages": messages}, context())
        assert error.status == 400 and message in error.message
        assert error.param == "messages[1].tool_calls[1].function.arguments"
        assert error.message.startswith(error.param)
    schema = {"model": "demo", "prompt": "x", "structured_outputs": {"json": text}}
    error = refusal_of(open_completion, schema, context())
    assert error.param == "structured_outputs" and message in error.message


def _tokenize(body: dict[str, Any], context: Any) -> Any:
    from jaxpage.serving.wire.exchange import tokenize

    return tokenize(body, context)


def test_the_texts_of_a_request_share_its_limits():
    part = "[" + "[]," * (MAX_CONTAINERS // 3) + "[]]"
    reader = JsonReader()
    for _ in range(2):
        reader.read(part, "a")
    error = refusal_of(reader.read, part, "messages[9].x")
    assert error.param == "messages[9].x" and "with the texts before it" in error.message
    arguments = {"name": "f", "arguments": f'{{"a": {part}}}'}
    calls = [[{"id": str(index), "function": arguments}] for index in range(4)]
    messages = [USER, *({"role": "assistant", "tool_calls": each} for each in calls)]
    error = refusal_of(open_chat, {"model": "demo", "messages": messages}, context())
    assert error.param == "messages[3].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("opens", "fields", "param"),
    [
        (open_chat, {"logprobs": True, "top_logprobs": 20, "n": 100, "max_tokens": 500},
         "top_logprobs"),
        (open_chat, {"logprobs": True, "n": 128, "max_completion_tokens": 10**9}, "logprobs"),
        (open_completion, {"logprobs": 5, "n": 4, "max_tokens": 512, "prompt": ["x"] * 256},
         "logprobs"),
        (open_completion, {"logprobs": 1, "n": 1, "best_of": 64, "max_tokens": 512}, "logprobs"),
    ],
)  # fmt: skip
def test_log_probabilities_of_outputs_have_a_limit(opens, fields, param):
    limits = RequestLimits(max_output_logprobs=60_000)
    body = (
        {"model": "demo", "messages": [USER]}
        if opens is open_chat
        else {"model": "demo", "prompt": "x"}
    )
    error = refusal_of(opens, {**body, **fields}, context(limits=limits))
    assert (error.status, error.param) == (400, param)
    assert "at most 60000 are allowed: ask for max_tokens of at most" in error.message
    max_length = int(error.message.rpartition(" ")[2])
    length = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    fits = opens({**body, **fields, length: max_length}, context(limits=limits))
    assert fits.prompts[0].params.max_tokens == max_length


def test_an_output_without_a_length_gets_the_room_that_there_is():
    limits = RequestLimits(max_output_logprobs=4200)
    body = {"model": "demo", "messages": [USER], "logprobs": True, "top_logprobs": 20, "n": 2}
    assert open_chat(body, context(limits=limits)).prompts[0].params.max_tokens == 100
    assert open_chat(body, context()).prompts[0].params.max_tokens is None
    body |= {"n": 101, "max_tokens": None}
    few = refusal_of(
        open_chat,
        {**body, "top_logprobs": 20},
        context(limits=RequestLimits(max_output_logprobs=2000)),
    )
    assert "fewer sequences" in few.message


# Files.


class Searched(bytes):
    """Bytes that count the searches in them."""

    num_searches = 0

    def find(self, *arguments: Any) -> int:
        self.num_searches += 1
        return super().find(*arguments)

    def split(self, *arguments: Any) -> Any:
        raise AssertionError("splits before it counts")

    def __radd__(self, other: bytes) -> bytes:
        raise AssertionError("copies the body")


PART = b'--a\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n'
NO_LIMITS = [
    "0" * 5000 + "11",
    "01",
    "10001",
    "0",
    "-1",
    "+5",
    "",
    " 5",
    "5.0",
    "٣",
    "1e3",
    "5" * 5000,
]


@pytest.mark.parametrize("boundary", [b"--a\r\n\r\n", b"\r\n--a", PART])
def test_an_upload_of_boundaries_is_not_split(boundary):
    body = Searched(b"--a\r\n" + boundary * 100_000 + b"\r\n--a--")
    assert refusal_of(read_form, "multipart/form-data; boundary=a", body).status == 400
    assert body.num_searches <= 40


def test_files_are_written_and_synced_off_the_event_loop(server, monkeypatch):
    threads: list[str] = []
    write = store._write

    def note(path: Path, content: bytes) -> None:
        threads.append(threading.current_thread().name)
        write(path, content)

    monkeypatch.setattr(store, "_write", note)
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    content = json.dumps(
        {"custom_id": "a", "method": "POST", "url": COMPLETIONS,
         "body": {"model": "demo", "prompt": "A"}}
    ).encode()  # fmt: skip
    form += content + b"\r\n--b--\r\n"
    status, _, body = ask(
        server, "POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=b"
    )
    assert status == 200 and json.loads(body)["bytes"] == len(content)
    requested = {
        "input_file_id": json.loads(body)["id"],
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    status, _, body = ask(server, "POST", "/v1/batches", requested)
    batch = json.loads(body)
    assert status == 200 and batch["status"] == "validating"
    path = f"/v1/batches/{batch['id']}"
    wait_until(lambda: json.loads(ask(server, "GET", path)[2])["status"] == "completed")
    assert len(threads) >= 6 and server.thread.name not in threads


def test_room_for_a_file_is_kept_while_it_is_written(tmp_path):
    files = Store(tmp_path, 100)
    with files.room(60):
        assert "has 60" not in refusal_of(files.room(41).__enter__).message
        with files.room(40):
            files.write_file("a", "batch", "", "file-" + "0" * 32, b"x" * 40)
    with files.room(60):
        pass
    record = files.find("file", "file-" + "0" * 32, "")
    files.forget(record)
    files.write(record)  # a record that is forgotten does not come back
    files.delete_files(record)
    assert not list(tmp_path.glob("file-*")) and not files.every("file")
    files.close()


@given(
    custom_id=st.text(max_size=20) | st.just('","body":{"usage":{"a":1}}'),
    text=st.text(max_size=20) | st.just('"usage":{"prompt_tokens":9}'),
    after=st.sampled_from([{}, {"prompt_logprobs": [None, {"1": {"rank": 1}}]}, {"user": "usage"}]),
)
def test_a_large_answer_of_a_batch_is_counted_without_reading_it(custom_id, text, after):
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    body = {
        "choices": [{"text": text + "a" * LARGE_LINE_BYTES, "usage": 1}],
        "usage": usage,
        **after,
    }
    line = write_answer(Line("id", custom_id, "/", b"", ""), 200, "request", encoding.encode(body))
    assert len(line) > LARGE_LINE_BYTES
    seen = outline(line)
    expected = json.loads(line)
    assert seen["response"]["body"] == {"usage": usage}
    seen["response"]["body"] = expected["response"]["body"]
    assert seen == expected


# Query strings.


@pytest.mark.parametrize("given_limit", NO_LIMITS)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_limits_of_lists_that_are_no_limits(path, given_limit, server):
    from urllib.parse import quote

    status, _, body = ask(server, "GET", f"{path}?limit={quote(given_limit)}")
    assert (status, json.loads(body)["error"]["param"]) == (400, "limit")
    assert not server.errors


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=1&limit=2", "limit"), ("after=x", "after"), ("after=" + "9" * 6000, "after"),
     ("x=1", "query")],
)  # fmt: skip
def test_queries_that_are_refused(query, param, server):
    for path in ("/v1/files", "/v1/batches"):
        status, _, body = ask(server, "GET", f"{path}?{query}")
        assert (status, json.loads(body)["error"]["param"]) == (400, param)


@pytest.mark.parametrize("limit", [1, 9, 10, 10_000])
def test_limits_of_lists(limit):
    scope = {"type": "http", "query_string": f"limit={limit}".encode(), "headers": []}
    records = [{"id": f"{number}"} for number in range(20)]
    page = json.loads(bytes(page_of(Request(scope), records, {"limit"}, 5).body))
    assert len(page["data"]) == min(limit, 20) and page["has_more"] == (limit < 20)


def test_a_level_of_sleep_with_many_digits_is_refused():
    from jaxpage.serving.model.pausing import read_order

    scope = {
        "type": "http",
        "query_string": b"model=demo&level=" + b"1" * 5000,
        "headers": [(b"host", b"localhost")],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    fields = asyncio.run(read_order(Request(scope, receive), {"model", "level"}))
    assert fields["level"] == "1" * 5000, "a text, which is no level"
