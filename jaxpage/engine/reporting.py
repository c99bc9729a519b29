"""Makes a `RequestOutput` of a sequence group: the whole, or what is new since the last one.

The thread that runs the engine makes outputs between its steps, so an output for a server must be
small. A reporter with a bound cuts what is new into deltas, and leaves the log probabilities of a
large output to `add_logprobs`, which the reader calls on another thread:

    engine's thread   step ── delta (at most `max_entries`) ── step ── whole (brief) ── step
    another thread                                                └▶ add_logprobs
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage import decoding
from jaxpage.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingMask,
    TokenLogprobs,
)
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.request import Request, Sequence, SequenceGroup


class Reporter:
    """Reports on one request. Each `delta` starts where the one before it ended.

    Attributes:
        metrics: The times and counts of the request, which grow with it.
        max_entries: The most entries of a delta, where each token is an entry and so is each of its
            log probabilities; None for any number.
        has_unsent: True if the last delta left out tokens that the next one brings.
        is_brief: True if the last output lacks log probabilities, which `add_logprobs` adds.
    """

    def __init__(self, group: SequenceGroup, metrics: RequestMetrics, tokenizer: Any | None):
        self._group = group
        self.metrics = metrics
        self.max_entries: int | None = None
        self.has_unsent = False
        self.is_brief = False
        self._tokenizer = tokenizer
        self._prompt_token_ids = list(group.request.prompt_token_ids)  # all chunks share one list
        self._prompt_was_reported = False
        # The number of output tokens and characters already reported, by sequence id.
        self._seen: dict[int, tuple[int, int]] = {}
        self._texts: dict[int, str] = {}  # the texts of single tokens, by their ids

    @property
    def finished(self) -> bool:
        """Returns whether all sequences of the request have ended."""
        return self._group.finished

    @property
    def first_weights_version(self) -> int:
        """Returns the version of the weights that the request began with."""
        return min(sequence.weights[0][1] for sequence in self._group.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Returns the number of output tokens of all sequences."""
        return sum(sequence.num_output_tokens for sequence in self._group.sequences)

    @property
    def num_computed_tokens(self) -> int:
        """Returns the number of tokens of the prompt that are computed; any thread may ask."""
        computed = (sequence.num_computed_tokens for sequence in self._group.sequences)
        return min(max(computed, default=0), len(self._prompt_token_ids))

    def whole(self) -> RequestOutput:
        """Returns all that was generated; for `best_of` and beam search only the best sequences.

        If there are more log probabilities than `max_entries`, it has none; see `add_logprobs`.
        """
        self.is_brief = self.max_entries is not None and self._num_entries > self.max_entries
        return self._whole(is_brief=self.is_brief)

    def delta(self) -> RequestOutput:
        """Returns what is new of all sequences, at most `max_entries` of it.

        All of them are in it, because `best_of` cannot choose before they have finished. The log
        probabilities of the prompt come once, as soon as they are complete.
        """
        completions = []
        stops = self._stops()
        self.has_unsent = False
        for sequence in self._group.sequences:
            tokens, characters = self._seen.get(sequence.sequence_id, (0, 0))
            stop = stops.get(sequence.sequence_id, sequence.num_output_tokens)
            part = self._completion(sequence, tokens, characters, stop)
            completions.append(part)
            self._seen[sequence.sequence_id] = (stop, characters + len(part.text))
            self.has_unsent |= stop < sequence.num_output_tokens
        self.is_brief = False
        prompt_logprobs = None
        if not self._prompt_was_reported and self._has_prompt_logprobs:
            self._prompt_was_reported = True
            self.is_brief = (
                self.max_entries is not None and self._num_prompt_entries > self.max_entries
            )
            prompt_logprobs = None if self.is_brief else self._prompt_logprobs()
        return self._output(completions, prompt_logprobs)

    def add_logprobs(self, output: RequestOutput, *, is_delta: bool) -> RequestOutput:
        """Returns an output that was brief with its log probabilities; any thread may call it.

        What it reads does not change any more: the scores of a prompt that is computed, or a
        request that has ended.

        Args:
            output: The output.
            is_delta: True for a delta, False for a whole output.
        """
        if is_delta:
            return replace(output, prompt_logprobs=self._prompt_logprobs())
        return self._whole(is_brief=False)

    def answer(self) -> tuple[Request, RequestOutput]:
        """Returns a request that has ended and its whole output; any thread may call it."""
        return self._group.request, self._whole(is_brief=False)

    def _whole(self, *, is_brief: bool) -> RequestOutput:
        if beam := self._group.request.beam:
            chosen = self._hypotheses(beam)
        else:
            chosen = [
                self._completion(sequence, 0, 0, is_brief=is_brief)
                for sequence in self._group.sequences
            ]
            if self._group.request.params.ranks:
                chosen = self._best(chosen)
        self.has_unsent = False
        return self._output(chosen, None if is_brief else self._prompt_logprobs())

    @property
    def _entries_per_token(self) -> int:
        params = self._group.request.params
        # The token, its own log probability, and those of the most likely tokens.
        number = 1 if params.logprobs is None else 2 + params.logprobs
        return number + (params.top_k if params.return_sampling_mask else 0)

    @property
    def _num_prompt_entries(self) -> int:
        num_logprobs = self._group.request.params.prompt_logprobs
        return 0 if num_logprobs is None else len(self._prompt_token_ids) * (1 + num_logprobs)

    @property
    def _num_entries(self) -> int:
        """Returns how many log probabilities the whole output has."""
        number = self._num_prompt_entries
        params = self._group.request.params
        if (
            params.logprobs is not None
            or params.return_sampling_mask
            or params.return_hidden_states
        ):
            number += self.num_output_tokens * self._entries_per_token
        number += sum(len(sequence.routes) for sequence in self._group.sequences)
        return number

    def _stops(self) -> dict[int, int]:
        """Returns how many output tokens of each sequence are reported after the next delta.

        A sequence that is not in it is reported as far as it is known. The sequences share the
        bound evenly, and those that are behind the most come first.
        """
        if self.max_entries is None:
            return {}
        new = {}
        for sequence in self._group.sequences:
            seen, _ = self._seen.get(sequence.sequence_id, (0, 0))
            if sequence.num_output_tokens > seen:
                new[sequence.sequence_id] = (seen, sequence.num_output_tokens - seen)
        left = max(1, self.max_entries // self._entries_per_token)
        if sum(number for _, number in new.values()) <= left:
            return {}
        share = max(1, left // len(new))
        stops = {}
        for sequence_id, (seen, number) in sorted(new.items(), key=lambda item: item[1]):
            taken = min(number, share, left)
            stops[sequence_id] = seen + taken
            left -= taken
        return stops

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """Returns the most likely `n` completions, in order and numbered anew.

        Of equal ones the first comes first; those that ended with an error come last.
        """

        def rank(completion: CompletionOutput) -> tuple[bool, float]:
            assert completion.cumulative_logprob is not None
            return completion.finish_reason == "error", -completion.cumulative_logprob

        return _number(sorted(completions, key=rank)[: self._group.request.params.n])

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
            score = decoding.hypothesis_score(
                # A beam that was cut short before its first token would be divided by a power of 0.
                sequence.cumulative_logprob,
                max(num_tokens, 1),
                beam.length_penalty,
            )
            completions.append(
                replace(self._completion(sequence, 0, 0), score=score if num_tokens else None)
            )
        ranked = sorted(completions, key=lambda completion: -(completion.score or 0.0))
        return _number(ranked[: beam.n or beam.beam_width])

    @property
    def _has_prompt_logprobs(self) -> bool:
        """Returns whether the prompt's log probabilities are wanted and complete."""
        num_logprobs = self._group.request.params.prompt_logprobs
        return num_logprobs is not None and not self._group.num_unscored

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the prompt's log probabilities, or None if they are unwanted or not complete.

        The entry of the first token is None, since no token comes before it.
        """
        num_logprobs = self._group.request.params.prompt_logprobs
        if num_logprobs is None or not self._has_prompt_logprobs:
            return None
        return [
            None,
            *(self._logprobs(token, num_logprobs) for token in self._group.prompt_logprobs),
        ]

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
            finished=self._group.finished and not self.has_unsent,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            weights_version=max(sequence.weights[-1][1] for sequence in self._group.sequences),
            adapter_digest=None if request.lora is None else request.lora.digest,
        )

    def _completion(
        self,
        sequence: Sequence,
        tokens: int,
        characters: int,
        stop: int | None = None,
        *,
        is_brief: bool = False,
    ) -> CompletionOutput:
        """Returns a part of a sequence.

        Args:
            sequence: The sequence.
            tokens: The number of output tokens before the part.
            characters: The number of characters before it.
            stop: The number of output tokens to its end; None for all that are known.
            is_brief: True leaves out the log probabilities.
        """
        stop = sequence.num_output_tokens if stop is None else stop
        is_last = stop >= sequence.num_output_tokens
        last_character = len(sequence.text) if is_last else _text_end(sequence, stop)
        first = sequence.num_prompt_tokens
        request = self._group.request
        num_logprobs = request.params.logprobs
        return CompletionOutput(
            index=sequence.sample_index,
            text=sequence.text[characters:last_character],
            token_ids=sequence.token_ids[first + tokens : first + stop],
            cumulative_logprob=None
            if request.num_logprobs is None
            else sequence.cumulative_logprob,
            logprobs=None
            if num_logprobs is None or is_brief
            else [self._logprobs(entry, num_logprobs) for entry in sequence.logprobs[tokens:stop]],
            finish_reason=sequence.finish_reason if is_last else None,
            stop_reason=sequence.stop_reason if is_last else None,
            weights_versions=sequence.weights_versions(tokens, stop),
            routed_experts=None if is_brief or not is_last else _routed_experts(sequence),
            hidden_states=None if is_brief or not is_last else _hidden_states(sequence),
            **({} if is_brief else _cuts(request.params, sequence.logprobs[tokens:stop])),
        )

    def _logprobs(self, token: TokenLogprobs, num_logprobs: int) -> dict[int, Logprob]:
        """Returns the entry of the token itself, and those of the most likely tokens."""
        entries = {token.token_id: Logprob(token.logprob, token.rank, self._decode(token.token_id))}
        for rank, (token_id, logprob) in enumerate(
            zip(token.top_token_ids[:num_logprobs], token.top_logprobs[:num_logprobs], strict=True),
            start=1,
        ):
            # The token itself may be among them, and stays the first entry.
            entries.setdefault(token_id, Logprob(logprob, rank, self._decode(token_id)))
        return entries

    def _decode(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        # The most likely tokens are the same few ones again and again.
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text


def _cuts(params: SamplingParams, tokens: list[TokenLogprobs]) -> dict[str, Any]:
    """Returns the fields of a `CompletionOutput` that say what tokens were drawn from."""
    fields: dict[str, Any] = {}
    if params.num_logprobs is not None and params.logprobs_mode == "processed":
        fields["num_kept"] = [token.num_kept for token in tokens]
    if params.return_sampling_mask:
        kept_ids = [np.frombuffer(token.mask_ids, np.int32) for token in tokens]
        fields["sampling_mask"] = SamplingMask(
            np.array([len(ids) for ids in kept_ids], np.int32),
            np.concatenate(kept_ids) if kept_ids else np.zeros(0, np.int32),
        )
    return fields


def _routed_experts(sequence: Sequence) -> npt.NDArray[np.int16] | None:
    """Returns the experts of all tokens but the last, once the sequence has ended."""
    if not sequence.routes or not sequence.finished:
        return None
    return np.stack(sequence.routes[: sequence.num_known_tokens - 1])


def _hidden_states(sequence: Sequence) -> npt.NDArray[np.float32] | None:
    """Returns the hidden states of all tokens of the output, once the sequence has ended."""
    if not sequence.finished or not sequence.logprobs or not sequence.logprobs[0].hidden_state:
        return None
    numbers = bytearray().join(token.hidden_state for token in sequence.logprobs)
    return np.frombuffer(numbers, np.float32).reshape(len(sequence.logprobs), -1)


def _text_end(sequence: Sequence, num_tokens: int) -> int:
    return sequence.text_ends[num_tokens - 1] if num_tokens else 0


def _number(completions: list[CompletionOutput]) -> list[CompletionOutput]:
    return [replace(completion, index=index) for index, completion in enumerate(completions)]
