"""Turns what a caller asks into a `Request`, or refuses it with the parameter, its value and the limit, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpage.errors import UnsupportedError
from jaxpage.request import Request
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.support import unsupported


class Admission:
    """The limits of one engine's model, and the seeds of requests that bring none."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        has_text: bool,
        has_priorities: bool,
        seed: int,
    ):
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._has_text = has_text
        self._has_priorities = has_priorities
        self._seed = seed
        self._num_admitted = 0

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams | BeamSearchParams) -> None:
        """Raises ValueError or UnsupportedError; returns if the request can be admitted."""
        if refused := unsupported(params):
            raise UnsupportedError(f"This version does not support {', '.join(refused)}")
        assert isinstance(params, SamplingParams)
        if params.priority and not self._has_priorities:
            raise UnsupportedError(f"priority={params.priority} needs scheduling_policy='priority'")
        if not prompt_token_ids:
            raise ValueError("The prompt has no tokens; at least one is needed")
        self._check_token_ids("prompt_token_ids", prompt_token_ids)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        if len(prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"The prompt has {len(prompt_token_ids)} tokens, which leaves no room to generate: max_model_len is "
                f"{self._max_model_len}, prompt and output together"
            )
        room = self._max_model_len - len(prompt_token_ids)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} does not fit: after the prompt there is room for {room} tokens"
            )
        if params.stop and not self._has_text:
            raise ValueError(
                f"stop={list(params.stop)!r} needs text, but the model has no tokenizer; use stop_token_ids"
            )
        if params.structured_outputs and not self._has_text:
            kind, _ = params.structured_outputs
            raise ValueError(f"structured_outputs of {kind!r} needs text, but the model has no tokenizer")
        suppressed = self._eos(params).union(params.stop_token_ids)
        if params.min_tokens and len(suppressed) >= self._vocab_size:
            raise ValueError(f"min_tokens={params.min_tokens}: every token of the vocabulary is a stop token")

    def admit(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Request:
        self.check(prompt_token_ids, params)
        self._num_admitted += 1
        longest = self._max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            seed=self._drawn_seed() if params.seed is None else params.seed,
            eos_token_ids=self._eos(params),
            max_total_tokens=longest,
        )

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._eos_token_ids

    def _drawn_seed(self) -> int:
        """A function of the engine's seed and the request's ordinal, so that a run can be repeated."""
        return int(np.random.SeedSequence((self._seed, self._num_admitted)).generate_state(1, np.uint64)[0])

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if type(token_id) is not int:
                raise TypeError(f"{name} must hold integers, but has {token_id!r}")
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"{name} has {token_id}, but the model's token ids are 0 to {self._vocab_size - 1}")
