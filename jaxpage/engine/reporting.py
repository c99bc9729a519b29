"""Makes a `RequestOutput` of a sequence group: the whole, or what is new since the last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpage.decoding import hypothesis_score
from jaxpage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from jaxpage.settings.sampling_params import BeamSearchParams
from jaxpage.step.request import Sequence, SequenceGroup


class Reporter:
    """Reports on one request. Each `delta` starts where the one before it ended.

    Attributes:
        metrics: The times and counts of the request, which grow with it.
    """

    def __init__(
        self,
        group: SequenceGroup,
        metrics: RequestMetrics,
        tokenizer: Any | None,
        weights_version: int = 0,
    ):
        self._group = group
        self.metrics = metrics
        self._tokenizer = tokenizer
        self._weights_version = weights_version
        self._prompt_token_ids = list(group.request.prompt_token_ids)  # all chunks share one list
        self._prompt_was_reported = False
        # The number of output tokens and characters already reported, by sequence id.
        self._seen: dict[int, tuple[int, int]] = {}

    @property
    def finished(self) -> bool:
        """Returns whether all sequences of the request have ended."""
        return self._group.finished

    @property
    def num_output_tokens(self) -> int:
        """Returns the number of output tokens of all sequences."""
        return sum(sequence.num_output_tokens for sequence in self._group.sequences)

    def whole(self) -> RequestOutput:
        """Returns all that was generated; for `best_of` and beam search only the best sequences."""
        if beam := self._group.request.beam:
            return self._output(self._hypotheses(beam), self._prompt_logprobs())
        completions = [self._completion(sequence, 0, 0) for sequence in self._group.sequences]
        best = self._best(completions) if self._group.request.params.ranks else completions
        return self._output(best, self._prompt_logprobs())

    def delta(self) -> RequestOutput:
        """Returns what is new of all sequences.

        All of them are in it, because `best_of` cannot choose before they have finished. The log
        probabilities of the prompt come once, as soon as they are complete.
        """
        completions = []
        for sequence in self._group.sequences:
            tokens, characters = self._seen.get(sequence.sequence_id, (0, 0))
            completions.append(self._completion(sequence, tokens, characters))
            self._seen[sequence.sequence_id] = (sequence.num_output_tokens, len(sequence.text))
        prompt_logprobs = None if self._prompt_was_reported else self._prompt_logprobs()
        self._prompt_was_reported |= prompt_logprobs is not None
        return self._output(completions, prompt_logprobs)

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """Returns the most likely `n` completions, in order and numbered anew.

        Of equal ones the first comes first; those that ended with an error come last.
        """

        def rank(completion: CompletionOutput) -> tuple[bool, float]:
            assert completion.cumulative_logprob is not None
            return completion.finish_reason == "error", -completion.cumulative_logprob

        return _numbered(sorted(completions, key=rank)[: self._group.request.params.n])

    def _hypotheses(self, beam: BeamSearchParams) -> list[CompletionOutput]:
        """Returns the result of a beam search, the best first.

        A search that was cut short has no result; then the beams that it had are returned.
        """
        sequences = self._group.sequences
        cut_short = [
            sequence for sequence in sequences if sequence.finish_reason in ("abort", "error")
        ]
        completions = []
        for sequence in cut_short or sequences:
            num_tokens = sequence.num_output_tokens
            score = hypothesis_score(
                sequence.cumulative_logprob, max(num_tokens, 1), beam.length_penalty
            )
            completions.append(
                replace(self._completion(sequence, 0, 0), score=score if num_tokens else None)
            )
        ranked = sorted(completions, key=lambda completion: -(completion.score or 0.0))
        return _numbered(ranked[: beam.n or beam.beam_width])

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the prompt's log probabilities, or None if they are unwanted or not complete.

        The entry of the first token is None, since no token comes before it.
        """
        wanted = self._group.request.params.prompt_logprobs
        if wanted is None or self._group.num_unscored:
            return None
        return [None, *(self._logprobs(token, wanted) for token in self._group.prompt_logprobs)]

    def _output(
        self,
        completions: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        request = self._group.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=self._group.finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            weights_version=self._weights_version,
        )

    def _completion(self, sequence: Sequence, tokens: int, characters: int) -> CompletionOutput:
        params = self._group.request.params
        wanted = params.logprobs
        return CompletionOutput(
            index=sequence.sample_index,
            text=sequence.text[characters:],
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + tokens :],
            cumulative_logprob=None
            if self._group.request.num_logprobs is None
            else sequence.cumulative_logprob,
            logprobs=None
            if wanted is None
            else [self._logprobs(one, wanted) for one in sequence.logprobs[tokens:]],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _logprobs(self, token: TokenLogprobs, wanted: int) -> dict[int, Logprob]:
        """Returns the entry of the token itself, then those of the `wanted` most likely tokens."""
        entries = {
            token.token_id: Logprob(token.logprob, token.rank, self._decoded(token.token_id))
        }
        for rank, (token_id, logprob) in enumerate(
            zip(token.top_token_ids[:wanted], token.top_logprobs[:wanted], strict=True), start=1
        ):
            entries.setdefault(token_id, Logprob(logprob, rank, self._decoded(token_id)))
        return entries

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])


def _numbered(completions: list[CompletionOutput]) -> list[CompletionOutput]:
    return [replace(completion, index=index) for index, completion in enumerate(completions)]
