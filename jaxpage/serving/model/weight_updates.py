"""Replaces the weights of the served model, for POST /v1/update_weights.

The new weights are files below one directory, which a setting gives.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any, get_args

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpage.assembly import check_replaceable
from jaxpage.driver import AsyncDriver
from jaxpage.errors import CheckpointError, QueueFull, ShuttingDown, UnsupportedError
from jaxpage.serving.hosts.leader import Leader
from jaxpage.serving.hosts.weight_loading import (
    LoadedWeights,
    load_other_weights,
    load_with_hash,
)
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.posting import json_body, post_route
from jaxpage.serving.model.directories import directory_inside
from jaxpage.serving.model.pausing import pause_routes
from jaxpage.serving.requests.generating import while_connected
from jaxpage.serving.requests.in_flight import InFlightRequests
from jaxpage.serving.requests.preparing import Workers
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.body import check_fields, parse_object, text_field
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show
from jaxpage.step.update import Mode

MODES = get_args(Mode)
MAX_PROBLEMS_CHARACTERS = 100_000


class Updating:
    """Loads new weights, one update at a time; the old ones are in use until an update ends."""

    def __init__(self, driver: AsyncDriver, directory: Path, hosts: Leader | None = None) -> None:
        """Starts with the weights of the driver's engine.

        Args:
            driver: The driver of the engine.
            directory: The directory below which other weights are.
            hosts: The leader of the other hosts; None where this is the only one.
        """
        self._driver = driver
        self._directory = directory
        self._hosts = hosts
        # No second update waits for the first: it is refused.
        self._loading = Workers("weights", 1, 0)
        self._numbers = itertools.count()

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
        number = next(self._numbers)
        try:
            loaded = await self._loading.run(
                lambda: self._load(number, path, body["path"], check_finite=check_finite)
            )
            version = await self._driver.replace_weights(loaded.weights, mode, loaded.checksum)
        except (CheckpointError, UnsupportedError) as error:
            # Clients see the path that they gave, and not the one on this machine.
            message = str(error).replace(str(path), body["path"])
            raise ApiError(400, message, param="path", limit=MAX_PROBLEMS_CHARACTERS).quoting(
                body
            ) from error
        except QueueFull as error:
            raise ApiError(
                409, "Other weights are on their way already", code="conflict"
            ) from error
        # It is a RuntimeError too, but is answered otherwise.
        except ShuttingDown:
            raise
        except RuntimeError as error:
            raise ApiError(409, str(error), code="conflict") from error
        finally:
            self._forget(number)
        return {"weights_version": version}

    def _load(
        self, number: int, directory: Path, path: str, *, check_finite: bool
    ) -> LoadedWeights:
        """Returns the weights of a directory, which all other hosts have loaded, too.

        With `check_finite` numbers that are NaN or infinite are an error. The errors are those of
        `weights_on_device` and `Leader.load_on_all`.
        """
        built = self._driver.built
        if self._hosts is None:
            weights = load_other_weights(built, directory, check_finite=check_finite)
            return LoadedWeights(weights, built.checksum_of(weights))
        return self._hosts.load_on_all(
            number,
            path,
            check_finite=check_finite,
            load=lambda: load_with_hash(built, directory, check_finite=check_finite),
        )

    def _forget(self, number: int) -> None:
        """Lets other hosts drop the weights of an update that has ended in whatever way."""
        hosts = self._hosts
        if hosts is not None:
            self._driver.call(lambda engine: hosts.forget_weights(number))


def weights_routes(
    config: ServerConfig,
    driver: AsyncDriver,
    visitors: InFlightRequests,
    hosts: Leader | None = None,
) -> list[Route]:
    """Returns the routes that update the weights, and pause; none without `weights_directory`.

    Args:
        config: The settings of the server.
        driver: The driver of the engine.
        visitors: The counter of the requests for which a shutdown waits.
        hosts: The leader of the other hosts; None where this is the only one.

    Raises:
        UnsupportedError: The weights of this model cannot be replaced.
    """
    if config.weights_directory is None:
        return []
    built = driver.built
    check_replaceable(built.model, "weights_directory")
    updating = Updating(driver, Path(config.weights_directory), hosts)

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
