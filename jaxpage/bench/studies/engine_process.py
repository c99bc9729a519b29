"""Runs an engine in a process of its own, which is driven step by step from here.

Several engines take turns, and each has a process as its users would have. If one process has
several engines, all but the first lose up to 4 % (docs/lab-log.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from typing import Any, NamedTuple

from jaxpage.bench.studies.oracle import OracleLLM
from jaxpage.errors import JaxpageError
from jaxpage.llm import LLM
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams

Prompts = list[list[int]]


class EngineRun(NamedTuple):
    """Holds the result of computing all prompts once.

    Attributes:
        seconds: The time that the engine took in its turns.
        tokens_per_step: The tokens of a sequence per step, after its first token.
        outputs: The token ids of each output.
        accepted: The share of steps with drafts that accepted so many drafts or more: 1, 2 and so
            on.
    """

    seconds: float
    tokens_per_step: float
    outputs: list[list[int]]
    accepted: tuple[float, ...] = ()


class EngineInTurns:
    """Computes all prompts together, a few tokens each time that it is asked to go on."""

    def start(self, config: EngineConfig, *, oracle: bool = False) -> None:
        """Starts the engine; with `oracle` it drafts what `learn` tells it."""
        threading.Thread(target=_end_with_parent, daemon=True).start()
        make_llm = OracleLLM if oracle else LLM
        # With start=False the engine steps only when a stream is read.
        self._llm = make_llm(**config.explicit_settings(), use_tqdm=False, start=False)

    def learn(self, prompts: Prompts, params: Sequence[SamplingParams], outputs: Prompts) -> None:
        """Tells the oracle what comes of the prompts that begin next."""
        assert isinstance(self._llm, OracleLLM), "started with `oracle`"
        self._llm.learn(prompts, params, outputs)

    def begin(self, prompts: Prompts, params: Sequence[SamplingParams]) -> None:
        """Adds the prompts; nothing is computed before `go_on`."""
        self._before = self._llm.stats()
        self._streams = [
            self._llm.stream(prompt, param) for prompt, param in zip(prompts, params, strict=True)
        ]
        self._outputs: list[list[int]] = [[] for _ in prompts]
        self._seconds = 0.0

    def go_on(self) -> tuple[float, bool]:
        """Computes the next tokens of each sequence.

        Returns:
            The seconds that all calls took so far, and whether more tokens may come.
        """
        start = time.perf_counter()
        chunks = [next(stream, None) for stream in self._streams]
        self._seconds += time.perf_counter() - start
        for output, chunk in zip(self._outputs, chunks, strict=True):
            output += chunk.outputs[0].token_ids if chunk else ()
        return self._seconds, any(chunk is not None for chunk in chunks)

    def end(self) -> EngineRun:
        """Returns the result after the last token."""
        now = self._llm.stats()
        num_tokens, num_rows = (
            now[name] - self._before[name] for name in ("decode_tokens_total", "decode_rows_total")
        )
        per_step = num_tokens / num_rows if num_rows else 1.0
        return EngineRun(
            self._seconds, per_step, self._outputs, _subtract_counts(self._before, now)
        )

    def shutdown(self) -> None:
        """Shuts the engine down."""
        self._llm.shutdown()


def _subtract_counts(before: dict[str, Any], now: dict[str, Any]) -> tuple[float, ...]:
    drafted = now["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    added = [count - before[name].get(place, 0) for place, count in now[name].items()]
    return tuple(count / drafted for count in added if count) if drafted else ()


class _Process(BaseManager):
    engine: Callable[[], EngineInTurns]  # returns a proxy


_Process.register("engine", EngineInTurns)


@contextmanager
def engine_process(config: EngineConfig, *, oracle: bool = False) -> Iterator[EngineInTurns]:
    """Yields an engine in a process of its own; its errors are raised here.

    Args:
        config: The settings of the engine.
        oracle: See `EngineInTurns.start`.

    Raises:
        JaxpageError: The process ended by itself.
    """
    # On a GPU the first engine would take the memory that the others need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # A forked process would have the state of jax's threads, but not the threads.
    with _Process(ctx=get_context("spawn")) as process:
        try:
            engine = process.engine()
            engine.start(config, oracle=oracle)
            yield engine
            # After an error there is no such call, because the reply to another call may still
            # come. Leaving the block ends the process in any case.
            engine.shutdown()
        except (EOFError, ConnectionError) as error:
            raise JaxpageError(
                "The process of an engine ended; too little memory is a likely reason"
            ) from error


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even if the parent is killed."""
    if parent := parent_process():
        wait([parent.sentinel])
        os._exit(1)
