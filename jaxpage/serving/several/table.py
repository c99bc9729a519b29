"""Decides which models are in memory: loads, unloads, puts to sleep and wakes them.

A request takes a lease of its model, and waits for it while the model is not there. One task does
all the work, one model after the other, so that two loads never compete for memory:

    lease ── usable ──────────────────────────▶ runs
      └───── waits ─▶ jobs ─▶ check ─▶ room ─▶ load or wake ─▶ all that wait for it run

Room is made by unloading idle models, the least recently used first. If all are busy, the least
recently used of them takes no more requests until it is idle: those that come in meanwhile wait,
and so no model starves another.

A model that is unloaded or put to sleep gives no lease from the look at its leases on, and not only
from the end: both take as long as the device needs. A request that comes meanwhile is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from jaxpage.errors import CapacityError, JaxpageError, QueueFull, ShuttingDown
from jaxpage.serving.several.models_file import mib

logger = logging.getLogger(__name__)
REPORT_SECONDS = 10.0  # the time between two lines of the log that say that a model still loads


class Resident(Protocol):
    """A model in memory."""

    @property
    def is_over(self) -> bool:
        """Returns whether its engine has ended by itself."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees the device's memory; see `Engine.sleep`."""
        ...

    async def wake(self) -> None:
        """Takes its weights back."""
        ...

    async def close(self) -> None:
        """Ends the engine and frees its memory."""
        ...


Model = TypeVar("Model", bound=Resident)


class LoadFailed(JaxpageError):
    """Says that a model could not be loaded; its cause is why."""


class InUse(JaxpageError):
    """Says that a model answers requests or sleeps otherwise, and cannot be put to sleep."""


@dataclass
class Slot(Generic[Model]):
    """Holds what is known of a model of the table.

    Attributes:
        name: The name of the model.
        size: The bytes that it may take while it is awake.
        default_keep_alive: The seconds without requests until it is unloaded.
        stays: True if it is never unloaded to make room.
        model: The model; None if it is not loaded.
        sleep_level: The level at which it sleeps; 0 while it is awake.
        is_loading: True while it is loaded or woken.
        is_closing: True while it gives no leases: it is to become idle, falls asleep or is
            unloaded.
        keep_alive: The seconds of the last request that gave some, else the default.
        last_used: The time of the last lease, by the table's clock.
        num_leases: The requests that use it.
        waiters: The requests that wait for it, each with the `keep_alive` that it gives or None.
        is_requested: True if a job for it is in the queue.
        timer: Has the models looked at when the time of this one is over; None if nothing is set.
    """

    name: str
    size: int
    default_keep_alive: float
    stays: bool = False
    model: Model | None = None
    sleep_level: int = 0
    is_loading: bool = False
    is_closing: bool = False
    keep_alive: float = 0.0
    last_used: float = 0.0
    num_leases: int = 0
    waiters: dict[asyncio.Future[None], float | None] = field(default_factory=dict)
    is_requested: bool = False
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Gives the model its default keep-alive time."""
        self.keep_alive = self.default_keep_alive

    @property
    def is_asleep(self) -> bool:
        """Returns whether the model sleeps."""
        return self.sleep_level > 0

    @property
    def state(self) -> str:
        """Returns the word for what the model does."""
        if self.is_loading:
            return "loading"
        if self.model is None:
            return "unloaded"
        return "asleep" if self.is_asleep else "loaded"

    @property
    def is_usable(self) -> bool:
        """Returns whether a request can run at once."""
        is_awake = self.model is not None and not self.model.is_over and not self.is_asleep
        # While others wait for the model, newcomers wait with them.
        return is_awake and not self.is_closing and not self.is_requested

    @property
    def device_bytes(self) -> int:
        """Returns the bytes that the model takes of the device."""
        return 0 if self.model is None or self.is_asleep else self.size

    @property
    def num_waiters(self) -> int:
        """Returns the number of requests that still wait for the model."""
        return sum(not waiter.done() for waiter in self.waiters)


class ModelTable(Generic[Model]):
    """Holds the models by name, on one event loop.

    Attributes:
        slots: The models by name.
        memory_bytes: The bytes that they may take together.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot[Model]],
        memory_bytes: int,
        *,
        check: Callable[[str], Awaitable[None]],
        load: Callable[[str], Awaitable[Model]],
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a table in which nothing is loaded.

        Args:
            slots: The models by name.
            memory_bytes: The bytes that they may take together.
            check: Raises an error if a model certainly cannot be loaded; no room is made for it.
            load: Loads a model.
            max_waiting: The most requests that wait for models.
            clock: Gives the time in seconds.
        """
        self.slots = slots
        self.memory_bytes = memory_bytes
        self._check = check
        self._load = load
        self._max_waiting = max_waiting
        self._clock = clock
        self._jobs: deque[Callable[[], Awaitable[None]]] = deque()
        self._commands: set[asyncio.Future[None]] = set()
        self._changed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Begins to work, on the event loop that runs."""
        self._worker = asyncio.ensure_future(self._work())

    async def stop(self) -> None:
        """Ends the work. Models stay as they are.

        Requests and orders to sleep that wait, and those that come later, end with ShuttingDown.
        """
        self._is_stopped = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for slot in self.slots.values():
            self._refuse(slot, _shutting_down())
        for command in self._commands:
            if not command.done():
                command.set_exception(_shutting_down())

    @contextlib.asynccontextmanager
    async def lease(self, name: str, keep_alive: float | None = None) -> AsyncIterator[Model]:
        """Gives a model to a request, which waits for it if need be.

        Args:
            name: The name of the model.
            keep_alive: The seconds that the model stays loaded after this request and later ones;
                None leaves them as they are.

        Raises:
            LoadFailed: The model cannot be loaded.
            QueueFull: Too many requests wait for models.
            ShuttingDown: The table stops.
        """
        slot = self.slots[name]
        if slot.is_usable:
            self._count(slot, keep_alive)
        else:
            await self._wait_for_lease(slot, keep_alive)
        try:
            assert slot.model is not None, "a model with leases is never unloaded"
            yield slot.model
        finally:
            self._release(slot)

    def expire(self, name: str) -> bool:
        """Unloads a model as soon as it is idle; returns whether it was there or waited for.

        The order holds for the requests that wait for the model, too: it is younger than they are.
        """
        slot = self.slots[name]
        if slot.model is None and not slot.is_loading and not slot.num_waiters:
            return False
        slot.keep_alive = 0.0
        slot.waiters.update(dict.fromkeys(slot.waiters, 0.0))
        self.tidy()
        return True

    async def sleep(self, name: str, level: int) -> None:
        """Puts a model to sleep; one that is not loaded stays as it is.

        Requests that come while it falls asleep wait, and wake it then.

        Raises:
            InUse: The model answers requests, or sleeps at another level.
            ShuttingDown: The table stops.
        """
        if self._is_stopped:
            raise _shutting_down()
        command = asyncio.get_running_loop().create_future()

        async def job() -> None:
            try:
                await self._put_to_sleep(self.slots[name], level)
            except Exception as error:
                # The caller may have left, which cancels the future, or `stop` has answered it.
                if not command.done():
                    command.set_exception(error)
            else:
                if not command.done():
                    command.set_result(None)

        self._commands.add(command)
        self._post(job)
        try:
            await command
        finally:
            self._commands.discard(command)

    def tidy(self) -> None:
        """Has models unloaded whose time is over; called by the timers that leases set."""
        for slot in self.slots.values():
            if self._is_due(slot):
                self._post(lambda slot=slot: self._unload_if_due(slot))  # type: ignore[misc]

    def check(self) -> None:
        """Asserts what holds between two events."""
        assert sum(slot.device_bytes for slot in self.slots.values()) <= self.memory_bytes
        for slot in self.slots.values():
            assert slot.num_leases >= 0
            assert not slot.num_leases or slot.device_bytes, f"{slot.name}: leases without a model"
            assert not slot.num_waiters or slot.is_requested, (
                f"{slot.name}: nobody works for waiters"
            )

    # The work of the one task.

    def _post(self, job: Callable[[], Awaitable[None]]) -> None:
        self._jobs.append(job)
        self._changed.set()

    async def _work(self) -> None:
        while True:
            while self._jobs:
                await self._jobs.popleft()()
            # Nothing was awaited since the last look, so no job is missed.
            self._changed.clear()
            await self._changed.wait()

    async def _wait_for_lease(self, slot: Slot[Model], keep_alive: float | None) -> None:
        """Waits until the model is usable, and counts the lease."""
        if self._is_stopped:
            raise _shutting_down()
        waiting = sum(other.num_waiters for other in self.slots.values())
        if waiting >= self._max_waiting:
            raise QueueFull(f"{waiting} requests wait for models to be loaded; try again later")
        granted = asyncio.get_running_loop().create_future()
        slot.waiters[granted] = keep_alive
        if not slot.is_requested:
            slot.is_requested = True
            self._post(lambda: self._bring(slot))
        try:
            await granted
        except asyncio.CancelledError:
            # The lease may have been granted in the turn of the loop in which the request ended.
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(slot)
            raise
        finally:
            del slot.waiters[granted]
            self._changed.set()

    async def _bring(self, slot: Slot[Model]) -> None:
        """Makes a model usable for those that wait for it, or ends them with an error."""
        try:
            if slot.num_waiters and await self._is_there(slot):
                self._grant(slot)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            expected = isinstance(error, JaxpageError)
            logger.error(
                "the model %s cannot be loaded: %s", slot.name, error, exc_info=not expected
            )
            failure = LoadFailed(str(error) if expected else "the server failed to load it")
            failure.__cause__ = error
            self._refuse(slot, failure)
        finally:
            slot.is_loading = slot.is_requested = False
            if slot.model is None:
                slot.keep_alive = slot.default_keep_alive
            self._set_timer(slot)

    async def _is_there(self, slot: Slot[Model]) -> bool:
        """Loads or wakes a model if need be; returns False if nobody waits for it any more."""
        if slot.model is not None and slot.model.is_over:
            # The requests of an engine that has ended are over or end at once.
            while slot.num_leases:
                await self._next_change()
            await self._unload(slot)
        if slot.device_bytes:
            return True
        if slot.model is None:
            await self._check(slot.name)
        if not await self._make_room(slot):
            return False
        slot.is_loading = True
        with _log_work(slot.name, "loading" if slot.model is None else "waking"):
            if slot.model is None:
                slot.model = await self._load(slot.name)
            else:
                await slot.model.wake()
                slot.sleep_level = 0
        slot.last_used = self._clock()
        return True

    async def _make_room(self, slot: Slot[Model]) -> bool:
        """Unloads models until a model fits; returns False if nobody waits for it any more.

        Raises:
            CapacityError: Models that are never unloaded take the room.
        """
        try:
            return await self._unload_others(slot)
        finally:
            self._reopen()

    async def _unload_others(self, slot: Slot[Model]) -> bool:
        # Those that wait may leave in each pause: then no other model goes for them.
        while slot.num_waiters:
            taken = sum(other.device_bytes for other in self.slots.values())
            if taken + slot.size <= self.memory_bytes:
                return True
            candidates = [
                other for other in self.slots.values() if other.device_bytes and not other.stays
            ]
            if not candidates:
                raise CapacityError(
                    f"it takes {mib(slot.size)}, and of {mib(self.memory_bytes)} models that are "
                    f"never unloaded take {mib(taken)}"
                )
            oldest = min(candidates, key=lambda other: (other.num_leases > 0, other.last_used))
            if oldest.num_leases:
                oldest.is_closing = True
                await self._next_change()
            else:
                await self._unload(oldest)
        return False

    def _reopen(self) -> None:
        """Has models that were to make room, and did not have to, take requests again."""
        for slot in self.slots.values():
            if slot.is_closing and slot.device_bytes and slot.model is not None:
                slot.is_closing = False
                if not slot.model.is_over:
                    slot.is_requested = False
                    self._grant(slot)

    async def _next_change(self) -> None:
        """Waits until a lease or a waiter has gone, or a job has come."""
        self._changed.clear()
        await self._changed.wait()

    async def _unload_if_due(self, slot: Slot[Model]) -> None:
        if self._is_due(slot):
            await self._unload(slot)

    def _is_due(self, slot: Slot[Model]) -> bool:
        """Returns whether to unload a model. One that sleeps stays, unless it was told to go."""
        if slot.model is None or slot.num_leases or slot.num_waiters:
            return False
        if slot.is_asleep:
            return slot.keep_alive == 0
        return self._clock() >= slot.last_used + slot.keep_alive

    async def _unload(self, slot: Slot[Model]) -> None:
        model = slot.model
        assert model is not None
        # The memory counts as taken until it is free.
        with _close(slot):
            try:
                await model.close()
            except Exception as error:
                logger.error("the model %s did not end as it should", slot.name, exc_info=error)
            finally:
                slot.model = None
                slot.sleep_level = 0
                slot.keep_alive = slot.default_keep_alive
        logger.info("%s is unloaded", slot.name)

    async def _put_to_sleep(self, slot: Slot[Model], level: int) -> None:
        if slot.num_leases:
            raise InUse(f"requests run in {slot.name!r} ({slot.num_leases}); try again later")
        if slot.is_asleep and slot.sleep_level != level:
            raise InUse(f"{slot.name!r} sleeps at level {slot.sleep_level}: wake it first")
        if slot.model is not None and not slot.is_asleep:
            with _close(slot):
                await slot.model.sleep(level)
                slot.sleep_level = level

    def _count(self, slot: Slot[Model], keep_alive: float | None) -> None:
        """Counts a lease, with the `keep_alive` that its request gives."""
        slot.num_leases += 1
        if keep_alive is not None:
            slot.keep_alive = keep_alive

    def _grant(self, slot: Slot[Model]) -> None:
        for waiter, keep_alive in slot.waiters.items():
            if not waiter.done():
                self._count(slot, keep_alive)
                waiter.set_result(None)

    def _refuse(self, slot: Slot[Model], why: JaxpageError) -> None:
        for waiter in slot.waiters:
            if not waiter.done():
                # Each has an error of its own, because raising an error changes its traceback.
                error = type(why)(str(why))
                error.__cause__ = why.__cause__
                waiter.set_exception(error)

    def _release(self, slot: Slot[Model]) -> None:
        slot.num_leases -= 1
        slot.last_used = self._clock()
        self._changed.set()
        self._set_timer(slot)

    def _set_timer(self, slot: Slot[Model]) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.model is None or slot.num_leases or math.isinf(slot.keep_alive):
            return
        # A moment later than due, because the timer's clock is another.
        seconds = slot.keep_alive + 0.001
        slot.timer = asyncio.get_running_loop().call_later(seconds, self.tidy)


@contextlib.contextmanager
def _close(slot: Slot[Model]) -> Iterator[None]:
    """Has an idle model give no leases while the context lasts."""
    assert not slot.num_leases
    slot.is_closing = True
    try:
        yield
    finally:
        slot.is_closing = False


@contextlib.contextmanager
def _log_work(name: str, activity: str) -> Iterator[None]:
    """Logs the beginning and the end of work on a model, and between them that it goes on."""
    logger.info("%s %s", activity, name)
    began = time.monotonic()

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            logger.info("still %s %s, after %.0f s", activity, name, time.monotonic() - began)

    reporting = asyncio.ensure_future(report())
    try:
        yield
    finally:
        reporting.cancel()
    logger.info("%s is loaded, after %.1f s", name, time.monotonic() - began)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down")
