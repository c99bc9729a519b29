"""Streams are never silent for long, by a clock that jumps, and refuse in time or in the stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.errors import QueueFull
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.dialects.dialect import GenerationPath
from jaxpage.serving.dialects.registry import DIALECTS, dialect_of
from jaxpage.serving.http.answer_stream import AnswerStream, stream_of
from jaxpage.serving.http.envelope import Envelope
from jaxpage.serving.http.posting import json_body
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.requests.generating import Generating
from jaxpage.serving.requests.stored_responses import open_store
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.several.models_file import read_models_file
from jaxpage.serving.several.switchboard import Switchboard
from jaxpage.serving.several.table import LoadFailed
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange
from tests.support.table_fuzzing import JumpingLoop
from tests.support.wire import Scripted, context, deltas, output

SECONDS = 5.0
# /v1/generate does not stream.
PATHS = [
    path
    for dialect in DIALECTS
    for path in dialect.paths_of(GenerationPath)
    if path != "/v1/generate"
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 8, "messages": [{"role": "user", "content": "x"}]},
    "/api/generate": {"prompt": "x"},
}
Step = Callable[[AnswerStream], Awaitable[None]]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    usual = {"messages": [{"role": "user", "content": "x"}]}
    return {"model": "demo", **BODIES.get(path, usual), "stream": True, **fields}


class Sent:
    """Holds what a client has been sent, with the times."""

    def __init__(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.path = path
        self.metrics = ServerMetrics("demo")
        self.messages: list[tuple[float, Message]] = []
        self.state: dict[str, Any] = {}
        self.blocks = asyncio.Event()  # a client that reads nothing
        self.blocks.set()
        self.max_at_once = 0
        self._num_at_once = 0
        self._leaves = asyncio.Event()
        self._began = asyncio.get_running_loop().time()
        self._raw = json.dumps(body_of(path) if body is None else body).encode()

    def leave(self) -> None:
        self._leaves.set()

    async def receive(self) -> Message:
        if self._raw:
            raw, self._raw = self._raw, b""
            return {"type": "http.request", "body": raw, "more_body": False}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._num_at_once += 1
        self.max_at_once = max(self.max_at_once, self._num_at_once)
        await self.blocks.wait()
        self._num_at_once -= 1
        assert not self.is_over
        assert (message["type"] == "http.response.start") == (not self.messages)
        self.messages.append((asyncio.get_running_loop().time() - self._began, message))

    async def answer(self, app: ASGIApp, seconds: float = SECONDS) -> None:
        """Has a request answered; no task and no timer is left of it."""
        loop = asyncio.get_running_loop()
        before = asyncio.all_tasks()
        scope: Scope = {"type": "http", "path": self.path, "state": self.state, "method": "POST"}
        scope["headers"] = [(b"content-type", b"application/json"), (b"content-length", b"1")]
        try:
            await Envelope(app, self.metrics, seconds)(scope, self.receive, self.send)
        finally:
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before
            assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    @property
    def is_over(self) -> bool:
        return bool(self.messages) and not (
            self.messages[-1][1].get("more_body", self.messages[-1][1]["type"].endswith("start"))
        )

    @property
    def parts(self) -> list[tuple[float, bytes]]:
        return [
            (time, message["body"])
            for time, message in self.messages
            if message["type"].endswith("body")
        ]

    @property
    def comments(self) -> list[float]:
        comment = dialect_of(self.path).stream.comment
        return [time for time, part in self.parts if part == comment]

    @property
    def status(self) -> int:
        return int(self.messages[0][1]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    def refusals(self) -> dict[str, float]:
        lines = self.metrics.exposition({}).decode().splitlines()
        named = (
            line.partition("rejected_total{")[2] for line in lines if "rejected_total{" in line
        )
        counts = (
            (line.partition('reason="')[2].partition('"')[0], line.rpartition(" ")[2])
            for line in named
        )
        return {name: float(count) for name, count in counts if float(count)}


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = JumpingLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def wait(seconds: float) -> Step:
    async def step(stream: AnswerStream) -> None:
        await asyncio.sleep(seconds)

    return step


async def want(stream: AnswerStream) -> None:
    stream.is_requested = True


async def begin(stream: AnswerStream) -> None:
    await stream.begin({"x-other": "1"})


async def say(stream: AnswerStream) -> None:
    await stream.send(b"data: {}\n\n")


async def say_nothing(stream: AnswerStream) -> None:
    await stream.send(b"")


async def end(stream: AnswerStream) -> None:
    await stream.end(b"")


def refuse(error: Exception) -> Step:
    async def step(stream: AnswerStream) -> None:
        raise error

    return step


def app_of(*steps: Step) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await json_body(scope, receive)
        for step in steps:
            await step(stream_of(scope))

    return app


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_silent_for_no_longer_than_it_may_be(path):
    """It tells that it lives before the engine has the request, in its prompt, and while parts say
    nothing.
    """

    async def work() -> None:
        sent = Sent(path)
        steps = [want, wait(12), begin, wait(2.5), say, *[wait(2), say_nothing] * 6, say, end]
        await sent.answer(app_of(*steps))
        assert sent.messages[0][0] == 5 and sent.status == 200
        assert sent.comments == [5, 10, 19.5, 24.5]
        assert [time for time, part in sent.parts if part.startswith(b"data: {")][:2] == [
            14.5,
            26.5,
        ]
        assert sent.is_over

    run(work())


def test_headers_wait_for_the_engine_but_not_longer():
    async def work() -> None:
        for delay, headers in ((4.9, [b"1"]), (5.1, [])):
            sent = Sent("/v1/chat/completions")
            await sent.answer(app_of(want, wait(delay), begin, end))
            start = dict(sent.messages[0][1]["headers"])
            assert [start[name] for name in (b"x-other",) if name in start] == headers
            assert (
                start[b"content-type"].startswith(b"text/event-stream") and start[b"x-request-id"]
            )
            assert start[b"cache-control"] == b"no-cache"

    run(work())


REFUSALS: list[tuple[Exception, int, str]] = [
    (ApiError(400, "messages is wrong", param="messages"), 400, "invalid"),
    (QueueFull("full"), 429, "queue_full"),
    (ApiError(404, "no such model"), 404, "not_found"),
    (KeyError("secret"), 500, ""),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status", "reason"), REFUSALS)
def test_a_refusal_has_a_status_until_the_headers_are_out_and_ends_the_stream_then(
    path, error, status, reason
):
    async def work() -> None:
        soon = Sent(path)
        await soon.answer(app_of(want, wait(4), refuse(error)))
        assert soon.status == status and not soon.comments
        late = Sent(path)
        await late.answer(app_of(want, wait(11), refuse(error)))
        assert late.status == 200 and late.comments == [5, 10] and late.is_over
        assert soon.refusals() == late.refusals() == ({reason: 1.0} if reason else {})
        dialect = dialect_of(path)
        (_, last) = late.parts[-1]
        assert last.endswith(dialect.stream.end) and b"secret" not in last
        (line,) = (line for line in last.splitlines() if b"{" in line)
        in_stream = json.loads(line.removeprefix(b"data: "))
        in_stream.pop("sequence_number", None)
        whole = json.loads(soon.body)
        message = whole["error"] if path.startswith("/api/") else whole["error"]["message"]
        assert json.dumps(message) in json.dumps(in_stream)

    run(work())


def test_only_what_asks_for_a_stream_gets_one():
    async def work() -> None:
        sent = Sent("/v1/chat/completions")
        await sent.answer(app_of(wait(60), refuse(ApiError(400, "no"))))
        assert sent.status == 400 and [time for time, _ in sent.messages] == [60, 60]
        never = Sent("/v1/chat/completions")
        await never.answer(app_of(want, wait(60), begin, wait(60), say, end), 0)
        assert [time for time, _ in never.messages] == [60, 120, 120] and never.comments == []
        # A request that waits to be read is looked at again soon.
        later = Sent("/v1/chat/completions")
        await later.answer(app_of(wait(7.5), want, wait(9), begin, end))
        assert later.comments == [8, 13]

    run(work())


def test_a_client_that_does_not_read_gets_one_comment_at_a_time():
    async def work() -> None:
        sent = Sent("/v1/chat/completions")

        async def block(stream: AnswerStream) -> None:
            sent.blocks.clear()

        async def unblock(stream: AnswerStream) -> None:
            sent.blocks.set()

        await sent.answer(app_of(want, begin, block, wait(60), unblock, wait(1), say, wait(6), end))
        assert sent.max_at_once == 1 and sent.comments == [60, 66] and sent.is_over
        blocked = Sent("/v1/chat/completions")
        blocked.blocks.clear()
        late = app_of(want, wait(60), refuse(ApiError(400, "no")))
        loop = asyncio.get_running_loop()
        loop.call_later(70, blocked.blocks.set)
        await blocked.answer(late)
        assert blocked.status == 400 and blocked.comments == []

    run(work())


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from([say, say_nothing])), max_size=12),
    st.floats(0.1, 30),
)
def test_no_silence_is_longer_than_it_may_be(plan, seconds):
    async def work() -> None:
        sent = Sent("/api/chat")
        steps = [step for delay, spoken in plan for step in (wait(delay), spoken)]
        await sent.answer(app_of(want, wait(1), begin, *steps, wait(7), end), seconds)
        times = [0.0, *(time for time, _ in sent.messages)]
        assert max(after - before for before, after in itertools.pairwise(times)) <= seconds + 1e-6
        assert len(sent.comments) <= times[-1] / seconds + 1

    run(work())


# The way of a request


class Handle:
    """A request whose deltas come at the times of a plan, after its prompt is computed."""

    metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=0.0, num_cached_tokens=16)
    request = SimpleNamespace(token_ids=(7,) * 112)

    def __init__(self, plan: Sequence[tuple[float, RequestOutput]]) -> None:
        self._plan = list(plan)
        self._began = asyncio.get_running_loop().time()
        self.is_cancelled = False

    @property
    def num_computed_tokens(self) -> int:
        """Returns the cached tokens and 32 more for each second."""
        return min(112, 16 + 32 * int(asyncio.get_running_loop().time() - self._began))

    def next_delta(self) -> asyncio.Future[RequestOutput]:
        delay, delta = self._plan.pop(0)
        future: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        # A reader that has left cancels the future, and the timer with it.
        timer = asyncio.get_running_loop().call_later(delay, future.set_result, delta)
        future.add_done_callback(lambda _: timer.cancel())
        self.waiting = future
        return future

    async def whole(self) -> RequestOutput:
        return await self.next_delta()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.waiting.cancel()


class Driver:
    """Takes a request after a while, and says when each delta comes."""

    def __init__(
        self, submit_seconds: float, delays: Sequence[float], texts: Sequence[str]
    ) -> None:
        self._submit_seconds = submit_seconds
        self._delays = delays
        self._texts = texts
        self.handles: list[Handle] = []
        self.exchange: Exchange | None = None

    def in_time(self, arrived: float) -> Any:
        return contextlib.nullcontext()

    async def submit(self, requests: Any, *, stream: bool, **_: Any) -> list[Handle]:
        await asyncio.sleep(self._submit_seconds)
        assert self.exchange is not None
        scripts = [Scripted(self._texts)]
        whole = output(self.exchange, scripts)
        parts = list(deltas(whole, scripts)) if stream else [whole]
        self.handles = [Handle(list(zip(self._delays, parts, strict=False)))]
        return self.handles


class Preparing:
    """Makes whole answers at once."""

    async def requests(self, prompts: Sequence[Any]) -> list[Any]:
        return []  # the driver looks at the exchange instead

    async def answer(self, function: Callable[[], Any], num_values: int) -> Any:
        return function()


def generating(path: str, driver: Driver, open_seconds: float, body: dict[str, Any]) -> ASGIApp:
    dialect = dialect_of(path)
    metrics = ServerMetrics("demo")
    answers = Generating(driver, Preparing(), metrics)  # type: ignore[arg-type]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await json_body(scope, receive)

        async def open_exchange() -> Exchange:
            stream_of(scope).is_requested = dialect.is_for_stream(path, body)
            await asyncio.sleep(open_seconds)
            driver.exchange = dialect.paths_of(GenerationPath)[path].open(body, context())
            return driver.exchange

        await answers.answer(open_exchange, 0.0, scope, receive, send)

    return app


@pytest.mark.parametrize("path", PATHS)
def test_comments_come_while_a_request_is_read_queued_and_computed(path):
    async def work() -> None:
        body = body_of(path)
        driver = Driver(6, [13, 1, 11], ["The ", "", "house"])
        sent = Sent(path, body)
        await sent.answer(generating(path, driver, 3, body))
        assert sent.messages[0][0] == 5 and sent.status == 200
        assert sent.comments[:3] == [5, 10, 15] and sent.comments[-1] >= 27
        assert sent.is_over and driver.handles[0].is_cancelled
        quick = Sent(path, body)
        soon = Driver(0, [0, 0, 0], ["The ", "", "house"])
        await quick.answer(generating(path, soon, 0, body))
        assert quick.comments == [] and quick.is_over
        assert _texts(quick.body) == _texts(sent.body) and "house" in _texts(sent.body)

    run(work())


def _texts(body: bytes) -> str:
    """Returns the texts of a stream, joined, whatever the API calls them."""
    texts = []
    for line in body.splitlines():
        if line.strip().startswith((b"data: {", b"{")):
            event = json.loads(line.strip().removeprefix(b"data: "))
            choice = (event.get("choices") or [{}])[0]
            delta = event.get("delta")
            texts += [
                choice.get("text"),
                choice.get("delta", {}).get("content"),
                delta if isinstance(delta, str) else (delta or {}).get("text"),
                event.get("message", {}).get("content") if "done" in event else None,
                event.get("response") if "done" in event else None,
            ]
    return "".join(text for text in texts if isinstance(text, str))


def test_a_chat_says_how_much_of_its_prompt_is_computed():
    """The form is llama.cpp's: the share is processed / total, and cache is a part of processed."""

    async def work() -> None:
        for fields in ({}, {"return_progress": False}, {"return_progress": True}):
            body = body_of("/v1/chat/completions", **fields)
            sent = Sent("/v1/chat/completions", body)
            driver = Driver(0, [4.25, 0, 9], ["The ", "old ", "house"])
            await sent.answer(generating("/v1/chat/completions", driver, 0, body))
            events = [
                (time, json.loads(line.removeprefix(b"data: ")))
                for time, part in sent.parts
                for line in part.splitlines()
                if line.startswith(b"data: {")
            ]
            progress = [(time, event) for time, event in events if "prompt_progress" in event]
            times = [0.5, 1, 2, 3] if fields.get("return_progress") else []
            assert [time for time, _ in progress] == times
            assert [
                (event["prompt_progress"]["cache"], event["prompt_progress"]["processed"])
                for _, event in progress
            ] == [(16, 16), (16, 48), (16, 80), (16, 112)][: len(times)]
            for _, event in progress:
                assert event["object"] == "chat.completion.chunk" and event["choices"]
                assert event["prompt_progress"]["total"] == 112
                assert event["prompt_progress"]["time_ms"] >= 0
            assert _texts(sent.body) == "The old house"
            whole = body_of("/v1/chat/completions", stream=False, **fields)
            once = Sent("/v1/chat/completions", whole)
            await once.answer(generating("/v1/chat/completions", Driver(0, [1], ["x"]), 0, whole))
            assert b"prompt_progress" not in once.body

    run(work())


@pytest.mark.parametrize("leaves_at", [1, 4, 7, 10, 20])
def test_a_client_that_leaves_takes_everything_along(leaves_at):
    async def work() -> None:
        body = body_of("/v1/chat/completions")
        driver = Driver(6, [9, 9], ["a", "b"])
        sent = Sent("/v1/chat/completions", body)
        app = generating("/v1/chat/completions", driver, 3, body)

        async def leave() -> None:
            await asyncio.sleep(leaves_at)
            sent.leave()

        async def app_and_leave(scope: Scope, receive: Receive, send: Send) -> None:
            leaving = asyncio.ensure_future(leave())
            try:
                await app(scope, receive, send)
            finally:
                await leaving

        await sent.answer(app_and_leave)
        assert asyncio.get_running_loop().time() == leaves_at and not sent.is_over
        assert all(handle.is_cancelled for handle in driver.handles)

    run(work())


def test_a_request_that_loads_a_model_of_ollama_has_one_line_after_the_spaces():
    async def work() -> None:
        for delay in (1, 12):
            for body in ({"model": "demo"}, {"model": "demo", "stream": True}):
                sent = Sent("/api/chat", body)
                await sent.answer(generating("/api/chat", Driver(0, [], []), delay, body))
                assert sent.is_over and json.loads(sent.body)["done_reason"] == "load"
                assert len(sent.comments) == (2 if delay == 12 else 0)
            request = Sent("/api/chat", {"model": "demo", "stream": False})
            await request.answer(
                generating(
                    "/api/chat", Driver(0, [], []), delay, {"model": "demo", "stream": False}
                )
            )
            assert request.comments == [] and json.loads(request.body)["done_reason"] == "load"

    run(work())


class Router:
    """A model that answers after a while."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert json.loads(await json_body(scope, receive))["model"] == "demo"
        stream = stream_of(scope)
        await stream.begin({})
        await stream.end(b"data: {}\n\n")


class Table:
    """A table whose models are loaded after a while, or never."""

    def __init__(self, seconds: float, *, fails: bool) -> None:
        self._seconds = seconds
        self._fails = fails
        self.slots: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def lease(self, name: str, keep_alive: float | None) -> Any:
        await asyncio.sleep(self._seconds)
        if self._fails:
            raise LoadFailed("its files are gone")
        yield type("Model", (), {"context": context(), "router": Router()})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_lives_while_its_model_is_loaded(path, fails, tmp_path, monkeypatch):
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  - {name: demo, model: demo}\n")
    config = ServerConfig(models_file=str(file))
    entries = {entry.name: entry for entry in read_models_file(file, config)[0]}

    async def work() -> None:
        for seconds in (4, 12):
            table: Any = Table(seconds, fails=fails)
            board = Switchboard(table, entries, config, open_store(config), has_own_memory=False)

            async def read(function: Callable[[], Any], size: int) -> Any:
                return function()

            monkeypatch.setattr(board.preparing, "run", read)
            for is_stream in (True, False):
                sent = Sent(path, body_of(path, stream=is_stream))
                await sent.answer(board._answer)
                is_long = is_stream and seconds == 12
                assert sent.comments == ([5, 10] if is_long else [])
                assert sent.status == (500 if fails and not is_long else 200)
                assert (b"its files are gone" in sent.body) == fails and sent.is_over

    run(work())


def test_the_clock_is_that_of_the_setting():
    assert ServerConfig().sse_keep_alive_seconds == SECONDS
    with pytest.raises(Exception, match="sse_keep_alive_seconds"):
        ServerConfig(sse_keep_alive_seconds=-1)
