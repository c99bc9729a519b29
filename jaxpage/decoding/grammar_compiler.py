"""Compiles the grammars of requests, within limits of time and memory, on the caller's thread.

The engine's thread never waits for it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from copy import copy
from typing import TYPE_CHECKING, Any

from jaxpage.errors import UnsupportedError
from jaxpage.settings.argument_checks import show
from jaxpage.worker_process import WorkerGoneError, WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from jaxpage.decoding.constraints import Grammar

COMPILE_SECONDS = 2.0  # for one grammar
COMPILE_BYTES = 256 << 20
WAIT_SECONDS = 10.0  # to wait while the grammars of other requests are compiled
# Compiled grammars are kept for later requests. Their size is taken to be the memory that compiling
# them took.
CACHED_BYTES = 128 << 20
CACHED_GRAMMARS = 64
REFUSED_SECONDS = 60.0  # a refused grammar is not tried again for this long
_MIN_BYTES = 1 << 18  # the smallest size that a kept grammar counts as


class GrammarCompiler:
    """Compiles and caches grammars, keyed by the parameter that asks for them.

    A separate process tries each grammar first, and only then it is compiled here. Several threads
    may use a compiler at once: llguidance lets other threads run while it compiles and while it
    computes masks.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiling = threading.Lock()
        self._caching = threading.Lock()  # held for short times only
        # The grammar that was used last comes last. The number is its size in bytes.
        self._cache: OrderedDict[tuple[str, str], tuple[Grammar, int]] = OrderedDict()
        # The latest refusal comes last. The number is the time of the refusal.
        self._refusals: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        self._worker: _Worker | None = None
        self._closed = False
        self._tokenizer: tuple[LLTokenizer, int] | None = None
        self._unsupported: str | None = None  # why llguidance cannot take the tokenizer

    def compile(self, requested: tuple[str, str]) -> Grammar:
        """Returns the grammar that a parameter asks for; it may take seconds.

        Raises:
            ValueError: Something is wrong with the grammar.
            TimeoutError: Other requests kept the compiler busy for too long.
            UnsupportedError: llguidance cannot take the tokenizer.
            JaxpageError: The process that tries grammars was killed twice, or gave no answer.
            RuntimeError: The compiler is closed.
        """
        if (grammar := self.find(requested)) is not None:
            return grammar
        if not self._compiling.acquire(timeout=WAIT_SECONDS):
            raise TimeoutError(
                f"structured_outputs: timed out after {WAIT_SECONDS:g} s waiting for the grammar "
                "compiler; try again"
            )
        try:
            self._check_open()
            return self.find(requested) or self._keep(requested, *self._compile(*requested))
        finally:
            self._compiling.release()

    def close(self) -> None:
        """Ends the worker process, even while it tries a grammar; nothing is compiled any more."""
        # This comes first: a worker that starts now is either seen below, or its starter sees this
        # flag.
        self._closed = True
        if (worker := self._worker) is not None:
            worker.kill()  # before the lock: a thread that waits for the worker holds it
        with self._compiling:
            self._end_worker()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This LLM was shut down")

    def _compile(self, kind: str, value: str) -> tuple[Grammar, int]:
        from jaxpage.decoding.constraints import Grammar
        from jaxpage.decoding.grammars import source_of

        requested = f"structured_outputs={show({kind: json.loads(value)})}"
        try:
            problem, num_bytes = self._try(kind, value)
        except UnsupportedError as error:
            self._unsupported = str(error)
            raise UnsupportedError(f"{requested} cannot be honoured: {error}") from None
        if problem is not None:
            raise ValueError(self._refuse((kind, value), f"{requested} is refused: {problem}"))
        assert self._tokenizer is not None
        return Grammar(*self._tokenizer, self._vocab_size, source_of(kind, value)), num_bytes

    def _try(self, kind: str, value: str) -> tuple[str | None, int]:
        """Returns the worker's answer.

        A worker that was killed from outside is started once more, since the grammar may not be the
        cause.
        """
        for is_last in (False, True):
            try:
                return self._start().try_grammar(kind, value)
            except WorkerGoneError:
                self._end_worker()
                self._check_open()
                if is_last:
                    raise
            except (
                BaseException
            ):  # even an interrupt: the late answer would be read as that to the next question
                self._end_worker()
                raise
        raise AssertionError("unreachable")

    def _start(self) -> _Worker:
        if self._unsupported is not None:
            raise UnsupportedError(self._unsupported)
        if self._worker is None or self._tokenizer is None:
            from jaxpage.decoding.grammars import tokenizer_of

            description = _description(self._hf_tokenizer)
            # First, so that both processes read the tokenizer at once.
            self._worker = _Worker(description)
            self._tokenizer = self._tokenizer or tokenizer_of(description)
        self._check_open()
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def find(self, requested: tuple[str, str]) -> Grammar | None:
        """Returns the grammar if it is cached, else None; never waits for a compilation.

        Raises:
            ValueError: The grammar was refused a short time ago.
        """
        with self._caching:
            message, since = self._refusals.get(requested, ("", -math.inf))
            if time.monotonic() - since < REFUSED_SECONDS:
                raise ValueError(message)
            if requested not in self._cache:
                return None
            self._cache.move_to_end(requested)
            return self._cache[requested][0]

    def _keep(self, requested: tuple[str, str], grammar: Grammar, num_bytes: int) -> Grammar:
        """Caches the grammar and returns it.

        The grammars that were not used for the longest time are dropped; requests that use one keep
        it.
        """
        with self._caching:
            self._cache[requested] = grammar, max(num_bytes, _MIN_BYTES)
            while (
                len(self._cache) > CACHED_GRAMMARS
                or sum(size for _, size in self._cache.values()) > CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        return grammar

    def _refuse(self, requested: tuple[str, str], message: str) -> str:
        """Keeps a refusal for a while, and returns its message.

        It is forgotten later, because a grammar may time out only because the machine was busy.
        """
        with self._caching:
            self._refusals[requested] = message, time.monotonic()
            self._refusals.move_to_end(requested)
            while len(self._refusals) > CACHED_GRAMMARS:
                self._refusals.popitem(last=False)
        return message


class _Worker(WorkerProcess):
    """Runs the process that tries grammars; see `jaxpage.decoding.grammar_worker`."""

    def __init__(self, tokenizer_description: str) -> None:
        super().__init__(
            "jaxpage.decoding.grammar_worker", "structured_outputs: the process that tries grammars"
        )
        self.say(tokenizer_description)

    def try_grammar(self, kind: str, value: str) -> tuple[str | None, int]:
        """Returns the problem of a grammar or None, and the number of bytes that compiling it took.

        Raises:
            JaxpageError: The process gave no answer.
        """
        problem, num_bytes = self.ask(
            [kind, value, COMPILE_SECONDS, COMPILE_BYTES], COMPILE_SECONDS
        )
        return problem, num_bytes


def _description(tokenizer: Any) -> str:
    """Returns the content of tokenizer.json in one line, with the tokens that other files added."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return json.dumps(json.loads(backend.to_str()))
