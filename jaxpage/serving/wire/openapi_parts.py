"""Makes the parts of an OpenAPI document: routes and schemas of answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.serving.wire.field_types import RequestObject

PLACE = "#/components/schemas/"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


class DialectDocument(NamedTuple):
    """Holds what the document says of one API.

    Attributes:
        requests: The models of its requests.
        paths: Its routes by path.
        answers: The schemas of its answers and errors, by name.
    """

    requests: tuple[type[RequestObject], ...]
    paths: dict[str, Any]
    answers: dict[str, Any]


def post(
    summary: str,
    requests: list[str],
    answer: str,
    *,
    streams: str | None = None,
    error: str = "Error",
) -> dict[str, Any]:
    """Returns a route for POST.

    Args:
        summary: The summary of the route.
        requests: The names of the schemas of a request.
        answer: The name of the schema of the answer.
        streams: The media type of a stream; None if the route does not stream.
        error: The name of the schema of an error.
    """
    schemas = [reference(name) for name in requests]
    content = _json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    responses = _responses(
        _json(reference(answer)), 400, 404, 408, 413, 415, 429, 503, 504, error=error
    )
    if streams is not None:
        # It has no type: in OpenAPI 3.1 that would describe the whole stream, but readers of events
        # would take it for each event.
        events = {"description": "What comes of the answer, part by part, as JSON"}
        responses["200"]["content"][streams] = {"schema": events}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": responses,
        }
    }


def get(summary: str, answer: str | None, *errors: int, error: str = "Error") -> dict[str, Any]:
    """Returns a route for GET; `answer` names the schema of its answer, and None means text."""
    content = (
        {"text/plain": {"schema": {"type": "string"}}}
        if answer is None
        else _json(reference(answer))
    )
    return {"get": {"summary": summary, "responses": _responses(content, *errors, error=error)}}


def _responses(content: dict[str, Any], *errors: int, error: str) -> dict[str, Any]:
    """Returns the responses of a route.

    Each has 401, for a server that wants a key; none has 500, which should never happen.
    """
    refused = {
        str(status): {"description": "An error", "content": _json(reference(error))}
        for status in (401, *errors)
    }
    return {"200": {"description": "The answer", "content": content}, **refused}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def reference(name: str) -> dict[str, Any]:
    """Returns a reference to a schema."""
    return {"$ref": PLACE + name}


def object_of(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a list."""
    return {"type": "array", "items": items}


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
OPTIONAL = {"type": ["string", "null"]}
USAGE = object_of(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
PROMPT_USAGE = object_of(prompt_tokens=INTEGER, total_tokens=INTEGER)
