"""Defines a request as the host sees it.

`Request` is what was asked, and never changes. `Sequence` and `SequenceGroup` are what has come of
it so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import TokenLogprobs
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.embedded import EmbeddedPrompt
from jaxpage.step.thinking import ThinkingBudget


class LoRAAdapter(NamedTuple):
    """A LoRA adapter that was opened.

    Attributes:
        name: The name that the caller gave it.
        digest: The hash of its numbers, by which it is known.
    """

    name: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One admitted request, in which everything is resolved.

    Attributes:
        request_id: The id, which no other unfinished request has.
        prompt: The text of the prompt, if it was given as text.
        prompt_token_ids: The tokens of the prompt.
        params: The sampling parameters. For a beam search they are neutral but for its lengths and
            the tokens that end it.
        seed: The seed of the noise, 0 <= seed < 2**64. The engine drew it if the caller gave none.
        eos_token_ids: The end-of-sequence tokens; none with `ignore_eos`.
        max_total_tokens: The most tokens of prompt and output together, clipped to the model.
        beam: The parameters of a beam search; None for sampling.
        bad_word_token_ids: The bad words as tokens. None of them may be output as a whole.
        thinking: The budget for reasoning, or None.
        is_prefix: True if the request is computed for a pin and ends when its prompt is computed.
            Nothing is drafted for it.
        lora: The adapter that it is computed with, or None.
        embedded: What vectors take the place of which tokens of the prompt; None for a prompt of
            tokens alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    max_total_tokens: int
    beam: BeamSearchParams | None = None
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    is_prefix: bool = False
    lora: LoRAAdapter | None = None
    embedded: EmbeddedPrompt | None = None

    @cached_property
    def content_ids(self) -> tuple[int, ...]:
        """Returns the prompt as the prefix cache compares it; see `Sequence.content_ids`."""
        if self.embedded is None:
            return self.prompt_token_ids
        return tuple(self.embedded.replace_ids(self.prompt_token_ids))

    @cached_property
    def prefix_salt(self) -> str | None:
        """Returns the salt of its cached prefixes: only requests with the same one share them.

        It is made of the caller's cache salt, which has no NUL, and of the adapter's numbers.
        """
        salt = self.params.cache_salt
        if self.lora is None:
            return salt
        # A request without an adapter cannot have this salt, because callers' salts have no NUL.
        return f"\0{self.lora.digest}" + ("" if salt is None else f"\0{salt}")

    @property
    def num_sequences(self) -> int:
        """Returns how many sequences can run at once, for which its admission makes room."""
        return self.beam.beam_width if self.beam else self.params.best_of or self.params.n

    @property
    def num_sequence_ids(self) -> int:
        """Returns how many sequence ids it can use at once.

        A beam search also keeps sequences that have ended and may still be the result.
        """
        return 2 * self.beam.beam_width if self.beam else self.num_sequences

    @cached_property
    def ending_token_ids(self) -> frozenset[int]:
        """Returns every token that ends a sequence."""
        return self.eos_token_ids.union(self.params.stop_token_ids)

    @cached_property
    def processes_logits(self) -> bool:
        """Returns whether the logits are changed by more than temperature and truncation."""
        return self.params.processes_logits or bool(self.bad_word_token_ids)

    @cached_property
    def bad_token_ids(self) -> frozenset[int]:
        """Returns the bad words of one token."""
        return frozenset(word[0] for word in self.bad_word_token_ids if len(word) == 1)

    @cached_property
    def bad_words_after(self) -> dict[int, list[tuple[int, ...]]]:
        """Returns the other bad words, by their last token but one."""
        words: dict[int, list[tuple[int, ...]]] = {}
        for word in self.bad_word_token_ids:
            if len(word) > 1:
                words.setdefault(word[-2], []).append(word)
        return words

    @cached_property
    def num_logprobs(self) -> int | None:
        """Returns how many of the most likely candidates of each draw must leave the device.

        None says that not even the log probability of the drawn token is needed. A beam search
        needs as many candidates as there are beams, should one beam have them all, and in addition
        those that end it.
        """
        if self.beam:
            return self.beam.beam_width + len(self.ending_token_ids)
        return self.params.num_logprobs


# Sequences are told apart by identity: two samples with equal tokens are not the same, and
# comparing all tokens would take long.
@dataclass(eq=False)
class Sequence:
    """One sequence of a request: the tokens that are known, and how many of them are computed.

    The scheduler gives it work so that the second number catches up with the first. The logits of
    the last known token are sampled next. Only `Scheduler.commit`, admission and preemption change
    a sequence, and known tokens are only ever added.

    Attributes:
        sequence_id: The id, under which it has block tables.
        sample_index: Its number among the samples of the request.
        num_prompt_tokens: The number of tokens of the prompt.
        token_ids: The known tokens: the prompt, then the output.
        embedded: See `Request.embedded`.
        num_computed_tokens: The number of tokens whose keys and values are in its blocks.
        block_digests: The digests of its first full blocks; see `memory.PrefixIndex`.
        text: The text that may be shown. Text that a stop string could still cut is held back.
        text_ends: The length of the text in characters after each output token.
        logprobs: The log probabilities of the output tokens; empty unless asked for.
        routes: The experts [L, X] of each computed token, prompt first; empty unless asked for.
        cumulative_logprob: The sum of the log probabilities of the output tokens.
        finish_reason: The reason why it ended; None while it has not.
        stop_reason: The stop string or token that ended it, or what went wrong.
        weights: The weights that drew its output: for each that did, the number of output tokens
            before, and the version.
    """

    sequence_id: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: list[int]
    embedded: EmbeddedPrompt | None = None
    num_computed_tokens: int = 0
    block_digests: list[bytes] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    routes: list[npt.NDArray[np.int16]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weights: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def goes_on_with(self, version: int) -> None:
        """Notes the version of the weights that draw its next tokens."""
        if self.weights[-1][0] == self.num_output_tokens:
            # No token was drawn with the weights of this entry.
            self.weights.pop()
        self.weights.append((self.num_output_tokens, version))

    def weights_versions(self, start: int, stop: int) -> list[int]:
        """Returns the version of the weights that drew each of the output tokens of a span."""
        versions: list[int] = []
        stops = [first for first, _ in self.weights[1:]] + [stop]
        for (first, version), after in zip(self.weights, stops, strict=True):
            # The product is empty where the two spans do not overlap: a list times a negative
            # number.
            versions += [version] * (min(after, stop) - max(first, start))
        return versions

    @property
    def num_known_tokens(self) -> int:
        """Returns how many tokens are known."""
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Returns how many known tokens are not computed.

        There is one while it decodes, and more with a new prompt or after a preemption.
        """
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def content_ids(self) -> list[int]:
        """Returns the known tokens as the prefix cache compares them.

        A token that a vector takes the place of has a number that stands for the vector.
        """
        return (
            self.token_ids if self.embedded is None else self.embedded.replace_ids(self.token_ids)
        )

    @property
    def takes_vectors(self) -> bool:
        """Returns whether a vector takes the place of a token that is not computed."""
        return self.embedded is not None and self.num_computed_tokens < self.embedded.stop

    @property
    def needs_embedded(self) -> bool:
        """Returns whether its next step takes vectors, or rotary positions on several axes."""
        embedded = self.embedded
        return embedded is not None and (self.takes_vectors or embedded.axes_AT is not None)

    @property
    def output_token_ids(self) -> list[int]:
        """Returns the tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Returns how many tokens follow the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Returns whether it has ended."""
        return self.finish_reason is not None


@dataclass(eq=False)
class SequenceGroup:
    """The sequences of one request.

    They are admitted, preempted and resumed together (PagedAttention, section 4.5).

    Attributes:
        request: What was asked.
        sequences: The sequences, the finished ones included.
        arrival: The number of its arrival, given by the scheduler.
        admission: The number of its first admission, given by the scheduler.
        num_preemptions: The number of times that it was preempted.
        num_cached_tokens: The tokens of the prompt that were found at the first admission; None
            before it.
        child_ids: The sequence ids of samples 1, 2, ..., which the first draw forks off sample 0.
        reserved_ids: The sequence ids that a beam search gives to its forks, each to one at a time.
        prompt_logprobs: The log probabilities of the prompt's tokens 1, 2, ..., as far as they are
            known.
    """

    request: Request
    sequences: list[Sequence]
    arrival: int = 0
    admission: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    child_ids: tuple[int, ...] = ()
    reserved_ids: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_unscored(self) -> int:
        """Returns how many tokens of the prompt lack a log probability that is wanted.

        No token comes before the first one, so the first one has none.
        """
        if self.request.params.prompt_logprobs is None:
            return 0
        return len(self.request.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    @property
    def pending_forks(self) -> tuple[int, ...]:
        """Returns the ids of `child_ids` until they are forked, all in one step."""
        return self.child_ids if len(self.sequences) == 1 else ()

    @property
    def sequence_ids(self) -> list[int]:
        """Returns all ids that are its own: of sequences, of forks to come, and reserved ones."""
        present = (sequence.sequence_id for sequence in self.sequences)
        # Reserved ids are in use by sequences, too; each id is told once.
        return list(dict.fromkeys([*present, *self.pending_forks, *self.reserved_ids]))

    @property
    def unfinished(self) -> list[Sequence]:
        """Returns the sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def finished(self) -> bool:
        """Returns whether all its sequences have ended."""
        return not self.unfinished
