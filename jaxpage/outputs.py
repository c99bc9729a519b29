"""What comes back from the engine: `RequestOutput` with one `CompletionOutput` per sequence, and log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """One token's log probability under the model (natural logarithm, before temperature and truncation) and its rank (1 = likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token of one position and the likeliest candidates there, as token ids."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`, how often it was preempted, and what came of drafts for it."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    # of the prompt, found in the prefix cache when the request was first admitted
    num_cached_tokens: int = 0
    num_drafts: int = 0  # of a sequence in a step, one or more tokens each
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of them, those in the text: right, and before whatever ended it


@dataclass(kw_only=True)
class CompletionOutput:
    """One sequence of a request. In a stream `text`, `token_ids` and `logprobs` are what is new since the last chunk."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    # None stands for the first token of an echoed prompt alone
    logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    # of a beam search: cumulative_logprob / output length ** length_penalty
    score: float | None = None

    def __getitem__(self, name: str) -> Any:
        """`output["text"]`, for scripts written for engines whose outputs are dicts."""
        return getattr(self, name)


@dataclass(kw_only=True)
class RequestOutput:
    """A request and what has been generated for it.

    `outputs` are in the order of their sample index; of `best_of` the likeliest first, of a beam search the best score first. A search
    that was cut short has the beams that there were, with "abort" or "error" for a reason.

    `prompt_logprobs` has an entry for each token of the prompt, None for the first; the token itself comes first in it.
    `weights_version` counts the calls of `LLM.update_parameters` before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    weights_version: int = 0

    def echoed(self, index: int = 0, *, prompt: str | None = None) -> CompletionOutput:
        """Output `index` with the prompt before it: text, token ids and, where both were asked for, log probabilities (else None).

        What OpenAI's completions call `echo`. Of a stream it makes sense for the first chunk.

        Args:
            prompt: the prompt's text, where the request was given token ids.

        Raises:
            ValueError: there is text, and none is known for the prompt.
        """
        completion = self.outputs[index]
        text = self.prompt if prompt is None else prompt
        if text is None and completion.text:
            raise ValueError(
                "the prompt was given as token ids; echoed needs its text: echoed(prompt=...)"
            )
        logprobs = None
        if self.prompt_logprobs is not None and completion.logprobs is not None:
            logprobs = self.prompt_logprobs + completion.logprobs
        return replace(
            completion,
            text=(text or "") + completion.text,
            token_ids=self.prompt_token_ids + completion.token_ids,
            logprobs=logprobs,
        )
