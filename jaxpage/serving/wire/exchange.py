"""One request of a client and what is said in answer: the seam between the wire format and the server."""

from __future__ import annotations

from typing import Any, Protocol

from jaxpage.outputs import RequestOutput
from jaxpage.serving.wire.chat import open_chat
from jaxpage.serving.wire.completions import open_completion
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.score import open_score
from jaxpage.serving.wire.tokenizing import detokenize, tokenize

__all__ = [
    "Exchange",
    "PromptRequest",
    "detokenize",
    "open_chat",
    "open_completion",
    "open_score",
    "tokenize",
]


class Exchange(Protocol):
    """A request that was understood. The server runs its prompts, all or none, and gives what comes of them back in here.

    For one thread at a time. A stream is `chunks` for every delta of every prompt, in any order among prompts, then `last_chunks`.
    """

    id: str
    stream: bool
    # with one object of parameters, checked once; none: nothing is generated
    prompts: list[PromptRequest]
    ignored_fields: tuple[str, ...]  # unknown ones, as paths; safe in a header

    def refusal(self, error: Exception) -> ApiError:
        """The client's error for a prompt that the engine refuses: `as_api_error`, in the client's terms."""
        ...

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Of a stream: what to send of a delta. Raises ApiError where the engine failed: no chunk comes after it."""
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """Of a stream, after all deltas: the usage, if it was asked for."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Not streamed: the response, of one output for each prompt. Raises ApiError where the engine failed."""
        ...
