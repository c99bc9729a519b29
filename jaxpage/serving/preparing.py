"""The work of requests that must not hold the event loop up, on a few threads: reading, templates, encoding, checks, grammars."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jaxpage.decoding import Grammar
from jaxpage.driver import prepared
from jaxpage.engine.admission import CheckedParams, PreparedRequest
from jaxpage.engine.engine import Engine
from jaxpage.engine.prompts import Prompt
from jaxpage.errors import NativeError, QueueFull
from jaxpage.serving.wire.exchange import PromptRequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_READING_THREADS = 2  # tokenizers and parsers let the engine's thread run meanwhile, or are short
GRAMMAR_QUEUE_SECONDS = 10.0  # for the grammars of other requests before it
_GRAMMAR_THREADS = 1  # grammars are compiled one at a time
MAX_PANIC = 200  # characters of what it says
_ASIDE_THREADS = 1  # a text that no model could take may be tokenized, which takes seconds


def _contained(function: Callable[[], _Result]) -> _Result:
    """The function's result. Native code (tokenizers, their regular expressions) panics with what is no Exception: nobody would
    answer it. Raises NativeError in its place.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as panic:
        what = f"{type(panic).__name__}: {panic}"[:MAX_PANIC]
        logger.error("a request is refused, because native code gave up on it: %s", what)
        raise NativeError(what) from None


class Workers:
    """A few threads with a bounded number of things to do."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"jaxpage-{name}")
        self._places = threading.BoundedSemaphore(num_threads + max_waiting)

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """The function's result. Who stops waiting takes it back, unless it has begun. Raises QueueFull, and what it raises."""
        if not self._places.acquire(blocking=False):
            raise QueueFull("Too many requests are being read; try again later")
        try:
            future = self._pool.submit(_contained, function)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(self._is_done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """What has not begun never does."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_done(self, future: Future[Any]) -> None:
        self._places.release()


class Preparing:
    """Prepares requests for an engine that runs elsewhere meanwhile."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine = engine
        self._reading = Workers("reading", _READING_THREADS, max_waiting)
        self._aside = Workers("aside", _ASIDE_THREADS, max_waiting)
        # of their own: each may take seconds
        self._grammars = Workers("grammars", _GRAMMAR_THREADS, max_waiting)

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """Anything else that a request needs done. Raises QueueFull, and what it raises."""
        return await self._reading.run(function)

    async def aside(self, function: Callable[[], _Result]) -> _Result:
        """The same for what is not on its way to the engine: what is does not wait behind it."""
        return await self._aside.run(function)

    async def requests(self, prompt_requests: Sequence[PromptRequest]) -> list[PreparedRequest]:
        """Of one exchange, whose prompts share their parameters.

        Raises QueueFull, and what is wrong with one of the prompts: see `Admission` and `Engine.compiled`.
        """
        params = prompt_requests[0].params
        checked = await self._reading.run(partial(self._engine.admission.check_params, params))
        requests = [
            await self._reading.run(partial(self._prepared, prompt_request, checked))
            for prompt_request in prompt_requests
        ]  # others come in between
        if (asked := getattr(params, "structured_outputs", None)) is None:
            return requests
        grammar = self._engine.grammars.found(asked)  # what is known does not queue
        if grammar is None:
            grammar = await self._grammars.run(partial(self._compiled, params, time.monotonic()))
        return [request._replace(grammar=grammar) for request in requests]

    def _compiled(
        self, params: SamplingParams | BeamSearchParams, asked_at: float
    ) -> Grammar | None:
        """Raises TimeoutError if the turn of who asked then comes too late."""
        if time.monotonic() - asked_at > GRAMMAR_QUEUE_SECONDS:
            raise TimeoutError(
                f"structured_outputs: timed out after {GRAMMAR_QUEUE_SECONDS:g} s waiting for the grammar compiler; try again"
            )
        return self._engine.compiled(params)

    def close(self) -> None:
        self._reading.close()
        self._aside.close()
        self._grammars.close()

    def _prepared(self, prompt_request: PromptRequest, checked: CheckedParams) -> PreparedRequest:
        text, token_ids = (
            (prompt_request.prompt, None)
            if isinstance(prompt_request.prompt, str)
            else (None, prompt_request.prompt)
        )
        request = prepared(
            self._engine,
            Prompt(text, token_ids),
            checked,
            add_special_tokens=prompt_request.add_special_tokens,
        )
        lora = prompt_request.lora
        return request if lora is None else request._replace(lora=self._engine.opened_adapter(lora))
