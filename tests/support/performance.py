"""Plays the events of a case of the fuzzer on its engines, and judges what becomes of each call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpage import AsyncLLM, LoRARequest
from jaxpage.errors import (
    CapacityError,
    ConfigError,
    ShuttingDown,
    UnsupportedError,
    WeightsReplaced,
)
from jaxpage.outputs import RequestOutput
from tests.support.fuzz_cases import NUM_SETS, Ask, Case, Event
from tests.support.fuzz_models import Weights, other_weights
from tests.support.stage import Interrupt, RealTime, Stage

MAX_SECONDS = 20.0  # of the last drain, and of calls on threads while their engines do nothing
MAX_BUSY_SECONDS = 600.0  # of calls on threads: steps are compiled in turns, which takes minutes
MAX_SCORED = 12  # tokens of a continuation, so that prompt and continuation fit


class WrongBehaviour(Exception):
    """Says what an engine did that it must not do."""


@dataclass
class Actor:
    """Follows the call of an event.

    Attributes:
        event: The event.
        engine: The engine.
        started: The turn at which it began.
        ended: The turn after which it had ended; None before that.
        first_version: The version of the weights when it began.
        task: What runs it.
        outputs: The outputs of whole requests, with the index of their request.
        chunks: The chunks of a stream.
        result: What another call returned.
        was_interrupted: True if it was interrupted while it waited.
        interrupted_at: The turn at which that was.
        must_abort: True if its request was aborted by its id before it had finished.
    """

    event: Event
    engine: PlayedEngine
    started: int
    first_version: int
    ended: int | None = None
    task: asyncio.Future[Any] | Future[Any] | None = None
    outputs: list[tuple[int, RequestOutput]] = field(default_factory=list)
    chunks: list[RequestOutput] = field(default_factory=list)
    result: Any = None
    last_version: int = 0
    was_interrupted: bool = False
    interrupted_at: int | None = None
    must_abort: bool = False

    @property
    def is_over(self) -> bool:
        """Returns whether the call has ended."""
        return self.task is not None and self.task.done()

    @property
    def is_request(self) -> bool:
        """Returns whether it runs on the engine as requests do."""
        return self.event.name in ("generate", "stream", "score", "pin")

    def meets(self, other: Actor) -> bool:
        """Returns whether two calls on an engine were there at the same time."""
        if other is self or other.engine is not self.engine:
            return False
        return (other.ended is None or other.ended >= self.started) and (
            self.ended is None or self.ended >= other.started
        )


class PlayedEngine:
    """An engine of a case, and what has been done to it.

    Attributes:
        llm: The engine's `LLM` or `AsyncLLM`.
        weights: The set of weights by version.
        modes: The modes of the updates by version.
        pins: Pins that a call holds.
        held: Weights that the caller holds.
        drained_at: The turn at which it was first drained; None before that.
        is_drained: True if a drain has said that all requests have finished.
    """

    def __init__(self, llm: Any, stage: Stage | RealTime, own_weights: Weights) -> None:
        self.llm = llm
        self.weights = {0: 0}
        self.modes: dict[int, str] = {}
        self.pins: list[Any] = []
        self.held: list[Weights] = []
        self.drained_at: int | None = None
        self.is_drained = False
        self.is_async = isinstance(llm, AsyncLLM)
        self._stage = stage
        self._own_weights = own_weights
        self._step = llm._engine.step
        self._real = {name: getattr(llm._engine, name) for name in ("replace_weights", "wake")}
        self._problem: Exception | None = None  # the first of a step
        llm._engine.step = self._checked_step
        for name in self._real:
            setattr(llm._engine, name, functools.partial(self._noting_weights, name))

    def _checked_step(self) -> Any:
        """Runs a step and checks what must hold after each."""
        try:
            if self.is_drained:
                raise WrongBehaviour("drain returned True, and a request runs")
            if self.llm.is_paused:
                raise WrongBehaviour("a step runs while the engine is paused")
            groups = self._step()
            self.llm._engine.scheduler.check()
        except Exception as error:
            # The driver handles it, as it does for users.
            self._problem = self._problem or error
            raise
        return groups

    def _noting_weights(self, name: str, weights: Any, mode: str = "wait", *more: Any) -> Any:
        """Gives the engine other weights, and notes which they are."""
        arguments = (weights,) if name == "wake" else (weights, mode, *more)
        result = self._real[name](*arguments)
        if self.version not in self.weights:
            self.modes[self.version] = mode
            named = self.llm._by_checkpoint_name(self.llm._engine.runner.parameters)
            self.weights[self.version] = set_of(named, self._own_weights)
        return result

    async def call(self, name: str, *args: Any, **more: Any) -> Any:
        """Returns the result of a method that `LLM` and `AsyncLLM` both have."""
        method = getattr(self.llm, name)
        if self.is_async:
            return await method(*args, **more)
        return await self._stage.in_thread(lambda: method(*args, **more))

    async def outputs_of(
        self, asks: Sequence[Ask], adapters: Sequence[LoRARequest | None], request_id: str
    ) -> list[RequestOutput]:
        """Returns the outputs of requests."""
        if self.is_async:
            (ask,), (adapter,) = asks, adapters
            async with aclosing(
                self.llm.generate(
                    ask.given(self.llm.hf_config), ask.made(), request_id, lora_request=adapter
                )
            ) as outputs:
                return [output async for output in outputs][-1:]
        lora = {"lora_request": list(adapters)} if any(adapters) else {}
        config = self.llm.hf_config
        prompts, params = [ask.given(config) for ask in asks], [ask.made() for ask in asks]
        outputs_: list[RequestOutput] = await self.call(
            "generate", prompts, params, use_tqdm=False, **lora
        )
        return outputs_

    async def chunks_of(
        self, ask: Ask, adapter: LoRARequest | None, request_id: str, *, closes: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the chunks of a request; a stream that is left is closed, or dropped."""
        if self.is_async:
            chunks = self.llm.stream(
                ask.given(self.llm.hf_config), ask.made(), request_id, lora_request=adapter
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            return
        stream = await self.call(
            "stream", ask.given(self.llm.hf_config), ask.made(), lora_request=adapter
        )
        try:
            while (chunk := await self._stage.in_thread(lambda: next(stream, None))) is not None:
                yield chunk
        finally:
            if closes:
                stream.close()

    def given_weights(self, number: int, form: str) -> Weights:
        """Returns weights for an update.

        Args:
            number: The number of the set.
            form: "numpy", "jax" (arrays that the caller holds), or "held" (what `parameters` gave).
        """
        if form == "held" and self.held:
            return self.held[-1]
        weights: Weights = other_weights(self._own_weights, number)
        if form == "jax":
            weights = {name: jax.device_put(value) for name, value in weights.items()}
            self.held.append(weights)
        return weights

    @property
    def version(self) -> int:
        """Returns the version of the weights."""
        return int(self.llm._engine.weights_version)

    @property
    def is_busy(self) -> bool:
        """Returns whether its driver is in a turn in which there is something to do."""
        turns = self.llm._driver.turns
        return turns.running_thread is not None and turns.began is not None

    def watch(self) -> None:
        """Checks its steps and what the caller holds.

        Raises:
            WrongBehaviour: An array that the caller holds was deleted.
            Exception: A step failed, or an invariant did.
        """
        if self._problem is not None:
            raise self._problem
        for weights in self.held:
            lost = [
                name
                for name, array in weights.items()
                if isinstance(array, jax.Array) and array.is_deleted()
            ]
            if lost:
                raise WrongBehaviour(
                    f"{len(lost)} of {len(weights)} arrays that the caller holds were deleted, "
                    f"such as {lost[0]!r}"
                )


def set_of(weights: Weights, weights_before: Weights) -> int:
    """Returns the number of the set that weights are of."""
    name = next(name for name, value in weights_before.items() if np.ndim(value) > 1)
    value = np.asarray(weights[name])
    sets = (other_weights({name: weights_before[name]}, number)[name] for number in range(NUM_SETS))
    return next(number for number, each in enumerate(sets) if np.array_equal(each, value))


class Performance:
    """Plays a case.

    Attributes:
        actors: The calls, in the order in which they began.
    """

    def __init__(
        self,
        case: Case,
        stage: Any,
        engines: Sequence[PlayedEngine],
        adapters: Sequence[LoRARequest],
    ) -> None:
        self.case = case
        self.stage = stage
        self.engines = engines
        self.actors: list[Actor] = []
        self._adapters = adapters

    def play(self) -> None:
        """Plays all events, and waits until every call has ended."""
        stage = self.stage
        for turn, act in sorted(self._acts(), key=lambda item: item[0]):
            while stage.turn < turn:
                self._take_turn()
            act()
            self._watch()
        while not all(actor.is_over for actor in self.actors):
            if not stage.run_until(self._has_news):
                self._wake_all()
            self._watch()

    def play_in_threads(self) -> None:
        """Makes each call on a thread; one that is to be interrupted is on this one, with a signal.

        Raises:
            WrongBehaviour: A call does not end.
        """
        events = self.case.events
        interrupted = [event for event in events if event.interrupted_after is not None]
        here = interrupted[0] if interrupted else None
        threads = []
        for number, event in enumerate(events):
            actor = Actor(event, self.engines[event.engine], 0, 0)
            self.actors.append(actor)
            act = functools.partial(self._perform_in_time, number, actor)
            if event is not here:
                threads.append(threading.Thread(target=act, daemon=True))
                threads[-1].start()
        for actor in self.actors:
            if actor.event is here:
                act = functools.partial(self._perform_in_time, events.index(here), actor)
                turns = here.at + (here.interrupted_after or 0) + 0.5
                seconds = turns * RealTime.TURN_SECONDS
                actor.was_interrupted = self.stage.interrupted(act, seconds)
                if actor.task is None:
                    actor.task = Future()
                    actor.task.set_exception(Interrupt())
        began = idle_since = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.05)
                self._wake_for_threads(threads)
                now = time.monotonic()
                if any(engine.is_busy for engine in self.engines):
                    idle_since = now
                if now - idle_since > MAX_SECONDS or now - began > MAX_BUSY_SECONDS:
                    raise WrongBehaviour(
                        f"a call has not ended after {now - began:.0f} s, and its engine has done "
                        f"nothing for {now - idle_since:.0f} s"
                    )
        for engine in self.engines:
            engine.watch()
        for actor in self.actors:
            actor.last_version = actor.engine.version

    def _wake_for_threads(self, threads: Sequence[threading.Thread]) -> None:
        """Wakes or resumes an engine on which requests wait since a call was interrupted."""
        for engine in self.engines:
            if engine.llm.is_paused and any(thread.is_alive() for thread in threads):
                with contextlib.suppress(RuntimeError):
                    engine.llm.resume()
            if engine.llm.is_sleeping and any(thread.is_alive() for thread in threads):
                with contextlib.suppress(RuntimeError):
                    engine.llm.wake_up()

    def _perform_in_time(self, number: int, actor: Actor) -> None:
        event = actor.event
        time.sleep(event.at * RealTime.TURN_SECONDS)
        actor.task = future = self.stage.start(self._perform(number, actor))
        error = future.exception()
        if isinstance(error, Interrupt):
            raise error

    def _acts(self) -> Iterator[tuple[int, Callable[[], None]]]:
        for number, event in enumerate(self.case.events):
            yield event.at, functools.partial(self._begin, number, event)
            if event.interrupted_after is not None:
                turn = event.at + event.interrupted_after
                yield turn, functools.partial(self._interrupt, number)
            if event.aborted_after is not None:
                yield event.at + event.aborted_after, functools.partial(self._abort, number)

    def _take_turn(self) -> None:
        self.stage.take_turn()
        self._watch()

    def _watch(self) -> None:
        for actor in self.actors:
            if actor.ended is None and actor.is_over:
                actor.ended, actor.last_version = self.stage.turn, actor.engine.version
                if actor.event.name == "drain" and actor.result is True:
                    actor.engine.is_drained = True
        for engine in self.engines:
            engine.watch()

    def _has_news(self) -> bool:
        self._watch()
        return all(actor.is_over for actor in self.actors)

    def _wake_all(self) -> None:
        """Wakes and resumes engines for which nobody else does it, on which requests wait."""
        paused = [engine for engine in self.engines if engine.llm.is_paused]
        asleep = [engine for engine in self.engines if engine.llm.is_sleeping]
        if not asleep and not paused:
            names = [
                f"{actor.event.name} of turn {actor.started}"
                for actor in self.actors
                if not actor.is_over
            ]
            raise WrongBehaviour(f"{', '.join(names)} waits, and nothing is left to do")
        for engine in paused:
            self.finish(engine.call("resume"), "resume")
        for engine in asleep:
            self.wake(engine)

    def wake(self, engine: PlayedEngine) -> None:
        """Wakes an engine. A call that was interrupted may wake it first."""
        try:
            self.finish(engine.call("wake_up"), "wake_up")
        except RuntimeError:
            if engine.llm.is_sleeping:
                raise

    def finish(self, coroutine: Any, what: str) -> Any:
        """Returns the result of a last call, which nothing may keep from ending."""
        task = self.stage.start(coroutine)
        if not self.stage.run_until(task.done):
            raise WrongBehaviour(f"{what} waits at the end, and nothing is left to do")
        return task.result()

    def _begin(self, number: int, event: Event) -> None:
        engine = self.engines[event.engine]
        actor = Actor(event, engine, self.stage.turn, engine.version)
        self.actors.append(actor)
        if event.name == "drain" and engine.drained_at is None:
            engine.drained_at = self.stage.turn
        actor.task = self.stage.start(self._perform(number, actor))

    def _interrupt(self, number: int) -> None:
        actor = self._actor(number)
        if not actor.is_over:
            assert actor.task is not None
            actor.was_interrupted = True
            actor.interrupted_at = self.stage.turn
            actor.task.cancel()
            self.stage.settle()

    def _abort(self, number: int) -> None:
        actor = self._actor(number)
        if actor.is_over:
            return
        handle = actor.engine.llm._running.get(f"id-{number}")
        reporter = getattr(handle, "reporter", None)
        actor.must_abort = reporter is None or not reporter.finished
        self.stage.start(actor.engine.llm.abort(f"id-{number}"))

    def _actor(self, number: int) -> Actor:
        event = self.case.events[number]
        return next(actor for actor in self.actors if actor.event is event)

    async def _perform(self, number: int, actor: Actor) -> None:
        event, engine = actor.event, actor.engine
        asks = [self.case.asks[index] for index in event.asks]
        request_id = f"id-{number}"
        match event.name:
            case "generate":
                adapters = [self._adapter(ask) for ask in asks]
                outputs = await engine.outputs_of(asks, adapters, request_id)
                actor.outputs = list(zip(event.asks, outputs, strict=True))
            case "stream":
                await self._read(actor, asks[0], request_id)
            case "pin":
                pin = await engine.call("pin_prefix", asks[0].given(engine.llm.hf_config))
                engine.pins.append(pin)
                await self.stage.pause(event.details[0])
                await self.release(engine, pin)
            case "reset":
                await engine.call("reset_prefix_cache")
            case "score":
                prompt, continuation = (list(ask.prompt) for ask in asks)
                actor.result = await engine.call("score", prompt, continuation[:MAX_SCORED])
            case "embed":
                more = {} if engine.is_async else {"use_tqdm": False}
                prompts = [list(ask.prompt) for ask in asks]
                actor.result = await engine.call("embed", prompts, pooling=event.details[0], **more)
            case "hold":
                weights = await engine.call("parameters")
                engine.held.append(weights)
            case "update":
                weights_set, form, mode = event.details
                weights = engine.given_weights(weights_set, form)
                actor.result = await engine.call("update_parameters", weights, mode=mode)
            case "sleep":
                level, num_turns = event.details
                await engine.call("sleep", level)
                await self.stage.pause(num_turns)
                await engine.call("wake_up")
            case "pause":
                await engine.call("pause")
                await self.stage.pause(event.details[0])
                await engine.call("resume")
            case "drain":
                actor.result = await engine.call("drain", event.details[0])

    async def _read(self, actor: Actor, ask: Ask, request_id: str) -> None:
        """Reads a stream, with a pause after some chunks, or leaves it there."""
        num_chunks, num_turns, end = actor.event.details
        chunks = actor.engine.chunks_of(ask, self._adapter(ask), request_id, closes=end == "close")
        async with aclosing(chunks):
            async for chunk in chunks:
                actor.chunks.append(chunk)
                if len(actor.chunks) == num_chunks:
                    await self.stage.pause(num_turns)
                    if end != "whole":
                        return

    async def release(self, engine: PlayedEngine, pin: Any) -> None:
        """Releases a pin."""
        if engine.is_async:
            await pin.release()
        else:
            await self.stage.in_thread(pin.release)
        engine.pins.remove(pin)

    def _adapter(self, ask: Ask) -> LoRARequest | None:
        return self._adapters[ask.adapter - 1] if ask.adapter else None

    # What may become of a call.

    def is_aborted(self, actor: Actor) -> bool:
        """Returns whether something may have ended a request before its time."""
        return actor.event.aborted_after is not None or self._met(actor, "update", "abort")

    def _met(self, actor: Actor, name: str, mode: str | None = None) -> bool:
        return any(
            other.event.name == name
            and (mode is None or mode in other.event.details)
            and actor.meets(other)
            for other in self.actors
        )

    def is_refusal(self, error: BaseException) -> bool:
        """Returns whether an engine says that it cannot do what a case asks for."""
        return isinstance(error, UnsupportedError | CapacityError | ConfigError)

    def may_raise(self, actor: Actor, error: BaseException) -> bool:
        """Returns whether a call may end with an error, for what others did at the time."""
        if isinstance(error, Interrupt | asyncio.CancelledError):
            return actor.was_interrupted
        text = str(error)
        engine = actor.engine
        if isinstance(error, ShuttingDown):
            after = engine.drained_at is not None and actor.started >= engine.drained_at
            return after or self._met_late_drain(actor)
        if isinstance(error, WeightsReplaced):
            return self._met(actor, "update", "abort")
        if not isinstance(error, RuntimeError):
            return False
        if "is paused with" in text:
            return self._met(actor, "pause") or self._is_left(actor, "pause")
        if "is not paused" in text:  # somebody else has resumed it
            return actor.event.name == "pause"
        if "sleep" in text and "way already" not in text and "pinned" not in text:
            return (
                actor.event.name == "sleep"
                or self._met(actor, "sleep")
                or self._is_left(actor, "sleep")
            )
        if "way already" in text:
            return any(
                other.event.name in ("update", "sleep")
                and (other.interrupted_at is None or other.interrupted_at >= (actor.ended or 0))
                and actor.meets(other)
                for other in self.actors
            )
        if "pinned" in text:
            return bool(engine.pins) or self._met(actor, "pin")
        if "scoring" in text or "prefix could not be computed" in text:
            return self._met(actor, "update", "abort")
        return False

    def _is_left(self, actor: Actor, name: str) -> bool:
        """Returns whether the engine sleeps, or is paused, since an interrupted call."""
        return any(
            other.event.name == name
            and other.was_interrupted
            and other.engine is actor.engine
            and other.started <= (actor.ended or self.stage.turn)
            for other in self.actors
        )

    def _met_late_drain(self, actor: Actor) -> bool:
        """Returns whether a drain ended the call: at once, or when its time was over.

        The time of a drain is over while the engine sleeps since an interrupted call, because
        nobody wakes it.
        """
        return any(
            other.event.name == "drain"
            and actor.meets(other)
            and (other.event.details[0] == 0.0 or self._is_left(actor, "sleep"))
            for other in self.actors
        )
