"""Shows one model of a server of several on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from jaxpage.serving.inspector.routes import page_routes
from jaxpage.serving.several.served_model import ServedModel
from jaxpage.serving.several.table import Slot
from jaxpage.serving.wire.errors import ApiError


def routes_of_page(
    slot_of: Callable[[Mapping[str, Any]], Slot[ServedModel]],
) -> list[BaseRoute]:
    """Returns the routes of the page's files, and of snapshots of the model that a query names.

    Snapshots take no lease, so that a model that is only looked at is neither loaded nor kept.

    Args:
        slot_of: Returns the slot of the model that a query names.
    """

    async def watch(request: Request) -> ASGIApp:
        slot = slot_of(request.query_params)
        if slot.model is None:
            raise ApiError(
                409,
                f"The model {slot.name!r} is not loaded; a request that names it loads it",
                param="model",
                code="model_not_loaded",
            )
        return slot.model.router

    return [
        *page_routes(),
        Route("/debug/state", watch),
        Route("/debug/events", watch, methods=["GET", "POST"]),
    ]
