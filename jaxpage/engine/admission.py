"""Turns what a caller asks for into a `Request`, or refuses it before anything runs.

A refusal names the parameter, its value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxpage.engine.texts.embedding import TextEmbedding
from jaxpage.engine.thinking import for_prompt
from jaxpage.errors import UnsupportedError
from jaxpage.settings.sampling_params import (
    THINK_MARKERS,
    BeamSearchParams,
    SamplingParams,
    ThinkingMarkers,
)
from jaxpage.shapes import MAX_BIASES, NUM_CANDIDATES
from jaxpage.step.aborted import AbortedRequest
from jaxpage.step.embedded import EmbeddedPrompt
from jaxpage.step.request import LoRAAdapter, Request
from jaxpage.step.thinking import ThinkingBudget

if TYPE_CHECKING:
    from jaxpage.checkpoints import Adapter
    from jaxpage.decoding import Grammar

Words = tuple[tuple[int, ...], ...]  # each word as its token ids

NO_GENERATION = (
    "this model is an encoder: it embeds and ranks texts (LLM.embed and LLM.rerank, POST "
    "/v1/embeddings and /v1/rerank), and generates none"
)
REPETITION_PENALTIES = (1e-9, 1e9)  # a logit times or divided by any of these fits into float32


class CheckedParams(NamedTuple):
    """Holds parameters that fit the model; they are checked once, however many prompts share them.

    Attributes:
        requested: The parameters of the caller.
        sampling: The same as sampling parameters. For a beam search they have only its lengths and
            its ends, and are neutral otherwise.
        bad_word_token_ids: The token ids of each bad word.
        thinking: The budget for reasoning, or None.
    """

    requested: SamplingParams | BeamSearchParams
    sampling: SamplingParams
    bad_word_token_ids: Words
    thinking: ThinkingBudget | None = None

    @property
    def beam(self) -> BeamSearchParams | None:
        """Returns the parameters of the beam search, or None for sampling."""
        return self.requested if isinstance(self.requested, BeamSearchParams) else None


class AdmissionRules(NamedTuple):
    """Holds what the model and the settings of an engine admit.

    Attributes:
        max_model_len: The most tokens of a sequence, prompt and output together.
        eos_token_ids: The end-of-sequence ids of the model.
        seed: The engine's seed, from which the seeds of requests are made.
        generates: False for an encoder, which computes vectors and scores of texts alone.
        refusals: The reasons for which parameters of requests cannot be True, by their names.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    seed: int
    generates: bool = True
    refusals: Mapping[str, str] = {}


class NamedAdapter(NamedTuple):
    """Holds a LoRA adapter that was read and fits the model."""

    name: str
    adapter: Adapter


class PreparedRequest(NamedTuple):
    """Holds a request that is checked, tokenized and compiled, and can be added to the engine.

    Attributes:
        prompt: The text of the prompt, if there is one.
        token_ids: The token ids of the prompt.
        checked: The parameters.
        grammar: The compiled grammar; None if there is none, or if `Engine.add` shall compile it.
        is_prefix: True if the prompt is computed in order to be pinned.
        lora: The adapter, if the request has one.
        embedded: The vectors that take the place of tokens, if any do.
        aborted: What the request had before it was aborted, if it is continued.
    """

    prompt: str | None
    token_ids: tuple[int, ...]
    checked: CheckedParams
    grammar: Grammar | None = None
    is_prefix: bool = False
    lora: NamedAdapter | None = None
    embedded: EmbeddedPrompt | None = None
    aborted: AbortedRequest | None = None

    @property
    def params(self) -> SamplingParams | BeamSearchParams:
        """Returns the parameters of the caller."""
        return self.checked.requested


class Admission:
    """Knows the limits of one engine's model, and gives seeds to requests that have none.

    `check_params` and `prepare` take time that grows with the request; any thread may call them.
    `admit` is quick.
    """

    def __init__(
        self,
        rules: AdmissionRules,
        *,
        vocab_size: int,
        spell: Callable[[tuple[str, ...]], Words] | None,
        read_budget: Callable[[int, ThinkingMarkers], ThinkingBudget] | None,
        has_priorities: bool,
    ):
        """Sets the limits.

        Args:
            rules: What the model and the settings admit.
            vocab_size: The number of token ids (V).
            spell: Gives the tokens of words; None if the model has no tokenizer.
            read_budget: Makes the budget for reasoning; None if the model has no tokenizer.
            has_priorities: True if the scheduling policy uses the priorities of requests.
        """
        self._rules = rules
        self._vocab_size = vocab_size
        self._spell = spell
        self._read_budget = read_budget
        self._has_priorities = has_priorities
        self._num_admitted = 0

    def check_params(self, requested: SamplingParams | BeamSearchParams) -> CheckedParams:
        """Checks everything that does not depend on the prompt.

        Raises:
            ValueError: A parameter does not fit the model.
            UnsupportedError: A parameter cannot be honoured, or the model generates nothing.
        """
        # Only a request for vectors has this very object, whatever others have in common with it.
        if not self._rules.generates and requested is not TextEmbedding.params:
            raise UnsupportedError(NO_GENERATION)
        params = requested
        if isinstance(params, BeamSearchParams):
            self._check_width(params)
            params = _neutral(params)
        if params.priority and not self._has_priorities:
            raise UnsupportedError(f"priority={params.priority} needs scheduling_policy='priority'")
        self._check_returned(params)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        if params.stop and self._spell is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs text, but the model has no tokenizer; use "
                "stop_token_ids"
            )
        if params.structured_outputs and self._spell is None:
            kind, _ = params.structured_outputs
            raise ValueError(
                f"structured_outputs of {kind!r} needs text, but the model has no tokenizer"
            )
        self._check_processor_inputs(params)
        words = self._words(params)
        self._check_choice(params, words)
        return CheckedParams(requested, params, words, self._thinking(params, words))

    def prepare(
        self,
        prompt: str | None,
        token_ids: Sequence[int],
        checked: CheckedParams,
        embedded: EmbeddedPrompt | None = None,
    ) -> PreparedRequest:
        """Returns a request for `admit`, without a grammar.

        Args:
            prompt: The text of the prompt, if there is one.
            token_ids: The token ids of the prompt.
            checked: The parameters, which `check_params` returned.
            embedded: The vectors that take the place of some of the tokens, if any do.

        Raises:
            ValueError: The prompt is empty or too long, or has ids that the model does not have.
            UnsupportedError: The tokens of a prompt with vectors are to be scored.
        """
        if not token_ids:
            raise ValueError("The prompt has no tokens; at least one is needed")
        max_length = self._max_length(checked.sampling)
        # Such a prompt is only scored, so the message speaks of no output.
        if len(token_ids) >= max_length > self._rules.max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens are more than max_model_len = {self._rules.max_model_len}"
            )
        if len(token_ids) >= max_length:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, which leaves no room to generate: "
                "max_model_len is "
                f"{self._rules.max_model_len}, prompt and output together"
            )
        self._check_token_ids("prompt_token_ids", token_ids)
        room = max_length - len(token_ids)
        if checked.sampling.min_tokens > room:
            raise ValueError(
                f"min_tokens={checked.sampling.min_tokens} does not fit: after the prompt there is "
                f"room for {room} tokens"
            )
        if checked.beam:
            _check_length_penalty(checked.beam, min(checked.beam.max_tokens or room, room))
        if embedded is not None and checked.sampling.prompt_logprobs is not None:
            raise UnsupportedError(
                f"prompt_logprobs={checked.sampling.prompt_logprobs} is not possible for a prompt "
                "with vectors in place of tokens: a vector has no log probability"
            )
        return PreparedRequest(prompt, tuple(token_ids), checked, embedded=embedded)

    def _max_length(self, params: SamplingParams) -> int:
        """Returns the most tokens of a sequence, prompt and output together.

        If a prompt is scored, the one token after it is drawn but never computed, so it needs no
        room.
        """
        return self._rules.max_model_len + (
            params.max_tokens == 1 and params.prompt_logprobs is not None
        )

    def _check_width(self, beam: BeamSearchParams) -> None:
        num_ends = len(self._eos(beam).union(beam.stop_token_ids))
        if min(beam.beam_width + num_ends, self._vocab_size) > NUM_CANDIDATES:
            raise UnsupportedError(
                f"beam_width={beam.beam_width} with {num_ends} end-of-sequence and stop ids needs "
                f"{beam.beam_width + num_ends}"
                f" candidates for each token; at most {NUM_CANDIDATES} are available"
            )

    def admit(self, request_id: str, prepared: PreparedRequest) -> Request:
        """Returns the request, with a seed if it has none."""
        checked = prepared.checked
        params = prepared.checked.sampling
        self._num_admitted += 1
        max_length = self._max_length(params)
        if params.max_tokens is not None:
            max_length = min(max_length, len(prepared.token_ids) + params.max_tokens)
        return Request(
            request_id=request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.token_ids,
            params=params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=self._eos(params),
            max_total_tokens=max_length,
            bad_word_token_ids=checked.bad_word_token_ids,
            thinking=checked.thinking and for_prompt(checked.thinking, prepared.token_ids),
            beam=checked.beam,
            is_prefix=prepared.is_prefix,
            lora=prepared.lora and LoRAAdapter(prepared.lora.name, prepared.lora.adapter.digest),
            embedded=prepared.embedded,
        )

    def _check_returned(self, params: SamplingParams) -> None:
        for name, reason in self._rules.refusals.items():
            if getattr(params, name):
                raise UnsupportedError(f"{name}=True {reason}")
        if params.return_sampling_mask and (params.greedy or not params.top_k):
            raise UnsupportedError(
                "return_sampling_mask=True needs a temperature above 0 and a top_k above 0, "
                "because greedy decoding cuts nothing and top_k bounds the mask; they are "
                f"{params.temperature:g} and {params.top_k}"
            )

    def _check_processor_inputs(self, params: SamplingParams) -> None:
        if len(params.logit_bias) > MAX_BIASES:
            raise UnsupportedError(
                f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_BIASES} are allowed"
            )
        self._check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        low, high = REPETITION_PENALTIES
        if not low <= params.repetition_penalty <= high:
            raise UnsupportedError(
                f"repetition_penalty={params.repetition_penalty} is out of range for float32 "
                f"logits; use {low} to {high}"
            )

    def _words(self, params: SamplingParams) -> Words:
        """Returns the token ids of each bad word."""
        if not params.bad_words:
            return ()
        if self._spell is None:
            raise ValueError(
                f"bad_words={list(params.bad_words)!r} needs text, but the model has no tokenizer; "
                "use allowed_token_ids or logit_bias"
            )
        return self.check_words(self._spell(params.bad_words))

    def check_words(self, words: Words) -> Words:
        """Returns these words.

        Raises:
            ValueError: A word has no tokens, or has ids that the model does not have.
        """
        for word in words:
            self._check_token_ids("bad_words", word)
            if not word:
                raise ValueError("bad_words has a word that has no tokens")
        return words

    def _thinking(self, params: SamplingParams, words: Words) -> ThinkingBudget | None:
        """Returns the budget for reasoning.

        Raises:
            ValueError: The other parameters do not admit the tokens of the closing marker.
        """
        if params.thinking_token_budget is None:
            return None
        name = f"thinking_token_budget={params.thinking_token_budget}"
        if self._read_budget is None:
            raise ValueError(f"{name} needs text, but the model has no tokenizer")
        markers = params.thinking_markers or THINK_MARKERS
        budget = self._read_budget(params.thinking_token_budget, markers)
        token_ids = budget.endings[0]
        self._check_token_ids("thinking_markers", token_ids)
        forbidden = {word[0] for word in words if len(word) == 1}
        if params.allowed_token_ids is not None:
            forbidden |= set(token_ids) - params.allowed_token_ids.as_set
        if masked := sorted(forbidden.intersection(token_ids)):
            raise ValueError(
                f"{name} forces {markers[1]!r}, but allowed_token_ids or bad_words forbid its "
                f"token ids {masked}"
            )
        return budget

    def _check_choice(self, params: SamplingParams, words: Words) -> None:
        """Checks that a first token can be drawn, whatever the logits are.

        Raises:
            ValueError: The parameters mask all tokens.
        """
        forbidden = {word[0] for word in words if len(word) == 1}
        why = [
            "every token of the vocabulary"
            if params.allowed_token_ids is None
            else "all of allowed_token_ids"
        ]
        why += ["is a bad word"] if forbidden else []
        if params.min_tokens:
            forbidden |= self._eos(params) | params.stop_token_ids.as_set
            why.append(f"ends the text before min_tokens={params.min_tokens}")
        allowed: Collection[int] = range(self._vocab_size)
        if params.allowed_token_ids is not None:
            allowed = params.allowed_token_ids
        if forbidden and forbidden.issuperset(allowed):
            raise ValueError(f"all tokens are masked: {why[0]} {' or '.join(why[1:])}")

    def _eos(self, params: SamplingParams | BeamSearchParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._rules.eos_token_ids

    def _draw_seed(self) -> int:
        """Returns a seed that depends on the engine's seed and the number of the request only."""
        return int(
            np.random.SeedSequence((self._rules.seed, self._num_admitted)).generate_state(
                1, np.uint64
            )[0]
        )

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            # `isinstance` would let a bool through.
            if type(token_id) is not int:
                raise TypeError(f"{name} must hold integers, but has {token_id!r}")
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{name} has {token_id}, but the model's token ids are 0 to "
                    f"{self._vocab_size - 1}"
                )


def _check_length_penalty(beam: BeamSearchParams, max_length: int) -> None:
    try:
        # A score is divided by this power, also where the penalty is negative.
        math.pow(max_length, abs(beam.length_penalty))
    except OverflowError:
        raise ValueError(
            f"length_penalty={beam.length_penalty}: {max_length} tokens to this power is too large "
            "for a float; use a smaller value"
        ) from None


def _neutral(beam: BeamSearchParams) -> SamplingParams:
    """Returns what a beam search has in common with sampling: its lengths and its ends.

    The rest is neutral, since a beam search draws nothing at random.
    """
    return SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=beam.max_tokens,
        ignore_eos=beam.ignore_eos,
        stop_token_ids=beam.stop_token_ids,
    )
