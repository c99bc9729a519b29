"""Runs calls of `LLM` and `AsyncLLM` at once, in an order that is the same each time.

The drivers have no threads: the stage takes their turns. Between two turns every call runs, one
after the other, until it waits for an engine. Calls of `LLM` run on threads of their own, and those
of `AsyncLLM` on an event loop whose clock the stage sets, so nothing waits for real time.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from jaxpage.driver import Driver
from jaxpage.driver.async_driver import AsyncDriver

MAX_IDLE_TURNS = 40  # no pause of a case is as long
_HOUR = 3600.0
_here = threading.local()


class Interrupt(BaseException):
    """Stands for what a signal handler raises into a call that waits, such as KeyboardInterrupt."""


class _Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        """Returns the time in seconds."""
        return self.now


class _Waiter:
    def __init__(
        self, condition: Callable[[], bool], timeout: float | None, future: asyncio.Future[bool]
    ) -> None:
        self.condition = condition
        self.timeout = timeout
        self.future = future

    @property
    def may_go_on(self) -> bool:
        return not self.future.done() and self.condition()


class _Call(threading.Thread):
    """A call on a thread of its own, which runs only while the stage waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.condition: Callable[[], bool] = lambda: True
        self.timeout: float | None = None
        self.is_over = self.is_late = False
        self.thrown: BaseException | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._may_run = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)

    def run(self) -> None:
        """Makes the call when the stage says so."""
        self._may_run.acquire()
        _here.call = self
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._has_stopped.release()

    def go_on(self) -> None:
        """Runs the call until it waits or ends; the stage calls this."""
        self._may_run.release()
        self._has_stopped.acquire()

    def wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        """Waits for a condition, on the thread of the call.

        Raises:
            TimeoutError: The time is over.
            Interrupt: The call is interrupted.
        """
        self.condition, self.timeout = condition, timeout
        self._has_stopped.release()
        self._may_run.acquire()
        if self.thrown is not None:
            error = self.thrown
            self.thrown = None
            raise error
        if self.is_late:
            raise TimeoutError("the engine has not answered")


class Stage:
    """Takes the turns of drivers, and runs what waits for them in between.

    Attributes:
        turn: The number of turns so far.
        drivers: The drivers.
    """

    def __init__(self) -> None:
        self.turn = 0
        self.drivers: list[Driver] = []
        self._waiters: list[_Waiter] = []
        self._loop = _Clock()
        self._loop.set_exception_handler(lambda loop, context: None)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Has drivers made meanwhile wait for the stage, and calls wait on it."""
        with pytest.MonkeyPatch.context() as patch:
            taken = Driver.wait_for_item

            def taken_on_stage(driver: Driver, box: Any, timeout: float | None = None) -> Any:
                call: _Call | None = getattr(_here, "call", None)
                if call is None:
                    return taken(driver, box, timeout)
                if box.empty():
                    if timeout is not None and timeout <= 0:
                        raise TimeoutError("the engine has not answered")
                    call.wait(lambda: not box.empty(), timeout)
                return box.get_nowait()

            async def to_thread(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
                await asyncio.sleep(0)
                return function(*args, **more)

            patch.setattr(Driver, "wait_for_item", taken_on_stage)
            patch.setattr(AsyncDriver, "start", lambda driver: None)
            patch.setattr(asyncio, "to_thread", to_thread)
            try:
                yield
            finally:
                self._cancel_all()
                self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a coroutine and runs it until it waits."""
        task = self._loop.create_task(coroutine)
        self.settle()
        return task

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Returns what a function returns that waits for an engine on its thread.

        Cancelling the wait raises `Interrupt` into the function.
        """
        call = _Call(function)
        call.start()
        call.go_on()
        while not call.is_over:
            try:
                call.is_late = not await self.until(call.condition, timeout=call.timeout)
            except asyncio.CancelledError:
                call.thrown = Interrupt()
            call.go_on()
        call.join()
        if call.error is not None:
            raise call.error
        return call.result

    async def until(self, condition: Callable[[], bool], *, timeout: float | None = None) -> bool:
        """Waits until a condition holds; returns False if the time is over before."""
        waiter = _Waiter(condition, timeout, self._loop.create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.future
        finally:
            self._waiters.remove(waiter)

    async def pause(self, num_turns: int) -> None:
        """Waits for some turns."""
        end = self.turn + num_turns
        await self.until(lambda: self.turn >= end)

    def settle(self) -> None:
        """Runs all tasks, in order, until each of them waits for an engine or has ended."""
        while True:
            self._loop.run_until_complete(self._run_ready())
            waiter = next((each for each in self._waiters if each.may_go_on), None)
            if waiter is None:
                return
            waiter.future.set_result(True)

    async def _run_ready(self) -> None:
        # The tasks of asyncio that may run, which has no public name.
        while self._loop._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    def take_turn(self) -> bool:
        """Has each driver take a turn, and returns whether there was anything to do."""
        has_worked = False
        for driver in self.drivers:
            has_worked |= driver.step()
        self.turn += 1
        self.settle()
        return has_worked

    def run_until(self, is_over: Callable[[], bool]) -> bool:
        """Takes turns until something is over.

        Returns:
            False if nothing is left to do before it is over.
        """
        num_idle = 0
        while not is_over():
            num_idle = 0 if self.take_turn() else num_idle + 1
            if num_idle > MAX_IDLE_TURNS:
                if not self._pass_time():
                    return False
                num_idle = 0
        return True

    def _pass_time(self) -> bool:
        """Lets an hour pass, and returns whether anything waited for that."""
        late = [
            each for each in self._waiters if each.timeout is not None and not each.future.done()
        ]
        for waiter in late:
            waiter.future.set_result(False)
        has_timers = bool(self._loop._scheduled)  # type: ignore[attr-defined]
        self._loop.now += _HOUR
        self._loop.run_until_complete(asyncio.sleep(0))
        self.settle()
        return bool(late) or has_timers

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self.settle()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())


class RealTime:
    """Runs calls as `Stage` does, but at once and in real time, for drivers that have threads."""

    TURN_SECONDS = 0.003  # about as long as a step takes

    turn = 0

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Returns what a function returns."""
        return function()

    async def pause(self, num_turns: int) -> None:
        """Waits about as long as some turns take."""
        time.sleep(num_turns * self.TURN_SECONDS)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine, which never waits for an event loop here, to its end."""
        future: Future[Any] = Future()
        try:
            coroutine.send(None)
        except StopIteration as end:
            future.set_result(end.value)
        except BaseException as error:
            future.set_exception(error)
        return future

    def run_until(self, is_over: Callable[[], bool]) -> bool:
        """Returns whether something is over, as everything is that was started."""
        return is_over()

    def interrupted(self, act: Callable[[], Any], seconds: float) -> bool:
        """Runs an act on the main thread, into which a signal handler raises after some time.

        Returns:
            True if the signal came before its end.
        """

        def raise_interrupt(*_: object) -> None:
            raise Interrupt

        before = signal.signal(signal.SIGALRM, raise_interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            act()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return False
