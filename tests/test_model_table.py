"""The table of models with fake ones: never more memory than there is, nobody waits for ever, and
no request is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.errors import CapacityError, QueueFull, ShuttingDown
from jaxpage.serving.several import table
from jaxpage.serving.several.table import InUse, LoadFailed, ModelTable, Slot
from jaxpage.serving.wire.keep_alive import keep_alive_seconds
from tests.support.sweeps import examples
from tests.support.table_fuzzing import Case, Event, Kind, failure, fuzz, random_case


class Fake:
    """A model whose calls are noted."""

    def __init__(self, name, log):
        self.name, self.log, self.is_over, self.level = name, log, False, 0
        log.append(f"load {name}")

    async def sleep(self, level):
        await asyncio.sleep(0)
        self.level = level
        self.log.append(f"sleep {self.name}")

    async def wake(self):
        await asyncio.sleep(0)
        self.level = 0
        self.log.append(f"wake {self.name}")

    async def close(self):
        await asyncio.sleep(0)
        self.is_over = True
        self.log.append(f"close {self.name}")


class World:
    """A table of fake models, whose clock stands still unless it is set."""

    def __init__(self, sizes, memory, *, broken=(), gone=(), staying=(), keep_alive=math.inf):
        self.log, self.now = [], 0.0
        self.broken, self.gone = set(broken), set(gone)
        slots = {
            name: Slot(name, size, keep_alive, stays=name in staying)
            for name, size in sizes.items()
        }
        self.table = ModelTable(
            slots,
            memory,
            check=self._check,
            load=self._load,
            max_waiting=100,
            clock=lambda: self.now,
        )

    async def _check(self, name):
        if name in self.gone:
            raise CapacityError("its file is gone")

    async def _load(self, name):
        await asyncio.sleep(0)
        self.table.check()
        if name in self.broken:
            raise ValueError("a mistake")
        return Fake(name, self.log)

    async def request(self, name, turns=1, keep_alive=None):
        async with self.table.lease(name, keep_alive) as model:
            for _ in range(turns):
                assert model.name == name and not model.is_over and model.level == 0
                await asyncio.sleep(0)
        return name


@contextlib.asynccontextmanager
async def running(*arguments, **more):
    world = World(*arguments, **more)
    world.table.start()
    yield world
    world.table.check()
    await world.table.stop()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_room_is_made_by_the_idle_model_that_was_used_the_longest_ago():
    async def run():
        async with running({"a": 1, "b": 1, "c": 1}, 2) as world:
            for now, name in enumerate(["a", "b", "a", "c", "a", "b"]):
                world.now = now
                await world.request(name)
            return world.log

    assert asyncio.run(run()) == [
        *("load a", "load b", "close b", "load c", "close c", "load b"),
    ]


def test_a_busy_model_takes_no_more_requests_when_another_waits_for_its_room():
    async def run():
        async with running({"a": 1, "b": 1}, 1) as world:
            busy = asyncio.ensure_future(world.request("a", turns=30))
            await settle()
            order = []
            for name in "baab":
                task = asyncio.ensure_future(world.request(name))
                task.add_done_callback(lambda task: order.append(task.result()))
                await asyncio.sleep(0)
            assert not order
            await busy
            while len(order) < 4:
                await asyncio.sleep(0)
            return order, world.log

    order, log = asyncio.run(run())
    assert order == ["b", "b", "a", "a"]  # who waits for a model runs when it is there
    assert log == ["load a", "close a", "load b", "close b", "load a"]


def test_a_busy_model_that_need_not_go_takes_requests_while_another_is_loaded():
    """Those that came while it was to go run first."""

    async def run():
        async with running({"a": 1, "b": 1, "c": 1}, 2) as world:
            long = [asyncio.ensure_future(world.request(name, turns=60)) for name in "ab"]
            await settle()
            wants = asyncio.ensure_future(world.request("c"))
            await settle()
            assert world.table.slots["a"].is_closing
            waits = asyncio.ensure_future(world.request("a"))
            loading = asyncio.Event()
            load = world.table._load

            async def slow(name):
                loading.set()
                await waits
                await world.request("a")
                return await load(name)

            world.table._load = slow
            long[1].cancel()
            await asyncio.wait_for(loading.wait(), 5)
            await asyncio.wait_for(asyncio.gather(wants, waits, long[0]), 5)
            return world.log

    assert asyncio.run(run()) == ["load a", "load b", "close b", "load c"]


def test_a_load_that_fails_answers_its_requests_and_leaves_the_others_alone():
    async def run():
        sizes = {"a": 1, "b": 1, "c": 1}
        async with running(sizes, 1, broken="b", gone="c") as world:
            await world.request("a")
            with pytest.raises(LoadFailed, match="its file is gone"):
                await world.request("c")
            assert world.log == ["load a"], "room was made for a model that is not there"
            failed = await asyncio.gather(
                *(world.request("b") for _ in range(3)), return_exceptions=True
            )
            assert [str(error) for error in failed] == ["the server failed to load it"] * 3
            world.broken.clear()
            assert await world.request("b") == "b"
            assert await world.request("a") == "a"

    asyncio.run(run())


def test_a_lease_that_is_granted_as_its_request_ends_is_given_back():
    async def run():
        async with running({"a": 1}, 1) as world:
            request = asyncio.ensure_future(world.request("a"))
            grant = world.table._grant

            def grant_and_cancel(slot):
                grant(slot)
                request.cancel()

            world.table._grant = grant_and_cancel
            with pytest.raises(asyncio.CancelledError):
                await request
            assert world.log == ["load a"] and not world.table.slots["a"].num_leases

    asyncio.run(run())


def test_models_that_stay_are_never_unloaded():
    async def run():
        async with running({"a": 1, "b": 1}, 1, staying="a") as world:
            await world.request("a")
            with pytest.raises(LoadFailed, match="never unloaded take 0 MiB"):
                await world.request("b")
            return world.log

    assert asyncio.run(run()) == ["load a"]


def test_keep_alive_is_that_of_the_last_request_that_gave_one():
    async def run():
        async with running({"a": 1}, 1, keep_alive=10.0) as world:
            await world.request("a", keep_alive=60.0)
            await world.request("a")
            for now, state in ((59.0, "loaded"), (60.0, "unloaded")):
                world.now = now
                world.table.tidy()
                await settle()
                assert world.table.slots["a"].state == state
            await world.request("a")
            world.now += 10.0  # the value went with the model
            world.table.tidy()
            await settle()
            assert world.table.slots["a"].state == "unloaded"
            busy = asyncio.ensure_future(world.request("a", turns=30))
            await settle()
            assert world.table.expire("a") and world.table.slots["a"].state == "loaded"
            await busy
            await asyncio.sleep(0.01)  # the timer
            await settle()
            assert world.table.slots["a"].state == "unloaded" and not world.table.expire("a")

    asyncio.run(run())


def test_a_model_that_sleeps_takes_no_room_and_wakes_for_a_request():
    async def run():
        async with running({"a": 1, "b": 1}, 1) as world:
            busy = asyncio.ensure_future(world.request("a", turns=9))
            await settle()
            busy = asyncio.ensure_future(world.request("a", turns=30))
            await asyncio.sleep(0)
            with pytest.raises(InUse, match=r"run in .a. \(1\)"):
                await world.table.sleep("a", 1)
            await busy
            await world.table.sleep("a", 1)
            await world.table.sleep("a", 1)
            with pytest.raises(InUse, match="sleeps at level 1: wake it first"):
                await world.table.sleep("a", 2)
            await world.table.sleep("b", 1)  # it is not loaded
            await world.request("b")
            await world.request("a")
            return world.log

    log = ["load a", "sleep a", "load b", "close b", "wake a"]
    assert asyncio.run(run()) == log


def test_a_model_whose_engine_has_ended_is_loaded_again():
    async def run():
        async with running({"a": 1}, 1) as world:
            await world.request("a")
            world.table.slots["a"].model.is_over = True
            await world.request("a")
            return world.log

    assert asyncio.run(run()) == ["load a", "close a", "load a"]


def test_the_queue_has_an_end_and_a_stop_ends_it():
    async def run():
        async with running({"a": 1, "b": 1}, 1) as world:
            async with world.table.lease("a"):
                waiting = [asyncio.ensure_future(world.request("b")) for _ in range(100)]
                await settle()
                with pytest.raises(QueueFull, match="100 requests"):
                    await world.request("b")
                await world.table.stop()
                ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(end) for end in ends} == {ShuttingDown}

    asyncio.run(run())


@examples(50)
@given(st.randoms(use_true_random=False))
def test_whatever_comes_the_table_keeps_its_promises(rng):
    case = random_case(rng)
    assert failure(case) is None, case.program()


def test_an_order_to_unload_before_a_request_of_the_same_moment_does_not_end_its_model():
    """The fuzzer knows which of the two the table got first: the client's, whose task begins a turn
    later, is second.
    """
    kinds = (Kind("a", 1),)
    events = (Event(1.0, "leave", "a", 1.5), Event(1.0, "expire", "a"))
    assert failure(Case(kinds, events)) is None
    later = (events[0], Event(1.5, "expire", "a"))
    assert failure(Case(kinds, later)) is None


ALWAYS_USABLE = property(lambda slot: slot.model is not None and not slot.is_asleep)


@pytest.mark.parametrize(
    ("where", "name", "mistake", "says"),
    [
        (table, "_close", contextlib.nullcontext, "a lease of . during (sleep|close) of ."),
        (table.Slot, "is_usable", ALWAYS_USABLE, "a lease of . during"),
        (table.ModelTable, "_refuse", lambda *_: None, "wait"),
    ],
)
def test_the_fuzzer_finds_a_mistake_and_shrinks_it(monkeypatch, where, name, mistake, says):
    """The first is what `ModelTable.sleep` once had: a look at the leases, a pause, and the state
    after it.
    """
    monkeypatch.setattr(where, name, mistake)
    events = []
    assert fuzz(1, 1, events.append) == 1
    assert re.search(says, events[0].split("\n\n")[1])
    program = events[0].split("\n\n", 2)[2]
    assert program.count("Event(") <= 4
    scope = {"print": events.append}
    exec(program, scope)
    assert events[1] == events[0].split("\n\n")[1]


@pytest.mark.parametrize("what", ["sleep", "close"])
def test_a_request_that_comes_while_its_model_falls_asleep_or_goes_waits_and_runs(what):
    async def run():
        async with running({"a": 1}, 1) as world:
            await world.request("a")
            model = world.table.slots["a"].model
            began, may_end = asyncio.Event(), asyncio.Event()
            work = getattr(model, what)

            async def slow(*arguments):
                began.set()
                await may_end.wait()
                await work(*arguments)

            setattr(model, what, slow)
            if what == "sleep":
                order = asyncio.ensure_future(world.table.sleep("a", 1))
            else:
                world.table.expire("a")
                order = asyncio.ensure_future(asyncio.sleep(0))
            await began.wait()
            request = asyncio.ensure_future(world.request("a"))
            await settle()
            assert not request.done() and not world.table.slots["a"].num_leases
            world.table.check()
            may_end.set()
            await order
            assert await request == "a"
            return world.log

    after = {"sleep": ["sleep a", "wake a"], "close": ["close a", "load a"]}[what]
    assert asyncio.run(run()) == ["load a", *after]


def test_an_order_to_unload_holds_for_a_model_that_is_being_loaded():
    async def run():
        async with running({"a": 1}, 1) as world:
            request = asyncio.ensure_future(world.request("a", keep_alive=60.0))
            await asyncio.sleep(0)
            assert world.table.expire("a")
            await request
            await asyncio.sleep(0.01)  # the timer
            await settle()
            assert world.log == ["load a", "close a"]
            assert world.table.slots["a"].keep_alive == math.inf

    asyncio.run(run())


def test_an_order_to_sleep_ends_with_the_table():
    async def run():
        async with running({"a": 1, "b": 1}, 1) as world:
            async with world.table.lease("a"):
                waits = asyncio.ensure_future(world.request("b"))
                await settle()
                order = asyncio.ensure_future(world.table.sleep("b", 1))
                await settle()
                await world.table.stop()
            ended = asyncio.gather(
                *(waits, order, world.request("b"), world.table.sleep("b", 1)),
                return_exceptions=True,
            )
            ends = await asyncio.wait_for(ended, 5)
            assert {type(end) for end in ends} == {ShuttingDown}

    asyncio.run(run())


def test_a_load_that_takes_long_is_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(table, "REPORT_SECONDS", 0.01)

    async def run():
        async with running({"a": 1}, 1) as world:
            load = world.table._load

            async def slow(name):
                await asyncio.sleep(0.05)
                return await load(name)

            world.table._load = slow
            await world.request("a")

    with caplog.at_level("INFO", "jaxpage"):
        asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "loading a" and said[-1] == "a is loaded, after 0.1 s"
    assert "still loading a, after 0 s" in said


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0), ("0", 0), (90, 90), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("300ms", 0.3)),
        *((-1, math.inf), ("-1m", math.inf), ("-1", math.inf), ("120", 120)),
    ],
)
def test_durations_are_ollamas(value, seconds):
    assert keep_alive_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "5x", "m", "1h 2m", "5m3", "nan", "9" * 65, "١s"])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ValueError, match="duration"):
        keep_alive_seconds(value)
