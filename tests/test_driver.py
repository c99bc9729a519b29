"""The driver's thread: every order's answer comes out, to whoever still waits for it; whatever
happens, every block and every place comes back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import get_args

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxpage import BeamSearchParams, EngineConfig, SamplingParams
from jaxpage.assembly import build_engine
from jaxpage.device import to_device
from jaxpage.driver import Driver, Handle, async_driver, turns
from jaxpage.driver import driver as driver_module
from jaxpage.driver.async_driver import AsyncDriver
from jaxpage.driver.facade import prepare
from jaxpage.engine import WakingWeights
from jaxpage.engine.calls import (
    Prompt,
)
from jaxpage.engine.reporting import Reporter
from jaxpage.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineFailed,
    JaxpageError,
    QueueFull,
    ShuttingDown,
    UnsupportedError,
    WeightsReplaced,
)
from jaxpage.serving.requests.generating import updates_of
from jaxpage.step.update import Mode
from tests.support.engines import LLAMA
from tests.support.gates import Gate
from tests.support.random_checkpoints import random_checkpoint
from tests.support.running import wait_until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 33,
        "max_model_len": 256,
    }
    built = build_engine(EngineConfig(model=str(directory), **settings))
    yield built
    built.engine.runner.close()


@pytest.fixture(autouse=True)
def nothing_left_after(built):
    yield
    engine = built.engine
    engine.scheduler.check()
    stats = engine.stats()
    assert stats["num_blocks_free"] == stats["num_blocks_total"]
    assert (
        not engine.has_unfinished
        and not engine._groups
        and not engine._strategies
        and not engine.metrics.requests
    )


def unfinished_ids(engine):
    return {
        group.request.request_id for group in (*engine.scheduler.running, *engine.scheduler.waiting)
    }


@asynccontextmanager
async def looping(built, **settings):
    """Runs a loop that leaves the engine to the next one."""
    loop = AsyncDriver(built, **settings)
    loop.turns.close_engine = lambda: None
    loop.start()
    try:
        yield loop
    finally:
        assert await asyncio.to_thread(loop.stop, 60)
        assert not loop.turns.live and not loop.num_open


def order(built, prompt=PROMPT, **params):
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return built.engine.prepare(None, prompt, SamplingParams(**params))


def alone(built, order_):
    """Returns what the engine makes of an order without any loop."""
    engine = built.engine
    reporter = engine.add("alone", order_)
    while engine.has_unfinished:
        engine.step()
    return reporter.whole()


async def deltas_of(handle):
    """Reads a stream as the server does. Leaving it ends the request."""
    try:
        async for updates in updates_of([handle]):
            for _, delta in updates:
                yield delta
    finally:
        handle.cancel()


async def _all(streamed):
    return [delta async for delta in deltas_of(streamed)]


def token_ids(output):
    return [completion.token_ids for completion in output.outputs]


class Clock:
    """Is the time that the loop sees."""

    def __init__(self, monkeypatch):
        self.now = time.monotonic()
        for module in (async_driver, driver_module, turns):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self):
        return self.now


def test_whole_and_streamed_outputs_are_those_of_the_engine(built):
    orders = [
        order(built),
        order(built, PROMPT[:3], n=2, temperature=1.0, seed=7),
        order(built, [5] * 40, logprobs=2),
    ]
    expected = [alone(built, each) for each in orders]

    async def main():
        async with looping(built) as loop:
            whole = await loop.submit(orders, stream=False)
            streamed = await loop.submit(orders, stream=True)
            outputs = await asyncio.gather(*(each.whole() for each in whole))
            for output, result in zip(outputs, expected, strict=True):
                assert output.outputs == result.outputs and output.finished
            for each, result in zip(streamed, expected, strict=True):
                deltas = await _all(each)
                assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
                for index, completion in enumerate(result.outputs):
                    parts = [d.outputs[index] for d in deltas if index < len(d.outputs)]
                    assert [
                        token for part in parts for token in part.token_ids
                    ] == completion.token_ids
                    assert parts[-1].finish_reason == completion.finish_reason

    asyncio.run(main())


def test_a_beam_search_is_reported_whole_and_cannot_be_streamed(built):
    beams = built.engine.prepare(None, PROMPT, BeamSearchParams(beam_width=2, max_tokens=5))
    best = order(built, n=1, best_of=2, temperature=1.0, seed=1)
    expected = [alone(built, beams), alone(built, best)]

    async def main():
        async with looping(built) as loop:
            outputs = [
                await each.whole() for each in await loop.submit([beams, best], stream=False)
            ]
            assert [output.outputs for output in outputs] == [result.outputs for result in expected]
            for each in (beams, best):
                with pytest.raises(UnsupportedError, match="known only at the end"):
                    await loop.submit([each], stream=True)

    asyncio.run(main())


def test_who_reads_slowly_gets_all_of_it_at_once_and_nothing_is_kept_for_him(built, monkeypatch):
    made = []
    delta = Reporter.delta
    monkeypatch.setattr(Reporter, "delta", lambda self: made.append(1) or delta(self))
    order_ = order(built, max_tokens=60)
    expected = alone(built, order_)

    async def main():
        async with looping(built) as loop:
            [slow] = await loop.submit([order_], stream=True)
            first = await slow.next_delta()
            [other] = await loop.submit([order(built, max_tokens=100)], stream=False)
            await other.whole()  # meanwhile the slow one has finished
            assert len(made) == 1
            remainder = await slow.next_delta()
            assert remainder.finished and len(made) == 2
            both = first.outputs[0].token_ids + remainder.outputs[0].token_ids
            assert len(first.outputs[0].token_ids) < 60 and both == expected.outputs[0].token_ids

    asyncio.run(main())


def test_orders_are_taken_all_or_none(built):
    never = order(built, [1] * 100, n=4, max_tokens=150, temperature=1.0)

    async def main():
        async with looping(built) as loop:
            with pytest.raises(CapacityError, match="KV blocks"):
                await loop.submit([order(built), never, order(built)], stream=False)
            stats = await loop.stats()
            assert stats["num_requests_waiting"] == stats["num_requests_running"] == 0
            assert not loop.turns.live and not loop.num_open

    asyncio.run(main())


def test_a_tokenizer_that_panics_refuses_the_prompt(built, monkeypatch):
    """Rust's panics are no exceptions; other things that are none go on as they are."""

    class PanicException(BaseException):
        pass

    raised = []

    def tokenizer(text, **_):
        raise raised[0]

    monkeypatch.setattr(built.engine, "tokenizer", tokenizer)
    checked = built.engine.admission.check_params(SamplingParams())
    for error, seen in ((PanicException(), ValueError), (SystemExit(), SystemExit)):
        raised[:] = [error]
        with pytest.raises(seen):
            prepare(built.engine, Prompt("text", None), checked)


def test_the_queue_is_bounded_and_has_room_again(built, monkeypatch):
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built, max_queued_requests=2) as loop:
            taken = await loop.submit([order(built)] * 5, stream=False)
            await gate.reached()
            with pytest.raises(QueueFull, match="5 requests run or wait, and there are 6 places"):
                await loop.submit([order(built)] * 2, stream=False)  # at once: no step was taken
            with pytest.raises(CapacityError, match="7 requests at once"):
                await loop.submit([order(built)] * 7, stream=False)
            last = asyncio.create_task(loop.submit([order(built)], stream=False))
            gate.open()
            taken += await last
            outputs = await asyncio.gather(*(handle.whole() for handle in taken))
            assert len({str(token_ids(output)) for output in outputs}) == 1
            assert [
                await handle.whole()
                for handle in await loop.submit([order(built)] * 6, stream=False)
            ]

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["inbox", "waiting", "prompt", "decoding", "finished"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_is_gone_before_the_next_step(built, monkeypatch, phase, stream):
    """It is gone whatever it was doing; the other one, which is not disturbed, says what it says
    alone.
    """
    victim = order(built, [9] * 130, n=2, temperature=1.0, seed=3, max_tokens=20)
    expected = alone(built, order(built))
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built) as loop:
            others = await loop.submit([order(built)], stream=False)
            await gate.reached()
            submitting = asyncio.create_task(loop.submit([victim], stream=stream))
            await asyncio.sleep(0)  # it is in the inbox now, after a step that waits
            if phase == "inbox":
                submitting.cancel()
                with suppress(asyncio.CancelledError):
                    await submitting
            for _ in range(
                {"inbox": 1, "waiting": 1, "prompt": 3, "decoding": 8, "finished": 8}[phase]
            ):
                gate.permits.release()
                await gate.reached()
            if phase == "finished":
                gate.open()
                while (await submitting)[0].reporter.finished is False:
                    await loop.stats()
            if phase != "inbox":
                [handle] = await submitting
                assert handle.reporter.finished is (phase == "finished")
                assert bool(handle.reporter.num_output_tokens) is (
                    phase in ("decoding", "finished")
                )
                handle.cancel()
                handle.cancel()
            looking = asyncio.ensure_future(loop.snapshot(unfinished_ids))
            await asyncio.sleep(0)
            # the step that is under way; before the next one the victim is gone
            gate.permits.release()
            assert await looking <= {others[0].request_id} and loop.num_open == 1
            gate.open()
            assert token_ids(await others[0].whole()) == token_ids(expected)

    asyncio.run(main())


def test_who_waits_for_a_request_that_another_cancels_gets_an_error(built, monkeypatch):
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built) as loop:
            [whole] = await loop.submit([order(built, max_tokens=200)], stream=False)
            [streamed] = await gate.until(loop.submit([order(built, max_tokens=200)], stream=True))
            reading = [asyncio.ensure_future(whole.whole()), streamed.next_delta()]
            threading.Thread(target=lambda: (whole.cancel(), streamed.cancel())).start()
            gate.open()
            outputs = [await reading[0], await reading[1]]
            while not outputs[1].finished:  # a delta was on its way
                outputs[1] = await streamed.next_delta()
            assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_who_stops_waiting_ends_the_request(built, monkeypatch, stream):
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built) as loop:
            [handle] = await loop.submit([order(built, max_tokens=200)], stream=stream)

            async def read():
                if stream:
                    async for _ in deltas_of(handle):
                        pass
                else:
                    await handle.whole()

            reading = asyncio.create_task(read())
            await gate.reached()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            gate.permits.release()
            assert (
                not await loop.snapshot(lambda engine: engine.has_unfinished)
                and gate.num_steps == 1
            )

    asyncio.run(main())


def test_a_request_has_its_time_and_no_more(built, monkeypatch):
    gate, clock = Gate(monkeypatch, built.engine), Clock(monkeypatch)

    async def main():
        async with looping(built, request_timeout_seconds=600) as loop:
            [whole] = await loop.submit([order(built, max_tokens=200)], stream=False)
            [streamed] = await gate.until(loop.submit([order(built, max_tokens=200)], stream=True))
            clock.now += 300
            [later] = await gate.until(loop.submit([order(built)], stream=False))
            [early] = await gate.until(
                loop.submit([order(built)], stream=False, arrived=clock.now - 300)
            )
            clock.now += 301
            reading = [
                asyncio.ensure_future(early.whole()),
                asyncio.ensure_future(whole.whole()),
                asyncio.ensure_future(_all(streamed)),
            ]
            gate.open()
            for result in await asyncio.gather(*reading, return_exceptions=True):
                assert isinstance(result, DeadlineExceeded) and "600 s" in str(result)
            assert (await later.whole()).outputs[0].finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("place", ["propose", "plan", "commit", "build", "detokenize"])
def test_a_step_that_breaks_off_anywhere_ends_the_requests_and_not_the_server(
    built, monkeypatch, place
):
    expected = alone(built, order(built))
    engine = built.engine
    owner, name = {
        "propose": (engine.speculator, "propose"),
        "plan": (engine.scheduler, "plan"),
        "commit": (engine.scheduler, "commit"),
        "build": (engine.builder, "build"),
        "detokenize": (engine.metrics, "stepped"),
    }[place]
    real, num_calls = getattr(owner, name), 0

    def failing(*arguments):
        nonlocal num_calls
        num_calls += 1
        # it happens, and then it fails: the worst state that can remain
        result = real(*arguments)
        if num_calls == 3:
            raise RuntimeError("planted")
        return result

    async def main():
        async with looping(built) as loop:
            monkeypatch.setattr(owner, name, failing)
            running = [*await loop.submit([order(built, max_tokens=50)] * 6, stream=False)]
            running += await loop.submit([order(built, max_tokens=50)], stream=True)
            ends = await asyncio.gather(
                *(handle.next_delta() for handle in running), return_exceptions=True
            )
            assert all(
                isinstance(e, EngineFailed) or e.outputs[0].finish_reason == "error"
                for e in ends[:4]
            )
            for handle in running:
                handle.cancel()
            assert loop.healthy
            [again] = await loop.submit([order(built)], stream=False)
            assert token_ids(await again.whole()) == token_ids(expected)

    asyncio.run(main())


def test_an_output_that_cannot_be_identified_ends_its_own_request_only(built, monkeypatch):
    expected = alone(built, order(built))
    whole = Reporter.whole
    ids = []

    def failing(self):
        if self._group.request.request_id == ids[0]:
            raise RuntimeError("planted")
        return whole(self)

    async def main():
        async with looping(built) as loop:
            both = await loop.submit([order(built)] * 2, stream=False)
            ids.append(both[0].request_id)
            monkeypatch.setattr(Reporter, "whole", failing)
            with pytest.raises(EngineFailed):
                await both[0].whole()
            assert token_ids(await both[1].whole()) == token_ids(expected)

    asyncio.run(main())


def test_when_the_thread_dies_everybody_hears_of_it_at_once(built, monkeypatch):
    gate = Gate(monkeypatch, built.engine)

    async def main():
        loop = AsyncDriver(built)
        loop.start()
        [whole] = await loop.submit([order(built)], stream=False)
        await gate.reached()
        submitting = asyncio.create_task(loop.submit([order(built)], stream=True))
        looking = asyncio.create_task(loop.stats())
        waiting = asyncio.create_task(whole.whole())
        await asyncio.sleep(0)
        monkeypatch.setattr(gate, "_step", lambda: (_ for _ in ()).throw(SystemExit("planted")))
        gate.open()
        ends = await asyncio.gather(submitting, looking, waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineFailed] * 3
        assert not loop.healthy and not loop.ready
        for attempt in (
            loop.submit([order(built)], stream=False),
            loop.stats(),
            whole.whole(),
            loop.wait_until_drained(0),
        ):
            with pytest.raises(EngineFailed):
                await attempt
        assert isinstance(loop.termination.exception(0).__cause__, SystemExit)
        whole.cancel()
        assert await asyncio.to_thread(loop.stop, 60)

    asyncio.run(main())
    built.engine.abort_all()


def test_an_engine_that_cannot_be_made_whole_dies_instead_of_serving_on(built, monkeypatch):
    """A step that breaks off loses a block: nobody is served from a pool that shrinks."""
    engine = built.engine

    lost = []

    def failing(*arguments):
        lost.append(engine.scheduler.block_manager.groups[0].pool.allocate())
        raise RuntimeError("planted")

    async def main():
        monkeypatch.setattr(
            engine.builder, "build", lambda *_: (_ for _ in ()).throw(KeyError("device"))
        )
        monkeypatch.setattr(engine, "_fail", failing)
        loop = AsyncDriver(built)
        loop.start()
        [handle] = await loop.submit([order(built)], stream=False)
        with pytest.raises(EngineFailed):
            await handle.whole()
        with pytest.raises(EngineFailed) as caught:
            await asyncio.wrap_future(loop.termination)
        assert "blocks were not freed" in str(caught.value.__cause__) and not loop.healthy

    asyncio.run(main())
    for block in lost:
        engine.scheduler.block_manager.groups[0].pool.release(block)


def test_health_is_a_heartbeat(built, monkeypatch):
    gate, clock = Gate(monkeypatch, built.engine), Clock(monkeypatch)

    async def main():
        async with looping(built, stalled_after_seconds=60) as loop:
            assert loop.healthy and loop.step_age is None
            clock.now += 1000
            assert loop.healthy  # nothing to do is no stall
            [handle] = await loop.submit([order(built)], stream=False)
            await gate.reached()
            clock.now += 59
            assert loop.healthy and loop.step_age == 59
            clock.now += 2
            assert not loop.healthy and not loop.ready
            gate.open()
            await handle.whole()
            await loop.stats()
            assert loop.healthy

    asyncio.run(main())
    assert not AsyncDriver(built).healthy  # before it is started


def test_a_drain_lets_finish_what_runs_and_takes_nothing_in(built, monkeypatch):
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built) as loop:
            [handle] = await loop.submit([order(built)], stream=False)
            await gate.reached()
            draining = asyncio.create_task(loop.wait_until_drained(600))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                await loop.submit([order(built)], stream=False)
            assert not loop.ready and loop.healthy
            gate.open()
            assert (await handle.whole()).outputs[0].finish_reason == "length"
            assert await draining and await loop.wait_until_drained(0)

    asyncio.run(main())


def test_what_does_not_finish_in_a_drain_ends_with_an_error(built):
    async def main():
        async with looping(built) as loop:
            running = await loop.submit([order(built, max_tokens=240)] * 6, stream=True)
            await running[0].next_delta()
            assert not await loop.wait_until_drained(0)
            for handle in running:
                with pytest.raises(ShuttingDown, match="time to finish was over"):
                    await handle.next_delta()
            assert (await loop.stats())["num_requests_running"] == 0

    asyncio.run(main())


def test_stopping_ends_everything_and_says_so(built):
    async def main():
        async with looping(built) as loop:
            [handle] = await loop.submit([order(built, max_tokens=240)], stream=True)
            await handle.next_delta()
            assert await asyncio.to_thread(loop.stop, 60)
            with pytest.raises(ShuttingDown):
                await handle.next_delta()
            with pytest.raises(ShuttingDown):
                await loop.stats()
            assert loop.termination.result(0) is None and not loop.healthy

    asyncio.run(main())


def test_a_waiter_for_the_end_that_is_cancelled_leaves_it_to_the_others(built, caplog):
    async def main():
        async with looping(built) as loop:
            waiter = asyncio.wrap_future(loop.termination)
            waiter.cancel()
            await asyncio.sleep(0)
            assert await asyncio.to_thread(loop.stop, 60)
            assert loop.termination.result(0) is None

    asyncio.run(main())
    assert "died" not in caplog.text


def test_a_function_that_fails_between_steps_is_its_callers_affair(built):
    async def main():
        async with looping(built) as loop:
            with pytest.raises(ZeroDivisionError):
                await loop.snapshot(lambda engine: 1 // 0)
            assert await loop.snapshot(lambda engine: engine.has_unfinished) is False

    asyncio.run(main())


# Requests that were accepted and wait: for other weights, or for a model that sleeps


class Witness:
    """An embedder that notes which weights it gets, and fails if they were deleted."""

    def __init__(self):
        self.seen = []

    def batches(self, lengths):
        return [[index] for index in range(len(lengths))]

    def embed(self, weights, prompts, poolings):
        self.seen.append(first := jax.tree.leaves(weights)[0])
        return [np.full(3, np.asarray(first).ravel()[0], np.float32) for _ in prompts]


def same_weights(engine):
    """Returns other arrays with the numbers of the engine's weights."""
    return {
        "target": jax.tree.map(
            lambda leaf: jax.device_put(np.array(leaf)), engine.runner.parameters["target"]
        )
    }


def weights_held_by(engine):
    """Returns the weights that a model that sleeps has kept."""
    return WakingWeights(to_device(engine.runner.host_parameters), engine.runner.num_sleeps)


@contextmanager
def by_hand(built, **settings):
    """Makes a driver that takes a turn when a test says so, and leaves the engine to the
    next one.
    """
    made = Driver(built.engine, **settings)
    made.turns.close_engine = lambda: None
    try:
        yield made
    finally:
        if built.engine.is_asleep:
            made.wait(made.wake(weights_held_by(built.engine)))
        made.stop()
        assert not made.turns.live and not made.turns._held and not made.turns._later


class Reader:
    """Reads the outputs of a handle."""

    def __init__(self, request, **more):
        self.updates = []
        self.handle = Handle(request, self.updates.extend, **more)

    @property
    def end(self):
        """Returns the finish reason and the number of tokens, or the type of the error; None until
        then.
        """
        if not self.updates:
            return None
        [(_, update)] = self.updates
        if isinstance(update, JaxpageError):
            return type(update)
        [completion] = update.outputs
        return completion.finish_reason, len(completion.token_ids)


@contextmanager
def awaiting_weights(driver, how):
    """Starts a request, and a change of the weights that waits for it."""
    runs = Reader(order(driver, max_tokens=20))
    driver.wait(driver.add([runs.handle]))
    driver.step()
    change = (
        driver.falling_asleep(1)
        if how == "sleep"
        else driver.replacing(same_weights(driver.engine))
    )
    with change as answer:
        driver.step()
        assert not answer.done() and driver.turns.change is not None
        yield runs, answer


def finish(driver, reader, how):
    """Steps until a request that waits for weights has ended."""
    while not reader.updates:
        driver.step()
        if how == "sleep" and driver.engine.is_asleep:
            driver.wait(driver.wake(weights_held_by(driver.engine)))


WAYS = pytest.mark.parametrize("how", ["update", "sleep"])


@WAYS
def test_a_drain_waits_for_a_request_that_waits_for_weights(built, how):
    with by_hand(built) as driver, awaiting_weights(driver, how) as (runs, answer):
        held = Reader(order(built, max_tokens=5))
        added = driver.add([held.handle])
        driver.step()
        drained = driver.drain()
        driver.step()
        assert not added.done() and not drained.done()
        late = Reader(order(built))
        with pytest.raises(ShuttingDown):
            driver.add([late.handle])
        while not answer.done():
            driver.step()
        assert runs.end == ("length", 20) and not drained.done()
        finish(driver, held, how)
        assert held.end == ("length", 5) and added.done() and drained.done()


@WAYS
def test_what_still_waits_for_weights_ends_when_a_drain_takes_too_long(built, how):
    with by_hand(built) as driver, awaiting_weights(driver, how) as (runs, _):
        held = Reader(order(built, max_tokens=5))
        added = driver.add([held.handle])
        with driver.embedding(Witness(), [order(built)], ["last"]) as [vector]:
            assert not driver.drain_for(0)
            assert runs.end == held.end == ShuttingDown and added.done()
            with pytest.raises(ShuttingDown):
                driver.wait(vector)
        assert not built.engine.has_unfinished


@WAYS
def test_a_request_that_is_given_up_while_it_waits_for_weights_never_runs(built, how):
    """Neither does a pin or a vector; the drain that waits for them is over at once."""
    witness = Witness()
    with by_hand(built) as driver, awaiting_weights(driver, how) as (runs, answer):
        held = Reader(order(built, max_tokens=5))
        driver.add([held.handle])
        with pytest.raises(KeyboardInterrupt), driver.pinning(order(built)):
            driver.step()
            raise KeyboardInterrupt
        with (
            pytest.raises(KeyboardInterrupt),
            driver.embedding(witness, [order(built)] * 2, ["last"] * 2),
        ):
            driver.step()
            raise KeyboardInterrupt
        drained = driver.drain()
        driver.step()
        assert set(driver.turns.live.values()) == {runs.handle, held.handle}
        driver.end([held.handle])
        while not answer.done():
            driver.step()
        assert drained.done() and not driver.turns.live and not witness.seen
        assert not built.engine.has_unfinished and not built.engine.scheduler.block_manager.pins


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_finds_a_request_that_waits_for_weights(built, how, stream):
    with by_hand(built) as driver, awaiting_weights(driver, how) as (runs, answer):
        held, other = (Reader(order(built, max_tokens=5), is_stream=stream) for _ in range(2))
        added = driver.add([held.handle])
        driver.step()
        for _ in range(2):
            driver.wait(driver.abort(held.handle))
            assert held.end == ("abort", 0) and added.done() and not runs.updates
        driver.abort(other.handle)  # before the driver has it
        driver.wait(driver.add([other.handle]))
        assert other.end == ("abort", 0)
        while not answer.done():
            driver.step()
        assert runs.end == ("length", 20) and not driver.turns.live
    with by_hand(built) as driver:
        driver.abort(held.handle)  # it is over
        early = Reader(order(built, max_tokens=5), is_stream=stream)
        driver.abort(early.handle)
        driver.wait(driver.add([early.handle]))
        assert early.end == ("abort", 0)


@WAYS
def test_the_time_of_a_request_that_waits_for_weights_runs_on(built, how, monkeypatch):
    clock = Clock(monkeypatch)
    with by_hand(built, request_timeout_seconds=600) as driver, awaiting_weights(driver, how):
        held = Reader(order(built), deadline=clock.now + 600)
        added = driver.add([held.handle])
        driver.step()
        clock.now += 601
        driver.step()
        assert held.end == DeadlineExceeded and added.done()


def test_the_time_of_a_request_runs_on_while_steps_are_paused(built):
    """Nothing else wakes the thread."""
    driver = Driver(built.engine, request_timeout_seconds=0.2)
    driver.turns.close_engine = lambda: None
    driver.start()
    driver.wait(driver.pause())
    reader = Reader(order(built), deadline=time.monotonic() + 0.2)
    driver.wait(driver.add([reader.handle]))
    wait_until(lambda: reader.updates, "it is late")
    assert reader.end == DeadlineExceeded and driver.healthy and driver.stop(60)


def test_a_request_that_is_refused_after_its_weights_came_says_so(built):
    """It says so to the caller that waits for it, or to its reader, if another of the same call
    ended before.
    """
    never = order(built, [1] * 100, n=4, max_tokens=150, temperature=1.0)
    with by_hand(built) as driver, awaiting_weights(driver, "update") as (_, answer):
        alone_, together = Reader(never), [Reader(order(built)), Reader(never)]
        refused = driver.add([alone_.handle])
        added = driver.add([reader.handle for reader in together])
        driver.wait(driver.abort(together[0].handle))
        assert added.result(0) is None
        driver.wait(answer)
        with pytest.raises(CapacityError):
            refused.result(0)
        driver.step()
        assert alone_.end is None and together[1].end == CapacityError and not driver.turns.live


def test_sleep_waits_for_vectors_and_an_update_does_not(built):
    witness, engine = Witness(), built.engine
    with (
        by_hand(built) as driver,
        driver.embedding(witness, [order(built)] * 20, ["last"] * 20) as vectors,
    ):
        driver.step()
        driver.step()
        before = witness.seen[0]
        with driver.replacing(same_weights(engine)) as version:
            driver.step()
            assert version.done() and not vectors[-1].done()
        with driver.falling_asleep(1) as asleep:
            driver.step()
            assert not asleep.done()
            with driver.embedding(witness, [order(built)], ["last"]) as [late]:
                driver.wait(asleep)
                assert (
                    all(weights is before for weights in witness.seen) and len(witness.seen) == 20
                )
                assert vectors[-1].done() and not late.done() and engine.is_asleep
                for refused in (driver.weights(), *_changes(driver, engine)):
                    with pytest.raises(RuntimeError, match="sleeps"):
                        driver.wait(refused)
                driver.wait(driver.wake(weights_held_by(engine)))
                np.testing.assert_array_equal(driver.wait(late), vectors[0].result())


@pytest.mark.parametrize("tells", [False, True])
def test_an_update_that_aborts_ends_vectors_too(built, tells):
    witness, engine = Witness(), built.engine
    with (
        by_hand(built) as driver,
        driver.embedding(witness, [order(built)] * 20, ["last"] * 20) as vectors,
    ):
        driver.step()
        driver.step()
        with driver.replacing(same_weights(engine), "abort", tells=tells) as version:
            driver.step()
        num_computed = len(witness.seen)
        assert version.done() and 0 < num_computed < 20 and not driver.turns.live
        ends = [type(vector.exception(0)) for vector in vectors]
        assert ends == [type(None)] * num_computed + [WeightsReplaced] * (20 - num_computed)


def _changes(driver, engine):
    """Returns the answers of changes that a model that sleeps refuses."""
    with driver.replacing({"target": {}}) as version:
        driver.step()
    with driver.falling_asleep(2) as asleep:
        driver.step()
    return version, asleep


def test_a_change_that_is_taken_back_is_in_nobodys_way(built):
    """It is in nobody's way even if another one comes in the same turn; orders between them run
    before the second.
    """
    with by_hand(built) as driver, awaiting_weights(driver, "update") as (runs, first):
        held = Reader(order(built, max_tokens=3))
        driver.add([held.handle])
        with (
            pytest.raises(KeyboardInterrupt),
            driver.replacing(same_weights(built.engine), queues=True),
        ):
            raise KeyboardInterrupt  # it is in the queue of changes, and never begins
        driver.turns.change.withdraw()
        with driver.falling_asleep(1) as asleep:
            driver.wait(asleep)
            assert runs.end == ("length", 20) and held.end == ("length", 3)
        with pytest.raises(RuntimeError, match="taken back"):
            first.result(0)
        version = built.engine.weights_version
        driver.wait(driver.wake(weights_held_by(built.engine)))
        assert built.engine.weights_version == version and driver.turns.change is None


def test_a_pin_that_is_taken_back_before_it_begins_is_no_error(built, caplog):
    with by_hand(built) as driver, awaiting_weights(driver, "update"):
        with (
            pytest.raises(KeyboardInterrupt),
            driver.pinning(order(built, [3] * 40)) as pin_id,
        ):
            driver.step()
            raise KeyboardInterrupt
        driver.step()
        assert not pin_id.done()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_lent_weights_are_left_to_those_that_hold_them(built):
    engine = built.engine
    with by_hand(built) as driver:
        shared = jax.tree.leaves(driver.wait(driver.weights()))
        for _ in range(2):
            with driver.falling_asleep(1) as asleep:
                driver.wait(asleep)
            assert not any(array.is_deleted() for array in shared)
            driver.wait(driver.wake(weights_held_by(engine)))
        unlent = jax.tree.leaves(engine.runner.parameters)
        with driver.falling_asleep(1) as asleep:
            driver.wait(asleep)
        assert all(array.is_deleted() for array in unlent)


def test_a_drain_has_its_time_and_no_more(built, monkeypatch):
    """An idle engine is drained in no time; a step that takes long does not hold the caller."""
    for timeout in (0, 0.0, 60, None):
        for starts in (False, True):
            with by_hand(built) as driver:
                if starts:
                    driver.start()
                assert driver.drain_for(timeout)
    with by_hand(built) as driver:
        endless = Reader(order(built, max_tokens=200))
        driver.wait(driver.add([endless.handle]))
        assert not driver.drain_for(0.01) and endless.end == ShuttingDown  # by hand
    monkeypatch.setattr(driver_module, "COMMAND_SECONDS", 0.1)
    monkeypatch.setattr(async_driver, "COMMAND_SECONDS", 0.1)
    gate = Gate(monkeypatch, built.engine)

    async def main():
        async with looping(built) as loop:
            [handle] = await loop.submit([order(built)], stream=False)
            await gate.reached()
            assert not await asyncio.wait_for(asyncio.to_thread(loop.drain_for, 0.1), 30)
            assert not await asyncio.wait_for(loop.wait_until_drained(0), 30)
            gate.open()
            with pytest.raises(ShuttingDown):
                await handle.whole()

    asyncio.run(main())


def _failing_once(real, place, armed):
    def function(*arguments):
        if place in armed:
            armed.discard(place)
            raise RuntimeError(f"planted in {place}")
        return real(*arguments)

    return function


class Lives(RuleBasedStateMachine):
    """Runs a driver by hand, which gets orders at any time, from callers of which some are
    interrupted.
    """

    def __init__(self, built):
        super().__init__()
        self.built, self.engine = built, built.engine
        self.engine.reset_prefix_cache()
        self.weights = jax.tree.map(np.array, self.engine.runner.parameters)
        self.patch, self.armed = pytest.MonkeyPatch(), set()
        run = _failing_once(self.engine.runner.run, "device", self.armed)
        self.patch.setattr(self.engine.runner, "run", run)
        self.driver = Driver(self.engine, num_places=12)
        self.driver.turns.close_engine = lambda: None
        self.readers = []  # of requests whose callers were not interrupted
        self.contexts = []  # of pins, vectors and changes, each with its answers
        self.all_answers, self.pins, self.shared, self.problems = [], [], [], []
        self.handles, self.drains, self.due = [], [], []

    def on_device(self):
        return jax.tree.map(jax.device_put, self.weights)

    @rule(
        number=st.integers(1, 3),
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 6),
        never_fits=st.sampled_from([False, False, True]),
        stream=st.booleans(),
        is_aborted=st.booleans(),
    )
    def add(self, number, length, max_tokens, never_fits, stream, is_aborted):
        params = {"n": 4, "max_tokens": 150} if never_fits else {"max_tokens": max_tokens}
        order_ = order(self.built, [2] * (100 if never_fits else length), temperature=1.0, **params)
        readers = [Reader(order_, is_stream=stream) for _ in range(number)]
        if is_aborted:
            self.driver.abort(readers[0].handle)
        with suppress(ShuttingDown, QueueFull):
            added = self.driver.add([reader.handle for reader in readers])
            self.readers += readers
            self.handles += [reader.handle for reader in readers]
            added.add_done_callback(lambda answer: answer.exception() and self.forget(readers))

    def forget(self, readers):
        self.readers = [reader for reader in self.readers if reader not in readers]

    @precondition(lambda self: self.readers)
    @rule(index=st.integers(0, 30), interrupts=st.booleans())
    def end(self, index, interrupts):
        reader = self.readers[index % len(self.readers)]
        if interrupts:
            self.driver.end([reader.handle])
            self.forget([reader])
        else:
            self.driver.abort(reader.handle)

    @rule(
        kind=st.sampled_from(["pin", "vectors", "weights", "level 1", "level 2"]),
        number=st.integers(1, 3),
        mode=st.sampled_from(get_args(Mode)),
        flags=st.tuples(*[st.booleans()] * 2),
    )
    def begin(self, kind, number, mode, flags):
        driver, (tells, queues) = self.driver, flags
        if kind == "pin":
            context = driver.pinning(order(self.built, [number] * 40))
        elif kind == "vectors":
            context = driver.embedding(Witness(), [order(self.built)] * number, ["last"] * number)
        elif kind == "weights":
            context = driver.replacing(self.on_device(), mode, tells=tells, queues=queues)
        else:
            context = driver.falling_asleep(int(kind[-1]))
        with suppress(ShuttingDown, QueueFull):
            entered = context.__enter__()
            answers = entered if kind == "vectors" else [entered]
            self.contexts.append((kind, context, answers))
            self.all_answers += answers

    @precondition(lambda self: self.contexts)
    @rule(index=st.integers(0, 30))
    def leave(self, index):
        """Leaves as a caller does that is interrupted, or has its answers."""
        kind, context, answers = self.contexts.pop(index % len(self.contexts))
        if all(answer.done() for answer in answers):
            context.__exit__(None, None, None)
            if kind == "pin" and answers[0].exception() is None:
                self.pins.append(answers[0].result())
            return
        for answer in answers:
            if not answer.done():
                self.all_answers.remove(answer)  # nobody waits for it any more
        with pytest.raises(KeyboardInterrupt):
            if not context.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None):
                raise KeyboardInterrupt

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.driver.unpin(self.pins.pop())

    @precondition(lambda self: self.engine.is_asleep)
    @rule()
    def wake(self):
        runner = self.engine.runner
        if runner.host_parameters is None:
            self.driver.wake(WakingWeights(self.on_device(), runner.num_sleeps))
        else:
            self.driver.wake(weights_held_by(self.engine))

    @rule()
    def pause(self):
        self.driver.pause()

    @rule()
    def resume(self):
        def resumed(answer):
            if answer.exception() is not None and "not paused" not in str(answer.exception()):
                self.problems.append(answer.exception())

        self.driver.resume().add_done_callback(resumed)

    @rule()
    def share(self):
        def shared(answer):
            if answer.exception() is None:
                self.shared += jax.tree.leaves(answer.result())

        self.driver.weights().add_done_callback(shared)

    @rule(is_late=st.booleans())
    def drain(self, is_late):
        def drained(answer):
            waiting = [
                answer
                for kind, _, answers in self.contexts
                for answer in answers
                if kind in ("pin", "vectors") and not answer.done()
            ]
            self.due += waiting  # an error is sent at the end of the turn
            if not all(handle.is_over for handle in self.handles):
                self.problems.append("drained, and a request is unfinished")

        answer = self.driver.drain()
        answer.add_done_callback(drained)
        self.drains.append(answer)
        if is_late:
            self.driver.end_late()

    @precondition(lambda self: self.drains and all(answer.done() for answer in self.drains))
    @rule()
    def open_again(self):
        """Opens it again, so that more happens than in a program, where a drain is the last
        thing.
        """
        self.driver.turns.draining, self.driver.turns._accepts = None, True
        self.drains.clear()

    @precondition(lambda self: self.engine.has_unfinished)
    @rule()
    def fail(self):
        self.armed.add("device")

    @rule(number=st.integers(1, 8))
    def step(self, number):
        for _ in range(number):
            self.driver.step()

    @rule()
    def obey(self):
        self.driver.turns.run_commands()

    @invariant()
    def holds(self):
        turns = self.driver.turns
        assert not self.problems and all(answer.done() for answer in self.due)
        assert not any(handle.is_over for handle in turns.live.values())
        waits = turns.change is not None or self.engine.is_asleep or turns.is_paused
        assert not turns._held or waits
        assert not any(array.is_deleted() for array in self.shared)
        self.engine.scheduler.check()

    def teardown(self):
        turns, pool = self.driver.turns, self.engine.scheduler.block_manager
        self.armed.clear()
        self.driver.turns.run_commands()
        if turns.is_paused:
            self.driver.resume()
        while self.driver.step() or self.engine.is_asleep:
            if self.engine.is_asleep and turns.inbox.empty():
                self.wake()
        try:
            self.holds()
            assert not turns.live and not turns._held and not turns._later and not turns.num_open
            assert all(answer.done() for answer in (*self.all_answers, *self.drains))
            for reader in self.readers:
                finals = [
                    update
                    for _, update in reader.updates
                    if isinstance(update, JaxpageError) or update.finished
                ]
                assert len(finals) == 1 and finals[0] is reader.updates[-1][1]
            requested = [answers[0] for kind, _, answers in self.contexts if kind == "pin"]
            known = {answer.result() for answer in requested if answer.exception() is None}
            assert set(pool.pins) <= known | {*self.pins}
            for pin_id in list(pool.pins):
                self.engine.unpin(pin_id)
            stats = self.engine.stats()
            assert stats["num_blocks_free"] == stats["num_blocks_total"]
        finally:
            self.driver.stop()
            self.patch.undo()


def test_whatever_callers_do_nothing_is_lost_and_nothing_runs_on(built):
    """Weights change, models sleep, and vectors, pins, drains and interrupts come between them."""
    run_state_machine_as_test(
        lambda: Lives(built), settings=settings(max_examples=60, stateful_step_count=30)
    )
