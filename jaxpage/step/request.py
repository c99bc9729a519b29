"""A request as the host sees it: what was asked (`Request`, frozen) and what has come of it so far (`Sequence`, `SequenceGroup`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jaxpage.outputs import TokenLogprobs
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


class LoRAAdapter(NamedTuple):
    """digest: of its numbers, by which it is known."""

    name: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One admitted request. Everything is resolved: the seed is drawn, the lengths are clipped to the model."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # of a beam search: neutral but for its lengths and its ends
    seed: int  # of the noise, 0 <= seed < 2**64; drawn by the engine when the caller gave none
    eos_token_ids: frozenset[int]  # empty when ignore_eos
    max_total_tokens: int  # prompt and output together: min(prompt + max_tokens, max_model_len)
    beam: BeamSearchParams | None = None
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # `bad_words` as tokens: none of these may come out whole
    is_prefix: bool = False  # it is computed to be pinned, and ended when its prompt is: nothing is drafted behind it
    lora: LoRAAdapter | None = None  # the adapter that it is computed with

    @cached_property
    def prefix_salt(self) -> str | None:
        """Only requests with the same share cached prefixes: that of the caller, and the adapter's numbers. Callers' have no NUL."""
        salt = self.params.cache_salt
        if self.lora is None:
            return salt
        return f"\0{self.lora.digest}" + ("" if salt is None else f"\0{salt}")

    @property
    def num_sequences(self) -> int:
        """How many sequences the request can have at once: what its admission has to make room for."""
        return self.beam.beam_width if self.beam else self.params.best_of or self.params.n

    @property
    def num_sequence_ids(self) -> int:
        """How many ids its sequences can have at once: of a beam search also those that have ended and may still be the result."""
        return 2 * self.beam.beam_width if self.beam else self.num_sequences

    @cached_property
    def ending_token_ids(self) -> frozenset[int]:
        """Every token that ends a sequence."""
        return self.eos_token_ids.union(self.params.stop_token_ids)

    @cached_property
    def processes_logits(self) -> bool:
        """Whether anything but temperature and truncation stands between the logits and a draw."""
        return self.params.processes_logits or bool(self.bad_word_token_ids)

    @cached_property
    def bad_token_ids(self) -> frozenset[int]:
        """Bad words of one token."""
        return frozenset(word[0] for word in self.bad_word_token_ids if len(word) == 1)

    @cached_property
    def bad_words_behind(self) -> dict[int, list[tuple[int, ...]]]:
        """The other bad words, by their last token but one."""
        words: dict[int, list[tuple[int, ...]]] = {}
        for word in self.bad_word_token_ids:
            if len(word) > 1:
                words.setdefault(word[-2], []).append(word)
        return words

    @cached_property
    def num_logprobs(self) -> int | None:
        """Of the likeliest candidates of each draw, how many have to leave the device; None: not even the drawn one.

        Of a beam search as many as go on, should one beam have them all, besides those that end it.
        """
        return self.beam.beam_width + len(self.ending_token_ids) if self.beam else self.params.num_logprobs


@dataclass(eq=False)
class Sequence:
    """One sequence of a request: tokens known, and how many of them the device has computed.

    There are no phases. The scheduler gives work so that `num_computed_tokens` catches up with `num_known_tokens`;
    the last known token is the one whose logits are sampled next. Only `Scheduler.commit`, admission and preemption change a
    sequence; known tokens are only ever added.
    """

    sequence_id: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: list[int]  # known: the prompt, then the output
    num_computed_tokens: int = 0  # their keys and values are in the sequence's blocks
    block_digests: list[bytes] = field(default_factory=list)  # of its first full blocks: see memory.PrefixIndex
    text: str = ""  # what may be shown: text that a stop string could still cut is held back
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output tokens; empty unless asked for
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not computed: 1 while decoding, more for a prompt or after a preemption."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and resumed together, all or nothing (PagedAttention, section 4.5)."""

    request: Request
    sequences: list[Sequence]
    arrival: int = 0  # ordinals, given by the scheduler: of its arrival, and of its first admission
    admission: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the cache at the first admission; None before it
    child_ids: tuple[int, ...] = ()  # sequence ids of samples 1, 2, ..., which the first draw forks off sample 0
    reserved_ids: tuple[int, ...] = ()  # sequence ids that a beam search gives to its forks, each to one at a time
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens 1, 2, ...: see `num_unscored`

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log probabilities are wanted and not known yet. Nothing stands before the first, so it has none."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return len(self.request.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    @property
    def pending_forks(self) -> tuple[int, ...]:
        """The ids of `child_ids` until they are forked, all at once."""
        return self.child_ids if len(self.sequences) == 1 else ()

    @property
    def sequence_ids(self) -> list[int]:
        """Of all its sequences, those that are due included, and all that are reserved for forks."""
        return list(dict.fromkeys([*(s.sequence_id for s in self.sequences), *self.pending_forks, *self.reserved_ids]))

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def finished(self) -> bool:
        return not self.unfinished
