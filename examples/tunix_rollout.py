"""jaxpage as the rollout engine of google-tunix, by the interface that it has for engines from outside (`BaseRollout`, Tunix 0.1.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxpage.llm import LLM
from jaxpage.settings.sampling_params import SamplingParams


class JaxpageRollout(BaseRollout):
    """`ClusterConfig(rollout_engine=functools.partial(JaxpageRollout, llm=llm, named=named), ...)`.

    Log probabilities are those of temperature 1, of rollouts and of `get_per_token_logps` alike, and equal to the last bit.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        named: Callable[[Any], Mapping[str, Any]],
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
    ):
        """
        Args:
            llm: the engine; it has its own devices.
            named: makes of the trainer's parameters a dict of arrays under the names of Hugging Face, as `LLM.update_parameters` takes it.
            rollout_actor: Tunix's model, which `model` gives back.
            tokenizer, mesh, rollout_config: given by Tunix and not needed.
        """
        if llm.tokenizer is None:
            raise ValueError("Tunix gives prompts as text, and the engine has no tokenizer")
        self._llm, self._named, self._actor = llm, named, rollout_actor
        self._tokenizer: Any = llm.tokenizer

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """One completion of each prompt. Equal prompts get different ones, also with a seed.

        Raises ValueError for prompts longer than `max_prompt_length`, and TypeError for arguments that are unknown.
        """
        if kwargs:
            raise TypeError(f"arguments that are not supported: {', '.join(kwargs)}")
        requested = rollout_config
        token_ids = [self._tokenizer(prompt)["input_ids"] for prompt in prompts]
        width = requested.max_prompt_length
        if (max_length := max(map(len, token_ids))) > width:
            raise ValueError(f"a prompt has {max_length} tokens, and max_prompt_length is {width}")
        seed = (
            None
            if requested.seed is None
            else int(np.asarray(jax.random.key_data(requested.seed)).ravel()[-1])
        )
        params = [
            SamplingParams(
                max_tokens=requested.max_tokens_to_generate,
                temperature=requested.temperature,
                top_p=1.0 if requested.top_p is None else requested.top_p,
                top_k=0 if requested.top_k in (None, -1) else requested.top_k,
                stop_token_ids=list(requested.eos_tokens or ()),
                ignore_eos=requested.eos_tokens is not None,
                seed=None if seed is None else (seed + index) % 2**32,
                logprobs=0 if requested.return_logprobs else None,
            )
            for index in range(len(prompts))
        ]
        outputs = [
            output.outputs[0] for output in self._llm.generate(token_ids, params, use_tqdm=False)
        ]
        padded_NC = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, ids in zip(padded_NC, token_ids, strict=True):
            row[width - len(ids) :] = ids
        logprobs = None
        if requested.return_logprobs:
            entries = [
                zip(output.logprobs or (), output.token_ids, strict=True) for output in outputs
            ]
            logprobs = [
                np.array([entry[id_].logprob for entry, id_ in each if entry], np.float32)
                for each in entries
            ]
        tokens = [np.array(output.token_ids, np.int32) for output in outputs]
        return RolloutOutput([output.text for output in outputs], [], tokens, padded_NC, logprobs)

    def get_per_token_logps(
        self, prompt_tokens: npt.ArrayLike, completion_tokens: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """[N, C] for prompts that are padded on the left and completions that are padded on the right; 0 for padding.

        A completion ends with its first end-of-sequence token, or before its padding.
        """
        prompts = [_without_first(row, self.pad_id()) for row in np.asarray(prompt_tokens).tolist()]
        completions_NC = np.asarray(completion_tokens)
        completions = [self._ended(row) for row in completions_NC.tolist()]
        result_NC = np.zeros(completions_NC.shape, np.float32)
        scores: Any = self._llm.score(prompts, completions)
        for row, found in zip(result_NC, scores, strict=True):
            row[: len(found)] = found
        return result_NC

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """The engine's next requests use them; nothing is compiled. What is missing or does not fit is an error, and the old ones stay."""
        self._llm.update_parameters(self._named(params))

    def pad_id(self) -> int:
        pad_id = self._tokenizer.pad_token_id
        return self.eos_id() if pad_id is None else int(pad_id)

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def model(self) -> Any:
        return self._actor

    def _ended(self, token_ids: list[int]) -> list[int]:
        if self.eos_id() in token_ids:
            return token_ids[: token_ids.index(self.eos_id()) + 1]
        return _without_first(token_ids[::-1], self.pad_id())[::-1]


def _without_first(token_ids: Sequence[int], pad_id: int) -> list[int]:
    start = next((index for index, id_ in enumerate(token_ids) if id_ != pad_id), len(token_ids))
    return list(token_ids[start:])
