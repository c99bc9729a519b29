"""Holds which requests name a model, what they say of it, and gives their bodies again."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.types import Message, Receive

from jaxpage.serving.dialects.dialect import Body, Stay
from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.wire.rerank import RERANK_PATHS


class ModelRequest(NamedTuple):
    """Holds which model a request names, and for how long it is to stay.

    Attributes:
        model: The model of the table.
        name: The name in the request, which may be that of an adapter.
        stay: How long the model is to stay loaded.
        is_for_stream: True if it asks for a stream.
        body: The body of the request.
    """

    model: str
    name: str
    stay: Stay
    is_for_stream: bool
    body: Body


def receive_again(raw: bytes, receive: Receive) -> Receive:
    """Returns a function that gives the messages of a request whose body was read already."""
    is_first = True

    async def receive_next() -> Message:
        nonlocal is_first
        if is_first:
            is_first = False
            return {"type": "http.request", "body": raw, "more_body": False}
        return await receive()

    return receive_next


def paths_of_requests(document: dict[str, Any]) -> set[str]:
    """Returns the paths of the OpenAPI document that a loaded model answers, and their aliases."""
    posts = {path for path, item in document["paths"].items() if "post" in item}
    descriptions = {path for dialect in DIALECTS for path in dialect.descriptions}
    return {*posts, *RERANK_PATHS} - descriptions
