"""Compiles the grammars of requests, within a time and a memory, on the caller's thread: never while the engine is held."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from copy import copy
from typing import Any

from llguidance import LLTokenizer

from jaxpage.decoding import Grammar
from jaxpage.decoding.grammars import source_of, tokenizer_of
from jaxpage.errors import UnsupportedError
from jaxpage.settings.argument_checks import shown
from jaxpage.worker_process import WorkerGoneError, WorkerProcess

COMPILE_SECONDS = 2.0  # for one grammar
COMPILE_BYTES = 256 << 20
WAIT_SECONDS = 10.0  # for the grammars of other requests before it
# of the grammars that are kept for the next who asks, by what their compilation took
CACHED_BYTES = 128 << 20
CACHED_GRAMMARS = 64
REFUSED_SECONDS = 60.0  # for so long the same grammar is refused without another try
_LEAST_BYTES = 1 << 18  # what a grammar counts at least


class GrammarCompiler:
    """Grammars by the parameter that asks for them. A grammar is first tried by a process of its own, then compiled here.

    For several threads at once. llguidance lets other threads run while it compiles and while it computes masks.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiling = threading.Lock()
        self._caching = threading.Lock()  # never held for long
        # the last used last; with bytes
        self._cache: OrderedDict[tuple[str, str], tuple[Grammar, int]] = OrderedDict()
        # the last one last; with times
        self._refusals: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        self._worker: _Worker | None = None
        self._closed = False
        self._tokenizer: tuple[LLTokenizer, int] | None = None
        self._unsupported: str | None = None  # what is wrong with the tokenizer

    def compiled(self, asked: tuple[str, str]) -> Grammar:
        """Raises ValueError with what is wrong with the grammar; TimeoutError if others keep the compiler busy for too long;
        UnsupportedError if llguidance cannot take the tokenizer; JaxpageError if the processes that try it are killed; RuntimeError
        after `close`.
        """
        if (found := self.found(asked)) is not None:
            return found
        if not self._compiling.acquire(timeout=WAIT_SECONDS):
            raise TimeoutError(
                f"structured_outputs: timed out after {WAIT_SECONDS:g} s waiting for the grammar compiler; try again"
            )
        try:
            self._check_open()
            return self.found(asked) or self._kept(asked, *self._compile(*asked))
        finally:
            self._compiling.release()

    def close(self) -> None:
        """For good: ends the worker, and what it is trying."""
        # first: a worker that starts now is seen below, or its starter sees this
        self._closed = True
        if (worker := self._worker) is not None:
            worker.kill()  # before the lock, which who waits for an answer holds
        with self._compiling:
            self._end_worker()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This LLM was shut down")

    def _compile(self, kind: str, value: str) -> tuple[Grammar, int]:
        asked = f"structured_outputs={shown({kind: json.loads(value)})}"
        try:
            problem, num_bytes = self._tried(kind, value)
        except UnsupportedError as error:
            self._unsupported = str(error)
            raise UnsupportedError(f"{asked} cannot be honoured: {error}") from None
        if problem is not None:
            raise ValueError(self._refused((kind, value), f"{asked} is refused: {problem}"))
        assert self._tokenizer is not None
        return Grammar(*self._tokenizer, self._vocab_size, source_of(kind, value)), num_bytes

    def _tried(self, kind: str, value: str) -> tuple[str | None, int]:
        """What the worker answers. A worker that was killed from outside is started again once: the grammar may not be the cause."""
        for is_last in (False, True):
            try:
                return self._started().tried(kind, value)
            except WorkerGoneError:
                self._end_worker()
                self._check_open()
                if is_last:
                    raise
            except (
                BaseException
            ):  # an interrupt as well: its answer would be taken for the next one's
                self._end_worker()
                raise
        raise AssertionError("unreachable")

    def _started(self) -> _Worker:
        if self._unsupported is not None:
            raise UnsupportedError(self._unsupported)
        if self._worker is None or self._tokenizer is None:
            description = _description(self._hf_tokenizer)
            self._worker = _Worker(description)  # first: both read the tokenizer at the same time
            self._tokenizer = self._tokenizer or tokenizer_of(description)
        self._check_open()
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def found(self, asked: tuple[str, str]) -> Grammar | None:
        """What is known without waiting for anybody: None if that is nothing. Raises ValueError if it was refused a while ago."""
        with self._caching:
            message, since = self._refusals.get(asked, ("", -math.inf))
            if time.monotonic() - since < REFUSED_SECONDS:
                raise ValueError(message)
            if asked not in self._cache:
                return None
            self._cache.move_to_end(asked)
            return self._cache[asked][0]

    def _kept(self, asked: tuple[str, str], grammar: Grammar, num_bytes: int) -> Grammar:
        """The grammar, cached. What was not used for the longest time leaves; requests that use it keep it."""
        with self._caching:
            self._cache[asked] = grammar, max(num_bytes, _LEAST_BYTES)
            while (
                len(self._cache) > CACHED_GRAMMARS
                or sum(size for _, size in self._cache.values()) > CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        return grammar

    def _refused(self, asked: tuple[str, str], message: str) -> str:
        """Returns the message, and keeps it for a while for the same grammar: a grammar may time out only because of the load."""
        with self._caching:
            self._refusals[asked] = message, time.monotonic()
            self._refusals.move_to_end(asked)
            while len(self._refusals) > CACHED_GRAMMARS:
                self._refusals.popitem(last=False)
        return message


class _Worker(WorkerProcess):
    """The process in which grammars are tried: see jaxpage/decoding/grammar_worker.py."""

    def __init__(self, tokenizer_description: str) -> None:
        super().__init__(
            "jaxpage.decoding.grammar_worker", "structured_outputs: the process that tries grammars"
        )
        self.say(tokenizer_description)

    def tried(self, kind: str, value: str) -> tuple[str | None, int]:
        """What is wrong with a grammar, if anything, and the bytes that it took. Raises JaxpageError if there is no answer."""
        problem, num_bytes = self.asked(
            [kind, value, COMPILE_SECONDS, COMPILE_BYTES], COMPILE_SECONDS
        )
        return problem, num_bytes


def _description(tokenizer: Any) -> str:
    """tokenizer.json, in one line, with the tokens that other files added."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return json.dumps(json.loads(backend.to_str()))
