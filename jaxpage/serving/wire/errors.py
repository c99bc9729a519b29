"""Makes the errors that clients receive: a status and OpenAI's error object.

A message shows nothing of the server's machine: no addresses, files or traces.
"""

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
# Addresses, reprs of objects, files (but not the routes under /v1/) and traces.
_OF_THE_MACHINE = re.compile(
    r"0x[0-9a-fA-F]+|<[\w.]+ object[^>]*>|object "
    r"at\b|(?<![\w/])/(?!v1/)(?:[\w.+@-]+/)+[\w.+@-]*|site-packages|Traceback"
)
# The engine's messages about a whole request begin with an id that the client does not know. Each
# entry has the pattern of that beginning, the parameter to name instead, and the words after it.
_PARAMETERS_OF_REQUESTS = (
    (re.compile(r"request '[^']*' asks for "), "n", "asks for "),
    (re.compile(r"request '[^']*' has a prompt of "), "prompt", "has "),
    (re.compile(r"request '[^']*' may need "), "prompt", "and what may follow it need "),
)
_IS_TOO_LONG = re.compile(r"The prompt has|[0-9]+ tokens are more than")
_OF_GRAMMAR = re.compile(
    r"(structured_outputs)(?:=\{.*?(?:\}|\.\.\.)|=a \w+ too large to print)?(?= is refused: "
    r"| cannot be honoured: |: )",
    re.DOTALL,
)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_PARAMETERS = {
    *SamplingParams.__annotations__,
    *BeamSearchParams.__annotations__,
    "prompt",
    "prompt_embeds",
    "prompt_token_ids",
}


class ApiError(Exception):
    """An error that is the answer to a request.

    Attributes:
        status: The HTTP status.
        message: The text for people, without anything of the machine.
        type: The kind of error, in OpenAI's words.
        param: The parameter that is at fault, or None.
        code: The name of the error for programs, or None.
        headers: The headers that go with the response.
    """

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
        """Makes an error.

        Args:
            status: The HTTP status.
            message: The text for people; what looks like something of the machine is removed.
            type: The kind of error; None takes the usual one for the status.
            param: The parameter that is at fault.
            code: The name of the error for programs.
            headers: The headers that go with the response.
            limit: The most characters of the message that are kept.
        """
        self.status = status
        self._unscrubbed = message[:limit]
        self.message = scrub(self._unscrubbed)
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def quoting(self, request: Any) -> ApiError:
        """Shows again the parts of the message that come from the request, and returns the error.

        A part that looks like something of the machine was removed from the message; if the request
        contains it, the client knows it already.
        """
        self.message = scrub(self._unscrubbed, request)
        self.args = (self.message,)
        return self

    def rename_param(self, names: Mapping[str, str]) -> ApiError:
        """Gives the parameter the name by which the client knows it, and returns the error.

        Args:
            names: The client's names by our names; other parameters keep their name.
        """
        if self.param is None or (begin := _find_known_beginning(self.param, names)) is None:
            return self
        # The message begins with the parameter, or with the path of a part of it.
        beginning = re.compile(rf"^{re.escape(begin)}(?!\w)")
        self._unscrubbed = beginning.sub(lambda _: names[begin], self._unscrubbed)
        self.message = beginning.sub(lambda _: names[begin], self.message)
        self.param = names[begin] + self.param[len(begin) :]
        self.args = (self.message,)
        return self

    def body(self) -> dict[str, Any]:
        """Returns the response body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def rename_path(path: str, names: Mapping[str, str]) -> str:
    """Returns the path of a field with the client's name for its beginning, if that has one."""
    begin = _find_known_beginning(path, names)
    return path if begin is None else names[begin] + path[len(begin) :]


def _find_known_beginning(path: str, names: Mapping[str, str]) -> str | None:
    ends = [len(path), *(match.start() for match in re.finditer(r"[.\[]", path))]
    return next((path[:end] for end in sorted(ends, reverse=True) if path[:end] in names), None)


def as_api_error(error: Exception, *, names: Mapping[str, str] | None = None) -> ApiError:
    """Returns the client's error for an error of the engine or of anything else.

    A request that is refused (ValueError, UnsupportedError, CapacityError) gets 400 with the
    parameter that the message names; a TimeoutError, which other requests cause, gets 503;
    everything else gets 500 with a fixed message.

    Args:
        error: The error.
        names: The client's names of parameters, by the engine's names.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, TimeoutError):
        return ApiError(503, message or "The server is too busy", headers=RETRY_AFTER)
    if type(error) is not ValueError and not isinstance(error, UnsupportedError | CapacityError):
        return ApiError(500, INTERNAL)
    if _IS_TOO_LONG.match(message) and "max_model_len" in message:
        return ApiError(
            400,
            message,
            param=(names or {}).get("prompt", "prompt"),
            code="context_length_exceeded",
        )
    for pattern, parameter, verb in _PARAMETERS_OF_REQUESTS:
        if match := pattern.match(message):
            known = (names or {}).get(parameter, parameter)
            return ApiError(400, f"{known} {verb}{message[match.end() :]}", param=known)
    if match := _OF_GRAMMAR.match(message):
        known = (names or {}).get("structured_outputs", "structured_outputs")
        return ApiError(
            400, message if known == match[1] else f"{known}{message[match.end() :]}", param=known
        )
    word = re.match(r"(?:[Tt]he )?(\w*)", message)
    param = word[1] if word and word[1] in _PARAMETERS else None
    return ApiError(400, message, param=(names or {}).get(param or "", param))


def quotes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Returns a function whose first argument is a request, with errors that quote the request.

    Who reads a client's request calls what reads it so. A dialect translates the request before,
    and its client knows the parts of its own.
    """

    @functools.wraps(function)
    def call_wrapped(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **named)
        except ApiError as error:
            error.quoting(arguments[0])
            raise

    return call_wrapped


def scrub(message: str, request: Any = None) -> str:
    """Returns the message with "..." in place of addresses, files and traces.

    Args:
        message: The message.
        request: The request as bytes of JSON, or as the object that was made of them. A text that
            it contains is not replaced.
    """
    request_texts: list[str] = []  # the request's text, which is made once and only if it matters

    def keep(match: re.Match[str]) -> str:
        if request is not None and not request_texts:
            request_texts.append(_text_of(request))
        # A value that was shortened for the message ends with dots, which the request lacks.
        return match[0] if request_texts and match[0].rstrip(".") in request_texts[0] else "..."

    return _OF_THE_MACHINE.sub(keep, message)


def _text_of(request: Any) -> str:
    if isinstance(request, bytes):
        return request.decode(errors="replace").replace("\\/", "/")
    value = request.model_dump() if isinstance(request, BaseModel) else request
    return json.dumps(value, ensure_ascii=False, default=str)
