"""The k-th failure: whatever fails in a server that answers, and whenever, others get their
answers, and the server serves on.

As in SQLite's tests of allocation failures the k-th call of one kind raises, for k = 1, 2, ...
until there is no k-th call any more.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from jaxpage.decoding import SamplingStrategy
from jaxpage.engine import engine as engine_module
from jaxpage.engine.engine import Engine
from jaxpage.engine.reporting import Reporter
from jaxpage.engine.text import StreamDetokenizer
from jaxpage.memory import BlockPool
from jaxpage.serving.settings.server_config import ServerConfig
from tests.support.running import Running, running, wait_until

# Greedy or seeded: each has one right answer, whoever is beside it.
COMMON: dict[str, Any] = {"model": "demo", "max_tokens": 6, "ignore_eos": True}
REQUESTS: tuple[dict[str, Any], ...] = (
    {
        **COMMON,
        "prompt": "Once upon a time there was a queen who lived in an old house by the sea",
        "temperature": 0,
    },
    {**COMMON, "prompt": "The rabbit", "seed": 7, "n": 2, "stream": True},
    {**COMMON, "prompt": list(range(40, 80)), "temperature": 0, "logprobs": 2},
)
MAX_CALLS = 400  # a sweep that does not end by then has no end


class Injected(Exception):
    """The failure."""


class Injector:
    """Counts calls, and lets the k-th fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.arm(0)

    def arm(self, k: int) -> None:
        """Chooses the call that fails; with k of 0 none does."""
        with self._lock:
            self._left, self.fired = k, False

    def count_call(self) -> None:
        """Counts a call. Raises Injected if it is the one."""
        with self._lock:
            self._left -= 1
            if self._left != 0:
                return
            self.fired = True
        raise Injected("this call was chosen to fail")

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count_call()
            return function(*args, **kwargs)

        return counted

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.count_call()
            return result

        return counted


class InFront:
    """Stands for another object with one of its methods replaced."""

    def __init__(self, real: Any, name: str, function: Callable[..., Any]) -> None:
        self._real = real
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class CalledInFront(InFront):
    """Stands for a tokenizer, whose call is looked up in its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(*args, **kwargs)


Plant = Callable[[pytest.MonkeyPatch, Running, Injector], None]


def _in_class(owner: Any, name: str) -> Plant:
    return lambda patch, server, injector: patch.setattr(
        owner, name, injector.before(getattr(owner, name))
    )


def _dispatch(patch: pytest.MonkeyPatch, server: Running, injector: Injector) -> None:
    """Lets the device refuse the step before it has taken the pages."""
    runner = server.loop.engine.runner
    patch.setattr(runner, "run", injector.before(runner.run))


def _fetch(patch: pytest.MonkeyPatch, server: Running, injector: Injector) -> None:
    """Lets the step fail after its dispatch, as a device that runs out of memory does: the donated
    pages are gone.
    """
    executables = server.loop.engine.runner.executables
    wrapped = InFront(executables, "step", lambda *step: injector.after(executables.step(*step)))
    patch.setattr(server.loop.engine.runner, "executables", wrapped)


def _tokenise(patch: pytest.MonkeyPatch, server: Running, injector: Injector) -> None:
    tokenizer = server.loop.engine.tokenizer
    patch.setattr(
        server.loop.engine,
        "tokenizer",
        CalledInFront(tokenizer, "called", injector.before(tokenizer)),
    )


def _advance(patch: pytest.MonkeyPatch, server: Running, injector: Injector) -> None:
    patch.setattr(engine_module, "advance", injector.before(engine_module.advance))


def _inbox(patch: pytest.MonkeyPatch, server: Running, injector: Injector) -> None:
    """Plants the failure between the threads. Both ends hold the same queue."""
    inbox = server.loop.turns.inbox
    patch.setattr(server.loop.turns, "inbox", InFront(inbox, "put", injector.before(inbox.put)))


@dataclass(frozen=True)
class Point:
    """Says where a sweep lets calls fail."""

    plant: Plant
    harms_all: bool  # a failure of the step may end all that run; any other one request alone


POINTS = {
    "block allocation": Point(_in_class(BlockPool, "allocate"), harms_all=True),
    "step dispatch": Point(_dispatch, harms_all=True),
    "step result": Point(_fetch, harms_all=True),
    "tokenise": Point(_tokenise, harms_all=False),
    "detokenise": Point(_in_class(StreamDetokenizer, "push"), harms_all=False),
    "sample": Point(_in_class(SamplingStrategy, "advance"), harms_all=False),
    "advance": Point(_advance, harms_all=True),
    "report": Point(_in_class(Reporter, "_output"), harms_all=False),
    "queue put": Point(_inbox, harms_all=False),
    "socket write": Point(_in_class(RequestResponseCycle, "send"), harms_all=False),
}


@pytest.fixture(scope="module")
def server():
    with running(ServerConfig()) as handle:
        yield handle


@pytest.fixture(scope="module")
def right(server):
    """Returns the answers of a server in which nothing fails, each alone."""
    return [asyncio.run(_ask_all(server, [request]))[0] for request in REQUESTS]


@pytest.fixture
def broken_laws(server, monkeypatch):
    """Collects the laws that do not hold after a step.

    An error raised there would end a request, and be taken for the failure.
    """
    engine, problems = server.loop.engine, []

    def checked() -> Any:
        groups = step()
        try:
            engine.scheduler.check()
        except AssertionError as error:
            problems.append(str(error))
        return groups

    step = engine.step
    monkeypatch.setattr(engine, "step", checked)
    return problems


@pytest.mark.parametrize("point", POINTS)
def test_the_kth_failure(server, right, broken_laws, monkeypatch, point):
    injector, num_harmed = Injector(), 0
    POINTS[point].plant(monkeypatch, server, injector)
    for k in (*range(1, 4), *range(4, MAX_CALLS, 16)):  # later calls are for tokens like the others
        server.loop.call(Engine.reset_prefix_cache).result()  # so that all rounds allocate alike
        injector.arm(k)
        answers = asyncio.run(_ask_all(server, REQUESTS))
        fired = injector.fired
        injector.arm(0)
        harmed = [index for index, answer in enumerate(answers) if answer != right[index]]
        for index in harmed:
            assert is_notified(answers[index], point), f"k={k}: {answers[index]}"
        assert fired or not harmed, f"k={k}: nothing failed, but {harmed} are wrong"
        assert POINTS[point].harms_all or len(harmed) <= 1, f"k={k}: one failure ended {harmed}"
        assert not broken_laws, f"k={k}"
        wait_until(lambda: nothing_is_left(server), f"k={k}: nothing is left")
        assert asyncio.run(_ask_all(server, REQUESTS[:1])) == right[:1], f"k={k}: the next request"
        num_harmed += bool(harmed)
        if not fired:
            break
    assert not fired, "the sweep ends where nothing fails any more"
    assert num_harmed, "something failed, and somebody was told"
    print(
        f"{point}: {k - 1} calls failed, one after the other; {num_harmed} times a request "
        f"ended with an error"
    )


def is_notified(answer: Any, point: str) -> bool:
    """Returns whether a client knows from this answer that it is none: an error in OpenAI's shape,
    or a connection that broke off.
    """
    if isinstance(answer, httpx.HTTPError):
        return point == "socket write"
    return isinstance(answer, dict) and set(answer["error"]) == {"message", "type", "param", "code"}


def nothing_is_left(server: Running) -> bool:
    """Returns whether no request, block or place is taken, and all structures are whole."""

    def look(engine: Engine) -> bool:
        engine.scheduler.check()
        pool = engine.scheduler.block_manager.groups[0].pool
        loop = server.loop
        remains = (
            engine._groups,
            engine._strategies,
            engine.metrics.requests,
            loop.turns.live,
            loop.num_open,
        )
        return pool.num_free == pool.num_usable and not any(remains)

    return server.loop.call(look).result()


async def _ask_all(server: Running, requests: Any) -> list[Any]:
    """Returns what becomes of requests that are sent at once: choices, the error's body, or the
    exception of a connection.
    """
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        return await asyncio.gather(*(_ask(client, request) for request in requests))


async def _ask(client: httpx.AsyncClient, request: dict[str, Any]) -> Any:
    try:
        answer = await client.post("/v1/completions", json=request)
    except httpx.HTTPError as error:
        return error
    if answer.status_code != 200:
        assert answer.status_code >= 500, answer.text
        return answer.json()
    return _join_stream(answer.text) if request.get("stream") else answer.json()["choices"]


def _join_stream(text: str) -> Any:
    """Returns the texts and reasons of a stream by choice, or its error."""
    *events, done, remainder = text.split("\n\n")
    assert (done, remainder) == ("data: [DONE]", ""), text
    texts: dict[int, str] = {}
    for event in events:
        if event.startswith(":"):  # the comment of a stream that was silent
            continue
        chunk = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            return chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] = (
                texts.get(choice["index"], "") + choice["text"] + (choice["finish_reason"] or "")
            )
    return texts
