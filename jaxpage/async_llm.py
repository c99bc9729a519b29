"""`AsyncLLM`: the Python interface for programs with an event loop. The engine runs on a thread of its own, as the server's does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, get_args

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.assembly import Built, BuiltModel, Hooks, Mode, given_weights
from jaxpage.checkpoints import ModelConfig, Parameters
from jaxpage.device.embedder import Pooling, normalized
from jaxpage.engine.calls import check_process, prepared
from jaxpage.engine.prompts import Messages, named_params, normalise
from jaxpage.engine.scoring import SCORING, scored_pairs, scores_of
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.replay.opening import open_engine, open_in_memory
from jaxpage.serving.engine_loop import EngineLoop
from jaxpage.serving.request_handle import RequestHandle
from jaxpage.serving.vectors import vectors_of
from jaxpage.settings.argument_checks import check_choice
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.engine_settings import AnyPath, EngineSettings, LLMSettings, engine_config
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


class AsyncLLM(BuiltModel):
    """A model with its KV cache and its compiled steps, for coroutines. Their requests share the batch.

    The constructor loads and compiles, and blocks meanwhile. Use it as an asynchronous context manager, or call `shutdown()`.

    Args:
        model, settings: as of `LLM`. max_queued_requests: requests beyond `max_num_seqs` that may wait; more are refused.

    Raises the errors of `LLM`.
    """

    def __init__(
        self,
        model: AnyPath = "demo",
        *,
        use_tqdm: bool = False,
        max_queued_requests: int = 4096,
        **settings: Unpack[LLMSettings],
    ):
        config = engine_config(model, settings)
        self._use(config, open_engine(config, Hooks(progress=use_tqdm)), max_queued_requests)

    def _use(self, config: EngineConfig, built: Built, max_queued_requests: int = 4096) -> None:
        super()._use(config, built)
        self._loop = EngineLoop(built, max_queued_requests=max_queued_requests)
        self._loop.start()
        self._running: dict[str, RequestHandle] = {}
        self._numbers = itertools.count()

    @classmethod
    def from_parameters(
        cls,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Any | None = None,
        *,
        use_tqdm: bool = False,
        max_queued_requests: int = 4096,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """As `LLM.from_parameters`. Raises what it raises."""
        made = cls.__new__(cls)
        made._use(
            *open_in_memory(config, parameters, tokenizer, settings, Hooks(progress=use_tqdm)), max_queued_requests
        )
        return made

    @named_params
    async def generate(
        self,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what there is of a request each time that there is more; the last output is finished.

        Each output has everything so far, as vLLM's. Beam search and `best_of` yield once, at the end. Leaving the loop ends the request.

        Args:
            prompt: one prompt, as of `LLM.generate`.
            params: None: those of the model's generation_config.json.
            request_id: for `abort` and in the outputs; None: a number. Two at once must not have the same.
            lora_request: as of `LLM.generate`.

        Raises:
            TypeError, ValueError, UnsupportedError, CapacityError: naming the parameter and its value.
            QueueFull, EngineFailed, ShuttingDown.
        """
        check_process()
        prompts = normalise(prompt)
        if len(prompts) != 1:
            raise ValueError(f"generate takes one prompt, not {len(prompts)}; call it for each")
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        if request_id in self._running:
            raise ValueError(f"request_id {request_id!r} is running already")
        engine, params = self._loop.engine, params or self.default_sampling_params()
        checked = engine.admission.check_params(params)
        request = await asyncio.to_thread(prepared, engine, prompts[0], checked)
        request = request._replace(grammar=await asyncio.to_thread(engine.compiled, params))
        if lora_request is not None:
            request = request._replace(lora=await asyncio.to_thread(engine.opened_adapter, lora_request))
        stream = not (isinstance(params, BeamSearchParams) or params.ranks)
        [handle] = await self._loop.submit([request], stream=stream)
        if request_id in self._running:  # since it was looked for
            handle.cancel()
            raise ValueError(f"request_id {request_id!r} is running already")
        self._running[request_id] = handle
        try:
            so_far: RequestOutput | None = None
            while so_far is None or not so_far.finished:
                delta = await handle.next_delta()
                so_far = replace(delta if so_far is None else _joined(so_far, delta), request_id=request_id)
                yield so_far
        finally:
            del self._running[request_id]
            handle.cancel()

    @named_params
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation, with what `chat_prompt` makes of it."""
        prompt = await asyncio.to_thread(self.chat_prompt, messages, tools, chat_template_kwargs)
        async for output in self.generate(prompt, params, request_id, lora_request=lora_request):
            yield output

    async def score(
        self,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]],
        continuation_token_ids: Sequence[int] | Sequence[Sequence[int]],
    ) -> list[float] | list[list[float]]:
        """As `LLM.score`. Raises what it raises, and QueueFull, EngineFailed and ShuttingDown."""
        check_process()
        single, pairs = scored_pairs(prompt_token_ids, continuation_token_ids)
        engine = self._loop.engine
        requests = [engine.prepare(None, (*prompt, *continuation), SCORING) for prompt, continuation in pairs]
        handles = await self._loop.submit(requests, stream=False)
        try:
            return scores_of([await handle.whole() for handle in handles], pairs, single=single)
        finally:
            for handle in handles:
                handle.cancel()

    async def embed(
        self, prompts: Any, *, pooling: Pooling = "last", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """As `LLM.embed`, one prompt after another between two steps of the engine, all with the weights of the first. Raises its errors,
        EngineFailed and ShuttingDown."""
        check_process()
        check_choice("pooling", pooling, get_args(Pooling))
        engine = self._loop.engine
        checked = engine.admission.check_params(SamplingParams(max_tokens=1))
        requests = [await asyncio.to_thread(prepared, engine, prompt, checked) for prompt in normalise(prompts)]
        if not requests:
            raise ValueError("embed needs at least one prompt")
        vectors = np.stack([vector async for vector in vectors_of(requests, self._loop, self._embedder, pooling)])
        return normalized(vectors) if normalize else vectors

    async def parameters(self) -> dict[str, jax.Array]:
        """As `LLM.parameters`. Raises what it raises, EngineFailed and ShuttingDown."""
        check_process()
        weights = await self._loop.snapshot(lambda engine: engine.runner.parameters["target"])
        return await asyncio.to_thread(self._named, weights)

    async def update_parameters(
        self, parameters: Parameters, *, check_finite: bool = False, mode: Mode = "wait"
    ) -> int:
        """As `LLM.update_parameters`. Requests that come in meanwhile wait, and have the new weights. With the mode "abort" those that run
        raise WeightsReplaced. Raises what `LLM.update_parameters` raises; RuntimeError during another update; EngineFailed, ShuttingDown.
        """
        check_process()
        load = partial(given_weights, self._model, self.spec, self.config.event_log, parameters)
        weights = await asyncio.to_thread(load, check_finite=check_finite, mode=mode)
        return await self._loop.replace_weights(weights, abort=mode == "abort")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several; who reads one gets a last output with the finish reason "abort". Other ids are ignored.

        Raises TypeError for what is neither a string nor an iterable of strings.
        """
        ids = [request_id] if isinstance(request_id, str) or not isinstance(request_id, Iterable) else list(request_id)
        if not all(isinstance(one, str) for one in ids):
            raise TypeError(f"request_id must be a string, or an iterable of strings; got {request_id!r:.80}")
        await asyncio.gather(*(self._loop.abort(self._running[one]) for one in {*ids} & self._running.keys()))

    async def stats(self) -> Mapping[str, Any]:
        """The current values of all metrics, by name."""
        return await self._loop.stats()

    async def shutdown(self) -> None:
        """Ends running requests and frees the device memory. A second call has no effect."""
        await asyncio.to_thread(self._loop.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def _joined(before: RequestOutput, delta: RequestOutput) -> RequestOutput:
    known = {output.index: output for output in before.outputs}
    outputs = [_joined_outputs(known.get(output.index), output) for output in delta.outputs]
    return replace(delta, outputs=outputs, prompt_logprobs=delta.prompt_logprobs or before.prompt_logprobs)


def _joined_outputs(before: CompletionOutput | None, delta: CompletionOutput) -> CompletionOutput:
    if before is None:
        return delta
    logprobs = None if delta.logprobs is None else (before.logprobs or []) + delta.logprobs
    text, token_ids = before.text + delta.text, list(before.token_ids) + list(delta.token_ids)
    return replace(delta, text=text, token_ids=token_ids, logprobs=logprobs)
