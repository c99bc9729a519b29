"""Prepares requests for a driver, and defines what `LLM` gives its callers, receipts among it."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from jaxpage import assembly, receipts
from jaxpage.assembly import (
    Built,
    BuiltModel,
    load_given_weights,
    weights_for_waking,
)
from jaxpage.driver.driver import Driver
from jaxpage.driver.handle import Handle, PendingAnswer, Update
from jaxpage.engine import (
    NO_PICTURES,
    CheckedParams,
    Engine,
    NamedAdapter,
    PreparedRequest,
    WakingWeights,
)
from jaxpage.engine.calls import (
    Prompt,
    normalise,
    one_each,
)
from jaxpage.engine.texts import (
    ByPairs,
    ByVectors,
    Pair,
    RerankMethod,
    Truncation,
    YesNo,
    are_texts,
    check_pairs,
    encode,
    encode_together,
    reranker_of,
    truncation_of,
)
from jaxpage.errors import JaxpageError, UnsupportedError
from jaxpage.outputs import Pooling, RequestOutput, TokenPooling
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.update import Mode

if TYPE_CHECKING:
    from jaxpage.checkpoints.in_memory import Parameters
    from jaxpage.images import PictureProcessor
    from jaxpage.receipts import EngineFacts, Generate, Verification, WeightFacts

Params = SamplingParams | BeamSearchParams
SLEEP_LEVELS = (1, 2)  # the weights are in the host's memory, or dropped


class DrivenModel(BuiltModel):
    """Prepares the requests of a model whose engine a driver drives.

    The methods here run on the thread of the caller, while the engine works for others.
    """

    _driver: Driver
    _receipts: Receipts

    @property
    def _engine(self) -> Engine:
        return self._driver.engine

    def _prepare(
        self,
        prompts: Any,
        params: Any,
        lora_request: Any = None,
        truncation: Truncation | None = None,
        *,
        receipt: bool = False,
    ) -> list[PreparedRequest]:
        """Encodes and checks all prompts, so that a bad one is refused before anything runs."""
        self._driver.check_awake()
        normalised = normalise(prompts)
        params_by_prompt = one_each(
            self.default_sampling_params() if params is None else params, len(normalised)
        )
        if receipt:
            params_by_prompt = with_logprobs(params_by_prompt)
        adapters = self._adapters(one_each(lora_request, len(normalised), "lora_request"))
        requests = []
        checked: dict[int, CheckedParams] = {}  # keyed by `id()`: prompts may share parameters
        for index, (prompt, params_of_prompt, lora) in enumerate(
            zip(normalised, params_by_prompt, adapters, strict=True)
        ):
            if not isinstance(params_of_prompt, SamplingParams | BeamSearchParams):
                raise TypeError(
                    "params must be SamplingParams or BeamSearchParams, not "
                    f"{type(params_of_prompt).__name__}"
                )
            try:
                if id(params_of_prompt) not in checked:
                    checked[id(params_of_prompt)] = self._engine.check_params(params_of_prompt)
                request = prepare(
                    self._engine,
                    prompt,
                    checked[id(params_of_prompt)],
                    truncation=truncation,
                    processor=self._pictures,
                )
                requests.append(
                    request._replace(
                        grammar=self._engine.compile_grammar(params_of_prompt), lora=lora
                    )
                )
            except Exception as error:
                if len(normalised) > 1:
                    error.add_note(f"This is prompt {index} of {len(normalised)}.")
                raise
        if receipt:
            self._receipts.check(requests)
        return requests

    def _find_aborted(self, request_id: str) -> PreparedRequest:
        """Returns an aborted request, for a handle with this name that continues it.

        Raises:
            TypeError: The id is no string.
            RequestGone: The request is not kept.
            UnsupportedError: It is a beam search.
        """
        self._driver.check_awake()
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r:.80}")
        return self._driver.wait(self._driver.find_aborted(request_id))

    def _prepare_stream(
        self, name: str, prompt: Any, params: Any, lora_request: Any, *, receipt: bool = False
    ) -> PreparedRequest:
        """Prepares one prompt whose output comes in chunks.

        Raises:
            UnsupportedError: Nothing can be shown before the end; see `check_streamable`.
        """
        request = self._prepare_one(name, prompt, params, lora_request, receipt=receipt)
        check_streamable(request.params)
        return request

    def _prepare_one(
        self,
        name: str,
        prompt: Any,
        params: Any,
        lora_request: Any = None,
        *,
        receipt: bool = False,
    ) -> PreparedRequest:
        """Prepares one prompt, for the method that is called `name`."""
        requests = self._prepare(prompt, params, lora_request, receipt=receipt)
        if len(requests) != 1:
            raise ValueError(f"{name} takes one prompt, not {len(requests)}; call it for each")
        return requests[0]

    def _adapters(self, requested: Sequence[Any]) -> list[NamedAdapter | None]:
        """Returns the adapter of each prompt; each is read once.

        Raises:
            TypeError: An element is no LoRARequest.
            UnsupportedError: The engine has no adapters.
            ValueError: A number belongs to another adapter.
            ModelNotFoundError: There is no such directory.
            CheckpointError: An adapter does not fit the model.
        """
        if wrong := [
            adapter for adapter in requested if not isinstance(adapter, LoRARequest | None)
        ]:
            raise TypeError(
                f"lora_request must be LoRARequest or None, not {type(wrong[0]).__name__}"
            )
        opened = {
            adapter: self._engine.open_adapter(adapter)
            for adapter in dict.fromkeys(requested)
            if adapter is not None
        }
        return [opened.get(adapter) for adapter in requested]

    def _take_adapter(
        self, requested: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> str:
        """Takes the numbers of an adapter from memory; see `LLM.update_adapter`."""
        self._driver.check_open()
        if not isinstance(requested, LoRARequest):
            raise TypeError(f"lora_request must be LoRARequest, not {type(requested).__name__}")
        return self._engine.adapters_for(requested).update(requested, tensors, config)

    def _prepare_prefix(self, prefix: Any, cache_salt: str | None) -> PreparedRequest:
        """Prepares a prefix that is computed to be pinned."""
        params = SamplingParams(
            # It is pinned when its first token is drawn, so that one must not end it.
            temperature=0.0,
            max_tokens=2,
            ignore_eos=True,
            cache_salt=cache_salt,
        )
        requests = self._prepare(prefix, params)
        if len(requests) != 1:
            raise ValueError(f"pin_prefix takes one prefix, not {len(requests)}")
        length = len(requests[0].token_ids)
        max_length = self.max_model_len
        # A prompt has a token after the prefix at least, and one more is drawn.
        if length + 2 > max_length:
            raise ValueError(
                f"The prefix has {length} tokens, which leaves no room for a prompt after it: "
                f"max_model_len is {max_length}"
            )
        return requests[0]

    def _prepare_embedding(
        self, prompts: Any, pooling: Pooling | None, truncate_prompt_tokens: int | None
    ) -> tuple[list[PreparedRequest], list[TokenPooling]]:
        """Prepares prompts whose vectors are computed, with how each is pooled."""
        truncation = self._truncation(truncate_prompt_tokens)
        prompts, poolings = self._embedding.add_prompts(prompts, pooling)
        prompts = encode_together(self._tokenizer, prompts, truncation)
        if requests := self._prepare(prompts, self._embedding.params, truncation=truncation):
            return requests, poolings
        raise ValueError("embed needs at least one prompt")

    def _truncation(self, truncate_prompt_tokens: int | None) -> Truncation | None:
        """Returns how the prompts of a call are cut; see `truncation_of`."""
        return truncation_of(truncate_prompt_tokens, self.max_model_len)

    def _prepare_pairs(
        self,
        reranker: ByVectors | ByPairs,
        pairs: Sequence[Pair],
        truncation: Truncation | None,
        instruction: str | None = None,
    ) -> tuple[list[PreparedRequest], list[TokenPooling]]:
        """Prepares prompts of whose vectors or scores the scores of pairs are made."""
        texts, poolings = reranker.inputs(pairs, instruction, truncation)
        prompts = [{"prompt": text} if isinstance(text, str) else text for text in texts]
        prompts = encode_together(self._tokenizer, prompts, truncation)
        return self._prepare(prompts, self._embedding.params, truncation=truncation), poolings

    def _text_pairs(self, first: Any, second: Any, lora_request: Any) -> list[Pair] | None:
        """Returns the pairs of texts that an encoder scores; None for token ids, or no encoder."""
        if not self.spec.encoded or not (are_texts(first) or are_texts(second)):
            return None
        if lora_request is not None:
            raise UnsupportedError("lora_request is not supported for pairs of texts")
        return check_pairs(first, second)

    def _reranker(self, method: RerankMethod) -> YesNo | ByVectors | ByPairs:
        """Returns the way in which the model ranks.

        Raises:
            ValueError: The model has no tokenizer, or cannot rank in this way.
        """
        if self._tokenizer is None:
            raise ValueError(f"The model {self.config.model!r} has no tokenizer to rank texts")
        return reranker_of(self._embedding, method)

    def _prompt_of(self, text: str) -> dict[str, Any]:
        """Returns a text that has all its special tokens in itself, as a prompt."""
        assert self._tokenizer is not None  # `_reranker` needs one
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"prompt": text, "prompt_token_ids": token_ids}

    def _prepare_weights(self, parameters: Parameters, *, check_finite: bool, mode: Mode) -> Any:
        """Returns other weights as they are on the device; see `load_given_weights`."""
        self._driver.check_awake()
        about = self._model, self.spec, self._packed
        return load_given_weights(*about, parameters, check_finite=check_finite, mode=mode)

    def _sleeping(self, level: int) -> AbstractContextManager[PendingAnswer[None]]:
        """Has the engine sleep once nothing runs; see `LLM.sleep`."""
        self._driver.check_awake()
        if level not in SLEEP_LEVELS:
            raise ValueError(f"level must be 1 or 2, not {level!r:.80}")
        if level == 2 and self._model.plan.is_in_memory:
            raise UnsupportedError(
                "level 2 drops the weights, and these came from memory: no checkpoint has them; "
                "level 1 keeps them on the host"
            )
        return self._driver.falling_asleep(level)

    def _weights_for_waking(self) -> WakingWeights:
        """Returns the weights with which a model that sleeps is woken, on its device."""
        self._driver.check_open()
        if not self._engine.is_asleep:
            raise RuntimeError("the model does not sleep")
        return weights_for_waking(self._model, self.spec, self._engine.runner)

    @property
    def is_paused(self) -> bool:
        """Returns whether steps are paused; see `LLM.pause`."""
        return self._driver.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Returns whether the model sleeps; see `LLM.sleep`."""
        return self._engine.is_asleep


def prepare(
    engine: Engine,
    prompt: Prompt,
    checked: CheckedParams,
    *,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    processor: PictureProcessor | None = None,
) -> PreparedRequest:
    """Encodes and checks a prompt; a grammar is left to `Engine.compile_grammar`.

    Any thread may call this while the engine runs.

    Args:
        engine: The engine.
        prompt: The prompt.
        checked: The checked parameters.
        add_special_tokens: True if the tokenizer adds its special tokens to a text.
        truncation: The way in which the prompt is cut; None if it is not.
        processor: What processes the pictures of the prompt; None if the model takes none.

    Raises:
        TypeError: A token id is no integer, or a picture is none.
        ValueError: The prompt or a picture is refused, or the tokenizer fails on the text.
        UnsupportedError: The prompt has pictures, and the model takes none.
    """
    if prompt.vectors is not None:
        placeholder_ids, embedded = engine.prompt_of_vectors(prompt.vectors)
        return engine.prepare(None, placeholder_ids, checked, embedded)
    if prompt.pictures and processor is None:
        raise UnsupportedError(NO_PICTURES)
    if prompt.pictures and processor is not None:
        source = prompt.text if prompt.token_ids is None else prompt.token_ids
        expanded, embedded = processor.expand(
            source or (),
            processor.process(prompt.pictures),
            add_special_tokens=add_special_tokens,
        )
        return engine.prepare(prompt.text, expanded, checked, embedded)
    token_ids = prompt.token_ids
    if token_ids is None and processor is not None and prompt.text is not None:
        # A text without pictures must not have markers of pictures.
        processor.check_text(prompt.text, 0)
    if token_ids is None:
        if engine.tokenizer is None:
            raise ValueError("The model has no tokenizer; give prompts as token ids")
        token_ids = encode(
            engine.tokenizer,
            prompt.text,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
        ).token_ids
    elif truncation is not None:
        token_ids = truncation.cut(token_ids, engine.tokenizer)
    return engine.prepare(prompt.text, token_ids, checked)


def check_streamable(params: SamplingParams | BeamSearchParams) -> None:
    """Checks that outputs can be shown before the end.

    Raises:
        UnsupportedError: The parameters choose the best outputs, which are known only at the end.
    """
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError(
            f"streaming cannot show beam_width={params.beam_width}: "
            "which hypotheses are the best is known only at the end"
        )
    if params.ranks:
        raise UnsupportedError(
            f"streaming cannot show best_of={params.best_of}: which are the best "
            f"n={params.n} is known only at the end"
        )


class RequestStream(Iterator[RequestOutput]):
    """Yields the chunks of one request, one for each step that changed it.

    Closing the stream, or losing the last reference to it, ends the request.
    """

    def __init__(
        self,
        driver: Driver,
        request: PreparedRequest,
        new_receipt: Callable[[Handle], dict[str, Any] | None] | None = None,
    ):
        """Gives the request to the engine; raises the same errors as `Driver.add`.

        Args:
            driver: The driver.
            request: The request.
            new_receipt: Makes the receipt of the last chunk; None if it has none.
        """
        self._driver = driver
        self._new_receipt = new_receipt
        self._box: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        self._updates: Iterator[Update] = iter(())
        self._handle: Handle | None = Handle(request, self._box.put, is_stream=True, is_kept=True)
        try:
            driver.wait(driver.add([self._handle]))
        except BaseException:
            self.close()
            raise

    def __next__(self) -> RequestOutput:
        """Returns the next chunk; waits until it is there."""
        if self._handle is None:
            raise StopIteration
        chunk: RequestOutput | None = None
        try:
            self._driver.check_open()
            update = next(self._updates, None)
            if update is None:
                updates: list[Update] = self._driver.wait_for_item(self._box)
                self._updates = iter(updates)
                update = next(self._updates)
            if isinstance(update[1], JaxpageError):
                raise update[1]
            chunk = update[1]
            if chunk.finished and self._new_receipt is not None:
                chunk = replace(chunk, receipt=self._new_receipt(self._handle))
        finally:
            # Any error ends the request, also Ctrl-C while it waits.
            if chunk is None or chunk.finished:
                self.close()
        return chunk

    def close(self) -> None:
        """Ends the request if it has not finished; its blocks are free before the next step."""
        handle = self._handle
        self._handle = None
        if handle is not None:
            self._driver.end([handle])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The attribute is missing where `__init__` failed early.
        if self.__dict__.get("_handle") is not None:
            self.close()


class HeldPrefix:
    """Keeps a prefix's keys and values in place until it is released.

    Unlike a stream, the pin does not end when the object is dropped: prompts find it by their
    tokens. It ends with its engine, too.

    Attributes:
        num_tokens: The number of tokens of the prefix.
    """

    def __init__(self, driver: Driver, pin_id: int, num_tokens: int):
        self.num_tokens = num_tokens
        self._driver = driver
        self._pin_id = pin_id

    @property
    def released(self) -> bool:
        """Returns whether the pin was released, or lost with the pages in a failed step."""
        return not self._driver.is_pinned(self._pin_id)


class PinnedPrefix(HeldPrefix):
    """Keeps a prefix in place until `release()` or the end of a `with` block; see `HeldPrefix`."""

    @classmethod
    def of(cls, driver: Driver, prefix: PreparedRequest) -> Self:
        """Computes a prefix and pins it; raises the same errors as `Driver.pinning`."""
        with driver.pinning(prefix) as pin_id:
            return cls(driver, driver.wait(pin_id), len(prefix.token_ids))

    def release(self) -> None:
        """Frees the blocks that no running request shares. A second call does nothing."""
        if not self.released:
            self._driver.wait(self._driver.unpin(self._pin_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Receipts:
    """Makes the receipts of answers; any thread but the driver's may call it.

    The weights are hashed when the first receipt of their version is made.
    """

    def __init__(self, driver: Driver, built: Built, *, progress: bool = False) -> None:
        """Hashes nothing yet.

        Args:
            driver: The driver.
            built: Its engine, with what is known of its model.
            progress: True shows a bar while large weights are hashed.
        """
        self._driver = driver
        self._built = built
        self._progress = progress
        self._lock = threading.Lock()
        self._hashed: tuple[int, WeightFacts] | None = None

    @functools.cached_property
    def facts(self) -> EngineFacts:
        """Returns what the bits of the engine depend on, besides its weights.

        Raises:
            UnsupportedError: The engine's answers have no receipts.
        """
        return assembly.describe_engine(self._built.model, self._built.spec, self._built.tokenizer)

    def hash_weights(self) -> tuple[int, WeightFacts]:
        """Returns the version of the weights that are in use now, and their hashes.

        Raises:
            UnsupportedError: The weights cannot be hashed.
            RuntimeError: The model sleeps.
        """
        with self._lock:
            if self._hashed is None or self._hashed[0] != self._built.engine.weights_version:
                version, parameters = self._driver.wait(self._driver.call(_share_parameters))
                built = self._built
                about = built.model, built.spec, built.engine.packed, parameters
                self._hashed = version, assembly.hash_model(*about, progress=self._progress)
            return self._hashed

    def check(self, requests: Sequence[PreparedRequest]) -> None:
        """Checks that the answers to requests can have receipts, and hashes the weights.

        Raises:
            UnsupportedError: They can have none; the message says why.
        """
        for request in requests:
            receipts.check_receiptable(
                request.params,
                has_adapter=request.lora is not None,
                has_vectors=request.embedded is not None,
            )
        # For its error: the answers of some engines have no receipts.
        _ = self.facts
        self.hash_weights()

    def verify(self, receipt: Mapping[str, Any], generate: Generate) -> Verification:
        """Computes the answer of a receipt again; see `LLM.verify`.

        Args:
            receipt: The receipt.
            generate: Generates with the driver's engine.

        Raises:
            ReceiptError: It is no receipt, or has a version that is not known.
            UnsupportedError: The answers of this engine have no receipts.
        """
        parsed = receipts.parse_receipt(receipt)
        _, weights = self.hash_weights()
        return receipts.verify(parsed, self.facts, weights, self._built.max_model_len, generate)

    def make(
        self, handle: Handle, model: str, *, names_tensors: bool = True
    ) -> dict[str, Any] | None:
        """Returns the receipt of an answer that has ended; None if it was cut short.

        Args:
            handle: The request, which asks for log probabilities.
            model: The name of the model.
            names_tensors: False leaves out the hashes of the single tensors.

        Raises:
            UnsupportedError: The weights were replaced since the request was added.
        """
        assert handle.reporter is not None, "the engine had the request"
        request, output = handle.reporter.answer()
        version, weights = self.hash_weights()
        if version != handle.weights_version:
            raise UnsupportedError(
                f"receipt: the request began with version {handle.weights_version} of the weights, "
                f"which were replaced by version {version} before its receipt was made"
            )
        if not names_tensors:
            weights = weights.model_copy(update={"tensors": None})
        return receipts.make_receipt(model, self.facts, weights, request, output)


def _share_parameters(engine: Engine) -> tuple[int, Any]:
    return engine.weights_version, engine.share_weights()


def with_logprobs(each: Sequence[Any]) -> list[Any]:
    """Returns parameters that ask for the log probability of each token, as receipts need it.

    Prompts that share their parameters share them afterwards, too.
    """
    changed = {
        id(params): replace(params, logprobs=0)
        for params in each
        if isinstance(params, SamplingParams) and params.logprobs is None
    }
    return [changed.get(id(params), params) for params in each]
