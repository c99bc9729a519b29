"""Writes the server's log to standard error, as text or JSON, with one line for each record.

While requests run, a line now and then tells how many tokens they get. Prompts are in no record
unless `log_requests` asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxpage.errors import JaxpageError
from jaxpage.serving.settings.server_config import ServerConfig

logger = logging.getLogger(__name__)

ACTIVITY_SECONDS = 10.0
# These characters could make one record look like two, or move a terminal's cursor: C0 and C1
# controls, and the line ends of Unicode.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NAME = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")  # the name of a parameter
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
_FIELDS_OF_RECORDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


class TextFormatter(logging.Formatter):
    """Formats a record as `12:34:56 INFO message`.

    A traceback follows in indented lines, so that none of them looks like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of a record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        lines = [f"{clock} {record.levelname} {_escape(record.getMessage())}{_fields(record)}"]
        if record.exc_info:
            lines += [
                f"    {_escape(line)}"
                for line in self.formatException(record.exc_info).splitlines()
            ]
        return "\n".join(lines)


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    It has time (seconds since 1970, UTC), level, logger, message, and the caller's `extra` fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the JSON of a record."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure(config: ServerConfig) -> None:
    """Sends the records of all loggers to standard error, and replaces all handlers set before.

    The setting `log_level` holds for jaxpage; of other libraries only warnings and errors are
    shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if config.log_json else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("jaxpage").setLevel(config.log_level.upper())
    logging.captureWarnings(True)


def log_refusal(scope: Mapping[str, Any], status: int, reason: str) -> None:
    """Logs at INFO that a request was refused, and why.

    The line has no text of the client, except for its request id and the name of a parameter if
    that is harmless.

    Args:
        scope: The request, as ASGI describes it, after the answer was made: its state has the
            error's code and parameter.
        status: The HTTP status of the answer.
        reason: The reason under which `/metrics` counts the refusal.
    """
    state = scope["state"]
    # A path is shown only if a route has it to the letter, because any other is text of the client.
    # Requests that are refused before they are routed have no app in their scope.
    routes = scope["app"].routes if "app" in scope else ()
    path = (
        scope["path"]
        if any(getattr(route, "path", None) == scope["path"] for route in routes)
        else None
    )
    param = state.get("refused_param")
    fields = {
        "status": status,
        "method": scope["method"] if scope["method"] in _METHODS else None,
        "path": path,
        "reason": reason,
        "code": state.get("refused_because"),
        "param": param if param and _NAME.fullmatch(param) else None,
        "id": state["request_id"],
    }
    logger.info(
        "refused", extra={name: value for name, value in fields.items() if value is not None}
    )


def activity(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> str | None:
    """Returns a line about the engine's work between two snapshots of its metrics.

    Args:
        before: The values of `Engine.stats` at the first time.
        after: The values at the second time.
        seconds: The time between the two.

    Returns:
        The line; None if no step ran and no request is running or waiting.
    """

    def add_number(name: str) -> float:
        return float(after[name] - before[name])

    if (
        not add_number("engine_steps_total")
        and not after["num_requests_running"]
        and not after["num_requests_waiting"]
    ):
        return None
    parts = [
        f"Running {after['num_requests_running']}",
        f"Waiting {after['num_requests_waiting']}",
        f"KV {after['kv_cache_usage_perc']:.1%}",
        f"prefill {_thousands(add_number('prompt_tokens_total') / seconds)} tok/s",
        f"decode {_thousands(add_number('generation_tokens_total') / seconds)} tok/s",
    ]
    for label, part, whole in (
        ("prefix hit", "prefix_cache_hits_total", "prefix_cache_queries_total"),
        (
            "drafts accepted",
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_draft_tokens_total",
        ),
    ):
        if requested := add_number(whole):
            parts.append(f"{label} {add_number(part) / requested:.0%}")
    return " · ".join(parts)


async def log_activity(
    stats: Callable[[], Awaitable[Mapping[str, Any]]], seconds: float = ACTIVITY_SECONDS
) -> None:
    """Logs at INFO, again and again, what the engine did in the last `seconds`.

    It logs nothing when nothing goes on, and ends when it is cancelled or the engine has ended.
    """
    with contextlib.suppress(JaxpageError):
        before = await stats()
        began = time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            after = await stats()
            now = time.monotonic()
            if line := activity(before, after, now - began):
                logger.info(line)
            before = after
            began = now


def _thousands(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _FIELDS_OF_RECORDS}


def _fields(record: logging.LogRecord) -> str:
    """Returns the `extra` fields of a record as they follow the message in a line of text."""
    return "".join(
        f" {name}={_escape(json.dumps(value, default=str))}"
        for name, value in _extra(record).items()
    )
