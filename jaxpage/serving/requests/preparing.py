"""Prepares requests on a few threads, so that the work does not hold up the event loop.

The work is reading, chat templates, tokenizing, checks of parameters, and compiling grammars.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jaxpage.decoding import Grammar
from jaxpage.driver import prepare
from jaxpage.engine import CheckedParams, Engine, PreparedRequest
from jaxpage.engine.calls import Prompt
from jaxpage.errors import NativeError, QueueFull
from jaxpage.images import ReadyPicture
from jaxpage.serving.wire.exchange import PromptRequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Tokenizers and parsers let the engine's thread run meanwhile, or are short.
_READING_THREADS = 2
GRAMMAR_QUEUE_SECONDS = 10.0  # the longest wait for the grammars of other requests before it
_GRAMMAR_THREADS = 1  # grammars are compiled one at a time
MAX_PANIC = 200  # the most characters of a panic's message
_PICTURE_THREADS = max(1, min(4, os.cpu_count() or 1))
# POST /tokenize may bring a text that is too long for any model, which takes seconds.
_ASIDE_THREADS = 1
# The bytes of a body, or the characters or token ids of a prompt, above which it counts as large.
LARGE_SIZE = 1 << 16
_LARGE_THREADS = 1
# The answers with more values, such as log probabilities or numbers of vectors, are made one at a
# time.
LARGE_ANSWER_VALUES = 1 << 14


def _contain(function: Callable[[], _Result]) -> _Result:
    """Returns the function's result, and turns a panic of native code into an error.

    Native code (tokenizers, their regular expressions) panics with a BaseException that is no
    Exception, so that no handler of errors would answer the request.

    Raises:
        NativeError: Native code has panicked.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as panic:
        description = f"{type(panic).__name__}: {panic}"[:MAX_PANIC]
        logger.error("a request is refused, because native code gave up on it: %s", description)
        raise NativeError(description) from None


class Workers:
    """A few threads with a bounded queue of functions to run."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"jaxpage-{name}")
        self._places = threading.BoundedSemaphore(num_threads + max_waiting)

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """Runs a function on one of the threads, and returns its result.

        A caller that stops waiting takes the function back, unless it has begun.

        Raises:
            QueueFull: The queue has no place.
            NativeError: Native code has panicked. The function's own exceptions come as they are.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFull("Too many requests are being read; try again later")
        try:
            future = self._pool.submit(_contain, function)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(self._is_done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Takes back the functions that have not begun, without waiting for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_done(self, future: Future[Any]) -> None:
        self._places.release()


class Readers:
    """Threads that read requests, of which one is for large bodies and long texts.

    Reading one of these takes longer than reading a hundred others, which do not wait for it.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._usual = Workers(name, num_threads, max_waiting)
        self._large = Workers(f"{name}-large", _LARGE_THREADS, max_waiting)

    async def run(self, function: Callable[[], _Result], size: int) -> _Result:
        """Runs a function that reads a request; see `Workers.run`.

        Args:
            function: The function.
            size: The number of bytes, characters or token ids that it reads.
        """
        workers = self._usual if size <= LARGE_SIZE else self._large
        return await workers.run(function)

    def close(self) -> None:
        """Takes back the functions that have not begun."""
        self._usual.close()
        self._large.close()


class Preparing:
    """Prepares requests for an engine that runs on another thread meanwhile."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine = engine
        self._reading = Readers("reading", _READING_THREADS, max_waiting)
        self._aside = Workers("aside", _ASIDE_THREADS, max_waiting)
        self._answers = Workers("answers", _LARGE_THREADS, max_waiting)
        # Grammars have a thread of their own, because each may take seconds.
        self._grammars = Workers("grammars", _GRAMMAR_THREADS, max_waiting)
        # Hashing the weights for the first receipt may take minutes.
        self._receipts = Workers("receipts", 1, max_waiting)
        # Processes read pictures, and these threads wait for them.
        self._pictures = Workers("pictures", _PICTURE_THREADS, max_waiting)

    async def run(self, function: Callable[[], _Result], num_bytes: int) -> _Result:
        """Runs a function that reads a request with a body of so many bytes; see `Readers.run`."""
        return await self._reading.run(function, num_bytes)

    async def answer(self, function: Callable[[], _Result], num_values: int) -> _Result:
        """Runs a function that makes an answer.

        Args:
            function: The function.
            num_values: The size of the answer. Large ones are made one at a time.

        Raises:
            QueueFull: Too many large answers are being made.
        """
        if num_values <= LARGE_ANSWER_VALUES:
            return await asyncio.to_thread(function)
        return await self._answers.run(function)

    async def aside(self, function: Callable[[], _Result]) -> _Result:
        """Runs a function that may take long, on a thread for which no generation waits.

        See `Workers.run`.
        """
        return await self._aside.run(function)

    async def receipt(self, function: Callable[[], _Result]) -> _Result:
        """Runs a function that hashes weights or makes a receipt; see `Workers.run`."""
        return await self._receipts.run(function)

    async def requests(self, prompt_requests: Sequence[PromptRequest]) -> list[PreparedRequest]:
        """Prepares the prompts of one exchange, which share their parameters.

        Raises:
            QueueFull: Too many requests are being read.
            TimeoutError: The grammar has waited too long for those of other requests.
            ValueError, JaxpageError: A prompt or the parameters cannot be served; see `Admission`
                and `Engine.compile_grammar`.
        """
        params = prompt_requests[0].params
        checked = await self._reading.run(partial(self._engine.check_params, params), 0)
        # One prompt at a time goes to the threads, so that other exchanges come in between.
        requests = [
            await self._reading.run(
                partial(self._prepare, prompt_request, checked, await self._ready(prompt_request)),
                len(prompt_request.prompt),
            )
            for prompt_request in prompt_requests
        ]
        if (requested := getattr(params, "structured_outputs", None)) is None:
            return requests
        grammar = self._engine.find_grammar(requested)  # a known grammar does not queue
        if grammar is None:
            grammar = await self._grammars.run(partial(self._compile, params, time.monotonic()))
        return [request._replace(grammar=grammar) for request in requests]

    async def _ready(self, prompt_request: PromptRequest) -> Sequence[ReadyPicture]:
        """Returns the pictures of a prompt as the model takes them."""
        pictures = prompt_request.pictures
        return () if pictures is None else await self._pictures.run(pictures.process)

    def _compile(
        self, params: SamplingParams | BeamSearchParams, requested_at: float
    ) -> Grammar | None:
        """Compiles a grammar, or raises TimeoutError if the request has waited for it too long."""
        if time.monotonic() - requested_at > GRAMMAR_QUEUE_SECONDS:
            raise TimeoutError(
                f"structured_outputs: timed out after {GRAMMAR_QUEUE_SECONDS:g} s waiting "
                "for the grammar compiler; try again"
            )
        return self._engine.compile_grammar(params)

    def close(self) -> None:
        """Takes back what the threads have not begun."""
        self._reading.close()
        self._aside.close()
        self._answers.close()
        self._grammars.close()
        self._receipts.close()
        self._pictures.close()

    def _prepare(
        self,
        prompt_request: PromptRequest,
        checked: CheckedParams,
        ready: Sequence[ReadyPicture],
    ) -> PreparedRequest:
        text, token_ids = (
            (prompt_request.prompt, None)
            if isinstance(prompt_request.prompt, str)
            else (None, prompt_request.prompt)
        )
        adds = prompt_request.add_special_tokens
        if (pictures := prompt_request.pictures) is not None:
            expanded, embedded = pictures.expand(
                prompt_request.prompt, ready, add_special_tokens=adds
            )
            request = self._engine.prepare(text, expanded, checked, embedded)
        else:
            prompt = Prompt(text, token_ids, prompt_request.vectors)
            request = prepare(
                self._engine,
                prompt,
                checked,
                add_special_tokens=adds,
                truncation=prompt_request.truncation,
            )
        lora = prompt_request.lora
        return request if lora is None else request._replace(lora=self._engine.open_adapter(lora))
