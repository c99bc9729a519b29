"""`LLM`: the front door for Python programs."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from jaxpage.config import EngineConfig
from jaxpage.config_sources import resolve_config
from jaxpage.engine.build import build_engine
from jaxpage.engine.reporting import Reporter
from jaxpage.interrupts import uninterrupted
from jaxpage.outputs import RequestOutput
from jaxpage.prompts import Prompt, normalise, one_each
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

logger = logging.getLogger(__name__)

Params = SamplingParams | BeamSearchParams
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, its KV pool and its compiled steps, ready to generate.

    Building one loads the weights and compiles every shape; after that nothing compiles. Calls from several threads take turns step
    by step. Use it as a context manager, or call `shutdown()`, to give the device memory back.

    Args: the fields of `EngineConfig`, by name. model: "demo", a local directory, or a hub id.

    Raises:
        ConfigError, UnsupportedError: a setting is wrong, or this version cannot honour it.
        ModelNotFoundError, CheckpointError: there is no such model, or its files do not fit; all that is wrong at once.
        CapacityError: it does not fit in memory; with the numbers and the remedies.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", *, use_tqdm: bool = True, **settings: Any):
        self.config = EngineConfig(model=os.fspath(model), **settings)
        built = build_engine(self.config, progress=use_tqdm)
        self._engine = built.engine
        self.tokenizer = built.tokenizer
        self.memory = built.memory
        self._generation_defaults = built.generation_defaults
        self._request_ids = (f"request-{number}" for number in itertools.count())
        self._lock = threading.RLock()
        self._changed: set[str] = set()  # requests that have news since somebody looked
        self._closed = False

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], *, use_tqdm: bool = True, **overrides: Any) -> Self:
        """The same settings from a YAML file; `overrides` win over it. Raises ConfigError naming the line."""
        config = resolve_config(path, overrides).config
        return cls(**config.model_dump(), use_tqdm=use_tqdm)

    def generate(
        self, prompts: Any, params: Params | Sequence[Params] | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Generates for every prompt; outputs come in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, {"prompt_token_ids": [...]}, or a list of those.
            params: one for all prompts, or one per prompt; by default those of the model's generation_config.json.
            use_tqdm: a progress bar on standard error.

        Raises, before anything runs: TypeError, ValueError, UnsupportedError or CapacityError, naming the parameter and its value.
        """
        requests = self._prepare(prompts, params)
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            reporters = self._add_all(requests)
            unfinished, num_tokens = set(reporters), 0
            try:
                while unfinished:
                    finished = {request_id for request_id in self._news(unfinished) if reporters[request_id].finished}
                    unfinished -= finished
                    num_tokens += sum(reporters[request_id].num_output_tokens for request_id in finished)
                    bar.update(len(finished))
                    bar.set_postfix_str(
                        f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False
                    )
            finally:
                self._end(reporters)
            return [reporter.whole() for reporter in reporters.values()]

    def stream(self, prompt: Any, params: Params | None = None) -> Iterator[RequestOutput]:
        """Generates for one prompt and yields what is new after each step; the last chunk has the finish reason.

        Closing the iterator ends the request and frees its blocks. Arguments are checked at once, not at the first chunk.
        """
        requests = self._prepare(prompt, params)
        if len(requests) != 1:
            raise ValueError(f"stream takes one prompt, not {len(requests)}; use generate for several")
        [(request_id, reporter)] = self._add_all(requests).items()
        return self._chunks(request_id, reporter)

    def _chunks(self, request_id: str, reporter: Reporter) -> Iterator[RequestOutput]:
        try:
            finished = False
            while not finished:
                self._news({request_id})
                chunk = reporter.delta()
                finished = chunk.finished
                yield chunk
        finally:
            self._end([request_id])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through the chat template of the model's tokenizer."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(one) for one in conversations], params, use_tqdm)

    def chat_prompt(self, messages: Any) -> dict[str, Any]:
        """The prompt that `chat` makes of a conversation. Raises ValueError if the model has no chat template."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"The model {self.config.model!r} has no chat template; use generate")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return {"prompt": text, "prompt_token_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the model's generation_config.json asks for (temperature, top_p, top_k, min_p), and `overrides` over it."""
        asked = self._generation_defaults
        names = ("temperature", "top_p", "top_k", "min_p")
        values = {name: asked[name] for name in names if asked.get(name) is not None}
        if asked.get("do_sample") is False:
            values = {"temperature": 0.0}
        if asked.get("repetition_penalty") not in (None, 1, 1.0):
            logger.warning(
                "generation_config.json asks for repetition_penalty=%s, which this version does not support; it is left out",
                asked["repetition_penalty"],
            )
        return SamplingParams(**{**values, **overrides})

    def stats(self) -> dict[str, Any]:
        """A snapshot of the engine's counters and gauges, under the names of the metrics."""
        with self._lock:
            return self._engine.stats()

    def shutdown(self) -> None:
        """Ends what is running and frees the device. The object cannot be used any more; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _prepare(self, prompts: Any, params: Any) -> list[tuple[Prompt, tuple[int, ...], SamplingParams]]:
        """Encodes and checks everything, so that a bad argument is refused before anything runs."""
        if self._closed:
            raise RuntimeError("This LLM was shut down")
        normalised = normalise(prompts)
        each = one_each(self.default_sampling_params() if params is None else params, len(normalised))
        requests = []
        for index, (prompt, one) in enumerate(zip(normalised, each, strict=True)):
            if not isinstance(one, SamplingParams | BeamSearchParams):
                raise TypeError(f"params must be SamplingParams or BeamSearchParams, not {type(one).__name__}")
            token_ids = self._encode(prompt)
            try:
                self._engine.check(token_ids, one)
            except Exception as error:
                if len(normalised) > 1:
                    error.add_note(f"This is prompt {index} of {len(normalised)}.")
                raise
            assert isinstance(one, SamplingParams)
            requests.append((prompt, token_ids, one))
        return requests

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if self.tokenizer is None:
            raise ValueError(f"The model {self.config.model!r} has no tokenizer; give prompts as token ids")
        return tuple(self.tokenizer(prompt.text)["input_ids"])

    def _add_all(self, requests: list[tuple[Prompt, tuple[int, ...], SamplingParams]]) -> dict[str, Reporter]:
        reporters: dict[str, Reporter] = {}
        try:
            with self._lock:
                for prompt, token_ids, params in requests:
                    request_id = next(self._request_ids)
                    reporters[request_id] = self._engine.add(request_id, prompt.text, token_ids, params)
        except BaseException:
            self._end(reporters)
            raise
        return reporters

    def _news(self, request_ids: set[str]) -> set[str]:
        """Steps the engine, for everybody, until there is news of one of these requests; returns those that have some."""
        with self._lock:
            while not (news := self._changed & request_ids):
                if self._closed:
                    raise RuntimeError("This LLM was shut down")
                with uninterrupted():
                    self._changed.update(group.request.request_id for group in self._engine.step())
            self._changed -= news
            return news

    def _end(self, request_ids: Iterable[str]) -> None:
        """Aborts what has not finished: an error, an interrupt or a closed stream leaves no block behind."""
        with self._lock:
            if not self._closed:
                self._engine.recover()
            for request_id in request_ids:
                self._engine.abort(request_id)
                self._changed.discard(request_id)
