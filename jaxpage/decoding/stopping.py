"""When a sequence ends and what of its text may be shown: end-of-sequence and stop ids, stop strings, lengths."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, Self

from jaxpage.decoding.constraints import End
from jaxpage.decoding.stop_strings import StopStrings
from jaxpage.step.request import Request


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text as they come. It may keep text back until a character is complete."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """The rest, incomplete characters included, when no more tokens come."""
        ...

    def fork(self) -> Self:
        """Another one with the same past, which goes on by itself."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What one token brings: text to show, and whether the sequence ends with it (`reason` None: it goes on).

    `last_text` is what was kept back and comes out because the sequence ends.
    """

    text: str
    reason: str | None = None
    stop_reason: int | str | None = None
    last_text: str = ""


class Stopping:
    """The end of one sequence. Feed it every output token once, until a verdict has a reason.

    An end-of-sequence or stop id stays a token of the output and brings no text. Up to `min_tokens` output tokens nothing
    but the length ends a sequence; a stop string must be complete after them. A stop string wins over an id or a length
    that ends the sequence at the same token, and the end of a grammar over a length.
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
        """The verdict on the next output token. `end`: why the sequence cannot go on behind it, whatever it may be."""
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
        """Of a sequence that begins as this one."""
        other = copy.copy(self)
        other._detokenizer, other._strings = self._detokenizer.fork(), copy.copy(self._strings)
        return other

    def end(self, text: str, reason: str, stop_reason: int | str | None) -> Verdict:
        """The sequence ends here; what comes out of the detokenizer now may still complete a stop string."""
        last_text, stop = self._strings.push(
            self._detokenizer.flush(), may_stop=self._num_tokens > self._min_tokens
        )
        if stop is not None:
            return Verdict(text, "stop", stop, last_text)
        return Verdict(text, reason, stop_reason, last_text + self._strings.flush())
