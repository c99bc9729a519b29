"""Defines the outputs of the engine: `RequestOutput`, with one `CompletionOutput` per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# The ways that a call may ask for in which the hidden states of a prompt become one vector.
Pooling = Literal["last", "mean", "cls"]


class TokenPooling(NamedTuple):
    """Says how the hidden states of a prompt become one vector.

    Attributes:
        modes: The ways, by the names of sentence-transformers; of several, all vectors in a row.
        num_skipped: The number of tokens at the beginning that do not count.
        second_text: The place of the first token of the second text of a pair, whose token type is
            1; None for one text.
    """

    modes: tuple[str, ...]
    num_skipped: int = 0
    second_text: int | None = None


@dataclass(frozen=True)
class Logprob:
    """Holds the log probability of one token.

    Attributes:
        logprob: The natural logarithm of its probability under the model, before temperature and
            truncation; with logprobs_mode="processed" after them.
        rank: Its rank; the most likely token has rank 1.
        decoded_token: Its text; None if the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class RerankResult:
    """Holds a document of `LLM.rerank`.

    Attributes:
        index: Its place among the documents of the call.
        relevance_score: Its score; the higher, the better it answers the query.
        document: Its text.
    """

    index: int
    relevance_score: float
    document: str


@dataclass(frozen=True)
class TokenLogprobs:
    """Holds the chosen token of one position and the most likely ones there.

    Attributes:
        token_id: The chosen token.
        logprob: Its log probability.
        rank: Its rank; the most likely token has rank 1.
        top_token_ids: The most likely tokens, in order.
        top_logprobs: Their log probabilities.
        num_kept: The number of tokens that could be drawn, with logprobs_mode="processed".
        mask_ids: The ids of these tokens as int32, with `return_sampling_mask`.
        hidden_state: The numbers of the hidden state as float32, with `return_hidden_states`.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    num_kept: int = 0
    mask_ids: bytes = b""
    hidden_state: bytes = field(default=b"", repr=False)


class SamplingMask:
    """Holds the tokens that each token of an output was drawn from: those that no cut left out.

    Attributes:
        num_kept: Their number for each token, int32 [tokens].
        kept_token_ids: Their ids, int32 [sum of `num_kept`]: those of the first token in ascending
            order, then those of the second, and so on.
    """

    def __init__(self, num_kept: npt.NDArray[np.int32], kept_token_ids: npt.NDArray[np.int32]):
        self.num_kept = num_kept
        self.kept_token_ids = kept_token_ids

    @property
    def token_ids(self) -> list[list[int]]:
        """Returns the ids for each token, as vLLM's `sampling_mask` has them."""
        parts = np.split(self.kept_token_ids, np.cumsum(self.num_kept)[:-1])
        # Without any token `np.split` still returns one part, which is empty.
        return [part.tolist() for part in parts[: len(self.num_kept)]]

    def __add__(self, other: SamplingMask) -> SamplingMask:
        """Returns the mask of the tokens of both."""
        return SamplingMask(
            np.append(self.num_kept, other.num_kept),
            np.append(self.kept_token_ids, other.kept_token_ids),
        )

    def __eq__(self, other: object) -> bool:
        """Returns whether another object is a mask with the same tokens."""
        return (
            isinstance(other, SamplingMask)
            and np.array_equal(self.num_kept, other.num_kept)
            and np.array_equal(self.kept_token_ids, other.kept_token_ids)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(kw_only=True)
class RequestMetrics:
    """Holds the times and counts of one request; times are seconds of `time.monotonic`.

    Attributes:
        arrival_time: The time when the engine got it.
        first_scheduled_time: The start of its first step.
        first_token_time: The end of the step that drew its first token.
        last_token_time: The end of the last step that drew a token for it.
        finished_time: The time when it ended.
        num_preemptions: The number of times it was preempted.
        num_cached_tokens: The prompt tokens found in the prefix cache when it was first admitted.
        num_drafts: The number of drafts, of one or more tokens each; a sequence has at most one per
            step.
        num_draft_tokens: The number of tokens in these drafts.
        num_accepted_tokens: The number of draft tokens in the text: those that were right, and came
            before whatever ended it.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(kw_only=True)
class CompletionOutput:
    """Holds the output of one sequence of a request.

    In a stream, `text`, `token_ids`, `logprobs`, `num_kept` and `sampling_mask` have only what is
    new since the last chunk.

    Attributes:
        index: The index among the outputs of the request.
        text: The text.
        token_ids: The token ids.
        cumulative_logprob: The sum of the log probabilities; None unless the request asks for some.
        logprobs: The log probabilities of each token and of the most likely ones. Only the first
            token of an echoed prompt has None in the list.
        finish_reason: "stop", "length", "abort" or "error"; None while the sequence goes on.
        stop_reason: The stop string or stop token id that ended it, or the message of an error.
        score: The score of a hypothesis of beam search: cumulative_logprob / output length **
            length_penalty.
        weights_versions: For each token of `token_ids` that was drawn, the version of the weights
            that drew it. The prompt of `echoed` has none.
        num_kept: The number of tokens that each token was drawn from; None unless the request asks
            for log probabilities with logprobs_mode="processed".
        sampling_mask: The tokens that each token was drawn from; None unless the request has
            `return_sampling_mask`.
        routed_experts: The experts of each token in each layer, int16 [tokens, layers, experts per
            token]: of the tokens of the prompt, then of those of the output but for the last, which
            is never computed. A layer without experts has -1. None unless the request has
            `return_routed_experts`; in a stream it comes with the end of the sequence.
        hidden_states: The last layer's hidden state that each token was drawn from, after the last
            norm, float32 [tokens, features]. None unless the request has `return_hidden_states`;
            in a stream it comes with the end of the sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    weights_versions: list[int] = field(default_factory=list)
    num_kept: list[int] | None = None
    sampling_mask: SamplingMask | None = None
    # The comparison of two arrays is an array, which has no truth value.
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)
    hidden_states: npt.NDArray[np.float32] | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        """Returns a field by its name, for scripts of engines whose outputs are dicts."""
        return getattr(self, name)


@dataclass(kw_only=True)
class RequestOutput:
    """Holds a request and what has been generated for it.

    Attributes:
        request_id: The id of the request.
        prompt: The text of the prompt; None if it was given as token ids.
        prompt_token_ids: The token ids of the prompt.
        outputs: The outputs of its sequences in the order of their index. For `best_of` the most
            likely comes first, for a beam search the best score. A search that was cut short has
            the beams that it had, with the finish reason "abort" or "error".
        finished: True if all sequences have ended.
        prompt_logprobs: An entry for each token of the prompt, in which the token itself comes
            first; None for the first token.
        metrics: The times and counts of the request.
        weights_version: The version of the weights that it last ran with: the number of calls of
            `LLM.update_parameters` before. What drew each token is in
            `CompletionOutput.weights_versions`.
        adapter_digest: The digest of the numbers of the LoRA adapter that it ran with, as
            `LLM.update_adapter` returns it; None without an adapter.
        receipt: The receipt of the finished request, if it asked for one and was not cut short
            (docs/guides/receipts.md).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    weights_version: int = 0
    adapter_digest: str | None = None
    receipt: dict[str, Any] | None = field(default=None, repr=False)

    def echoed(self, index: int = 0, *, prompt: str | None = None) -> CompletionOutput:
        """Returns one output with the prompt before it, as `echo` does in OpenAI's completions.

        It has the text, the token ids and, if both were asked for, the log probabilities (else
        None). In a stream, use it for the first chunk.

        Args:
            index: The index of the output.
            prompt: The prompt's text, if the request was given token ids.

        Raises:
            ValueError: The output has text, and the text of the prompt is not known.
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
