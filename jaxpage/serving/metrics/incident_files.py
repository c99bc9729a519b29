"""Writes the last steps of an engine to a file, for POST /debug/incident or after a failed step."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpage.assembly import Built
from jaxpage.driver import AsyncDriver
from jaxpage.errors import ConfigError
from jaxpage.replay import IncidentRing, Incidents, engine_header
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.engine_config import EngineConfig


def open_incidents(built: Built, engine: EngineConfig, server: ServerConfig) -> Incidents | None:
    """Lets a ring of records listen to an engine that has not begun.

    Args:
        built: The engine with the spec and the model that the file's header describes.
        engine: The settings of the engine.
        server: The settings of the server.

    Returns:
        The records, which can be written to a file; None without `incident_steps`.

    Raises:
        ConfigError: No file can be written to `incident_directory`.
    """
    if server.incident_steps is None:
        return None
    directory = Path(server.incident_directory)
    # A file can be made in a directory only with both rights.
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"incident_directory: {directory} is not a directory that can be written to"
        )
    unsaid = "which LoRA adapter a request has" if engine.enable_lora else ""
    if engine.prefix_cache_directory is not None:
        unsaid = "which blocks came from prefix_cache_directory"
    ring = IncidentRing(
        server.incident_steps, keeps_token_ids=server.incident_token_ids, unsaid=unsaid
    )
    built.engine.listen(ring)
    return Incidents(
        ring, directory, lambda: engine_header(engine, built.engine, built.spec, built.model)
    )


def incident_routes(driver: AsyncDriver, incidents: Incidents | None) -> list[Route]:
    """Returns the route /debug/incident; none if no records are kept."""
    if incidents is None:
        return []

    async def answer(request: Request) -> Response:
        check_origin(request.headers)
        incident = await driver.snapshot(lambda engine: incidents.ring.read_ring("asked for"))
        try:
            path = await asyncio.to_thread(incidents.write, incident)
        except FileExistsError as error:
            raise ApiError(409, str(error), code="conflict") from error
        except OSError as error:
            raise ApiError(500, f"The incident cannot be written: {error.strerror}") from error
        facts = {"num_steps": incident.num_steps, "why_not_replayable": incident.why_not_replayable}
        return json_answer({"file": path.name, **facts})

    return [Route("/debug/incident", answer, methods=["POST"])]
