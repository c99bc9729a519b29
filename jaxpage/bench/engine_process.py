"""An engine in a process of its own, driven step by step from here: several take turns, and each is as its users have it.

Of many engines in one process all but the first lose up to 4 % (docs/lab-log.md).
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
from typing import NamedTuple

from jaxpage.errors import JaxpageError
from jaxpage.llm import LLM
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sampling_params import SamplingParams

Prompts = list[list[int]]


class Run(NamedTuple):
    """All prompts once."""

    seconds: float
    tokens_per_step: float  # of a sequence, behind its first token
    outputs: list[list[int]]


class EngineInTurns:
    """Computes all prompts at once, a few tokens whenever it is asked to go on."""

    def start(self, config: EngineConfig) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        # which stands still unless it is asked to go on
        self._llm = LLM(**config.given(), use_tqdm=False, start=False)

    def begin(self, prompts: Prompts, params: Sequence[SamplingParams]) -> None:
        self._before = self._llm.stats()
        self._streams = [
            self._llm.stream(prompt, param) for prompt, param in zip(prompts, params, strict=True)
        ]
        self._outputs: list[list[int]] = [[] for _ in prompts]
        self._seconds = 0.0

    def go_on(self) -> tuple[float, bool]:
        """The next tokens of each sequence: how long all took so far, in seconds, and whether more may come."""
        start = time.perf_counter()
        chunks = [next(stream, None) for stream in self._streams]
        self._seconds += time.perf_counter() - start
        for output, chunk in zip(self._outputs, chunks, strict=True):
            output += chunk.outputs[0].token_ids if chunk else ()
        return self._seconds, any(chunk is not None for chunk in chunks)

    def end(self) -> Run:
        now = self._llm.stats()
        num_tokens, num_rows = (
            now[name] - self._before[name] for name in ("decode_tokens_total", "decode_rows_total")
        )
        return Run(self._seconds, num_tokens / num_rows if num_rows else 1.0, self._outputs)

    def shutdown(self) -> None:
        self._llm.shutdown()


class _Process(BaseManager):
    engine: Callable[[], EngineInTurns]  # a proxy of it


_Process.register("engine", EngineInTurns)


@contextmanager
def engine_process(config: EngineConfig) -> Iterator[EngineInTurns]:
    """What goes wrong there is raised here. Raises JaxpageError if the process ends of itself."""
    # on a GPU the first would take what others need
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # a fork would inherit jax's threads, of which it has none
    with _Process(ctx=get_context("spawn")) as process:
        try:
            engine = process.engine()
            engine.start(config)
            yield engine
            # after an error the reply to another call may be under way: leaving ends the process in
            # any case
            engine.shutdown()
        except (EOFError, ConnectionError) as error:
            raise JaxpageError(
                "The process of an engine ended; too little memory is a likely reason"
            ) from error


def _end_with_parent() -> None:
    """The parent may be killed, and this process would then go on for ever."""
    if parent := parent_process():
        wait([parent.sentinel])
        os._exit(1)
