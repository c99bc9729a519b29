"""Replaces the weights of the served model, for POST /v1/update_weights.

The new weights are files below one directory, which a setting gives.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpage.assembly import check_replaceable, weights_on_device
from jaxpage.checkpoints import with_weights_of
from jaxpage.driver import AsyncDriver
from jaxpage.errors import CheckpointError, QueueFull, ShuttingDown, UnsupportedError
from jaxpage.serving.config import ServerConfig
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.posting import json_body, post_route
from jaxpage.serving.model.directories import directory_inside
from jaxpage.serving.model.pausing import pause_routes
from jaxpage.serving.requests.generating import while_connected
from jaxpage.serving.requests.in_flight import InFlightRequests
from jaxpage.serving.requests.preparing import Workers
from jaxpage.serving.wire.body import check_fields, parse_object, text_field
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show
from jaxpage.step.update import Mode

MODES = get_args(Mode)
MAX_PROBLEMS_CHARACTERS = 100_000


class Updating:
    """Loads new weights, one update at a time; the old ones are in use until an update ends."""

    def __init__(self, driver: AsyncDriver, directory: Path):
        self._driver = driver
        self._directory = directory
        self._loading = Workers("weights", 1, 0)

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Loads and takes the weights that a request names.

        Args:
            body: The request's object.

        Returns:
            The object of the answer, which has the version of the weights.

        Raises:
            ApiError: A field is wrong, the weights cannot be loaded or taken, or another update is
                under way.
            ShuttingDown: The server is shutting down.
        """
        check_fields(body, {"path", "mode", "check_finite"})
        if (mode := body.get("mode", "wait")) not in MODES:
            raise ApiError(
                400, f"mode must be one of {', '.join(MODES)}, got {show(mode)}", param="mode"
            )
        if not isinstance(check_finite := body.get("check_finite", True), bool):
            raise ApiError(
                400,
                f"check_finite must be true or false, got {show(check_finite)}",
                param="check_finite",
            )
        path = directory_inside(
            self._directory, text_field(body, "path"), setting="weights_directory", param="path"
        )
        try:
            weights, checksum = await self._loading.run(
                lambda: self._load(path, check_finite=check_finite)
            )
            version = await self._driver.replace_weights(weights, mode, checksum)
        except (CheckpointError, UnsupportedError) as error:
            message = str(error).replace(str(path), body["path"])
            raise ApiError(400, message, param="path", limit=MAX_PROBLEMS_CHARACTERS).quoting(
                body
            ) from error
        except QueueFull as error:
            raise ApiError(
                409, "Other weights are on their way already", code="conflict"
            ) from error
        except ShuttingDown:
            raise
        except RuntimeError as error:
            raise ApiError(409, str(error), code="conflict") from error
        return {"weights_version": version}

    def _load(self, path: Path, *, check_finite: bool) -> tuple[Any, str | None]:
        """Returns the weights on the device, and their hash for an event log.

        With `check_finite` numbers that are NaN or infinite are an error, too. The errors are those
        of `weights_on_device`.
        """
        built = self._driver.built
        others = with_weights_of(built.model, path)
        packed = built.engine.packed
        weights = weights_on_device(others, built.spec, packed, finite=check_finite)
        return weights, built.checksum_of(weights)


def weights_routes(
    config: ServerConfig, driver: AsyncDriver, visitors: InFlightRequests
) -> list[Route]:
    """Returns the routes that update the weights, and pause; none without `weights_directory`.

    Args:
        config: The settings of the server.
        driver: The driver of the engine.
        visitors: The counter of the requests for which a shutdown waits.

    Raises:
        UnsupportedError: The weights of this model cannot be replaced.
    """
    if config.weights_directory is None:
        return []
    built = driver.built
    check_replaceable(built.model, "weights_directory")
    updating = Updating(driver, Path(config.weights_directory))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with visitors.inside():
            arrived = time.monotonic()
            check_origin(Headers(scope=scope))
            raw = await json_body(scope, receive)

            async def answer_update() -> None:
                async with driver.in_time(arrived):
                    requested = await asyncio.to_thread(parse_object, raw)
                    version = await updating.update(requested)
                await json_answer(version)(scope, receive, send)

            await while_connected(receive, answer_update())

    return [post_route("/v1/update_weights", answer), *pause_routes(lambda order: driver, set())]
