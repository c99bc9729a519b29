"""Pauses and resumes the steps of an engine, aborts requests, and empties the prefix cache.

The paths are POST /pause, /resume, /abort_requests and /reset_prefix_cache.

The names of the paths and of their fields are vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpage.driver import AsyncDriver
from jaxpage.engine import Engine
from jaxpage.errors import ShuttingDown
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.api_keys import owner_of
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.wire.body import check_fields, parse_object
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show


async def read_order(request: Request, known: set[str]) -> dict[str, Any]:
    """Returns the fields of an order, of its body and of its query, as vLLM's clients send.

    Args:
        request: The request, whose body may be empty.
        known: The names of the fields that it may have.

    Raises:
        ApiError: It comes from a page of another origin, or a field is unknown or given twice.
    """
    check_origin(request.headers)
    requested: dict[str, Any] = dict(request.query_params)
    if raw := await request.body():
        body = await asyncio.to_thread(parse_object, raw)
        if twice := sorted(body.keys() & requested.keys()):
            raise ApiError(400, f"{twice[0]} is in the body and in the query", param=twice[0])
        requested |= body
    check_fields(requested, known)
    return requested


def pause_routes(
    driver_of: Callable[[Mapping[str, Any]], AsyncDriver], naming: set[str]
) -> list[Route]:
    """Returns the routes that pause and resume steps, tell whether they are paused, and abort.

    Args:
        driver_of: Returns the driver that an order is for, from its fields.
        naming: The fields that name it.
    """

    async def pause(request: Request) -> Response:
        order = await read_order(request, {"mode", *naming})
        if (mode := order.get("mode", "keep")) != "keep":
            raise ApiError(
                400,
                f"mode must be keep, got {show(mode)}: requests wait for /resume; a client that "
                "leaves ends its own",
                param="mode",
            )
        await asyncio.wrap_future(driver_of(order).pause())
        return json_answer({"status": "paused"})

    async def resume(request: Request) -> Response:
        order = await read_order(request, naming)
        try:
            await asyncio.wrap_future(driver_of(order).resume())
        # It is a RuntimeError too, but is answered otherwise.
        except ShuttingDown:
            raise
        except RuntimeError as error:
            raise ApiError(409, str(error), code="conflict") from error
        return json_answer({"status": "resumed"})

    async def report(request: Request) -> Response:
        order = dict(request.query_params)
        check_fields(order, naming)
        return json_answer({"is_paused": driver_of(order).is_paused})

    async def abort(request: Request) -> Response:
        order = await read_order(request, {"request_ids", *naming})
        ids = order.get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise ApiError(
                400, f"request_ids must be a list of strings, got {show(ids)}", param="request_ids"
            )
        owner = owner_of(request.scope)
        number = await driver_of(order).abort_named({(owner, name) for name in ids})
        return json_answer({"aborted": number})

    async def reset(request: Request) -> Response:
        order = await read_order(request, naming)
        await driver_of(order).snapshot(Engine.reset_prefix_cache)
        return json_answer({"status": "reset"})

    return [
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/abort_requests", abort, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", report),
    ]
