"""A server over a real engine, on a thread and a free port, as `jaxpage serve` would make it; and what must hold of one that is idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

import jaxpage
from jaxpage.config import EngineConfig
from jaxpage.engine.build import build_engine
from jaxpage.serving.app import Server, build_app
from jaxpage.serving.capabilities import capabilities
from jaxpage.serving.config import ServerConfig
from jaxpage.serving.engine_loop import EngineLoop
from jaxpage.serving.metrics import ServerMetrics
from jaxpage.serving.server import Serving
from jaxpage.serving.startup import address_of, bound_socket, model_context
from jaxpage.serving.wire.context import ModelContext

SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 129}
WAIT_SECONDS = 60.0  # for what is bound to happen: far beyond what it takes


def demo_with_template(directory: Path, template: str) -> str:
    """The packaged model with another chat template. Returns `directory`, which is new and called "demo"."""
    packaged = Path(jaxpage.__file__).parent / "demo"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(packaged / name, directory)
    settings = json.loads((packaged / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return str(directory)


class Running:
    """One server that runs. Its engine is reached through `loop.call`, as others reach it."""

    def __init__(
        self, address: str, context: ModelContext, loop: EngineLoop, server: Server, errors: list[str]
    ) -> None:
        self.address = address
        self.context = context
        self.loop = loop
        self.server = server
        self.errors = errors  # what was logged as one


def wait_until(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Waits for something that other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def running(
    config: ServerConfig | None = None,
    *,
    model: str = "demo",
    api_keys: Sequence[str] = (),
) -> Iterator[Running]:
    config = (config or ServerConfig()).model_copy(update={"port": 0})
    engine = EngineConfig(model=model, **SMALL)
    built = build_engine(engine, progress=False)
    context = model_context(built, engine, config)
    loop = EngineLoop(
        built,
        max_queued_requests=config.max_queued_requests,
        request_timeout_seconds=config.request_timeout_seconds,
    )
    facts = capabilities(built, engine, config, context.limits)
    metrics = ServerMetrics(context.model_names[0])
    app = build_app(loop, context, config, metrics, capabilities=facts, api_keys=api_keys)
    answers, ends = threading.Event(), []

    with bound_socket(config) as listener, _logged_errors() as errors:

        async def serve() -> None:
            serving = Serving(app, loop, config, listener, answers.set)
            ends.append((asyncio.get_running_loop(), serving.signal))
            statuses.append(await serving.run())

        statuses: list[int] = []
        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        try:
            assert answers.wait(WAIT_SECONDS), "the server does not start"
            yield Running(address_of(listener), context, loop, app.state.server, errors)
        finally:
            home, signal = ends[0]
            home.call_soon_threadsafe(signal)
            thread.join(WAIT_SECONDS)
            assert loop.stop(WAIT_SECONDS), "the engine does not end"
            assert not thread.is_alive(), "the server does not end"
        assert statuses == [0]


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    errors: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(self.format(record))

    keeper = Keeper(logging.ERROR)
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
    """What holds of a server before, and must hold after whatever was done to it.

    It is healthy, its blocks are free, nothing was compiled, and a completion is the one of before, to the byte.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._completion = self._completed()
        self._compiled = metrics(client)["jaxpage_compile_total"]

    def check(self) -> None:
        wait_until(self._is_idle, "all blocks are free and nobody runs or waits")
        health = self._client.get("/health")
        assert health.status_code == 200, health.text
        assert self._completed() == self._completion
        assert metrics(self._client)["jaxpage_compile_total"] == self._compiled

    def _is_idle(self) -> bool:
        found = metrics(self._client)
        return found["jaxpage_num_blocks_free"] == found["jaxpage_num_blocks_total"] and not (
            found["jaxpage_num_requests_running"] or found["jaxpage_num_requests_waiting"]
        )

    def _completed(self) -> Any:
        answer = self._client.post("/v1/completions", json=REFERENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]


def metrics(client: httpx.Client) -> dict[str, float]:
    """By name; by name and value of the label where there is one beside the model's name."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found["/".join([sample.name, *labels])] = sample.value
    return found
