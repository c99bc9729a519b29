"""Defines `AsyncLLM`, the Python interface for programs with an event loop.

It has the same methods as `LLM`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, Unpack

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.assembly import Built, Hooks
from jaxpage.checkpoints.in_memory import ModelConfig, Parameters
from jaxpage.driver import AsyncDriver, AsyncPinnedPrefix, AwaitedHandle, DrivenModel, Receipts
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.engine.calls import (
    SCORING,
    Messages,
    accept_sampling_params,
    pair_arguments,
    scores_of,
)
from jaxpage.engine.texts import (
    ByPairs,
    ByVectors,
    RerankMethod,
    YesNo,
    check_dimensions,
    check_documents,
    check_scored_whole,
    check_truncatable,
    rank,
)
from jaxpage.memory import MemoryReport
from jaxpage.outputs import CompletionOutput, Pooling, RequestOutput, RerankResult, TokenPooling
from jaxpage.receipts import Verification
from jaxpage.replay import open_engine, open_in_memory
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.engine_settings import AnyPath, EngineSettings, LLMSettings, engine_config
from jaxpage.settings.lora_request import LoRARequest, LoRARequests
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.update import Mode


class AsyncLLM(DrivenModel):
    """Holds a model with its KV cache and its compiled steps, and generates text for coroutines.

    Their requests share the batch. The constructor loads and compiles, and blocks meanwhile. Use it
    as an asynchronous context manager, or call `shutdown()`. The errors are those of `LLM`.

    Args:
        model: See `LLM`.
        use_tqdm: Show progress bars on standard error.
        max_queued_requests: The most requests beyond `max_num_seqs` that may wait; more are
            refused.
        settings: The other fields of `EngineConfig`, by name.
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
        self._driver: AsyncDriver = AsyncDriver(built, max_queued_requests=max_queued_requests)
        self._receipts = Receipts(self._driver, built)
        self._driver.start()
        # The requests by their ids; None while a request is prepared.
        self._running: dict[str, AwaitedHandle | None] = {}
        self._aborted: set[str] = set()  # ids that were aborted while their request was prepared
        self._numbers = itertools.count()

    @classmethod
    def from_parameters(
        cls,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Any | None = None,
        *,
        may_alias: bool = False,
        use_tqdm: bool = False,
        max_queued_requests: int = 4096,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Returns an `AsyncLLM` with weights that are in memory; see `LLM.from_parameters`."""
        made = cls.__new__(cls)
        made._use(
            *open_in_memory(
                config,
                parameters,
                tokenizer,
                settings,
                Hooks(progress=use_tqdm),
                may_alias=may_alias,
            ),
            max_queued_requests,
        )
        return made

    @accept_sampling_params
    async def generate(
        self,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        receipt: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the whole output so far, each time that there is more.

        This is as in vLLM. The last output is finished. Beam search and `best_of` yield once, at
        the end. Leaving the loop ends the request.

        Args:
            prompt: One prompt; see `LLM.generate`.
            params: The parameters; None takes those of the model's generation_config.json.
            request_id: The id for `abort` and in the outputs; None takes a new number. Two requests
                at once must not have the same.
            lora_request: See `LLM.generate`.
            receipt: See `LLM.generate`; the last output has it.

        Raises:
            TypeError: An argument has another type.
            ValueError: A parameter, the prompt or the id is refused; the message names it and its
                value.
            UnsupportedError: A parameter cannot be honoured.
            CapacityError: The request can never fit into the pool.
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down.
        """
        outputs = self._outputs_so_far(
            lambda: self._prepare_one("generate", prompt, params, lora_request, receipt=receipt),
            request_id,
            receipt=receipt,
        )
        # A caller may leave the loop early. Without `aclosing` only the garbage collector would
        # close the inner generator, and its request would run on until then.
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    @accept_sampling_params
    async def stream(
        self,
        prompt: Any,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        receipt: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Yields chunks, each with what is new since the one before.

        The last chunk has the finish reason. Leaving the loop ends the request. The arguments are
        those of `generate`.

        Raises:
            UnsupportedError: The parameters ask for `best_of` or beam search, whose results are
                known only at the end. The other errors are those of `generate`.
        """
        deltas = self._deltas(
            lambda: self._prepare_stream("stream", prompt, params, lora_request, receipt=receipt),
            request_id,
            receipt=receipt,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def continue_request(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Goes on with an aborted request, as if it had never been aborted.

        Yields the whole output so far, as `generate` does. A request is kept if it was ended by
        `abort`, by an update of the weights with the mode "abort", or because its reader left; see
        `LLM.continue_request`.

        Args:
            request_id: The id that the request had, which it has again.

        Raises:
            ValueError: The request is running.
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of
                `LLM.continue_request`.
        """
        outputs = self._outputs_so_far(lambda: self._find_aborted(request_id), request_id)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def _outputs_so_far(
        self,
        prepare: Callable[[], PreparedRequest],
        request_id: str | None,
        *,
        receipt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        so_far: RequestOutput | None = None
        async with aclosing(self._deltas(prepare, request_id, receipt=receipt)) as deltas:
            async for delta in deltas:
                so_far = delta if so_far is None else _join(so_far, delta)
                yield so_far

    async def _deltas(
        self,
        prepare: Callable[[], PreparedRequest],
        request_id: str | None,
        *,
        receipt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields deltas, or once the whole output of a request that cannot be streamed.

        The id is taken from the first moment, so that `abort` finds it whatever the request does.

        Args:
            prepare: Prepares the request, on another thread.
            request_id: The id; None takes a new number.
            receipt: The last output has a receipt.
        """
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        if request_id in self._running:
            raise ValueError(f"request_id {request_id!r} is running already")
        self._running[request_id] = handle = None
        try:
            # A long prompt takes a tokenizer milliseconds, in which no other coroutine would run.
            request = await asyncio.to_thread(prepare)
            streams = _is_streamable(request)
            handle = self._driver.handle(request, stream=streams, name=request_id)
            handle.is_aborted = request_id in self._aborted
            self._running[request_id] = handle
            await self._driver.add_all([handle])
            finished = False
            while not finished:
                delta = replace(await handle.next_delta(), request_id=request_id)
                finished = delta.finished
                if finished and receipt:
                    name = self.config.model
                    made = await asyncio.to_thread(self._receipts.make, handle, name)
                    delta = replace(delta, receipt=made)
                yield delta
        finally:
            del self._running[request_id]
            self._aborted.discard(request_id)
            if handle is not None:
                handle.cancel()

    @accept_sampling_params
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        receipt: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generates for a conversation; see `chat_prompt` and `generate`."""

        def prepare() -> PreparedRequest:
            prompt = self.chat_prompt(messages, tools, chat_template_kwargs)
            return self._prepare_one("generate", prompt, params, lora_request, receipt=receipt)

        outputs = self._outputs_so_far(prepare, request_id, receipt=receipt)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def verify(self, receipt: Mapping[str, Any]) -> Verification:
        """Computes the answer of a receipt again; see `LLM.verify`.

        Raises:
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of `LLM.verify`.
        """
        loop = asyncio.get_running_loop()

        # A verification waits on a thread of its own, and its requests run on this loop.
        def generate(prompts: Any, params: Any) -> list[RequestOutput]:
            outputs = self._whole(prompts, params)
            return asyncio.run_coroutine_threadsafe(outputs, loop).result()

        return await asyncio.to_thread(self._receipts.verify, receipt, generate)

    async def score(
        self,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]],
        continuation_token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[float] | list[list[float]]:
        """Scores continuations; see `LLM.score`.

        Raises:
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of `LLM.score`.
        """
        truncation = self._truncation(truncate_prompt_tokens)
        if texts := self._text_pairs(prompt_token_ids, continuation_token_ids, lora_request):
            by = self._reranker("auto")
            assert not isinstance(by, YesNo), "an encoder draws no tokens"
            prepared = await asyncio.to_thread(self._prepare_pairs, by, texts, truncation)
            return by.scores(texts, await self._pool(*prepared))
        check_scored_whole(truncation)
        single, pairs = pair_arguments(prompt_token_ids, continuation_token_ids)
        prompts = [prompt + continuation for prompt, continuation in pairs]
        return scores_of(await self._whole(prompts, SCORING, lora_request), pairs, single=single)

    async def embed(
        self,
        prompts: Any,
        dimensions: int | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Returns the vectors of prompts; see `LLM.embed`.

        Each is computed between two steps of the engine, all with the weights at the time of the
        call.

        Raises:
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of `LLM.embed`.
        """
        checked = check_dimensions(dimensions)
        requests, poolings = await asyncio.to_thread(
            self._prepare_embedding, prompts, pooling, truncate_prompt_tokens
        )
        pooled = await self._pool(requests, poolings)
        files = self._embedding.files
        return np.stack([files.finish(vector, normalize, checked) for vector in pooled])

    async def _pool(
        self, requests: Sequence[PreparedRequest], poolings: Sequence[TokenPooling]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns the pooled vector [D] of each prompt, all with the same weights."""
        async with aclosing(self._driver.vectors(requests, self._embedder, poolings)) as vectors:
            return [vector async for vector in vectors]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        method: RerankMethod = "auto",
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankResult]:
        """Returns the documents that answer a query best, the best first; see `LLM.rerank`.

        Raises:
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of `LLM.rerank`.
        """
        documents = check_documents(query, documents, top_n, instruction)
        pairs = [(query, document) for document in documents]
        truncation = self._truncation(truncate_prompt_tokens)
        reranker = self._reranker(method)
        if isinstance(reranker, ByVectors | ByPairs):
            prepared = await asyncio.to_thread(
                self._prepare_pairs, reranker, pairs, truncation, instruction
            )
            return rank(reranker.scores(pairs, await self._pool(*prepared)), documents, top_n)
        check_truncatable(reranker, truncation)
        texts = reranker.texts(pairs, instruction)
        prompts = await asyncio.to_thread(lambda: [self._prompt_of(text) for text in texts])
        outputs = await self._whole(prompts, reranker.first)
        lacking = reranker.missing(outputs)
        others = (
            await self._whole(
                [prompts[index] for index in lacking],
                [reranker.drawing(token) for token in lacking.values()],
            )
            if lacking
            else []
        )
        scores = reranker.scores(outputs, dict(zip(lacking, others, strict=True)))
        return rank(scores, documents, top_n)

    async def _whole(
        self, prompts: Any, params: Any, lora_request: Any = None
    ) -> list[RequestOutput]:
        """Generates for prompts that nobody streams."""
        requests = await asyncio.to_thread(self._prepare, prompts, params, lora_request)
        handles = await self._driver.submit(requests, stream=False)
        try:
            return [await handle.whole() for handle in handles]
        finally:
            self._driver.end(handles)

    async def parameters(self) -> dict[str, jax.Array]:
        """Returns the weights; see `LLM.parameters`.

        Raises:
            UnsupportedError: The weights are quantised.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down.
        """
        self._driver.check_awake()
        weights = await asyncio.wrap_future(self._driver.weights())
        return await asyncio.to_thread(self._by_checkpoint_name, weights)

    async def update_parameters(
        self, parameters: Parameters, *, check_finite: bool = False, mode: Mode = "wait"
    ) -> int:
        """Takes other weights; see `LLM.update_parameters`.

        Requests that come in meanwhile wait, and use the new weights. With the mode "abort",
        running requests raise WeightsReplaced.

        Raises:
            RuntimeError: Another update is under way, a prefix is pinned, or requests would have
                to finish first while the engine is paused.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of
                `LLM.update_parameters`.
        """
        weights = await asyncio.to_thread(
            self._prepare_weights, parameters, check_finite=check_finite, mode=mode
        )
        checksum = await asyncio.to_thread(self._checksum_of, weights)
        return await self._driver.replace_weights(weights, mode, checksum)

    async def update_adapter(
        self, lora_request: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> str:
        """Takes the numbers of a LoRA adapter from memory; see `LLM.update_adapter`."""
        return await asyncio.to_thread(self._take_adapter, lora_request, tensors, config)

    async def weights_checksum(self) -> str:
        """Returns the SHA-256 of the weights in use; see `LLM.weights_checksum`."""
        _, facts = await asyncio.to_thread(self._receipts.hash_weights)
        return facts.hash

    async def pause(self) -> None:
        """Has no step run until `resume`; see `LLM.pause`."""
        await asyncio.wrap_future(self._driver.pause())

    async def resume(self) -> None:
        """Ends `pause`; see `LLM.resume`."""
        await asyncio.wrap_future(self._driver.resume())

    async def sleep(self, level: int = 1) -> None:
        """Frees the device's memory until `wake_up`; see `LLM.sleep`."""
        with self._sleeping(level) as asleep:
            await asyncio.wrap_future(asleep)

    async def wake_up(self) -> None:
        """Ends `sleep`; see `LLM.wake_up`."""
        weights = await asyncio.to_thread(self._weights_for_waking)
        await asyncio.wrap_future(self._driver.wake(weights))

    async def pin_prefix(self, prefix: Any, *, cache_salt: str | None = None) -> AsyncPinnedPrefix:
        """Computes a prefix and keeps its blocks; see `LLM.pin_prefix`.

        Use the result with `async with`, or `await` its `release()`.

        Raises:
            QueueFull: Too many requests wait.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down. The other errors are those of
                `LLM.pin_prefix`.
        """
        prepared = await asyncio.to_thread(self._prepare_prefix, prefix, cache_salt)
        return await self._driver.pin(prepared)

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache; see `LLM.reset_prefix_cache`."""
        await self._driver.snapshot(Engine.reset_prefix_cache)

    async def memory_report(self, *, reset: bool = False) -> MemoryReport:
        """Returns the use of the KV pool; see `LLM.memory_report`."""
        return await self._driver.memory_report(reset=reset)

    async def drain(self, timeout: float | None = None) -> bool:
        """Accepts no more requests, and waits until all have finished; see `LLM.drain`."""
        return await self._driver.wait_until_drained(timeout)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several; other ids are ignored.

        The reader of such a request gets a last output with the finish reason "abort". That also
        holds for a request that is still prepared, or waits for other weights.

        Raises:
            TypeError: The argument is neither a string nor an iterable of strings.
        """
        ids = (
            [request_id]
            if isinstance(request_id, str) or not isinstance(request_id, Iterable)
            else list(request_id)
        )
        if not all(isinstance(name, str) for name in ids):
            raise TypeError(
                f"request_id must be a string, or an iterable of strings; got {request_id!r:.80}"
            )
        # Tasks that were made before this call begin first, so that their ids are known.
        await asyncio.sleep(0)
        known = {*ids} & self._running.keys()
        handles = [handle for each in known if (handle := self._running[each]) is not None]
        self._aborted |= {each for each in known if self._running[each] is None}
        aborted = [asyncio.wrap_future(self._driver.abort(handle)) for handle in handles]
        await asyncio.gather(*aborted)

    async def stats(self) -> Mapping[str, Any]:
        """Returns the current values of all metrics, by name."""
        return await self._driver.stats()

    async def shutdown(self) -> None:
        """Ends running requests and frees the device memory. A second call has no effect."""
        await asyncio.to_thread(self._driver.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def _is_streamable(request: PreparedRequest) -> bool:
    # A beam search and `best_of` decide at their end which sequences are answers, so nothing can be
    # shown before.
    params = request.params
    return not (isinstance(params, BeamSearchParams) or params.ranks)


def _join(before: RequestOutput, delta: RequestOutput) -> RequestOutput:
    known = {output.index: output for output in before.outputs}
    outputs = [_join_outputs(known.get(output.index), output) for output in delta.outputs]
    # Only one delta of a request has the log probabilities of the prompt.
    return replace(
        delta, outputs=outputs, prompt_logprobs=delta.prompt_logprobs or before.prompt_logprobs
    )


def _join_outputs(before: CompletionOutput | None, delta: CompletionOutput) -> CompletionOutput:
    if before is None:
        return delta
    logprobs = None if delta.logprobs is None else (before.logprobs or []) + delta.logprobs
    text = before.text + delta.text
    token_ids = list(before.token_ids) + list(delta.token_ids)
    versions = before.weights_versions + delta.weights_versions
    num_kept = None if delta.num_kept is None else (before.num_kept or []) + delta.num_kept
    mask = delta.sampling_mask
    if mask is not None and before.sampling_mask is not None:
        mask = before.sampling_mask + mask
    return replace(
        delta,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        num_kept=num_kept,
        sampling_mask=mask,
        weights_versions=versions,
    )
