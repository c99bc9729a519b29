"""Errors for clients: a status and OpenAI's error object. Nothing of the machine shows in it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MAX_MESSAGE = 1000  # characters
RETRY_AFTER = {"Retry-After": "1"}
INTERNAL = "The server failed to answer this request"
# Addresses, object reprs, files (never the server's own routes) and traces.
_OF_THE_MACHINE = re.compile(
    r"0x[0-9a-fA-F]+|<[\w.]+ object[^>]*>|object at\b|(?<![\w/])/(?!v1/)(?:[\w.+@-]+/)+[\w.+@-]*|site-packages|Traceback"
)
# what the engine says of a request as a whole, by its own id, and the parameter that it is about
_PARAMETERS_OF_REQUESTS = (
    (re.compile(r"request '[^']*' asks for "), "n", "asks for "),
    (re.compile(r"request '[^']*' has a prompt of "), "prompt", "has "),
    (re.compile(r"request '[^']*' may need "), "prompt", "and what may follow it need "),
)
_OF_GRAMMAR = re.compile(
    r"(structured_outputs)(?:=\{.*?(?:\}|\.\.\.)|=a \w+ too large to print)?(?= is refused: | cannot be honoured: |: )",
    re.DOTALL,
)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_PARAMETERS = {
    *SamplingParams.__annotations__,
    *BeamSearchParams.__annotations__,
    "prompt",
    "prompt_token_ids",
}


class ApiError(Exception):
    """An answer that is an error. `code` is what programs look at; `headers` go with the response."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = MAX_MESSAGE,
    ) -> None:
        """limit: of the message, in characters."""
        self.status = status
        self._unscrubbed = message[:limit]
        self.message = scrubbed(self._unscrubbed)
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def quoting(self, request: Any) -> ApiError:
        """Itself: what looks like something of the machine, but stands in the request, is shown as it stands there."""
        self.message = scrubbed(self._unscrubbed, request)
        self.args = (self.message,)
        return self

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Itself, for a client that knows the parameter by another name."""
        if self.param is not None and (name := names.get(self.param)) is not None:
            self._unscrubbed = re.sub(rf"^{re.escape(self.param)}\b", name, self._unscrubbed)
            self.message = re.sub(rf"^{re.escape(self.param)}\b", name, self.message)
            self.param, self.args = name, (self.message,)
        return self

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: Exception, *, names: Mapping[str, str] | None = None) -> ApiError:
    """What an error of the engine, or of anything else, is to the client.

    A request that is refused (ValueError, UnsupportedError, CapacityError) is 400 with the parameter that the message begins with;
    a TimeoutError, which others cause, is 503; everything else is 500 with a fixed message.

    Args:
        names: of the parameters that the client knows by another name.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, TimeoutError):
        return ApiError(503, message or "The server is too busy", headers=RETRY_AFTER)
    if type(error) is not ValueError and not isinstance(error, UnsupportedError | CapacityError):
        return ApiError(500, INTERNAL)
    if message.startswith("The prompt has") and "max_model_len" in message:
        return ApiError(
            400,
            message,
            param=(names or {}).get("prompt", "prompt"),
            code="context_length_exceeded",
        )
    for pattern, parameter, verb in _PARAMETERS_OF_REQUESTS:
        if found := pattern.match(message):
            known = (names or {}).get(parameter, parameter)
            return ApiError(400, f"{known} {verb}{message[found.end() :]}", param=known)
    if found := _OF_GRAMMAR.match(message):
        known = (names or {}).get("structured_outputs", "structured_outputs")
        return ApiError(
            400, message if known == found[1] else f"{known}{message[found.end() :]}", param=known
        )
    word = re.match(r"(?:[Tt]he )?(\w*)", message)
    param = word[1] if word and word[1] in _PARAMETERS else None
    return ApiError(400, message, param=(names or {}).get(param or "", param))


def quotes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For a function whose first argument is a request: its errors quote it."""

    @functools.wraps(function)
    def wrapped(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **named)
        except ApiError as error:
            error.quoting(arguments[0])
            raise

    return wrapped


def scrubbed(message: str, request: Any = None) -> str:
    """Without addresses, files and traces: fixed texts say what is missing. What the request has itself may stay.

    Args:
        request: bytes of JSON, or what was made of them.
    """
    own: list[str] = []  # looked for once, and only if it matters

    def kept(found: re.Match[str]) -> str:
        if request is not None and not own:
            own.append(_text_of(request))
        # dots: a value that was shortened
        return found[0] if own and found[0].rstrip(".") in own[0] else "..."

    return _OF_THE_MACHINE.sub(kept, message)


def _text_of(request: Any) -> str:
    if isinstance(request, bytes):
        return request.decode(errors="replace").replace("\\/", "/")
    value = request.model_dump() if isinstance(request, BaseModel) else request
    return json.dumps(value, ensure_ascii=False, default=str)
