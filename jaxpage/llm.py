"""Defines `LLM`, the Python interface."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import jax
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jaxpage.assembly import Built, Hooks
from jaxpage.device.inputs import Bucket, BucketMenu
from jaxpage.driver import (
    DrivenModel,
    Driver,
    Handle,
    PinnedPrefix,
    Receipts,
    RequestStream,
    Update,
)
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
from jaxpage.errors import JaxpageError
from jaxpage.memory import MemoryReport
from jaxpage.outputs import Pooling, RequestOutput, RerankResult, TokenPooling
from jaxpage.replay import open_engine, open_in_memory
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.engine_settings import AnyPath, EngineSettings, LLMSettings, engine_config
from jaxpage.settings.lora_request import LoRARequest, LoRARequests
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.settings.sources import resolve_config
from jaxpage.step.update import Mode

if TYPE_CHECKING:
    from jaxpage.checkpoints.in_memory import ModelConfig, Parameters
    from jaxpage.receipts import Verification

Params = SamplingParams | BeamSearchParams


class LLM(DrivenModel):
    """Holds a model with its KV cache and its compiled steps, and generates text with it.

    The constructor loads the weights and compiles every shape. After that nothing is compiled.
    Several threads may use the same object; their requests share the batch. Use it as a context
    manager, or call `shutdown()`, to free the device memory.

    The engine runs on a thread of its own, for which the calls wait. An exception in a call, such
    as Ctrl-C, ends the requests of that call and no others. A signal handler may call the LLM in
    the middle of another call.

    Args:
        model: "demo" (packaged), "smollm2" (after `jaxpage fetch`), a local directory, a GGUF file,
            or a Hugging Face hub id.
        use_tqdm: Show progress bars on standard error.
        verbose: Print how memory is divided and how many executables were in the compile cache;
            None is the same as `use_tqdm`.
        start: Start the engine's thread. Without it a call takes the steps that it waits for
            itself, and no step runs between calls. This is for tests and measurements
            that step by hand; the calls must come from one thread at a time.
        first: Chooses, of the shapes of steps, those that are compiled in the background, the first
            ones first. The LLM is ready before that, and other shapes are compiled when a step asks
            for them. This is for programs of one text, such as `jaxpage generate`. None compiles
            every shape in the constructor.
        settings: The other fields of `EngineConfig`, by name.

    Raises:
        ConfigError: A setting is wrong.
        UnsupportedError: This version cannot honour a setting.
        ModelNotFoundError: The model does not exist.
        CheckpointError: The model's files are wrong; the message lists all errors.
        CapacityError: The model does not fit in memory; the message has the numbers and what to
            change.
    """

    def __init__(
        self,
        model: AnyPath = "demo",
        *,
        use_tqdm: bool = True,
        verbose: bool | None = None,
        start: bool = True,
        first: Callable[[BucketMenu], Sequence[Bucket]] | None = None,
        **settings: Unpack[LLMSettings],
    ):
        config = engine_config(model, settings)
        hooks = Hooks(progress=use_tqdm, verbose=verbose, first=first)
        self._use(config, open_engine(config, hooks), start=start, progress=use_tqdm)

    def _use(
        self, config: EngineConfig, built: Built, *, start: bool = True, progress: bool = False
    ) -> None:
        super()._use(config, built)
        self._driver = Driver(built.engine, max_aborted_requests=config.max_aborted_requests)
        self._receipts = Receipts(self._driver, built, progress=progress)
        if start:
            self._driver.start()

    @classmethod
    def from_config(
        cls,
        path: AnyPath,
        *,
        use_tqdm: bool = True,
        verbose: bool | None = None,
        **overrides: Unpack[LLMSettings],
    ) -> Self:
        """Returns an LLM with the settings of a YAML file.

        Args:
            path: The path of the file.
            use_tqdm: Show progress bars on standard error.
            verbose: See `LLM`.
            overrides: Fields of `EngineConfig` that replace those of the file.

        Raises:
            ConfigError: A setting is wrong; the message names the line. The other errors are those
                of `LLM`.
        """
        config = resolve_config(path, overrides).config
        return cls(**config.explicit_settings(), use_tqdm=use_tqdm, verbose=verbose)

    @classmethod
    def from_parameters(
        cls,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Any | None = None,
        *,
        may_alias: bool = False,
        use_tqdm: bool = False,
        verbose: bool | None = None,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Returns an LLM with weights that are in memory, such as a trainer's.

        Args:
            config: The content of the model's config.json as a dict, or a config of transformers.
            parameters: Arrays of numpy or JAX under the names of Hugging Face, weights as [out,
                in]; a flat dict, or one that is nested at the dots. Names and layouts of MaxText,
                Tunix and gemma are accepted for Llama, Qwen and Gemma. So is a Flax NNX module of
                `jaxpage.models` or of Tunix with its arrays.
            tokenizer: A tokenizer of transformers, or a directory with its files. With None,
                prompts are token ids.
            may_alias: Use arrays of JAX as they are where nothing has to be joined, converted or
                moved, so that they are in memory once. Such arrays must neither be donated nor
                deleted while the engine has them. With False they are copied.
            use_tqdm: Show progress bars on standard error.
            verbose: See `LLM`.
            settings: Fields of `EngineConfig`, by name.

        Raises:
            CheckpointError: Something does not fit; the message lists everything.
            TypeError: An argument has another type. The other errors are those of `LLM`.
        """
        # `__init__` would open the files of a model, and here there are none.
        made = cls.__new__(cls)
        hooks = Hooks(progress=use_tqdm, verbose=verbose)
        opened = open_in_memory(config, parameters, tokenizer, settings, hooks, may_alias=may_alias)
        made._use(*opened, progress=use_tqdm)
        return made

    def parameters(self) -> dict[str, jax.Array]:
        """Returns the weights by their names in the checkpoint, in the types of the computation.

        Some are the very arrays that the engine uses: a program that donates them must copy them
        first. The engine never deletes them; after `sleep` they take memory of the device until
        the program drops them.

        Raises:
            UnsupportedError: The weights are quantised.
        """
        self._driver.check_awake()
        return self._by_checkpoint_name(self._driver.wait(self._driver.weights()))

    def update_parameters(
        self, parameters: Parameters, *, check_finite: bool = False, mode: Mode = "wait"
    ) -> int:
        """Takes other weights, without compiling a step, and empties the prefix cache.

        If anything is wrong, the old weights stay in use.

        Args:
            parameters: All weights; see `from_parameters`.
            check_finite: Refuse numbers that are NaN or infinite.
            mode: With "wait", requests of other threads finish first, with the old weights. With
                "abort", they end with what they have and the finish reason "abort"; scores and
                vectors, of which a part is of no use, raise WeightsReplaced. With "keep", they go
                on with the keys and values that they have and the new weights. With "recompute",
                they go on as requests would that begin with the prompt and the tokens so far
                under the new weights, to the last bit.

        Returns:
            The version of the weights, which each later output has, too
            (`RequestOutput.weights_version`, `CompletionOutput.weights_versions`).

        Raises:
            ValueError: The mode is unknown.
            CheckpointError: Names, shapes or types do not fit; the message lists all.
            UnsupportedError: The weights are quantised.
            RuntimeError: A prefix is pinned, or requests would have to finish first while the
                engine is paused.
        """
        weights = self._prepare_weights(parameters, check_finite=check_finite, mode=mode)
        checksum = self._checksum_of(weights)
        with self._driver.replacing(weights, mode, checksum, queues=True) as version:
            return self._driver.wait(version)

    def update_adapter(
        self, lora_request: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> str:
        """Takes the numbers of a LoRA adapter from memory, without compiling anything.

        Requests from now on that name the adapter have these numbers. Those that run or wait keep
        the ones with which they began, and the prefix cache keeps both apart.

        Args:
            lora_request: The adapter, without a `lora_path`.
            tensors: A [rank, in] and B [out, rank] of each module as arrays of numpy or JAX, by
                their names in peft's files; `LoRAWeights.tensors` of a trainer. They are copied.
            config: The content of adapter_config.json; `LoRAWeights.config` of a trainer.

        Returns:
            The digest of the numbers, in hexadecimal digits.

        Raises:
            TypeError: An argument is of another type.
            ValueError: The adapter has a `lora_path`, or its number belongs to another one.
            CheckpointError: The adapter does not fit the model; the message lists everything.
            UnsupportedError: The engine takes no adapters (`enable_lora`).
        """
        return self._take_adapter(lora_request, tensors, config)

    def weights_checksum(self) -> str:
        """Returns the SHA-256 of the weights in use, however they are divided and packed.

        Equal weights have equal checksums. It is the `weights.hash` of receipts
        (docs/guides/receipts.md), and is computed once for each version, on the host.

        Raises:
            RuntimeError: The model sleeps.
        """
        _, facts = self._receipts.hash_weights()
        return facts.hash

    def pause(self) -> None:
        """Has no step run until `resume`; a second call does nothing.

        Requests are accepted and kept, and wait, whichever thread has made them: a call such as
        `generate` returns after another thread has called `resume`. Aborts end requests as ever.
        Weights can be updated meanwhile, and a model without requests can sleep. `drain` and
        `shutdown` end the pause.

        Raises:
            ShuttingDown: The engine is shutting down.
        """
        self._driver.wait(self._driver.pause())

    def resume(self) -> None:
        """Ends `pause`, however many times that was called.

        Raises:
            RuntimeError: The engine is not paused.
        """
        self._driver.wait(self._driver.resume())

    @accept_sampling_params
    def generate(
        self,
        prompts: Any,
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        receipt: bool = False,
    ) -> list[RequestOutput]:
        """Generates for every prompt and returns the outputs in the order of the prompts.

        Everything is checked before anything runs.

        Args:
            prompts: A string, a list of token ids, {"prompt_token_ids": [...]}, or a list of those.
                A prompt with pictures is {"prompt": ..., "multi_modal_data": {"image": [...]}}, and
                its text has a marker for each picture (docs/guides/images.md).
            params: The parameters for all prompts, or a list with those of each. None takes those
                of the model's generation_config.json.
            use_tqdm: Show a progress bar on standard error.
            lora_request: The adapter for all prompts, or a list with that of each, where None is
                the model without one; needs `enable_lora`.
            receipt: Make a receipt of each answer, with which others can verify it
                (docs/guides/receipts.md); the outputs have the log probability of each token then.

        Raises:
            TypeError: An argument has another type.
            ValueError: A parameter or prompt is refused; the message names it and its value.
            UnsupportedError: A parameter cannot be honoured.
            CapacityError: A request can never fit into the pool.
            ModelNotFoundError: An adapter does not exist.
            CheckpointError: An adapter does not fit; the message lists everything.
            TimeoutError: Waiting for the grammar compiler took too long.
            JaxpageError: The process that tries grammars was killed or does not answer, or the
                engine has failed.
        """
        requests = self._prepare(prompts, params, lora_request, receipt=receipt)
        box: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        handles = [Handle(request, box.put, is_kept=True) for request in requests]
        outputs = self._run(handles, box, use_tqdm=use_tqdm)
        if receipt:
            for handle, output in zip(handles, outputs, strict=True):
                output.receipt = self._new_receipt(handle)
        return outputs

    def continue_request(
        self, request_id: str | Sequence[str], use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Goes on with aborted requests, as if they had never been aborted.

        These are requests of `generate` and `stream` that ended early: another thread updated the
        weights with the mode "abort", a stream was closed, or the call was interrupted. The last
        ones are kept (`max_aborted_requests`). Each goes on with the prompt, the parameters and
        the tokens that it had, under the weights of now. With the same weights its output has the
        tokens and log probabilities that it would have had.

        Args:
            request_id: The id (`RequestOutput.request_id`), or a list of ids. An output has the
                same id again.
            use_tqdm: Show a progress bar on standard error.

        Returns:
            The outputs in the order of the ids, with all tokens from the first on.

        Raises:
            TypeError: An id is no string.
            RequestGone: A request is not kept; then none goes on.
            UnsupportedError: A request is a beam search.
            CapacityError: A request does not fit any more next to pinned prefixes.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        requests = [self._find_aborted(name) for name in ids]
        box: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        handles = [
            Handle(request, box.put, is_kept=True, name=name)
            for request, name in zip(requests, ids, strict=True)
        ]
        return self._run(handles, box, use_tqdm=use_tqdm)

    def _run(
        self, handles: list[Handle], box: queue.SimpleQueue[list[Update]], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Returns the outputs of requests whose updates come into a box."""
        outputs: dict[Handle, RequestOutput] = {}
        num_tokens = 0
        # tqdm takes None for a bar that is shown on terminals alone.
        disable = None if use_tqdm else True
        with tqdm(total=len(handles), desc="Generating", unit="request", disable=disable) as bar:
            try:
                self._driver.wait(self._driver.add(handles))
                while len(outputs) < len(handles):
                    for handle, output in self._driver.wait_for_item(box):
                        if isinstance(output, JaxpageError):
                            raise output
                        outputs[handle] = output
                        num_tokens += handle.num_output_tokens
                        bar.update()
                        # The clock of the bar may not have moved yet.
                        rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            finally:
                # After an error or Ctrl-C the other requests would run on, and nobody reads them.
                self._driver.end(handles)
        return [outputs[handle] for handle in handles]

    def _new_receipt(self, handle: Handle) -> dict[str, Any] | None:
        return self._receipts.make(handle, self.config.model)

    def verify(self, receipt: Mapping[str, Any]) -> Verification:
        """Computes the answer of a receipt again, alone and in a batch of other requests.

        Args:
            receipt: The receipt: `RequestOutput.receipt`, or the object in its file.

        Returns:
            "equal" if all bits are the same, "different" with the first token that differs, or
            "unknown" with the reasons why this engine cannot tell.

        Raises:
            ReceiptError: It is no receipt, or has a version that is not known.
            UnsupportedError: The answers of this engine have no receipts.
        """
        return self._receipts.verify(
            receipt, lambda prompts, params: self.generate(prompts, params, use_tqdm=False)
        )

    def stream(
        self,
        prompt: Any,
        params: Params | None = None,
        *,
        lora_request: LoRARequest | None = None,
        receipt: bool = False,
    ) -> RequestStream:
        """Generates for one prompt and returns an iterator over chunks.

        Each chunk has the new text of a step, and the last chunk has the finish reason. Closing the
        iterator (`close()`, or a `with` block) aborts the request and frees its blocks. Arguments
        are checked by this call, not at the first chunk. With `n`, every chunk has an output for
        each sample. The log probabilities of the prompt are in one chunk only.

        Args:
            prompt: One prompt; see `generate`.
            params: The parameters; None takes those of the model's generation_config.json.
            lora_request: The adapter; needs `enable_lora`.
            receipt: See `generate`; the last chunk has it.

        Raises:
            UnsupportedError: The parameters ask for `best_of` or beam search, whose results are
                known only at the end. The other errors are those of `generate`.
        """
        request = self._prepare_stream("stream", prompt, params, lora_request, receipt=receipt)
        return RequestStream(self._driver, request, self._new_receipt if receipt else None)

    def score(
        self,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]],
        continuation_token_ids: Sequence[int] | Sequence[Sequence[int]],
        use_tqdm: bool = False,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequests = None,
    ) -> list[float] | list[list[float]]:
        """Returns the log probability of each token of a continuation, given the tokens before it.

        The executables of generation compute them: on a CPU they equal those of `generate` to the
        last bit, in float32 and bfloat16. Prompt and continuation together have at most
        `max_model_len` tokens.

        An encoder scores pairs of texts instead, as `rerank` does: the first argument is a query or
        a list of them, and the second a document for each, or several for one query.

        Args:
            prompt_token_ids: At least one token id, or a list of such lists.
            continuation_token_ids: At least one token id, or one list for each prompt.
            use_tqdm: Show a progress bar on standard error.
            truncate_prompt_tokens: See `rerank`; only for texts.
            lora_request: The adapter for all pairs, or a list with that of each, where None is the
                model without one; only for token ids.

        Returns:
            A number for each token of the continuation; for lists, a list for each. Of pairs of
            texts, a score for each pair.

        Raises:
            TypeError: An argument is no list of token ids.
            ValueError: A list is empty or too long, or has an id that the model does not have.
            CapacityError: A request can never fit into the pool.
            RuntimeError: A step failed.
            WeightsReplaced: Another thread updated the weights with the mode "abort".
            UnsupportedError: An adapter is given for pairs of texts, or the engine takes none. The
                other errors of an adapter are those of `generate`.
        """
        truncation = self._truncation(truncate_prompt_tokens)
        if texts := self._text_pairs(prompt_token_ids, continuation_token_ids, lora_request):
            by = self._reranker("auto")
            assert not isinstance(by, YesNo), "an encoder draws no tokens"
            requests, poolings = self._prepare_pairs(by, texts, truncation)
            return by.scores(texts, self._pool(requests, poolings, use_tqdm=use_tqdm))
        check_scored_whole(truncation)
        single, pairs = pair_arguments(prompt_token_ids, continuation_token_ids)
        outputs = self.generate(
            [prompt + continuation for prompt, continuation in pairs],
            SCORING,
            use_tqdm,
            lora_request=lora_request,
        )
        return scores_of(outputs, pairs, single=single)

    def embed(
        self,
        prompts: Any,
        dimensions: int | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Returns the vectors [N, D] of N prompts: hidden states after the final norm, pooled.

        The files of sentence-transformers next to the model decide what comes before a text, how
        its tokens become one vector, and what that goes through (docs/guides/reranking.md).
        Without them it is the state of the last token, of length 1. The first call compiles, and so
        does the first with a prompt of more than 512 tokens, 1,024, and so on.

        Args:
            prompts: The prompts; see `generate`.
            dimensions: The number of dimensions that are kept, the first; None for all. A vector
                that has length 1 has it afterwards too.
            pooling: "last" takes the state of the last token, "mean" the mean of all tokens; None
                for what the files say.
            normalize: Whether each vector is scaled to length 1; None for what the files say.
            truncate_prompt_tokens: A longer prompt is cut to so many tokens, special ones among
                them, as its tokenizer cuts with `truncation=True`; -1 cuts to `max_model_len`. None
                refuses prompts that are longer than that.
            use_tqdm: Show a progress bar on standard error.

        Raises:
            TypeError: An argument has another type.
            ValueError: A prompt or an argument is refused, before anything runs.
            CheckpointError: The files ask for something that is not supported.
            WeightsReplaced: Another thread updated the weights with the mode "abort".
        """
        checked = check_dimensions(dimensions)
        requests, poolings = self._prepare_embedding(prompts, pooling, truncate_prompt_tokens)
        pooled = self._pool(requests, poolings, use_tqdm=use_tqdm)
        files = self._embedding.files
        return np.stack([files.finish(vector, normalize, checked) for vector in pooled])

    def _pool(
        self,
        requests: Sequence[PreparedRequest],
        poolings: Sequence[TokenPooling],
        *,
        use_tqdm: bool,
    ) -> list[npt.NDArray[np.float32]]:
        """Returns the pooled vector [D] of each prompt, all with the same weights."""
        disable = None if use_tqdm else True
        with self._driver.embedding(self._embedder, requests, poolings) as answers:
            bar = tqdm(answers, desc="Embedding", unit="prompt", disable=disable)
            return [self._driver.wait(answer) for answer in bar]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        method: RerankMethod = "auto",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[RerankResult]:
        """Returns the documents that answer a query best, the best first.

        Args:
            query: The query.
            documents: The documents.
            top_n: The most results; None for all.
            instruction: What to look for; None takes that of the model.
            method: "yes_no" asks the model whether a document answers the query, in the form of
                Qwen3-Reranker; the score is the probability of yes against no. "embedding" scores
                by how near the vectors of query and document are: by their cosine, unless the
                files of the model say otherwise. "auto" decides by these files
                (docs/guides/reranking.md).
            truncate_prompt_tokens: See `embed`; of a query and a document that are read together
                the longer one is cut. It is not for "yes_no".
            use_tqdm: Show a progress bar on standard error.

        Raises:
            TypeError: An argument has another type.
            ValueError: There is no document or no tokenizer, a text is too long, or the model
                cannot rank in this way.
            RuntimeError: A step failed. The other errors are those of `generate`.
        """
        documents = check_documents(query, documents, top_n, instruction)
        pairs = [(query, document) for document in documents]
        truncation = self._truncation(truncate_prompt_tokens)
        reranker = self._reranker(method)
        if isinstance(reranker, ByVectors | ByPairs):
            requests, poolings = self._prepare_pairs(reranker, pairs, truncation, instruction)
            pooled = self._pool(requests, poolings, use_tqdm=use_tqdm)
            return rank(reranker.scores(pairs, pooled), documents, top_n)
        check_truncatable(reranker, truncation)
        texts = reranker.texts(pairs, instruction)
        prompts = [self._prompt_of(text) for text in texts]
        outputs = self.generate(prompts, reranker.first, use_tqdm)
        lacking = reranker.missing(outputs)
        others = (
            self.generate(
                [prompts[index] for index in lacking],
                [reranker.drawing(token) for token in lacking.values()],
                use_tqdm=False,
            )
            if lacking
            else []
        )
        scores = reranker.scores(outputs, dict(zip(lacking, others, strict=True)))
        return rank(scores, documents, top_n)

    @accept_sampling_params
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        receipt: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates for one conversation, or for a list of them; see `chat_prompt` and `generate`.

        Args:
            messages: The messages of a conversation, or a list of conversations.
            params: See `generate`.
            use_tqdm: Show a progress bar on standard error.
            lora_request: See `generate`.
            receipt: See `generate`.
            tools: See `chat_prompt`.
            chat_template_kwargs: See `chat_prompt`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(conversation, tools, chat_template_kwargs)
            for conversation in conversations
        ]
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request, receipt=receipt)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Generates by beam search; see `generate`.

        Each output has the hypotheses, the best first.
        """
        if isinstance(params, BeamSearchParams):
            return self.generate(prompts, params, use_tqdm)
        raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")

    def stats(self) -> dict[str, Any]:
        """Returns the current values of all metrics, by name (docs/reference/metrics.md)."""
        return self._driver.read(Engine.stats)

    def memory_report(self, *, reset: bool = False) -> MemoryReport:
        """Returns the use of the KV pool over time: means, peak, and at most 512 samples.

        It covers the time since the start, or since the last call with `reset`. `print` it for a
        table.

        Args:
            reset: Start a new report with the next step.
        """
        return self._driver.read(lambda engine: engine.memory_report(reset=reset))

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache.

        Running requests go on, and their blocks are not found by others any more. Pins stay.
        """
        self._driver.wait(self._driver.call(Engine.reset_prefix_cache))

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory, so that something else can use it until `wake_up`.

        Requests and vectors of other threads finish first. The executables stay, so that waking
        compiles nothing; the prefix cache is emptied. While the model sleeps, requests are refused.

        Args:
            level: 1 moves the weights to the host's memory. 2 drops them: `wake_up` reads the
                checkpoint again, and so later updates of the weights are lost.

        Raises:
            ValueError: The level is neither 1 nor 2.
            UnsupportedError: The level is 2, and no checkpoint has the weights (`from_parameters`).
            RuntimeError: The model sleeps already, or a prefix is pinned.
        """
        with self._sleeping(level) as asleep:
            self._driver.wait(asleep)

    def wake_up(self) -> None:
        """Ends `sleep`: the weights come back to the device, and nothing is compiled.

        Raises:
            RuntimeError: The model does not sleep, or sleeps again since another thread woke it.
            CheckpointError: The checkpoint cannot be read again.
        """
        self._driver.wait(self._driver.wake(self._weights_for_waking()))

    def pin_prefix(self, prefix: Any, *, cache_salt: str | None = None) -> PinnedPrefix:
        """Computes a prefix, such as a system prompt, and keeps its blocks for later prompts.

        A prompt that begins with the prefix, or ends within it, shares its blocks (PagedAttention,
        section 4.4). A last block that is not full is copied on write. This also works with
        `enable_prefix_caching=False`. Prefix and prompt are compared by tokens. If they differ, the
        full blocks before the first difference are shared.

        Args:
            prefix: A string, a list of token ids, or {"prompt_token_ids": [...]}.
            cache_salt: If it is given, only requests with the same salt use the prefix.

        Raises:
            ValueError: The prefix is empty, or leaves no room for a prompt after it.
            CapacityError: Waiting or running requests need its blocks.
        """
        return PinnedPrefix.of(self._driver, self._prepare_prefix(prefix, cache_salt))

    def drain(self, timeout: float | None = None) -> bool:
        """Accepts no more requests, and waits until all have finished.

        Call `shutdown` afterwards.

        Args:
            timeout: The seconds after which unfinished requests end with ShuttingDown; None waits
                without a limit.

        Returns:
            True if all requests finished.
        """
        return self._driver.drain_for(timeout)

    def shutdown(self) -> None:
        """Aborts running requests and frees the device memory.

        The object cannot be used after this. A second call has no effect.
        """
        self._driver.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
