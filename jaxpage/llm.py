"""`LLM`: the Python interface."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from jaxpage.assembly import Built, Hooks, Mode
from jaxpage.checkpoints import ModelConfig, Parameters
from jaxpage.device.embedder import Pooling
from jaxpage.driver import DrivenModel, Driver, Handle, PinnedPrefix, RequestStream, Update, stacked
from jaxpage.engine.engine import Engine
from jaxpage.engine.prompts import Messages, named_params
from jaxpage.engine.scoring import SCORING, scored_pairs, scores_of
from jaxpage.errors import JaxpageError, ShuttingDown
from jaxpage.memory import MemoryReport
from jaxpage.outputs import RequestOutput
from jaxpage.replay.opening import open_engine, open_in_memory
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.engine_settings import AnyPath, EngineSettings, LLMSettings, engine_config
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.settings.sources import resolve_config

Params = SamplingParams | BeamSearchParams
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(DrivenModel):
    """A model with its KV cache and its compiled steps.

    The constructor loads the weights and compiles every shape. After that nothing is compiled. Several threads may use the same object;
    their requests share the batch. Use it as a context manager, or call `shutdown()`, to free the device memory.

    The engine runs on a thread of its own, for which the calls wait. An exception in a call, such as Ctrl-C, ends the requests of that
    call and no others. A signal handler may call the LLM in the middle of another call.

    Args:
        model: "demo" (packaged), "smollm2" (of `jaxpage fetch`), a local directory, a GGUF file, or a Hugging Face hub id.
        use_tqdm: show progress bars on standard error.
        verbose: print how memory is divided and what was in the compile cache; None: as `use_tqdm`.
        start: start the engine's thread. Without it a call takes the steps that it waits for itself, and the engine stands still between
            calls, for tests and measurements that step by hand; the calls must come from one thread at a time.
        settings: the other fields of `EngineConfig`, by name.

    Raises:
        ConfigError, UnsupportedError: settings are wrong, or this version cannot honour them.
        ModelNotFoundError, CheckpointError: the model does not exist, or its files are wrong; with all errors at once.
        CapacityError: it does not fit in memory; with the numbers and what to change.
    """

    def __init__(
        self,
        model: AnyPath = "demo",
        *,
        use_tqdm: bool = True,
        verbose: bool | None = None,
        start: bool = True,
        **settings: Unpack[LLMSettings],
    ):
        config = engine_config(model, settings)
        self._use(
            config, open_engine(config, Hooks(progress=use_tqdm, verbose=verbose)), start=start
        )

    def _use(self, config: EngineConfig, built: Built, *, start: bool = True) -> None:
        super()._use(config, built)
        self._driver = Driver(built.engine)
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
        """An LLM with the settings of a YAML file; `overrides` win over the file. Raises ConfigError, which names the line."""
        config = resolve_config(path, overrides).config
        return cls(**config.given(), use_tqdm=use_tqdm, verbose=verbose)

    @classmethod
    def from_parameters(
        cls,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Any | None = None,
        *,
        use_tqdm: bool = False,
        verbose: bool | None = None,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """An LLM of weights that are in memory, as those of a trainer are. No file is read or written.

        Args:
            config: what config.json of the model says, as a dict; or a config of transformers.
            parameters: arrays of numpy or JAX under the names of Hugging Face, weights as [out, in]; a flat dict, or nested at the dots.
                Or a Flax NNX module of `jaxpage.models` that has its arrays.
            tokenizer: a tokenizer of transformers, or a directory with its files; None: prompts are token ids.
            settings: fields of `EngineConfig`, by name.

        Raises CheckpointError with all that does not fit, TypeError for what is neither of these, and the errors of the constructor.
        """
        made, hooks = cls.__new__(cls), Hooks(progress=use_tqdm, verbose=verbose)
        made._use(*open_in_memory(config, parameters, tokenizer, settings, hooks))
        return made

    def parameters(self) -> dict[str, jax.Array]:
        """The weights, in the types that they are computed in, by the names that they have in the checkpoint. Some are the arrays that the
        engine uses: a program that donates them copies them first. Raises UnsupportedError for quantised weights.
        """
        return self._named(self._driver.wait(self._driver.weights()))

    def update_parameters(
        self, parameters: Parameters, *, check_finite: bool = False, mode: Mode = "wait"
    ) -> int:
        """Takes other weights, without compiling anything. The prefix cache is emptied. If anything is wrong, the old weights stay in use.

        Args:
            parameters: all of them, as of `from_parameters`.
            check_finite: refuse numbers that are NaN or infinite.
            mode: requests of other threads are finished first, with the old weights ("wait"), or end with what they have and the finish
                reason "abort" ("abort").

        Returns the version of the weights, which each later output has too (`RequestOutput.weights_version`).

        Raises:
            ValueError: the mode is unknown.
            CheckpointError: with all names, shapes and types that do not fit.
            UnsupportedError: the weights are quantised, or events are logged.
            RuntimeError: a prefix is pinned.
        """
        weights = self._prepare_weights(parameters, check_finite=check_finite, mode=mode)
        replacement = self._driver.replace_weights(weights, abort=mode == "abort", queues=True)
        try:
            return self._driver.wait(replacement.version)
        finally:
            replacement.withdraw()

    @named_params
    def generate(
        self,
        prompts: Any,
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Generates for every prompt and returns the outputs in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, {"prompt_token_ids": [...]}, or a list of those.
            params: one for all prompts, or one per prompt; None: those of the model's generation_config.json.
            use_tqdm: show a progress bar on standard error.
            lora_request: the adapter of all prompts, or of each, where None is the model without one; needs `enable_lora`.

        Raises, before anything runs:
            TypeError, ValueError, UnsupportedError, CapacityError: naming the parameter and its value.
            ModelNotFoundError, CheckpointError: an adapter is not there, or does not fit, with everything that is wrong.
            TimeoutError: waiting for the grammar compiler took too long.
            JaxpageError: the process that checks grammars was killed repeatedly, or does not answer.
        """
        requests = self._prepare(prompts, params, lora_request)
        box: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        handles = [Handle(request, box.put) for request in requests]
        outputs: dict[Handle, RequestOutput] = {}
        num_tokens = 0
        disable = None if use_tqdm else True
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=disable) as bar:
            try:
                self._driver.wait(self._driver.add(handles))
                while len(outputs) < len(handles):
                    for handle, output in self._driver.taken(box):
                        if isinstance(output, JaxpageError):
                            raise output
                        outputs[handle] = output
                        num_tokens += handle.num_output_tokens
                        bar.update()
                        rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            finally:
                self._driver.end(handles)
        return [outputs[handle] for handle in handles]

    def stream(
        self, prompt: Any, params: Params | None = None, *, lora_request: LoRARequest | None = None
    ) -> RequestStream:
        """Generates for one prompt. Returns an iterator over chunks with the new text of each step; the last has the finish reason.

        Closing the iterator (`close()`, or a `with` block) aborts the request and frees its blocks. Arguments are checked by this call,
        not at the first chunk. With `n`, every chunk has an output for each sample. Log probabilities of the prompt are in one chunk only.

        Raises UnsupportedError for `best_of` and beam search, whose results are known only at the end, and the errors of `generate`.
        """
        return RequestStream(
            self._driver, self._prepare_stream("stream", prompt, params, lora_request)
        )

    def score(
        self,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]],
        continuation_token_ids: Sequence[int] | Sequence[Sequence[int]],
        use_tqdm: bool = False,
    ) -> list[float] | list[list[float]]:
        """Log probabilities of continuations: of each of their tokens, given the prompt and the tokens before it.

        The executables of generation compute them: on a CPU they are those of `generate` to the last bit, in float32 and bfloat16.

        Args:
            prompt_token_ids: token ids, at least one; or a list of those.
            continuation_token_ids: token ids, at least one; or one list for each prompt.

        Returns a number for each token of the continuation; for lists, a list for each.

        Raises TypeError, ValueError and CapacityError as `generate` does. Prompt and continuation have at most `max_model_len` tokens.
        """
        single, pairs = scored_pairs(prompt_token_ids, continuation_token_ids)
        outputs = self.generate(
            [prompt + continuation for prompt, continuation in pairs], SCORING, use_tqdm
        )
        return scores_of(outputs, pairs, single=single)

    def embed(
        self,
        prompts: Any,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> npt.NDArray[np.float32]:
        """A vector [N, D] of each of N prompts: hidden states after the final norm.

        The first call compiles, and so does the first with a prompt of more than 512 tokens, 1,024, and so on.

        Args:
            prompts: as of `generate`.
            pooling: "last", the state of the last token, or "mean", of all tokens.
            normalize: to a length of 1.
            use_tqdm: show a progress bar on standard error.

        Raises TypeError, ValueError or CapacityError before anything runs.
        """
        requests = self._prepare_embedding(prompts, pooling)
        driver = self._driver
        weights = driver.wait(driver.weights())
        bar = tqdm(requests, desc="Embedding", unit="prompt", disable=None if use_tqdm else True)
        orders = (
            driver.embed(self._embedder, weights, request.token_ids, pooling) for request in bar
        )
        return stacked([driver.wait(order) for order in orders], normalize=normalize)

    @named_params
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or for a list of them, with what `chat_prompt` makes of it."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(one, tools, chat_template_kwargs) for one in conversations]
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """`generate` with beams. Each output has the hypotheses, the best first."""
        if isinstance(params, BeamSearchParams):
            return self.generate(prompts, params, use_tqdm)
        raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")

    def stats(self) -> dict[str, Any]:
        """The current values of all metrics, by name (docs/reference/metrics.md)."""
        return self._driver.read(Engine.stats)

    def memory_report(self, *, reset: bool = False) -> MemoryReport:
        """The use of the KV pool since the start, or since the last call with `reset`: means, peak, samples over time.

        `print` it for a table. It has at most 512 samples. `reset` starts a new report with the next step.
        """
        return self._driver.read(lambda engine: engine.memory_report(reset=reset))

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running requests are not affected."""
        self._driver.wait(self._driver.call(Engine.reset_prefix_cache))

    def pin_prefix(self, prefix: Any, *, cache_salt: str | None = None) -> PinnedPrefix:
        """Computes a prefix and keeps its blocks, for prompts that begin with it (a system prompt; PagedAttention, section 4.4).

        A prompt that begins with the prefix, or ends within it, shares its blocks. A last block that is not full is copied on write. This
        also works with `enable_prefix_caching=False`. Prefix and prompt are compared by tokens. If they differ, the full blocks before
        the first difference are shared.

        Args:
            prefix: a string, a list of token ids, or {"prompt_token_ids": [...]}.
            cache_salt: only requests with the same salt use it.

        Raises:
            ValueError: the prefix is empty, or leaves no room for a prompt after it.
            CapacityError: waiting or running requests need its blocks.
        """
        return PinnedPrefix.of(self._driver, self._prepare_prefix(prefix, cache_salt))

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no requests any more, and waits for those that are there; `shutdown` is what remains to be done.

        Args:
            timeout: seconds, after which requests that have not finished end with ShuttingDown; None: wait as long as it takes.

        Returns whether all requests finished.
        """
        try:
            self._driver.wait(self._driver.drain(), timeout)
        except TimeoutError:
            why = ShuttingDown("The engine is shutting down; the time to finish was over")
            self._driver.wait(self._driver.end_all(why))
            return False
        return True

    def shutdown(self) -> None:
        """Aborts running requests and frees the device memory. The object cannot be used after this. A second call has no effect."""
        self._driver.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
