"""Decides when a sequence ends, and which part of its text may be shown.

A sequence ends by an end-of-sequence id, a stop id, a stop string, its grammar, or its length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from jaxpage.decoding.stop_strings import StopStrings
from jaxpage.step.request import Request

if TYPE_CHECKING:
    from jaxpage.decoding.constraints import End


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text as they come.

    It may hold text back until a character is complete.
    """

    def push(self, token_id: int) -> str:
        """Returns the text that is certain with this token; it may be empty."""
        ...

    def flush(self) -> str:
        """Returns the rest, incomplete characters included, because no more tokens come."""
        ...

    def fork(self) -> Self:
        """Returns a detokenizer with the same past, which goes on by itself."""
        ...


@dataclass(frozen=True)
class Verdict:
    """Says what one more token does to a sequence.

    Attributes:
        text: The text to show.
        reason: The reason why the sequence ends; None if it goes on.
        stop_reason: The stop string or stop token id that ended it, or the message of an error.
        last_text: The text that was held back, and comes out because the sequence ends.
    """

    text: str
    reason: str | None = None
    stop_reason: int | str | None = None
    last_text: str = ""


class Stopping:
    """Finds the end of one sequence; takes each output token once, until a verdict has a reason.

    An end-of-sequence or stop id is a token of the output and has no text. Within the first
    `min_tokens` output tokens only the length or the grammar ends a sequence; a stop string must be
    complete after them. If several ends come with the same token, a stop string takes precedence
    over all others, and the grammar's end over the length.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        params = request.params
        self._detokenizer = detokenizer
        self._eos_token_ids = request.eos_token_ids
        self._stop_token_ids = params.stop_token_ids.as_set
        self._strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._min_tokens = params.min_tokens
        self._max_tokens = request.max_total_tokens - len(request.prompt_token_ids)

    def push(self, token_id: int, end: End | None = None) -> Verdict:
        """Returns the verdict on the next output token.

        Args:
            token_id: The token.
            end: The reason why the grammar cannot go on after this token; None if it can.
        """
        self._num_tokens += 1
        may_stop = self._num_tokens > self._min_tokens
        if may_stop and token_id in self._eos_token_ids:
            return self.end("", "stop", None)
        if may_stop and token_id in self._stop_token_ids:
            return self.end("", "stop", token_id)
        text, stop = self._strings.push(self._detokenizer.push(token_id), may_stop=may_stop)
        if stop is not None:
            return Verdict(text, "stop", stop)
        if end is not None:
            return self.end(text, *end)
        if self._num_tokens >= self._max_tokens:
            return self.end(text, "length", None)
        return Verdict(text)

    def fork(self) -> Self:
        """Returns the `Stopping` of a sequence that has the same tokens so far."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other._strings = copy.copy(self._strings)
        return other

    def end(self, text: str, reason: str, stop_reason: int | str | None) -> Verdict:
        """Returns the verdict for a sequence that ends here.

        The text that the detokenizer held back may still complete a stop string, which then is the
        reason.
        """
        last_text, stop = self._strings.push(
            self._detokenizer.flush(), may_stop=self._num_tokens > self._min_tokens
        )
        if stop is not None:
            return Verdict(text, "stop", stop, last_text)
        return Verdict(text, reason, stop_reason, last_text + self._strings.flush())
