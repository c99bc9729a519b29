"""The calls that share one engine: each adds its requests, steps the engine until they have updates, and cleans up behind itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from jaxpage.engine.admission import CheckedParams, PreparedRequest
from jaxpage.engine.engine import Engine
from jaxpage.engine.interrupts import Interrupts, held_interrupts
from jaxpage.engine.prompts import Prompt
from jaxpage.engine.reporting import Reporter
from jaxpage.errors import UnsupportedError
from jaxpage.memory import MemoryReport
from jaxpage.outputs import RequestOutput
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.request import SequenceGroup


def prepared(
    engine: Engine, prompt: Prompt, checked: CheckedParams, *, add_special_tokens: bool = True
) -> PreparedRequest:
    """The prompt encoded and checked; a grammar is left to `Engine.compiled`. On any thread. Raises TypeError or ValueError."""
    token_ids = prompt.token_ids
    if token_ids is None:
        if engine.tokenizer is None:
            raise ValueError("The model has no tokenizer; give prompts as token ids")
        token_ids = _encoded(engine.tokenizer, prompt.text, add_special_tokens=add_special_tokens)
    return engine.prepare(prompt.text, token_ids, checked)


def _encoded(tokenizer: Any, text: str | None, *, add_special_tokens: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except BaseException as panic:
        # A regular expression of tokenizer.json that gives up raises what is no Exception, from Rust.
        if isinstance(panic, Exception) or type(panic).__name__ != "PanicException":
            raise
        raise ValueError("prompt: the model's tokenizer gives up on this text") from None


def check_streamable(params: SamplingParams | BeamSearchParams) -> None:
    """Raises UnsupportedError where there is nothing to show before the end."""
    if isinstance(params, BeamSearchParams):
        raise UnsupportedError(
            f"streaming cannot show beam_width={params.beam_width}: which hypotheses are the best is known only at the end"
        )
    if params.ranks:
        raise UnsupportedError(
            f"streaming cannot show best_of={params.best_of}: which are the best n={params.n} is known only at the end"
        )


@functools.cache
def _first_process() -> int:
    """In which the first LLM was made: JAX's threads are there, and not in those that are forked from it."""
    return os.getpid()


def check_process() -> None:
    """Raises RuntimeError in a process that was forked from one in which an LLM was made: a step would wait for XLA's threads for ever."""
    if os.getpid() != _first_process():
        raise RuntimeError(
            f"an LLM was made in process {_first_process()}, from which this one was forked: none works here. Start processes by "
            "multiprocessing's method 'spawn', or fork before the first LLM is made"
        )


class Calls:
    """Lets several calls, of one thread or of several, take turns with one engine, step by step."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = threading.Lock()
        self._next = (
            threading.Lock()
        )  # of the thread that gets the engine next: a thread that steps on lets those go first that wait
        self._owner: int | None = None  # the thread whose turn it is
        self._numbers = itertools.count()  # of requests
        self._changed: set[str] = set()  # requests with updates that were not read yet
        self._dropped: deque[str] = deque()  # requests that end with the next turn
        self._closed = False
        check_process()

    def check_open(self) -> None:
        check_process()
        if self._closed:
            raise RuntimeError("This LLM was shut down")

    @property
    def _is_inside(self) -> bool:
        """Whether this thread has its turn already: a finaliser or a signal handler runs in the middle of it."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """While it is open, no other call uses the engine.

        Whatever happens in the middle of a turn, as finalisers do, finds requests and blocks between two states, so it may not open
        another one.
        """
        if self._is_inside:
            raise RuntimeError("this LLM was called from a finaliser or a signal handler in the middle of another call")
        with self._next:
            self._lock.acquire()
        try:
            self._owner = threading.get_ident()
            self._clean_up()
            yield
        finally:
            self._owner = None
            self._lock.release()

    def _clean_up(self) -> None:
        """After a call that an exception cut short."""
        if not self._closed:
            self._engine.recover()
        self._end_dropped()

    def _end_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._changed.discard(request_id)
            if not self._closed:
                self._engine.abort(request_id)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While it is open, no other call steps the engine."""
        with self._turn():
            self.check_open()
            yield

    def add(
        self, requests: Iterable[PreparedRequest], reporters: dict[str, Reporter], *, kind: str = "request"
    ) -> None:
        """Adds all requests; `reporters` has those that are in, also when one of them is refused. The caller ends them.

        kind: what messages call them.
        """
        with self._turn():
            self._add(requests, reporters, kind)

    def _add(self, requests: Iterable[PreparedRequest], reporters: dict[str, Reporter], kind: str) -> None:
        self.check_open()
        for request in requests:
            request_id = f"{kind}-{next(self._numbers)}"
            reporters[request_id] = self._engine.add(request_id, request)

    def step_until_updated(self, request_ids: set[str], interrupts: Interrupts) -> set[str]:
        """Steps the engine, for everybody, until there are updates of one of these requests, or an interrupt.

        Returns those that have updates.
        """
        while True:
            with self._turn():
                updates = self._changed & request_ids
                if updates or interrupts.pending:
                    self._changed -= updates
                    return updates
                if not self._step() and not self._engine.has_unfinished:
                    raise RuntimeError(f"nothing is left to do, but {sorted(request_ids)} have not finished")
            interrupts.run_handlers()

    def _step(self) -> list[SequenceGroup]:
        self.check_open()
        self._end_dropped()
        groups = self._engine.step()
        self._changed.update(group.request.request_id for group in groups)
        return groups

    def drain(self, *, abort: bool = False) -> None:
        """Steps the engine until nothing is left to do; abort: ends all at once. Callers that wait for requests find them finished.

        Only inside `alone`.
        """
        with held_interrupts() as interrupts:
            if abort:
                self._changed.update(group.request.request_id for group in self._engine.abort_all())
            while self._engine.has_unfinished and not interrupts.pending:
                self._step()
                interrupts.run_handlers()
            if interrupts.pending:
                raise KeyboardInterrupt

    def end(self, request_ids: Iterable[str]) -> None:
        """Aborts what has not finished: an error, an interrupt or a closed stream leaves no block behind.

        In the middle of a turn of this thread, where a generator may be closed that holds a stream, it only notes the requests.
        """
        self.drop(request_ids)
        if not self._is_inside:
            with held_interrupts(), self._turn():
                pass  # which begins with what was noted

    def drop(self, request_ids: Iterable[str]) -> None:
        """Notes requests that end with the next turn, and before the next step. Finalisers call it, at any time and from any thread."""
        self._dropped.extend(request_ids)

    def pin(self, prefix: PreparedRequest) -> PinnedPrefix:
        """Computes a prompt and keeps it in place. Steps the engine, for everybody, until that is done."""
        with held_interrupts() as interrupts, self._turn():
            reporters: dict[str, Reporter] = {}
            try:
                self._add([prefix._replace(is_prefix=True)], reporters, "prefix")
                [(request_id, reporter)] = reporters.items()
                while not reporter.num_output_tokens and not reporter.finished and not interrupts.pending:
                    self._step()
                    interrupts.run_handlers()
                if reporter.finished:
                    raise RuntimeError(f"the prefix could not be computed: {reporter.whole().outputs[0].stop_reason}")
                if interrupts.pending:
                    raise KeyboardInterrupt
                return PinnedPrefix(self, self._engine.pin(request_id), len(prefix.token_ids))
            finally:
                self.drop(reporters)
                self._clean_up()

    def unpin(self, pin_id: int) -> None:
        with held_interrupts(), self._turn():
            if not self._closed:
                self._engine.unpin(pin_id)

    def is_pinned(self, pin_id: int) -> bool:
        with self._reading():
            return not self._closed and self._engine.is_pinned(pin_id)

    def stats(self) -> dict[str, Any]:
        with self._reading():
            return self._engine.stats()

    def memory_report(self, *, reset: bool) -> MemoryReport:
        with self._reading():
            return self._engine.memory_report(reset=reset)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """As `_turn`, for what changes nothing: a signal handler may do so in the middle of a call."""
        return contextlib.nullcontext() if self._is_inside else self._turn()

    def reset_prefix_cache(self) -> None:
        with held_interrupts(), self._turn():
            self.check_open()
            self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        with held_interrupts(), self._turn():
            if not self._closed:
                self._closed = True
                self._engine.abort_all()
                self._engine.events.closed()
                self._engine.runner.close()
                self._engine.grammars.close()


class PinnedPrefix:
    """A prefix whose keys and values stay in place until `release()`, the end of a `with` block, or the engine's end.

    Unlike a stream it does not end when the object is dropped: prompts find it by their tokens.
    """

    def __init__(self, calls: Calls, pin_id: int, num_tokens: int):
        self.num_tokens = num_tokens
        self._calls = calls
        self._pin_id = pin_id

    @property
    def released(self) -> bool:
        """True after `release`, and after a failed step that took the KV pages with it."""
        return not self._calls.is_pinned(self._pin_id)

    def release(self) -> None:
        """Its blocks are free, but for those that running requests share. A second call does nothing."""
        self._calls.unpin(self._pin_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RequestStream(Iterator[RequestOutput]):
    """What is new of one request, chunk by chunk. Closing it, or losing the last reference to it, ends the request."""

    def __init__(self, calls: Calls, request: PreparedRequest):
        self._calls = calls
        self._reporters: dict[str, Reporter] = {}
        with held_interrupts():
            calls.add([request], self._reporters)

    def __next__(self) -> RequestOutput:
        if not self._reporters:
            raise StopIteration
        [(request_id, reporter)] = self._reporters.items()
        finished = True
        with held_interrupts() as interrupts:
            try:
                self._calls.step_until_updated({request_id}, interrupts)
                chunk = reporter.delta()
                finished = chunk.finished
            finally:
                if finished or interrupts.pending:
                    self.close()
        return chunk

    def close(self) -> None:
        """Ends the request if it has not finished; its blocks are free at once."""
        request_ids = list(self._reporters)
        self._reporters.clear()
        self._calls.end(request_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_reporters"):
            self._calls.drop(self._reporters)
