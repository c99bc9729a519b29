"""Answers lists of objects in parts."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

_LIMIT = re.compile("[1-9][0-9]{0,4}")
_MAX_LIMIT = 10_000


def page_of(
    request: Request, records: list[dict[str, Any]], known: set[str], limit: int
) -> Response:
    """Returns a part of a list, as clients ask for it by `limit`, `after` and `order`.

    Args:
        request: The request.
        records: The objects of the list, each with an id, the oldest first.
        known: The names that the query may have.
        limit: The most objects of a part where the query does not say.

    Raises:
        ApiError: The query is refused.
    """
    requested = request.query_params
    if unknown := sorted(requested.keys() - known):
        raise ApiError(400, f"Unknown parameter: {show(unknown[0])}", param="query")
    for name in requested:
        if len(requested.getlist(name)) > 1:
            raise ApiError(400, f"{name} is in the query more than once", param=name)
    text = requested.get("limit", str(limit))
    # Python reads no integer with more digits than sys.get_int_max_str_digits().
    if not _LIMIT.fullmatch(text) or int(text) > _MAX_LIMIT:
        raise ApiError(
            400,
            f"limit must be 1 to {_MAX_LIMIT}, without leading zeros, got {show(text)}",
            param="limit",
        )
    if (order := requested.get("order", "desc")) not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {show(order)}", param="order")
    if order == "desc":
        records = records[::-1]
    if (after := requested.get("after")) is not None:
        ids = [record["id"] for record in records]
        if after not in ids:
            raise ApiError(
                400, f"after must be an id of the list, got {show(after)}", param="after"
            )
        records = records[ids.index(after) + 1 :]
    part = records[: int(text)]
    return json_answer(
        {
            "object": "list",
            "data": part,
            "first_id": part[0]["id"] if part else None,
            "last_id": part[-1]["id"] if part else None,
            "has_more": len(records) > len(part),
        }
    )
