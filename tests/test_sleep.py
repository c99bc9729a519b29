"""A model that sleeps: its memory is free, it comes back without a compilation, and its texts are
what they were.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage import LLM, AsyncLLM, SamplingParams
from jaxpage.device import to_device, to_host
from jaxpage.engine import Runner
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.training import TrainableModel
from tests.support.engines import BLOCKS_OF_16, LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.running import wait_until

SMALL = {**BLOCKS_OF_16, "dtype": "float32", "preemption_mode": "recompute"}
PROMPTS = [[1, 2, 3, 4] * 12, [7, 8, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("sleep") / "model", LLAMA, seed=3)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as made:
        yield made


def texts(llm, **more):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


def write_adapter(directory):
    """Writes an adapter of one projection that changes every text."""
    directory.mkdir()
    random = np.random.default_rng(1)
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {"A": (4, 64), "B": (64, 4)}
    save_file(
        {
            f"{layer}{name}.weight": random.normal(size=shape).astype(np.float32)
            for name, shape in tensors.items()
        },
        directory / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def on_device(llm):
    """Returns the bytes of the arrays that the runner has."""
    runner = llm._engine.runner
    return sum(each.nbytes for each in jax.tree.leaves((runner._parameters, runner._pages)))


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_wakes_without_a_compilation_and_with_the_same_texts(llm, level):
    before = texts(llm)
    texts(llm)  # now with prefix hits, whose shapes are compiled here
    hits = llm.stats()["prefix_cache_hits_total"]
    weights = jax.tree.leaves(llm._engine.runner.parameters)
    num_compiled = llm.stats()["compile_total"]
    assert on_device(llm) > 0 and not llm.is_sleeping
    llm.sleep(level)
    assert llm.is_sleeping and on_device(llm) == 0
    assert weights and all(each.is_deleted() for each in weights), (
        "the device still has the weights"
    )
    for use in (texts, lambda llm: llm.parameters(), lambda llm: llm.sleep()):
        with pytest.raises(RuntimeError, match="sleeps"):
            use(llm)
    assert llm.stats()["num_blocks_cached"] == 0
    llm.wake_up()
    assert not llm.is_sleeping
    assert texts(llm) == before
    assert llm.stats()["prefix_cache_hits_total"] == hits, "the pages were lost, and are cached"
    assert llm.stats()["compile_total"] == num_compiled
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].weights_version == 0
    invariants(llm)
    with pytest.raises(RuntimeError, match="does not sleep"):
        llm.wake_up()


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_up_that_was_overtaken_does_not_end_a_later_sleep(directory, level):
    """Nor does it bring back the weights before an update that came between the two sleeps."""
    with make_llm(directory) as llm:
        before = texts(llm)
        read = llm._weights_for_waking

        def read_and_be_overtaken():
            weights = read()
            llm._weights_for_waking = read
            llm.wake_up()
            llm.update_parameters(random_tensors(LLAMA, seed=4))
            llm.sleep(level)
            return weights

        llm._weights_for_waking = read_and_be_overtaken
        llm.sleep()
        with pytest.raises(RuntimeError, match="sleeps again: call wake_up again"):
            llm.wake_up()
        assert llm.is_sleeping
        llm.wake_up()
        assert (texts(llm) == before) == (level == 2)  # level 2 loses updates
        invariants(llm)


def test_sleep_waits_for_running_requests_and_not_for_pins(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    next(stream)
    sleeping = threading.Thread(target=llm.sleep)
    sleeping.start()
    assert sum(len(chunk.outputs[0].token_ids) for chunk in stream) == 39
    sleeping.join(60)
    assert llm.is_sleeping
    llm.wake_up()
    with llm.pin_prefix([1] * 20), pytest.raises(RuntimeError, match="pinned"):
        llm.sleep()
    with pytest.raises(ValueError, match="level"):
        llm.sleep(3)
    assert not llm.is_sleeping


def test_by_hand_a_turn_that_only_makes_a_change_has_done_something(directory):
    with make_llm(directory, start=False) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        llm.sleep()
        assert sum(len(chunk.outputs[0].token_ids) for chunk in stream) == 8
        assert llm.is_sleeping and not llm._driver.step()


def test_updated_weights_survive_the_host_and_are_dropped_with_the_others(directory):
    with make_llm(directory) as llm:
        before = texts(llm)
        llm.update_parameters({name: -np.asarray(each) for name, each in llm.parameters().items()})
        updated = texts(llm)
        assert updated != before
        llm.sleep(1)
        llm.wake_up()
        assert texts(llm) == updated
        llm.sleep(2)
        llm.wake_up()
        assert texts(llm) == before
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].weights_version == 2


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_follow_their_model(directory, tmp_path, level):
    write_adapter(tmp_path / "one")
    adapter = LoRARequest("one", 1, str(tmp_path / "one"))
    with make_llm(directory, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        plain, adapted = texts(llm), texts(llm, lora_request=adapter)
        assert plain != adapted
        llm.sleep(level)
        llm.wake_up()
        assert texts(llm, lora_request=adapter) == adapted
        assert texts(llm) == plain


def test_an_async_model_sleeps(directory, compiled_when_used):
    async def run():
        async with AsyncLLM(str(directory), max_num_seqs=4, num_blocks=129) as llm:
            await llm.sleep()
            assert llm.is_sleeping
            with pytest.raises(RuntimeError, match="sleeps"):
                [_ async for _ in llm.generate([1, 2], GREEDY)]
            await llm.wake_up()
            return [output async for output in llm.generate([1, 2], GREEDY)][-1]

    assert len(asyncio.run(run()).outputs[0].token_ids) == 8


@pytest.mark.parametrize("level", [1, 2])
def test_what_a_caller_holds_is_never_deleted(directory, level):
    """Sleep and the end of the engine delete nothing of it, whoever gave the arrays to whom."""
    arrays = {name: jax.device_put(array) for name, array in random_tensors(LLAMA, seed=5).items()}
    numbers = {name: np.array(array) for name, array in arrays.items()}
    with make_llm(directory) as llm:
        shared = [llm.parameters()]
        expected = {name: np.array(array) for name, array in shared[0].items()}
        _, trained = TrainableModel.load(LLAMA, shared[0])
        with LLM.from_parameters(LLAMA, shared[0], **SMALL) as other:
            before = texts(other)
            for each in (llm, other):
                each.sleep(level) if each is llm else each.sleep(1)
                each.wake_up()
            llm.update_parameters(shared[0])
            assert texts(llm) == texts(other) == before
            shared.append(other.parameters())
            other.update_parameters(arrays)
            other.sleep(1)
            other.wake_up()
        shared.append(llm.parameters())
        llm.update_parameters(arrays)
        shared.append(llm.parameters())
        llm.sleep(level)
    for each in shared[:3]:
        jax.tree.map(np.testing.assert_array_equal, each, expected)
    jax.tree.map(np.testing.assert_array_equal, shared[3], numbers)
    jax.tree.map(np.testing.assert_array_equal, arrays, numbers)
    assert not any(array.is_deleted() for array in jax.tree.leaves(trained))


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_lent_arrays_leave_the_device_when_nobody_holds_them(keeps_weights):
    """Those that were not lent leave it at once, whoever refers to them."""
    arrays = {name: jax.device_put(np.arange(4.0)) for name in "ab"}
    runner = Runner({"target": arrays}, lambda: (), None, ())
    shared = runner.share_parameters()["target"]
    held, dropped = shared["a"], weakref.ref(shared["b"])
    del arrays, shared
    runner.sleep(keeps_weights=keeps_weights)
    assert dropped() is None and held.tolist() == [0, 1, 2, 3]
    runner.wake({"target": {"a": jax.device_put(np.arange(4.0))}})
    unlent = runner.parameters["target"]["a"]
    runner.sleep(keeps_weights=keeps_weights)
    assert unlent.is_deleted() and not held.is_deleted()


def slow_embedder(llm, begun):
    """Returns an embedder whose vectors take a while, so that something else comes between two of
    them.
    """
    embed = llm._embedder.embed

    def slowly(*arguments):
        begun.set()
        time.sleep(0.03)
        return embed(*arguments)

    llm._embedder.embed = slowly


def test_sleep_waits_for_vectors_of_other_threads(directory):
    with make_llm(directory) as llm, ThreadPoolExecutor(4) as pool:
        vectors = llm.embed(PROMPTS * 4, use_tqdm=False)
        begun = threading.Event()
        slow_embedder(llm, begun)
        for _ in range(3):
            begun.clear()
            requested = [pool.submit(llm.embed, PROMPTS * 4, use_tqdm=False) for _ in range(2)]
            assert begun.wait(60)
            llm.sleep(1)
            llm.wake_up()
            for answer in requested:
                np.testing.assert_array_equal(answer.result(60), vectors)


def test_sleep_waits_for_vectors_of_other_coroutines(directory, compiled_when_used):
    async def run():
        async with AsyncLLM(str(directory), **SMALL) as llm:
            vectors = await llm.embed(PROMPTS * 4)
            slow_embedder(llm, threading.Event())
            for _ in range(3):
                requested = [asyncio.create_task(llm.embed(PROMPTS * 4)) for _ in range(2)]
                await asyncio.sleep(0.05)
                await llm.sleep()
                await llm.wake_up()
                for each in await asyncio.gather(*requested):
                    np.testing.assert_array_equal(each, vectors)
            left = asyncio.create_task(llm.embed(PROMPTS * 100))
            await asyncio.sleep(0.05)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            await asyncio.wait_for(llm.sleep(), 10)  # not for vectors that nobody waits for
            await llm.wake_up()
            assert await llm.drain(60)

    asyncio.run(run())


def test_a_drain_counts_a_request_that_waits_for_other_weights(directory):
    with make_llm(directory) as llm, ThreadPoolExecutor(2) as pool:
        stream = llm.stream(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=60))
        first = next(stream)
        holds = threading.Event()
        gate = threading.Event()
        llm._driver.call(lambda engine: holds.set() or gate.wait(60))
        assert holds.wait(60)  # what is in the inbox from here on are the calls
        update = pool.submit(llm.update_parameters, random_tensors(LLAMA, seed=4))
        turns = llm._driver.turns
        wait_until(lambda: turns.inbox.qsize() == 1, "the update is there")
        answer = pool.submit(llm.generate, PROMPTS, GREEDY, use_tqdm=False)
        wait_until(lambda: turns.inbox.qsize() == 2, "the request is there")
        gate.set()
        assert llm.drain(60)
        assert [len(each.outputs[0].token_ids) for each in answer.result(60)] == [8, 8]
        assert update.result(60) == 1 and len([first, *stream]) == 60


def test_an_array_that_is_in_the_tree_twice_is_moved_once():
    array = jax.device_put(np.arange(6.0).reshape(2, 3))
    held = to_host({"a": array, "b": [array]})
    assert array.is_deleted() and held["a"] is held["b"][0]
    back = to_device(held)
    assert back["a"] is back["b"][0]
    np.testing.assert_array_equal(back["a"], np.arange(6.0).reshape(2, 3))
