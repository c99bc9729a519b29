"""Answers requests for responses that the server keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.api_keys import owner_of
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.pages import page_of
from jaxpage.serving.requests.response_store import ResponseStore, StoredResponse
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

_MAX_ITEMS = 20  # of a page, where the request does not say


def open_store(config: ServerConfig) -> ResponseStore:
    """Returns the store of a server.

    Raises:
        ConfigError: The directory cannot be used.
    """
    directory = config.response_store_directory
    return ResponseStore(
        config.response_store_bytes,
        config.response_store_seconds,
        Path(directory) if directory is not None else None,
    )


class StoredResponses:
    """Answers requests for the responses of one path.

    Attributes:
        routes: The routes.
    """

    def __init__(self, path: str, store: ResponseStore) -> None:
        self._store = store
        path += "/{response_id}"
        self.routes: list[BaseRoute] = [
            Route(path, self._get),
            Route(path, self._delete, methods=["DELETE"]),
            Route(f"{path}/input_items", self._input_items),
        ]

    async def _get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "stream is not supported for a stored response", param="stream")
        return Response(self._find(request).response, media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        check_origin(request.headers)
        response_id = request.path_params["response_id"]
        if not self._store.delete(response_id, owner_of(request.scope)):
            raise _not_found(response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: Request) -> Response:
        stored = self._find(request)
        response_id = request.path_params["response_id"]
        items = await asyncio.to_thread(_items_of, stored, response_id)
        known = {"after", "limit", "order", "include"}
        return page_of(request, items, known, _MAX_ITEMS)

    def _find(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = self._store.of_owner(owner_of(request.scope)).find(response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _items_of(stored: StoredResponse, response_id: str) -> list[dict[str, Any]]:
    """Returns the items that a response answers, the oldest first.

    Each has an id, and the content of a message is a list of parts.
    """
    items: list[dict[str, Any]] = json.loads(stored.conversation)
    end = response_id.removeprefix("resp_")
    for index, item in enumerate(items):
        item.setdefault("type", "message")
        item["id"] = item.get("id") or f"in_{end}_{index}"
        if isinstance(text := item.get("content"), str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": text}]
    return items


def _not_found(response_id: str) -> ApiError:
    message = f"Response with id {show(response_id)} not found"
    return ApiError(404, message, param="response_id", code="response_not_found")
