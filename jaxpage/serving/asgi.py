"""The server's application with its engine running, for programs that bring a server of their own, such as Ray Serve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette

from jaxpage.replay.opening import open_engine
from jaxpage.serving import logs
from jaxpage.serving.app import build_app
from jaxpage.serving.capabilities import capabilities
from jaxpage.serving.config import read_api_keys, resolve_both
from jaxpage.serving.engine_loop import EngineLoop
from jaxpage.serving.incidents import open_incidents
from jaxpage.serving.metrics import ServerMetrics
from jaxpage.serving.startup import model_context, publish_kv_events


def asgi_app(
    config: str | os.PathLike[str] | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
) -> Starlette:
    """Loads, compiles, starts the engine's thread, and returns the application. Settings of sockets and of the shutdown are the caller's.

    Args:
        config: a YAML file, as of `jaxpage serve --config`. engine, server: settings by name, which win over it.

    Raises the errors of `LLM`.
    """
    ours, theirs = (resolved.config for resolved in resolve_both(config, engine or {}, server or {}))
    logs.configure(theirs)
    api_keys = read_api_keys(theirs)
    built = open_engine(ours, progress=False)
    publish_kv_events(built, theirs)
    incidents, context = open_incidents(built, ours, theirs), model_context(built, ours, theirs)
    loop = EngineLoop(
        built,
        max_queued_requests=theirs.max_queued_requests,
        request_timeout_seconds=theirs.request_timeout_seconds,
    )
    loop.start()
    return build_app(
        loop,
        context,
        theirs,
        ServerMetrics(context.model_names[0], built.memory.block_size),
        capabilities=capabilities(built, ours, theirs, context.limits),
        api_keys=api_keys,
        incidents=incidents,
    )
