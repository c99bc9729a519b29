"""Prepares requests for a driver, for `LLM` and `AsyncLLM` alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxpage.assembly import BuiltModel, Mode, load_given_weights, weights_for_waking
from jaxpage.checkpoints import Parameters
from jaxpage.driver.driver import Driver
from jaxpage.driver.encoding import check_streamable, prepare
from jaxpage.driver.orders import PendingAnswer
from jaxpage.engine import (
    ByVectors,
    CheckedParams,
    Engine,
    NamedAdapter,
    PreparedRequest,
    RerankMethod,
    YesNo,
    normalise,
    one_each,
    reranker_of,
)
from jaxpage.outputs import Pooling, TokenPooling
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

Params = SamplingParams | BeamSearchParams
SLEEP_LEVELS = (1, 2)  # the weights are in the host's memory, or dropped


class DrivenModel(BuiltModel):
    """Prepares the requests of a model whose engine a driver drives.

    The methods here run on the thread of the caller, while the engine works for others.
    """

    _driver: Driver

    @property
    def _engine(self) -> Engine:
        return self._driver.engine

    def _prepare(
        self, prompts: Any, params: Any, lora_request: Any = None
    ) -> list[PreparedRequest]:
        """Encodes and checks all prompts, so that a bad one is refused before anything runs."""
        self._driver.check_awake()
        normalised = normalise(prompts)
        each = one_each(
            self.default_sampling_params() if params is None else params, len(normalised)
        )
        adapters = self._adapters(one_each(lora_request, len(normalised), "lora_request"))
        requests = []
        checked: dict[int, CheckedParams] = {}  # keyed by `id()`: prompts may share parameters
        for index, (prompt, params_of_prompt, lora) in enumerate(
            zip(normalised, each, adapters, strict=True)
        ):
            if not isinstance(params_of_prompt, SamplingParams | BeamSearchParams):
                raise TypeError(
                    f"params must be SamplingParams or BeamSearchParams, not {type(params_of_prompt).__name__}"
                )
            try:
                if id(params_of_prompt) not in checked:
                    checked[id(params_of_prompt)] = self._engine.check_params(params_of_prompt)
                request = prepare(self._engine, prompt, checked[id(params_of_prompt)])
                requests.append(
                    request._replace(
                        grammar=self._engine.compile_grammar(params_of_prompt), lora=lora
                    )
                )
            except Exception as error:
                if len(normalised) > 1:
                    error.add_note(f"This is prompt {index} of {len(normalised)}.")
                raise
        return requests

    def _prepare_stream(
        self, name: str, prompt: Any, params: Any, lora_request: Any
    ) -> PreparedRequest:
        """Prepares one prompt whose output comes in chunks.

        Raises:
            UnsupportedError: Nothing can be shown before the end; see `check_streamable`.
        """
        request = self._prepare_one(name, prompt, params, lora_request)
        check_streamable(request.params)
        return request

    def _prepare_one(
        self, name: str, prompt: Any, params: Any, lora_request: Any = None
    ) -> PreparedRequest:
        """Prepares one prompt, for the method that is called `name`."""
        requests = self._prepare(prompt, params, lora_request)
        if len(requests) != 1:
            raise ValueError(f"{name} takes one prompt, not {len(requests)}; call it for each")
        return requests[0]

    def _adapters(self, asked: Sequence[Any]) -> list[NamedAdapter | None]:
        """Returns the adapter of each prompt; each is read once.

        Raises:
            TypeError: An element is no LoRARequest.
            UnsupportedError: The engine has no adapters.
            ValueError: A number belongs to another adapter.
            ModelNotFoundError: There is no such directory.
            CheckpointError: An adapter does not fit the model.
        """
        if wrong := [adapter for adapter in asked if not isinstance(adapter, LoRARequest | None)]:
            raise TypeError(
                f"lora_request must be LoRARequest or None, not {type(wrong[0]).__name__}"
            )
        opened = {
            adapter: self._engine.open_adapter(adapter)
            for adapter in dict.fromkeys(asked)
            if adapter is not None
        }
        return [opened.get(adapter) for adapter in asked]

    def _prepare_prefix(self, prefix: Any, cache_salt: str | None) -> PreparedRequest:
        """Prepares a prefix that is computed to be pinned."""
        params = SamplingParams(
            temperature=0.0, max_tokens=2, ignore_eos=True, cache_salt=cache_salt
        )
        requests = self._prepare(prefix, params)
        if len(requests) != 1:
            raise ValueError(f"pin_prefix takes one prefix, not {len(requests)}")
        length = len(requests[0].token_ids)
        longest = self.memory.max_model_len
        if length + 2 > longest:
            raise ValueError(
                f"The prefix has {length} tokens, which leaves no room for a prompt after it: "
                f"max_model_len is {longest}"
            )
        return requests[0]

    def _prepare_embedding(
        self, prompts: Any, pooling: Pooling | None
    ) -> tuple[list[PreparedRequest], list[TokenPooling]]:
        """Prepares prompts whose vectors are computed, with how each is pooled."""
        prompts, poolings = self._embedding.add_prompts(prompts, pooling)
        if requests := self._prepare(prompts, SamplingParams(max_tokens=1)):
            return requests, poolings
        raise ValueError("embed needs at least one prompt")

    def _reranker(self, method: RerankMethod) -> YesNo | ByVectors:
        """Returns the way in which the model ranks.

        Raises:
            ValueError: The model has no tokenizer, or cannot rank in this way.
        """
        if self.tokenizer is None:
            raise ValueError(f"The model {self.config.model!r} has no tokenizer to rank texts")
        return reranker_of(self._embedding, method)

    def _prompt_of(self, text: str) -> dict[str, Any]:
        """Returns a text that has all its special tokens in itself, as a prompt."""
        assert self.tokenizer is not None  # `_reranker` needs one
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _prepare_weights(self, parameters: Parameters, *, check_finite: bool, mode: Mode) -> Any:
        """Returns other weights as they are on the device; see `load_given_weights`."""
        self._driver.check_awake()
        about = self._model, self.spec, self._packed, self.config.event_log
        return load_given_weights(*about, parameters, check_finite=check_finite, mode=mode)

    def _sleeping(self, level: int) -> AbstractContextManager[PendingAnswer[None]]:
        """Has the engine sleep once nothing runs; see `LLM.sleep`."""
        self._driver.check_awake()
        if level not in SLEEP_LEVELS:
            raise ValueError(f"level must be 1 or 2, not {level!r:.80}")
        return self._driver.falling_asleep(level)

    def _weights_for_waking(self) -> Any:
        """Returns the weights with which a model that sleeps is woken, on its device."""
        self._driver.check_open()
        if not self._engine.is_asleep:
            raise RuntimeError("the model does not sleep")
        return weights_for_waking(self._model, self.spec, self._engine.runner)

    @property
    def is_sleeping(self) -> bool:
        """Returns whether the model sleeps; see `LLM.sleep`."""
        return self._engine.is_asleep
