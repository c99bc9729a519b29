"""`AsyncLLM`: many coroutines, one engine, the texts of `LLM`."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.errors import ShuttingDown, UnsupportedError, WeightsReplaced
from tests.support.engines import BLOCKS_OF_16, LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.wire import with_template

PROMPTS = [[1, 2, 3, 4] * 12, [7, 8, 9], [100] * 30]
PARAMS: list[Any] = [
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=15, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=0),
    BeamSearchParams(beam_width=2, max_tokens=6),
]
CONTINUATIONS = [[5, 6], [7], [8]]


def test_coroutines_share_an_engine(tmp_path):
    model = random_checkpoint(tmp_path, LLAMA)
    with make_llm(model) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)

    async def run() -> None:
        async with AsyncLLM(model, **BLOCKS_OF_16, preemption_mode="recompute") as llm:

            async def whole(index: int) -> list[Any]:
                return [
                    output
                    async for output in llm.generate(PROMPTS[index], PARAMS[index], f"r{index}")
                ]

            for index, outputs in enumerate(await asyncio.gather(*map(whole, range(3)))):
                assert outputs[-1].outputs == expected[index].outputs
                assert outputs[-1].prompt_logprobs == expected[index].prompt_logprobs
                assert outputs[-1].finished and outputs[-1].request_id == f"r{index}"
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
                assert lengths == sorted(lengths) and (index == 2) == (len(outputs) == 1)
            endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
            seen = []
            async for output in llm.generate([5], endless, "long"):
                seen.append(output)
                with pytest.raises(ValueError, match="request_id 'long' is running already"):
                    await anext(llm.generate([5], endless, "long"))
                await llm.abort("long")
            assert seen[-1].outputs[0].finish_reason == "abort"
            async with asyncio.timeout(20):
                async for output in llm.generate([5], endless, "long"):
                    seen.append(output)
                    if not output.finished:
                        handle = llm._running["long"]
                        # As after a step whose news was taken: nothing but the abort will wake the
                        # reader.
                        await llm._driver.snapshot(
                            lambda engine, it=handle: (
                                engine.abort(it.request_id),
                                setattr(it, "is_updated", False),
                            )
                        )
                        await llm.abort("long")
                assert seen[-1].outputs[0].finish_reason == "abort"
            async for _ in llm.generate([5], endless):
                break  # leaving ends it
            several = [llm.generate([5], endless, name) for name in "ab"]
            await asyncio.gather(*map(anext, several))
            await llm.abort(name for name in ("a", "unknown", "b"))
            for each in several:
                assert [output async for output in each][-1].outputs[0].finish_reason == "abort"
            for wrong in (5, [["a"]]):
                with pytest.raises(
                    TypeError, match="request_id must be a string, or an iterable of strings; got"
                ):
                    await llm.abort(wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="takes one prompt, not 2"):
                await anext(llm.generate([[1], [2]]))
            for _ in range(200):
                if not (await llm.stats())["num_requests_running"]:
                    break
                await asyncio.sleep(0.01)
            stats = await llm.stats()
            assert stats["num_blocks_free"] == stats["num_blocks_total"] and not llm._running
        await llm.shutdown()

    asyncio.run(run())


def test_scores_and_vectors_and_other_weights_are_those_of_llm(tmp_path):
    model = random_checkpoint(tmp_path, LLAMA)
    weights = [random_tensors(LLAMA, seed=seed) for seed in (0, 1)]
    scores: list[Any] = []
    with make_llm(model) as llm:
        expected = llm.generate(PROMPTS[0], PARAMS[1], use_tqdm=False)[0].outputs[0].token_ids
        vectors = llm.embed(PROMPTS, pooling="mean", use_tqdm=False)
        for each in weights:
            llm.update_parameters(each)
            scores.append(llm.score(PROMPTS, CONTINUATIONS))

    async def run() -> None:
        settings = {**BLOCKS_OF_16, "preemption_mode": "recompute", "max_queued_requests": 9}
        async with AsyncLLM.from_parameters(LLAMA, weights[0], **settings) as llm:
            assert llm._driver.num_places == llm._driver.engine.scheduler.max_num_seqs + 9
            assert await llm.score(PROMPTS[0], CONTINUATIONS[0]) == scores[0][0]
            np.testing.assert_array_equal(await llm.embed(PROMPTS, pooling="mean"), vectors)
            with pytest.raises(
                ValueError, match="pooling must be one of last, mean, cls, not 'max'"
            ):
                await llm.embed(PROMPTS, pooling="max")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="embed needs at least one prompt"):
                await llm.embed([])
            runner, run_step = llm._driver.engine.runner, llm._driver.engine.runner.run
            runner.run = lambda batch: (time.sleep(0.01), run_step(batch))[1]  # type: ignore[method-assign]
            running = llm.generate(PROMPTS[0], PARAMS[1])
            await anext(running)
            update = asyncio.create_task(llm.update_parameters(weights[1]))
            last = [output async for output in running][-1]
            assert (last.outputs[0].token_ids, last.weights_version) == (expected, 0)
            assert await update == 1 and await llm.score(PROMPTS, CONTINUATIONS) == scores[1]
            running = llm.generate([5], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(running)
            update = asyncio.create_task(llm.update_parameters(weights[0], mode="abort"))
            with pytest.raises(WeightsReplaced):
                [output async for output in running]
            assert await update == 2 and await llm.score(PROMPTS, CONTINUATIONS) == scores[0]
            embedder, embed = llm._embedder, llm._embedder.embed
            embedder.embed = lambda *arguments: (time.sleep(0.2), embed(*arguments))[1]  # type: ignore[method-assign]
            embedding = asyncio.create_task(llm.embed(PROMPTS, pooling="mean"))
            await asyncio.sleep(0.1)
            assert await llm.update_parameters(weights[1]) == 3 and not embedding.done()
            np.testing.assert_array_equal(
                await embedding, vectors
            )  # no vector of the other weights
            jax.tree.map(np.testing.assert_array_equal, await llm.parameters(), weights[1])
            assert repr(llm).startswith("AsyncLLM(model=") and "max_model_len=256" in repr(llm)
            with pytest.raises(ValueError, match="has no chat template; use generate"):
                await anext(llm.chat([{"role": "user", "content": "Q"}]))
            llm.tokenizer = with_template("{{ messages[0].content }}")
            requested = llm.get_tokenizer()("Q")["input_ids"]
            greedy = SamplingParams(temperature=0.0, max_tokens=5)
            chatted = [
                each
                async for each in llm.chat(
                    [{"role": "user", "content": "Q"}], sampling_params=greedy
                )
            ]
            generated = [each async for each in llm.generate(requested, greedy)]
            assert (
                chatted[-1].prompt_token_ids == requested
                and chatted[-1].outputs == generated[-1].outputs
            )
            assert llm.detokenize(requested) == "Q"

    asyncio.run(run())


def test_the_other_verbs_are_those_of_llm(tmp_path):
    model, prefix = random_checkpoint(tmp_path, LLAMA), list(range(1, 38))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with make_llm(model) as llm:
        chunks = [chunk.outputs for chunk in llm.stream(PROMPTS[0], greedy)]
        with llm.pin_prefix(prefix):
            expected = llm.generate([*prefix, 5], greedy, use_tqdm=False)[0]
        whole = llm.memory_report()

    async def run() -> None:
        async with AsyncLLM(model, **BLOCKS_OF_16, preemption_mode="recompute") as llm:
            streamed = [chunk async for chunk in llm.stream(PROMPTS[0], greedy, "s")]
            tokens = [token for chunk in streamed for token in chunk.outputs[0].token_ids]
            assert tokens == [token for chunk in chunks for token in chunk[0].token_ids]
            assert [chunk.finished for chunk in streamed] == [False] * (len(streamed) - 1) + [True]
            assert streamed[0].request_id == "s"
            with pytest.raises(UnsupportedError, match="beam_width=2"):
                await anext(llm.stream(PROMPTS[0], PARAMS[2]))
            async with await llm.pin_prefix(prefix) as pinned:
                assert (pinned.num_tokens, pinned.released) == (37, False)
                await llm.reset_prefix_cache()
                (*_, last) = [output async for output in llm.generate([*prefix, 5], greedy)]
                assert last.outputs == expected.outputs and last.metrics.num_cached_tokens == 37
                with pytest.raises(RuntimeError, match="prefixes of the old ones are pinned"):
                    await llm.update_parameters(await llm.parameters())
            assert pinned.released and (await llm.stats())["num_blocks_pinned"] == 0
            await pinned.release()
            with pytest.raises(ValueError, match="pin_prefix takes one prefix, not 2"):
                await llm.pin_prefix([[1], [2]])
            report = await llm.memory_report(reset=True)
            assert (
                type(report) is type(whole)
                and report.num_steps > (await llm.memory_report()).num_steps
            )
            running = llm.generate([5], greedy)
            await anext(running)
            draining = asyncio.create_task(llm.drain())
            assert [output async for output in running][-1].outputs[0].finish_reason == "length"
            assert await draining
            with pytest.raises(ShuttingDown):
                await anext(llm.generate([5], greedy))

    asyncio.run(run())


def _ends(outputs: Any) -> list[tuple[Any, int]]:
    """Returns the last finish reason of each request, and the number of its tokens."""
    return [
        (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) for output in outputs
    ]


def test_an_abort_finds_a_request_whatever_it_waits_for(tmp_path, compiled_when_used):
    """It may wait for its task, its preparation, the engine, other weights or a wake-up."""
    model = random_checkpoint(tmp_path, LLAMA)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLM(model, **BLOCKS_OF_16, preemption_mode="recompute") as llm:
            llm.tokenizer = with_template("{{ messages[0].content }}")
            driver, messages = llm._driver, [{"role": "user", "content": "Q"}]

            async def last(outputs: Any) -> Any:
                return [output async for output in outputs][-1]

            def begin() -> list[asyncio.Task[Any]]:
                kinds = [
                    llm.generate([5], params, "generate"),
                    llm.stream([5], params, "stream"),
                    llm.chat(messages, params, "chat"),
                    llm.generate([5], BeamSearchParams(beam_width=2, max_tokens=200), "beams"),
                ]
                return [asyncio.create_task(last(each)) for each in kinds]

            async def abort_all(tasks: list[asyncio.Task[Any]]) -> list[Any]:
                for _ in range(2):
                    await llm.abort(["generate", "stream", "chat", "unknown", "beams"])
                return _ends(await asyncio.wait_for(asyncio.gather(*tasks), 30))

            assert await abort_all(begin()) == [("abort", 0)] * 4  # before any of them begins
            prepare, may_prepare = llm._prepare, threading.Event()
            llm._prepare = lambda *arguments, **named: (
                may_prepare.wait(60),
                prepare(*arguments, **named),
            )[1]  # type: ignore[method-assign]
            tasks = begin()
            await asyncio.sleep(0.05)  # their preparation has begun
            await llm.abort(["generate", "stream", "chat", "beams"])
            with pytest.raises(ValueError, match="request_id 'chat' is running already"):
                await last(llm.generate([5], params, "chat"))
            may_prepare.set()
            assert _ends(await asyncio.gather(*tasks)) == [("abort", 0)] * 4
            llm._prepare = prepare  # type: ignore[method-assign]

            runner, run_step = driver.engine.runner, driver.engine.runner.run
            runner.run = lambda batch: (time.sleep(0.02), run_step(batch))[1]  # type: ignore[method-assign]
            weights = llm._prepare_weights(random_tensors(LLAMA), check_finite=False, mode="wait")
            for change in (driver.replacing(weights), driver.falling_asleep(1)):
                running = llm.generate([7], params, "runs")
                await anext(running)
                with change as changed:
                    tasks = begin()
                    await asyncio.sleep(0.1)  # they wait for the weights
                    assert await abort_all(tasks) == [("abort", 0)] * 4 and not changed.done()
                    await llm.abort("runs")
                    assert [output async for output in running][-1].finished
                    await asyncio.wrap_future(changed)
            assert llm.is_sleeping and not llm._running and not llm._aborted

    asyncio.run(run())
