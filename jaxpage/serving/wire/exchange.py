"""Defines the exchange, the seam between the wire format and the server.

An exchange is one request of a client together with its answer.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxpage.outputs import RequestOutput
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.completions import open_completion
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.generate import open_generate
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.score import open_score
from jaxpage.serving.wire.tokenizing import detokenize, tokenize

__all__ = [
    "LOAD_SECONDS",
    "Exchange",
    "PromptRequest",
    "detokenize",
    "open_chat",
    "open_completion",
    "open_generate",
    "open_score",
    "tokenize",
]


# The key of a request's ASGI state with the seconds for which it waited for its model to be loaded.
LOAD_SECONDS = "load_seconds"


class Exchange(Protocol):
    """A request that was understood, and the answer that is made of the engine's outputs.

    The server runs all of its prompts or none, and passes their outputs to the methods here. Only
    one thread at a time may use an exchange:

        stream       chunks(delta of any prompt) ... chunks(delta) ── last_chunks()
        no stream    whole(one output for each prompt)

    Attributes:
        id: The id of the answer.
        model: The name of the model in the request.
        stream: True if the answer is streamed.
        prompts: The prompts, which share one object of parameters, so that it is checked once.
            An exchange without prompts generates nothing.
        ignored_fields: The paths of ignored fields, which are safe in a header.
        load_seconds: The time for which the request waited for its model to be loaded.
    """

    id: str
    model: str
    stream: bool
    prompts: list[PromptRequest]
    ignored_fields: tuple[str, ...]
    load_seconds: float

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a prompt that the engine refuses; see `as_api_error`."""
        ...

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream to send for a delta of one prompt.

        Raises:
            ApiError: The engine failed. No chunk follows.
        """
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream, after all deltas."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream, from one output for each prompt.

        Raises:
            ApiError: The engine failed.
        """
        ...
