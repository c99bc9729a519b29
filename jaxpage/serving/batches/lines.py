"""Reads the lines of a batch, and writes the lines that answer them, in OpenAI's format.

A line asks for one request:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.encoding import encode
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.pair_scores import SCORE_PATHS
from jaxpage.serving.wire.rerank import RERANK_PATHS
from jaxpage.settings.argument_checks import show

# The paths that a line may name. The server answers them with one JSON object.
URLS = (
    *(path for dialect in DIALECTS for path in dialect.batch_paths),
    "/v1/embeddings",
    SCORE_PATHS[0],
    RERANK_PATHS[0],
)
MAX_CUSTOM_ID_CHARACTERS = 512
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class Line:
    """Holds a line that asks for something the server may answer.

    Attributes:
        id: The id of the answer: the number of the line and a digest of its bytes.
        custom_id: The name that the client gave to the request.
        url: The path of the request.
        body: The JSON of the request.
        order: A text that begins alike for requests whose prompts begin alike.
    """

    id: str
    custom_id: str
    url: str
    body: bytes
    order: str


@dataclass(frozen=True)
class RefusedLine:
    """Holds a line that no request can be made of, and the reason."""

    id: str
    custom_id: str | None
    code: str
    message: str

    def answer(self) -> bytes:
        """Returns the line of the output."""
        error = {"code": self.code, "message": self.message}
        line = {"id": self.id, "custom_id": self.custom_id, "response": None, "error": error}
        return encode(line) + b"\n"


def line_id(number: int, raw: bytes) -> str:
    """Returns the id of the answer to a line, by which a later run knows that it was answered.

    Args:
        number: The number of the line in its file, from 1 on.
        raw: The bytes of the line.
    """
    # The last line of a file may have a line break or none.
    digest = hashlib.blake2s(raw.strip(), digest_size=6).hexdigest()
    return f"batch_req_{number}_{digest}"


def read_line(
    number: int, raw: bytes, seen: Container[str], url: str | None = None
) -> Line | RefusedLine:
    """Reads a line.

    Args:
        number: The number of the line in its file, from 1 on.
        raw: The bytes of the line.
        seen: The names of the lines before it.
        url: The path that all lines must name; None allows each of `URLS`.
    """
    answer_id = line_id(number, raw)
    custom_id: str | None = None

    def refuse(code: str, message: str) -> RefusedLine:
        return RefusedLine(answer_id, custom_id, code, f"Line {number}: {message}")

    try:
        line = parse_object(raw)
    except ApiError as error:
        return refuse("invalid_json_line", error.message.replace("Request body", "the line", 1))
    stated_id = line.get("custom_id")
    if not isinstance(stated_id, str) or not 0 < len(stated_id) <= MAX_CUSTOM_ID_CHARACTERS:
        return refuse(
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters, got "
            f"{show(stated_id)}",
        )
    custom_id = stated_id
    if custom_id in seen:
        return refuse(
            "duplicate_custom_id", f"custom_id {show(custom_id)} is that of a line before it"
        )
    if unknown := sorted(line.keys() - _FIELDS):
        return refuse("unknown_parameter", f"{show(unknown[0])} is not a field of a batch line")
    if line.get("method") != "POST":
        return refuse("invalid_method", f"method must be 'POST', got {show(line.get('method'))}")
    if line.get("url") not in ((url,) if url else URLS):
        urls = url or ", ".join(URLS)
        return refuse("invalid_url", f"url must be {urls}; got {show(line.get('url'))}")
    body = line.get("body")
    if not isinstance(body, dict):
        return refuse("invalid_body", f"body must be a JSON object, got {show(body)}")
    if body.get("stream"):
        return refuse("invalid_body", "stream cannot be true in a batch: answers are whole")
    return Line(answer_id, custom_id, line["url"], encode(body), _order(line["url"], body))


def _order(url: str, body: dict[str, Any]) -> str:
    """Returns a text whose beginning is that of the prompt.

    It is made of what the prompt is made of, in this order: the model and the salt, which divide
    the prefix cache, then tools, which templates write first, then texts or token ids.
    """
    messages = [
        [message.get("role"), message.get("content")] if isinstance(message, dict) else message
        for message in _list_values(body.get("messages"))
    ]
    parts = [body.get(name) for name in ("model", "cache_salt", "tools", "instructions")]
    prompt = messages or [body.get(name) for name in ("prompt", "input", "query", "documents")]
    return json.dumps([url, *parts, prompt])


def _list_values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def write_answer(line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """Returns the line of the output that has the server's answer, to the byte.

    Args:
        line: The line that was answered.
        status: The HTTP status.
        request_id: The id of the request in the server's log.
        body: The JSON of the answer.
    """
    head = encode({"id": line.id, "custom_id": line.custom_id})[:-1]
    status_fields = encode({"status_code": status, "request_id": request_id})[:-1]
    return head + b',"response":' + status_fields + b',"body":' + body + b'},"error":null}\n'
