"""Servers for tests: the real one, on a thread and a free port, around an engine that outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from jaxpage.config import EngineConfig
from jaxpage.engine.build import Built, build_engine
from jaxpage.serving.app import build_app
from jaxpage.serving.config import ServerConfig
from jaxpage.serving.engine_loop import EngineLoop
from jaxpage.serving.metrics import ServerMetrics
from jaxpage.serving.server import Serving
from jaxpage.serving.wire.context import ModelContext

MODEL = "demo"


def demo_engine(**settings: Any) -> Built:
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 129, "dtype": "float32"}
    return build_engine(EngineConfig(model="demo", **{**small, **settings}), progress=False)


class TestServer:
    """A server that runs. `status` is there once it has ended."""

    __test__ = False

    def __init__(self, built: Built, config: ServerConfig, api_keys: tuple[str, ...], send_buffer: int | None) -> None:
        self.config, self.engine, self.metrics = config, built.engine, ServerMetrics(MODEL)
        self.loop = EngineLoop(
            built,
            max_queued_requests=config.max_queued_requests,
            request_timeout_seconds=config.request_timeout_seconds,
        )
        self.loop._calls.shutdown = lambda: None  # type: ignore[method-assign]  # the engine is there for the next server
        context = ModelContext(
            model_names=(MODEL,),
            max_model_len=built.memory.max_model_len,
            vocab_size=built.engine.builder.vocab_size,
            tokenizer=built.tokenizer,
            sampling_defaults=built.sampling_defaults,
            strict_requests=config.strict_requests,
        )
        self._build = lambda: build_app(self.loop, context, config, self.metrics, api_keys=api_keys)
        self._listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.status: int | None = None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._home = asyncio.get_running_loop()
        self.app = self._build()
        self._serving = Serving(self.app, self.loop, self.config, self._listener, self._ready.set)
        self.status = await self._serving.run()

    def start(self) -> None:
        self.thread.start()
        self._ready.wait()

    def signal(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._home.call_soon_threadsafe(self._serving.signal)

    def aborted(self) -> dict[str, int]:
        return {reason: count for reason, count in self.metrics._aborted.items() if count}

    def rejected(self) -> dict[str, int]:
        return {reason: count for reason, count in self.metrics._rejected.items() if count}

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(60)
        try:
            client.connect(("127.0.0.1", self.port))
        except BaseException:
            client.close()
            raise
        return client


@contextlib.contextmanager
def serving(
    built: Built, *, api_keys: tuple[str, ...] = (), send_buffer: int | None = None, **settings: Any
) -> Iterator[TestServer]:
    settings = {"shutdown_timeout_seconds": 60.0, **settings}
    server = TestServer(built, ServerConfig(port=0, **settings), api_keys, send_buffer)
    server.start()
    try:
        yield server
    finally:
        server.signal()
        server.thread.join()
        assert server.loop.stop(60)


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A request as it goes over the wire. Underscores in names of headers are hyphens; `Host` can be left out with ''."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    found = {"Host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body is not None:
        found = {"Content-Type": "application/json", "Content-Length": str(len(content)), **found}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in found.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode() + content


def answer_of(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what comes, until the server closes the connection or the body is there."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := client.recv(65536)):
            return 0, {}, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        if not (part := client.recv(65536)):
            break
        body += part
    return int(status.split()[1]), headers, body


def ask(
    server: TestServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    with server.connect() as client:
        client.sendall(request_bytes(method, path, body, Connection="close", **headers))
        return answer_of(client)
