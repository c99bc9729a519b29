"""Many clients at once: who does harm changes nothing for others, who leaves gives everything back,
who is one too many is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxpage.engine.engine import Engine
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire import tokenizing
from tests.support.holding import Steps, held, stepped
from tests.support.running import WAIT_SECONDS, Running, metrics, running, wait_until
from tests.support.sweeps import few

MAX_QUEUED = 160
COMMON: dict[str, Any] = {"model": "demo", "max_tokens": 8}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Once upon a time there was a king who had a daughter"
# With one right answer each: greedy, or seeded.
HONEST: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {**COMMON, "prompt": TEXT, "temperature": 0}),
    (COMPLETIONS, {**COMMON, "prompt": TEXT, "temperature": 0, "stream": True}),
    (COMPLETIONS, {**COMMON, "prompt": "The fox", "seed": 1, "n": 3, "logprobs": 3}),
    (
        COMPLETIONS,
        {**COMMON, "prompt": list(range(100, 170)), "temperature": 0, "echo": True, "logprobs": 0},
    ),
    (
        COMPLETIONS,
        {
            **COMMON,
            "prompt": ["In", "the forest"],
            "seed": 5,
            "top_p": 0.9,
            "top_k": 40,
            "stop": ".",
        },
    ),
    (COMPLETIONS, {**COMMON, "prompt": "Why", "n": 2, "use_beam_search": True}),
    (
        COMPLETIONS,
        {
            **COMMON,
            "prompt": "A",
            "seed": 2,
            "structured_outputs": {"regex": "[a-z]{2,4} [0-9]{2}"},
        },
    ),
    (
        COMPLETIONS,
        {**COMMON, "prompt": "If", "seed": 3, "presence_penalty": 1, "repetition_penalty": 1.2},
    ),
    (
        CHAT,
        {
            **COMMON,
            "messages": [{"role": "user", "content": TEXT}],
            "temperature": 0,
            "logprobs": True,
        },
    ),
    (CHAT, {**COMMON, "messages": [{"role": "user", "content": "Hm"}], "seed": 9, "stream": True}),
)
HOSTILE: tuple[dict[str, Any], ...] = (
    {"n": 10**9},
    {"best_of": 128, "n": 128, "max_tokens": 400},
    {"prompt": ["x"] * 10_000},
    {"prompt": "x " * 500_000},
    {"prompt": [2048]},
    {"prompt": [2**31 - 1, 2**63]},
    {"prompt": [-1]},
    {"prompt": "\ud800"},
    {"prompt": []},
    {"temperature": 1e400},
    {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1.0},
    {"logit_bias": {str(token): 100 for token in range(1024)}},
    {"logit_bias": {"2048": 100}},
    {"allowed_token_ids": [2048]},
    {"allowed_token_ids": [0], "min_tokens": 8},
    {"bad_words": ["e"] * 128},
    {"stop_token_ids": [2**40]},
    {"stop": ["a" * 256] * 16},
    {"min_tokens": 400},
    {"max_tokens": None, "min_tokens": 4},
    {"logprobs": 10**6},
    {"structured_outputs": {"regex": "(a+)+$"}},
    {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": {"$ref": "http://localhost/schema"}}},
    {"structured_outputs": {"json": {"type": "banana"}}},
    {"structured_outputs": {"grammar": "start: start"}},
    {"cache_salt": "\0"},
    {"prompt_embeds": "AAAA"},
    {"user": "x" * 100_000},
    {"use_beam_search": True, "n": 128, "max_tokens": 300},
    {
        "repetition_penalty": 1e-300,
        "presence_penalty": 2,
        "frequency_penalty": -2,
        "seed": 2**64 - 1,
    },
)
RAW = (
    b"",
    b"\x00\xff" * 1000,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 40000\r\n\r\n"
    + b"[" * 40_000,
)


@pytest.fixture(scope="module")
def server():
    with running(ServerConfig(max_queued_requests=MAX_QUEUED)) as running_server:
        yield running_server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.address, timeout=120) as http_client:
        yield http_client


def test_a_hundred_hostile_clients_change_nothing_for_fifty_honest_ones(server):
    alone = [asyncio.run(_together(server, [each], 0))[0][0] for each in HONEST]
    answers, statuses = asyncio.run(_together(server, [*HONEST] * 5, 100))
    for index, answer in enumerate(answers):
        assert answer == alone[index % len(HONEST)], HONEST[index % len(HONEST)]
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[400] >= 20, "most of what is hostile is refused"
    wait_until(lambda: everything_is_free(server), "all blocks are free")
    assert not server.errors


async def _together(
    server: Running, honest: Any, num_hostile: int
) -> tuple[list[Any], Counter[int]]:
    """Returns what honest requests are answered, and the statuses of hostile ones.

    A status is 0 where the connection was not meant to have one.
    """
    async with httpx.AsyncClient(
        base_url=server.address, timeout=300, limits=httpx.Limits()
    ) as client:
        hostile = [
            asyncio.create_task(_attack(server, client, index)) for index in range(num_hostile)
        ]
        answers = await asyncio.gather(*(_answer(client, *each) for each in honest))
        return answers, Counter(await asyncio.gather(*hostile))


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Returns what was generated: choices, or the texts of those of a stream."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"]
    assert answer.text.endswith("data: [DONE]\n\n")
    texts: dict[int, str] = {}
    for line in answer.text.split("\n\n")[:-2]:
        if line.startswith(":"):  # the comment of a stream that was silent
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


async def _attack(server: Running, client: httpx.AsyncClient, index: int) -> int:
    """Sends what is no request from every third client, or leaves in the middle of one.

    The others ask for what they should not.
    """
    if index % 3 == 0:
        await _send(server, RAW[index // 3 % len(RAW)])
        return 0
    body = {**COMMON, "prompt": TEXT, **HOSTILE[index % len(HOSTILE)]}
    raw = json.dumps({name: value for name, value in body.items() if value is not None})
    if index % 3 == 1:
        answer = await client.post(
            COMPLETIONS, content=raw, headers={"Content-Type": "application/json"}
        )
        return answer.status_code
    await _send(server, _head(len(raw)) + raw.encode())
    return 0


def _head(num_bytes: int) -> bytes:
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()


async def _send(server: Running, raw: bytes) -> None:
    """Sends, and leaves."""
    host, port = server.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw)
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()


def everything_is_free(server: Running) -> bool:
    def look(engine: Engine) -> bool:
        engine.scheduler.check()
        pool = engine.scheduler.block_manager.groups[0].pool
        return (
            pool.num_free == pool.num_usable
            and not server.loop.turns.live
            and not server.loop.num_open
        )

    return server.loop.call(look).result()


LONG: dict[str, Any] = {"model": "demo", "max_tokens": 300, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "samples": {"n": 3, "seed": 1, "stream": True},
    "beams": {"n": 2, "use_beam_search": True},
    "structured": {"structured_outputs": {"regex": "[a-z ]{250}"}, "seed": 1, "ignore_eos": None},
}
PROMPT_STEPS = 3  # of 150 tokens, 64 in a step


NUMBERS_OF_STEPS = (0, 1, PROMPT_STEPS, PROMPT_STEPS + 5)
LEAVING = list(itertools.product(KINDS, NUMBERS_OF_STEPS))
ALWAYS_LEAVING = [
    *zip(("whole", "stream", "samples", "beams"), NUMBERS_OF_STEPS, strict=True),
    ("structured", PROMPT_STEPS + 5),
]


@pytest.mark.parametrize(("kind", "num_steps"), few(LEAVING, ALWAYS_LEAVING))
def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    server, client, monkeypatch, kind, num_steps
):
    body = {
        **LONG,
        "prompt": list(range(1000, 1150)),
        "cache_salt": f"{kind} {num_steps}",
        **KINDS[kind],
    }
    raw = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    if kind == "beams":
        raw = raw.replace(b'"cache_salt"', b'"user"')
    aborted = metrics(client)["jaxpage_aborted_total/disconnect"]
    with stepped(server, monkeypatch) as steps:
        leaving = asyncio.run(_leave(server, raw, steps, num_steps))
        assert leaving, "it has blocks, or waits for its first"
        wait_until(
            lambda: not server.server.visitors._number, "the server knows that the client has left"
        )
        before = steps.num_taken
        steps.allow(1)  # the one that was held when the client left
        wait_until(lambda: everything_is_free(server), "the blocks are free")
        assert steps.num_taken == before + 1
    assert metrics(client)["jaxpage_aborted_total/disconnect"] == aborted + 1
    assert not server.errors


async def _leave(server: Running, raw: bytes, steps: Steps, num_steps: int) -> bool:
    """Sends a request, lets some steps be taken, and leaves.

    Whether the engine had the request then.
    """
    host, port = server.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(_head(len(raw)) + raw)
    await writer.drain()
    await asyncio.to_thread(
        wait_until, lambda: server.loop.engine.has_unfinished, "the engine has it"
    )
    await asyncio.to_thread(steps.allow, num_steps)
    has_it = server.loop.engine.has_unfinished
    writer.transport.abort()
    return has_it


def test_a_client_that_leaves_before_the_engine_has_its_request(server, client):
    """It leaves in the middle of its body, and while the engine is busy with somebody else."""
    generated = metrics(client)["jaxpage_generation_tokens_total"]
    raw = json.dumps({**LONG, "prompt": TEXT}).encode()
    for sent in (_head(len(raw)), _head(len(raw)) + raw[:10]):
        asyncio.run(_send(server, sent))
    with held(server):
        asyncio.run(_leave_waiting(server, _head(len(raw)) + raw))
        wait_until(
            lambda: not server.server.visitors._number, "the server knows that the client has left"
        )
    wait_until(lambda: everything_is_free(server), "the blocks are free")
    assert metrics(client)["jaxpage_generation_tokens_total"] == generated, (
        "nothing was generated for nobody"
    )
    assert not server.errors


async def _leave_waiting(server: Running, raw: bytes) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    await writer.drain()
    await asyncio.to_thread(wait_until, lambda: server.loop.num_open, "it has a place in the queue")
    writer.transport.abort()


def test_nobody_waits_for_texts_that_are_only_tokenized(server, client, monkeypatch):
    """It may take seconds for each of them, and there may be many."""
    goes_on, requested = threading.Event(), threading.Semaphore(0)

    def endless(text: str, param: str) -> str:
        requested.release()
        goes_on.wait()
        return text

    monkeypatch.setattr(tokenizing, "valid_text", endless)
    answers: list[httpx.Response] = []
    tokenizings = [
        threading.Thread(
            target=lambda: answers.append(client.post("/tokenize", json={"prompt": TEXT}))
        )
        for _ in range(8)
    ]
    try:
        for each in tokenizings:
            each.start()
        assert requested.acquire(timeout=WAIT_SECONDS)
        assert (
            client.post(
                COMPLETIONS, json={**COMMON, "prompt": TEXT}, timeout=WAIT_SECONDS
            ).status_code
            == 200
        )
        assert not answers
    finally:
        goes_on.set()
        for each in tokenizings:
            each.join(WAIT_SECONDS)
    assert [answer.status_code for answer in answers] == [200] * 8


def test_a_thousand_clients_at_once(server):
    """The server serves as many as it has places; the others are told at once to come again."""
    places = server.loop.engine.scheduler.max_num_seqs + MAX_QUEUED
    with contextlib.ExitStack() as holding:
        holding.enter_context(held(server))
        statuses = asyncio.run(_crowd(server, 1000, places, holding.close))
    assert set(statuses) == {(200, None), (429, "1")} and sum(statuses.values()) == 1000, statuses
    assert MAX_QUEUED <= statuses[200, None] <= places, (
        "what comes in while too many are being read is refused, too"
    )
    wait_until(lambda: everything_is_free(server), "all blocks are free")


async def _crowd(
    server: Running, number: int, places: int, go_on: Callable[[], None]
) -> Counter[tuple[int, str | None]]:
    """Returns the statuses and Retry-After of so many requests on connections of their own.

    The engine goes on when the others were refused.
    """
    host, port = server.address.removeprefix("http://").split(":")
    raw = json.dumps({**COMMON, "max_tokens": 1, "prompt": [5]}).encode()
    refused = 0

    async def ask() -> tuple[int, str | None]:
        nonlocal refused
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(_head(len(raw)) + raw)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        finally:
            writer.close()
        status = int(head[0].split()[1])
        refused += status != 200
        if refused >= number - places:
            await asyncio.to_thread(go_on)
        return status, dict(line.split(": ", 1) for line in head[1:] if line).get("retry-after")

    return Counter(await asyncio.gather(*(ask() for _ in range(number))))
