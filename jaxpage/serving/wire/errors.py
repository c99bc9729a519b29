"""What a client is told when something goes wrong: a status and OpenAI's error object. Nothing of the machine shows in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MAX_MESSAGE = 1000  # characters
RETRY_AFTER = {"Retry-After": "1"}
INTERNAL = "The server failed to answer this request"
# Addresses, object reprs, files (never the server's own routes) and traces.
_OF_THE_MACHINE = re.compile(
    r"0x[0-9a-fA-F]+|<[\w.]+ object[^>]*>|object at\b|(?<![\w/])/(?!v1/)(?:[\w.+@-]+/)+[\w.+@-]*|site-packages|Traceback"
)
_PARAMETERS_OF_REQUESTS = (  # what the engine says of a request as a whole, by its own id, and the parameter that it is about
    (re.compile(r"request '[^']*' asks for "), "n", "asks for "),
    (re.compile(r"request '[^']*' has a prompt of "), "prompt", "has "),
    (re.compile(r"request '[^']*' may need "), "prompt", "and what may follow it need "),
)
_PARAMETERS = {*SamplingParams.__annotations__, *BeamSearchParams.__annotations__, "prompt", "prompt_token_ids"}


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
    ) -> None:
        self.status = status
        self.message = scrubbed(message)
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


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
        return ApiError(400, message, param=(names or {}).get("prompt", "prompt"), code="context_length_exceeded")
    for pattern, parameter, verb in _PARAMETERS_OF_REQUESTS:
        if found := pattern.match(message):
            known = (names or {}).get(parameter, parameter)
            return ApiError(400, f"{known} {verb}{message[found.end() :]}", param=known)
    word = re.match(r"(?:[Tt]he )?(\w*)", message)
    param = word[1] if word and word[1] in _PARAMETERS else None
    return ApiError(400, message, param=(names or {}).get(param or "", param))


def scrubbed(message: str) -> str:
    """Short, and without addresses, files and traces: fixed texts say what is missing."""
    return _OF_THE_MACHINE.sub("...", message[:_MAX_MESSAGE])
