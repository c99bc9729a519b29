"""Servers over real engines, on a thread and a free port, as `jaxpage serve` would make them; and
what must hold of one that is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.server import ServerState

import jaxpage
from jaxpage.assembly import Built, build_engine
from jaxpage.serving.app import Server
from jaxpage.serving.http.listening import address_of, bind_socket
from jaxpage.serving.metrics.tracing import open_tracing
from jaxpage.serving.server import Serving
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import open_app
from jaxpage.settings.engine_config import EngineConfig

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_blocks": 129,
}
WAIT_SECONDS = 60.0  # for what is bound to happen: far beyond what it takes


def demo_with_template(directory: Path, template: str) -> str:
    """Copies the packaged model with another chat template, and returns `directory`.

    The directory is new and called "demo".
    """
    packaged = Path(jaxpage.__file__).parent / "demo"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(packaged / name, directory)
    settings = json.loads((packaged / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": template})
    )
    return str(directory)


def demo_engine(**settings: Any) -> Built:
    return build_engine(EngineConfig(model="demo", **{**SMALL, **settings}))


def wait_until(
    condition: Callable[[], Any], what: str = "it happens", seconds: float = WAIT_SECONDS
) -> None:
    """Waits for something that other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Running:
    """A server on a thread, from `start` on. Its engine is reached through `loop.call`, as others
    reach it.
    """

    def __init__(
        self,
        built: Built,
        listener: socket.socket,
        config: ServerConfig,
        errors: list[str],
        *,
        model: str = "demo",
        api_keys: Sequence[str] = (),
        settings: EngineConfig | None = None,
    ) -> None:
        self.engine = built.engine
        self.errors = errors  # what was logged as one
        self.address = address_of(listener)
        self.status: int | None = None  # when it has ended
        settings = settings or EngineConfig(model=model, **SMALL)
        self.app, self.loop, self.context = open_app(
            built, settings, config, api_keys=tuple(api_keys), tracing=open_tracing(config)
        )
        self.server: Server = self.app.state.server
        self.metrics = self.server.metrics
        self._ready = threading.Event()
        self._serving = Serving(self.app, self.loop, config, listener, self._ready.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._home = asyncio.get_running_loop()
        self.status = await self._serving.run()

    def start(self) -> None:
        self.thread.start()
        assert self._ready.wait(WAIT_SECONDS), "the server does not start"

    def signal(self) -> None:
        """Stops the server as SIGTERM does."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._home.call_soon_threadsafe(self._serving.signal)

    def end(self) -> None:
        self.signal()
        self.thread.join(WAIT_SECONDS)
        assert self.loop.stop(WAIT_SECONDS), "the engine does not end"
        assert not self.thread.is_alive(), "the server does not end"

    @property
    def uvicorn(self) -> ServerState:
        """Returns its connections and how many requests there were."""
        return self._serving._uvicorn.server_state

    def aborted(self) -> dict[str, int]:
        return {reason: count for reason, count in self.metrics._aborted.items() if count}

    def rejected(self) -> dict[str, int]:
        return {reason: count for reason, count in self.metrics._rejected.items() if count}

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        parts = urllib.parse.urlsplit(self.address)
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(WAIT_SECONDS)
        try:
            client.connect((parts.hostname, parts.port))
        except BaseException:
            client.close()
            raise
        return client


@contextlib.contextmanager
def running(
    config: ServerConfig | None = None, *, model: str = "demo", api_keys: Sequence[str] = ()
) -> Iterator[Running]:
    """Runs a server with an engine of its own, which must end as one should."""
    config = (config or ServerConfig()).model_copy(update={"port": 0})
    built = build_engine(EngineConfig(model=model, **SMALL))
    with bind_socket(config) as listener, _logged_errors() as errors:
        server = Running(built, listener, config, errors, model=model, api_keys=api_keys)
        server.start()
        try:
            yield server
        finally:
            server.end()
        assert server.status == 0


@contextlib.contextmanager
def serving(
    built: Built,
    *,
    api_keys: Sequence[str] = (),
    send_buffer: int | None = None,
    engine: EngineConfig | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Runs a server around an engine that outlives it, whatever becomes of the server."""
    address = {} if {"uds", "port"} & set(settings) else {"port": 0}
    config = ServerConfig(**address, **{"shutdown_timeout_seconds": WAIT_SECONDS, **settings})
    with bind_socket(config) as listener, _logged_errors() as errors:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = Running(built, listener, config, errors, api_keys=api_keys, settings=engine)
        server.loop.turns.close_engine = lambda: None  # type: ignore[method-assign]  # the engine is there for the next server
        server.start()
        try:
            yield server
        finally:
            server.end()


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    errors: list[str] = []

    class HandleClient(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(self.format(record))

    keeper = HandleClient(logging.ERROR)
    logging.getLogger().addHandler(keeper)
    try:
        yield errors
    finally:
        logging.getLogger().removeHandler(keeper)


REFERENCE = {
    "model": "demo",
    "prompt": "The old house",
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": 3,
    "return_token_ids": True,
}


class Promises:
    """Holds what holds of a server before, and must hold after whatever was done to it.

    It is healthy, its blocks are free, nothing was compiled but for a first embedding, and a
    completion is the one of before, to the byte.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._completion = self._completed()
        # the first one compiles
        embedded = client.post("/v1/embeddings", json={"model": "demo", "input": [1]})
        assert embedded.status_code == 200, embedded.text
        self._compiled = metrics(client)["jaxpage_compile_total"]

    def check(self) -> None:
        wait_until(self._is_idle, "all blocks are free and nobody runs or waits")
        health = self._client.get("/health")
        assert health.status_code == 200, health.text
        assert self._completed() == self._completion
        assert metrics(self._client)["jaxpage_compile_total"] == self._compiled

    def _is_idle(self) -> bool:
        values = metrics(self._client)
        return values["jaxpage_num_blocks_free"] == values["jaxpage_num_blocks_total"] and not (
            values["jaxpage_num_requests_running"] or values["jaxpage_num_requests_waiting"]
        )

    def _completed(self) -> Any:
        answer = self._client.post("/v1/completions", json=REFERENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]


def metrics(client: httpx.Client) -> dict[str, float]:
    """Returns values by name; by name and value of the label where there is one beside the model's
    name.
    """
    values = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = [
                value for name, value in sorted(sample.labels.items()) if name != "model_name"
            ]
            values["/".join([sample.name, *labels])] = sample.value
    return values
