"""Makes the server's application with a running engine, for programs with their own HTTP server.

Such a program is Ray Serve, for example.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from jaxpage.assembly import Built
from jaxpage.driver import AsyncDriver
from jaxpage.replay import open_engine
from jaxpage.serving.batches.jobs import Batches
from jaxpage.serving.metrics import logs
from jaxpage.serving.metrics.tracing import SpanWriter, open_tracing
from jaxpage.serving.model.lora_modules import check_lora_modules
from jaxpage.serving.requests.response_store import ResponseStore
from jaxpage.serving.settings.key_sources import read_api_keys
from jaxpage.serving.settings.resolving import resolve_both
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import model_names, open_app
from jaxpage.settings.engine_config import EngineConfig


class Application:
    """An ASGI application whose engine ends with the lifespan of the program's HTTP server."""

    def __init__(self, app: Starlette, driver: AsyncDriver) -> None:
        self._app = app
        self._batches: Batches | None = app.state.server.batches
        self._responses: ResponseStore = app.state.server.responses
        self._driver = driver
        self._tracing: SpanWriter | None = app.state.tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or follows the lifespan and stops the engine at its end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while (await receive())["type"] == "lifespan.startup":
            if self._batches is not None:
                self._batches.start()
            await send({"type": "lifespan.startup.complete"})
        # Batches stop before the engine that answers them, and the stores close when it writes no
        # more.
        if self._batches is not None:
            await self._batches.stop()
        await asyncio.to_thread(self._driver.stop)
        await asyncio.to_thread(self._responses.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await send({"type": "lifespan.shutdown.complete"})


def asgi_app(
    config: str | os.PathLike[str] | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
) -> Application:
    """Loads and compiles a model, starts the engine's thread, and returns the application.

    The settings for sockets and for the shutdown have no effect: the caller's server decides them.

    Args:
        config: A YAML file, like that of `jaxpage serve --config`.
        engine: Settings of the engine by name, which win over the file.
        server: Settings of the server by name, which win over the file.

    Raises:
        JaxpageError: The settings, the model or the memory do not allow it; see `LLM`.
    """
    for_engine, for_server = resolve_both(config, engine or {}, server or {})
    ours = for_engine.config
    theirs = for_server.config
    logs.configure(theirs)
    api_keys = read_api_keys(theirs)
    check_lora_modules(ours, theirs, model_names(ours, theirs))
    return application(open_engine(ours), ours, theirs, api_keys)


def application(
    built: Built, ours: EngineConfig, theirs: ServerConfig, api_keys: tuple[str, ...] = ()
) -> Application:
    """Starts the thread of an engine that was built, and returns the application.

    Args:
        built: The engine with its tokenizer, memory and sampling defaults.
        ours: The settings of the engine.
        theirs: The settings of the server.
        api_keys: The keys that let a request in; see `build_app`.
    """
    tracing = open_tracing(theirs)
    app, driver, _ = open_app(built, ours, theirs, api_keys=api_keys, tracing=tracing)
    driver.start()
    return Application(app, driver)
