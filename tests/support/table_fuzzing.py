"""Random lives of a table of models, on an event loop whose clock jumps: no second passes, and what
waits for ever is seen at once.

The models are fake: loading, sleep, waking and the end of each take their time, and fail when the
case says so. They know what the device would hold and which request is in which of them, without
asking the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import selectors
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import QueueFull, ShuttingDown
from jaxpage.serving.several.table import InUse, LoadFailed, ModelTable, Slot

KINDS = ("request", "request", "request", "leave", "sleep", "sleep", "wake", "expire", "kill")
WORK = ("check", "load", "sleep", "wake", "close")
PARTING_SECONDS = 0.35  # how long a request goes on after its engine has ended
MAX_LENGTH = 7200.0  # virtual seconds; no case works for so long


class Broken(AssertionError):
    """Says which promise was broken."""


def promise(holds: object, text: str) -> None:
    """Raises Broken unless it holds."""
    if not holds:
        raise Broken(text)


class Jumping(selectors.SelectSelector):
    """Waits for nothing: the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Broken("everything waits, and nothing is left that could end it")
        self.now += max(timeout, 0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop with that clock; the same callbacks run in the same order each time."""

    def __init__(self) -> None:
        self.clock = Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@dataclass(frozen=True)
class Kind:
    """A model of a case: `seconds` and `fails` are those of its work, `fails` by name and number of
    the call.
    """

    name: str
    size: int
    keep_alive: float = math.inf
    stays: bool = False
    seconds: tuple[tuple[str, float], ...] = ()
    fails: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Event:
    """Holds what comes at a time: a request runs for `seconds`, a client that leaves does so after
    them.
    """

    at: float
    kind: str
    model: str
    seconds: float = 0.0
    keep_alive: float | None = None
    level: int = 1


@dataclass(frozen=True)
class Case:
    models: tuple[Kind, ...]
    events: tuple[Event, ...]
    memory: int = 3
    max_waiting: int = 100
    stops_at: float = math.inf

    def program(self) -> str:
        """Returns a program that shows the failure of the case."""
        return (
            "from math import inf\n"
            "from tests.support.table_fuzzing import Case, Event, Kind, failure\n\n"
            f"print(failure({self!r}))"
        )


def random_case(rng: random.Random) -> Case:
    """Returns a case of up to four models and two dozen events."""

    def seconds(maximum: float) -> float:
        return rng.randrange(1, int(10 * maximum)) / 10 + rng.randrange(10) / 1000

    def kind(name: str) -> Kind:
        fails = tuple(
            (rng.choice(WORK), rng.randrange(3)) for _ in range(rng.choice((0, 0, 0, 1, 2)))
        )
        stays = rng.random() < 0.1
        keep_alive = math.inf if stays else rng.choice((math.inf, 0.0, 2.0, 9.0))
        works = tuple((work, seconds(3)) for work in WORK)
        return Kind(name, rng.randrange(1, 4), keep_alive, stays, works, fails)

    def event() -> Event:
        keep_alive = rng.choice((None, None, 0.0, 1.0, 5.0, math.inf))
        picked = rng.choice(names)
        return Event(
            seconds(20),
            rng.choice(KINDS),
            picked,
            seconds(4),
            keep_alive,
            rng.choice((1, 1, 2)),
        )

    names = "abcd"[: rng.randrange(1, 5)]
    models = tuple(kind(name) for name in names)
    events = tuple(sorted((event() for _ in range(rng.randrange(1, 25))), key=lambda each: each.at))
    stops_at = seconds(20) if rng.random() < 0.15 else math.inf
    return Case(models, events, rng.randrange(3, 7), rng.choice((1, 3, 100)), stops_at)


class Fake:
    """A model in the memory of a fake device."""

    def __init__(self, world: World, kind: Kind) -> None:
        self._world, self.kind = world, kind
        self.is_over, self.level, self.num_users = False, 0, 0
        self.ended = asyncio.Event()
        self.last_used = world.now

    async def sleep(self, level: int) -> None:
        promise(self.level == 0, f"{self.kind.name} is put to sleep twice")
        async with self._world.works("sleep", self.kind):
            await self._world.takes_time("sleep", self.kind, self)
        self.level = level
        self._world.held[self.kind.name] = 0

    async def wake(self) -> None:
        promise(self.level, f"{self.kind.name} is woken, and does not sleep")
        self._world.hold(self.kind)
        try:
            async with self._world.works("wake", self.kind):
                await self._world.takes_time("wake", self.kind, self)
        except BaseException:
            self._world.held[self.kind.name] = 0
            raise
        self.level = 0

    async def close(self) -> None:
        self._world.check_reason_to_close(self)
        try:
            async with self._world.works("close", self.kind):
                await self._world.takes_time("close", self.kind)
        finally:
            self.end()
            self._world.held[self.kind.name] = 0
            del self._world.fakes[self.kind.name]

    def end(self) -> None:
        self.is_over = True
        self.ended.set()


class World:
    """The table of a case, and what it is measured by."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._loop = asyncio.get_running_loop()
        self.kinds = {kind.name: kind for kind in case.models}
        self.held = dict.fromkeys(self.kinds, 0)
        self.fakes: dict[str, Fake] = {}
        self.waiting: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()
        self.min_keep_alive = {kind.name: kind.keep_alive for kind in case.models}
        self.max_keep_alive = dict(self.min_keep_alive)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._failed: set[str] = set()
        self._at_work: str | None = None
        self.is_stopped = False
        # Who was told to go after the last request; two events of one moment may come in either
        # order.
        self._names_to_go: set[str] = set()
        slots: dict[str, Slot[Fake]] = {
            kind.name: Slot(kind.name, kind.size, kind.keep_alive, kind.stays)
            for kind in case.models
        }
        self.table = ModelTable(
            slots,
            case.memory,
            check=self._check,
            load=self._load,
            max_waiting=case.max_waiting,
            clock=self._loop.time,
        )

    @property
    def now(self) -> float:
        return self._loop.time()

    # What the fakes do.

    @contextlib.asynccontextmanager
    async def works(self, work: str, kind: Kind) -> AsyncIterator[None]:
        """Works on a model, at one at a time, while no request is in it."""

        def check() -> None:
            num_users = self.fakes[kind.name].num_users if kind.name in self.fakes else 0
            promise(not num_users, f"{work} of {kind.name} while {num_users} requests run in it")
            self.table.check()

        promise(self._at_work is None, f"{work} of {kind.name} during {self._at_work}")
        self._at_work = f"{work} of {kind.name}"
        check()
        try:
            yield
            if not self.is_stopped:
                check()
        finally:
            self._at_work = None

    async def takes_time(self, work: str, kind: Kind, fake: Fake | None = None) -> None:
        number = self._calls[work, kind.name]
        self._calls[work, kind.name] += 1
        await asyncio.sleep(dict(kind.seconds).get(work, 1.0))
        if (work, number) in kind.fails or (fake is not None and fake.is_over):
            self._failed.add(kind.name)
            raise RuntimeError(f"{work} of {kind.name} fails")

    def hold(self, kind: Kind) -> None:
        self.held[kind.name] = kind.size
        promise(
            sum(self.held.values()) <= self.case.memory, f"the device is too small for {self.held}"
        )

    async def _check(self, name: str) -> None:
        async with self.works("check", self.kinds[name]):
            await self.takes_time("check", self.kinds[name])

    async def _load(self, name: str) -> Fake:
        kind = self.kinds[name]
        self.hold(kind)
        try:
            async with self.works("load", kind):
                await self.takes_time("load", kind)
        except BaseException:
            self.held[name] = 0
            raise
        self.fakes[name] = Fake(self, kind)
        return self.fakes[name]

    def check_reason_to_close(self, fake: Fake) -> None:
        name = fake.kind.name
        others_wait = any(number for other, number in self.waiting.items() if other != name)
        is_due = self.now >= fake.last_used + self.min_keep_alive[name]
        promise(fake.is_over or others_wait or is_due, f"{name} is unloaded without a reason")
        if fake.kind.stays and not fake.is_over:
            promise(self.min_keep_alive[name] < math.inf, f"{name} stays, and is unloaded")

    # What clients do.

    async def request(self, name: str, seconds: float, keep_alive: float | None) -> None:
        self._names_to_go.discard(name)
        if keep_alive is not None:
            self.min_keep_alive[name] = min(self.min_keep_alive[name], keep_alive)
            self.max_keep_alive[name] = max(self.max_keep_alive[name], keep_alive)
        self.in_flight[name] += 1
        self.waiting[name] += 1
        is_waiting = True
        try:
            async with self.table.lease(name, keep_alive) as fake:
                self.waiting[name] -= 1
                is_waiting = False
                await self._use(name, fake, seconds)
        except QueueFull:
            num_others = self.waiting.total() - 1
            promise(num_others >= self.case.max_waiting, f"the queue is full of {num_others}")
        except LoadFailed as error:
            expected = name in self._failed or "never unloaded" in str(error)
            promise(expected, f"{name} is not loaded: {error}")
        except ShuttingDown:
            promise(self.is_stopped, "the table says that it stops")
        finally:
            self.waiting[name] -= is_waiting
            self.in_flight[name] -= 1

    async def _use(self, name: str, fake: Fake, seconds: float) -> None:
        fake.num_users += 1
        try:
            promise(fake is self.fakes.get(name), f"a lease of {name}, which is another one now")
            promise(fake.level == 0 and self.held[name], f"a lease of {name}, which sleeps")
            promise(
                not str(self._at_work).endswith(f" of {name}"),
                f"a lease of {name} during {self._at_work}",
            )
            self.table.check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fake.ended.wait(), seconds)
                await asyncio.sleep(PARTING_SECONDS)
        finally:
            fake.num_users -= 1
            fake.last_used = self.now

    async def leave(self, name: str, seconds: float, keep_alive: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.request(name, 1000.0, keep_alive), seconds)

    async def sleep(self, name: str, level: int) -> None:
        was_quiet = not self.in_flight[name]
        try:
            await self.table.sleep(name, level)
        except InUse:
            fake = self.fakes.get(name)
            is_busy = self.in_flight[name] or not was_quiet
            promise(is_busy or (fake and fake.level not in (0, level)), f"{name} is not in use")
        except ShuttingDown:
            promise(self.is_stopped, "the table says that it stops")
        except RuntimeError:
            promise(name in self._failed, f"{name} does not fall asleep")
        else:
            fake = self.fakes.get(name)
            if fake is not None and was_quiet and not self.in_flight[name]:
                promise(fake.level == level or fake.last_used == self.now, f"{name} does not sleep")

    def expire(self, name: str) -> None:
        self.min_keep_alive[name] = 0.0
        self._names_to_go.add(name)
        self.table.expire(name)

    def kill(self, name: str) -> None:
        if name in self.fakes:
            self.fakes[name].end()

    async def stop(self, at: float) -> None:
        await asyncio.sleep(at - self.now)
        self.is_stopped = True
        await self.table.stop()

    async def live(self) -> None:
        """Lives the case, and asks at the end whether everything still works."""
        self.table.start()
        tasks = []
        if self.case.stops_at < math.inf:
            tasks.append(asyncio.ensure_future(self.stop(self.case.stops_at)))
        for event in self.case.events:
            await asyncio.sleep(max(event.at - self.now, 0))
            tasks += self._begun(event)
            self.table.check()
        await self._ended(tasks)
        if self.is_stopped:
            await self._ended(
                [asyncio.ensure_future(self.request(name, 1, None)) for name in self.kinds]
            )
            return
        await self._check_the_end()
        await self.table.stop()

    def _begun(self, event: Event) -> list[asyncio.Task[None]]:
        name = event.model
        match event.kind:
            case "request":
                return [asyncio.ensure_future(self.request(name, event.seconds, event.keep_alive))]
            case "leave":
                return [asyncio.ensure_future(self.leave(name, event.seconds, event.keep_alive))]
            case "wake":
                return [asyncio.ensure_future(self.request(name, 0.0, None))]
            case "sleep":
                return [asyncio.ensure_future(self.sleep(name, event.level))]
            case "expire":
                self.expire(name)
            case "kill":
                self.kill(name)
        return []

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        if tasks:
            _, waiting = await asyncio.wait(tasks, timeout=MAX_LENGTH)
            promise(not waiting, f"{len(waiting)} of {len(tasks)} wait for ever")
            await asyncio.gather(*tasks)

    async def _check_the_end(self) -> None:
        promise(not any(slot.num_leases for slot in self.table.slots.values()), "leases are left")
        await asyncio.sleep(60)  # longer than all times to stay, and all work
        self.table.check()
        for name, fake in self.fakes.items():
            promise(name not in self._names_to_go, f"{name} was told to go, and is there")
            stays = fake.is_over or fake.level or self.max_keep_alive[name] == math.inf
            promise(stays, f"{name} is there, and its time is over")
        for name in self.kinds:
            for _ in range(1 + len(self.kinds[name].fails)):
                await self._ended([asyncio.ensure_future(self.request(name, 1.0, None))])


def failure(case: Case) -> str | None:
    """Returns the promise that the table breaks in a case, or None."""
    try:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.get_loop().set_exception_handler(lambda loop, context: None)
            runner.run(_live(case))
    except (AssertionError, KeyError, LoadFailed, ShuttingDown) as error:
        return f"{type(error).__name__}: {error}"
    return None


async def _live(case: Case) -> None:
    await World(case).live()


def simpler(case: Case) -> Iterator[Case]:
    """Yields cases with one thing less."""
    for index in range(len(case.events)):
        yield dataclasses.replace(case, events=(*case.events[:index], *case.events[index + 1 :]))
    used = {event.model for event in case.events}
    for index, kind in enumerate(case.models):
        models = (*case.models[:index], *case.models[index + 1 :])
        if kind.name not in used:
            yield dataclasses.replace(case, models=models)
        for plain in (
            dataclasses.replace(kind, seconds=()),
            dataclasses.replace(kind, fails=kind.fails[1:]),
            dataclasses.replace(kind, keep_alive=math.inf),
            dataclasses.replace(kind, stays=False),
            dataclasses.replace(kind, size=1),
        ):
            if plain != kind:
                yield dataclasses.replace(
                    case, models=(*case.models[:index], plain, *case.models[index + 1 :])
                )
    for index, event in enumerate(case.events):
        for plain_event in (
            dataclasses.replace(event, keep_alive=None),
            dataclasses.replace(event, level=1),
            dataclasses.replace(event, seconds=1.0),
            dataclasses.replace(event, at=float(round(event.at))),
        ):
            if plain_event != event:
                yield dataclasses.replace(
                    case, events=(*case.events[:index], plain_event, *case.events[index + 1 :])
                )
    if case.stops_at < math.inf:
        yield dataclasses.replace(case, stops_at=math.inf)
    if (case.memory, case.max_waiting) != (3, 100):
        yield dataclasses.replace(case, memory=3, max_waiting=100)


def shrunk(case: Case) -> Case:
    """Returns a case that fails, and of which nothing can be left out."""
    while True:
        for smaller in simpler(case):
            if failure(smaller):
                case = smaller
                break
        else:
            return case


def fuzz(minutes: float, seed: int, report: Callable[[str], None]) -> int:
    """Lives random cases for some minutes, and returns how many failed, which is at most one."""
    end = time.monotonic() + 60 * minutes
    rng = random.Random(seed)
    num_cases = 0
    while time.monotonic() < end:
        case = random_case(rng)
        num_cases += 1
        if problem := failure(case):
            small = shrunk(case)
            report(f"life {num_cases}: {problem}\n\n{failure(small)}\n\n{small.program()}")
            return 1
    report(f"{num_cases} lives of a table of models, no promise broken (seed {seed})")
    return 0
