"""Applications on a free port of this machine, and a whole server with the page over an engine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from jaxpage.assembly import Built
from jaxpage.driver.async_driver import AsyncDriver
from jaxpage.serving.app import build_app
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.model.capabilities import capabilities
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import model_context
from jaxpage.settings.engine_config import EngineConfig


class _Uvicorn(uvicorn.Server):
    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, http="h11", lifespan="off", log_level="warning", timeout_graceful_shutdown=1
            )
        )
        self.answers = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Runs an application; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Uvicorn(app)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert server.answers.wait(60), "the server does not start"
        yield "http://127.0.0.1:{1}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def served_engine(
    loop: AsyncDriver,
    built: Built,
    *,
    model: str = "demo",
    api_keys: Sequence[str] = (),
    show_prompts: bool = False,
) -> Iterator[str]:
    """Runs a server with the page over an engine that is running already."""
    config, engine = ServerConfig(ui=True, ui_show_prompts=show_prompts), EngineConfig(model=model)
    context = model_context(built, engine, config)
    facts = capabilities(built, engine, config, context.limits)
    app = build_app(
        loop, context, config, ServerMetrics(model), capabilities=facts, api_keys=api_keys
    )
    with served(app) as address:
        yield address
