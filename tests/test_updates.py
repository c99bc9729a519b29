"""Weights that are replaced while requests run: what each token is computed with, and pauses."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpage import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.driver import Handle
from jaxpage.errors import CheckpointError, ConfigError, EventLogError, ShuttingDown
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.replay import IncidentRing, Recorder, Report, check_new, replay
from jaxpage.replay.log_walk import Walk
from jaxpage.step.events import Both
from jaxpage.step.update import Mode
from tests.support.engines import BLOCKS_OF_16, ENGINES, LLAMA, invariants, make_kind, make_llm
from tests.support.executables import when_used
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.running import wait_until
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("largest_shapes")
PROMPTS = [[1, 2, 3, 4] * 9, [7, 8, 9], [5] * 20]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def fresh(checkpoint: Path) -> Iterator[Callable[..., CompletionOutput]]:
    """Returns what a request gives on an engine that has done nothing else with these weights."""
    with make_llm(checkpoint, enable_prefix_caching=False) as llm:

        def continue_from(version: int, token_ids: list[int], **params: Any) -> CompletionOutput:
            llm.update_parameters(random_tensors(LLAMA, seed=version))
            params = {"ignore_eos": True, "logprobs": 2, **params}
            output = llm.generate([token_ids], SamplingParams(**params), use_tqdm=False)
            return output[0].outputs[0]

        yield continue_from


def run_by_hand(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Begins requests on an engine stepped by hand; returns lists that get their outputs."""
    handles = []
    for request in llm._prepare(prompts, params):
        updates: list[Any] = []
        handle = Handle(request, updates.extend)
        handles.append((handle, updates))
    llm._driver.add([handle for handle, _ in handles])
    return handles


def finish(llm: LLM, handles: list[Any]) -> list[RequestOutput]:
    while llm._driver.step():
        llm._engine.scheduler.check()
    outputs = []
    for _, updates in handles:
        [(_, output)] = updates
        assert isinstance(output, RequestOutput), output
        outputs.append(output)
    return outputs


def bits(output: CompletionOutput, start: int = 0) -> list[Any]:
    """Returns the tokens from a place on, with the bits of their log probabilities."""
    assert output.logprobs is not None
    entries = output.logprobs[start:]
    return [
        (token, {each: entry.logprob for each, entry in (known or {}).items()})
        for token, known in zip(output.token_ids[start:], entries, strict=True)
    ]


WAYS: dict[str, Any] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3, "seed": 5, "top_p": 0.9},
    "samples": {"temperature": 1.1, "seed": 9, "n": 2},
}
_ENGINES: dict[str, dict[str, Any]] = ENGINES  # type: ignore[assignment]
SETTINGS = {
    "recompute": _ENGINES["recompute"],
    "swap": _ENGINES["swap"],
    "mixed": _ENGINES["fair and mixed"],
    "n-gram": {"speculative_config": NGRAM},
    "suffix": {**_ENGINES["recompute"], "speculative_config": SUFFIX},
}


@pytest.mark.parametrize(
    ("name", "way"),
    few(
        itertools.product(SETTINGS, WAYS),
        [("recompute", "drawn"), ("swap", "samples")],  # the fuzzer updates with drafts, too
    ),
)
def test_recomputed_requests_go_on_as_fresh_ones(
    checkpoint: Path, fresh: Callable[..., CompletionOutput], name: str, way: str
) -> None:
    """Each of several samples goes on with its own tokens.

    The noise of the first is a fresh request's.
    """
    params = SamplingParams(**WAYS[way], max_tokens=24, ignore_eos=True, logprobs=2)
    with make_llm(checkpoint, start=False, **SETTINGS[name]) as llm:
        handles = run_by_hand(llm, PROMPTS, params)
        for seed, num_steps in ((1, 9), (2, 6)):
            for _ in range(num_steps):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode="recompute")
        outputs = finish(llm, handles)
        assert all(output.weights_version == 2 for output in outputs)
        num_continued = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sample = output.outputs[0]
            versions = sample.weights_versions
            assert versions == sorted(versions) and len(versions) == len(sample.token_ids) == 24
            for version in set(versions):
                start, stop = versions.index(version), 24 - versions[::-1].index(version)
                more = {**WAYS[way], "n": 1, "max_tokens": stop - start}
                expected = fresh(version, prompt + sample.token_ids[:start], **more)
                assert bits(sample)[start:stop] == bits(expected)
                num_continued += start > 0
        assert num_continued >= 2
        invariants(llm)


@pytest.mark.parametrize(
    ("name", "way"),
    few(
        itertools.product(["swap", "mixed", "n-gram"], WAYS),
        [("swap", "drawn")],
    ),
)
def test_kept_requests_go_on_as_they_do_alone(
    checkpoint: Path, plain: LLM, name: str, way: str
) -> None:
    """Alone they have the same keys and values, that is the updates at the same tokens."""
    params = SamplingParams(**WAYS[way], max_tokens=24, ignore_eos=True, logprobs=2)
    with make_llm(checkpoint, start=False, **SETTINGS[name]) as llm:
        handles = run_by_hand(llm, PROMPTS, params)
        for seed, num_steps in ((1, 9), (2, 6)):
            for _ in range(num_steps):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode="keep")
        outputs = finish(llm, handles)
        num_compared = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sample = output.outputs[0]
            versions = sample.weights_versions
            if versions.count(0) and versions.count(1):
                alone_ = keep_alone(plain, prompt, params, versions)
                assert alone_.weights_versions == versions or alone_.weights_versions == [
                    version + alone_.weights_versions[0] for version in versions
                ]
                assert bits(sample) == bits(alone_)
                num_compared += 1
        assert num_compared
        invariants(llm)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with make_llm(checkpoint, start=False, enable_prefix_caching=False) as llm:
        yield llm


def keep_alone(llm: LLM, prompt: list[int], params: Any, versions: list[int]) -> CompletionOutput:
    """Returns what a request gives alone, when weights are replaced at the same tokens."""
    llm.update_parameters(random_tensors(LLAMA, seed=versions[0]))
    [(handle, updates)] = run_by_hand(llm, [prompt], params)
    for version in (1, 2):
        while handle.reporter is None or min(
            sequence.num_output_tokens for sequence in handle.reporter._group.sequences
        ) < versions.index(version):
            llm._driver.step()
        llm.update_parameters(random_tensors(LLAMA, seed=version), mode="keep")
    [output] = finish(llm, [(handle, updates)])
    return output.outputs[0]


@pytest.mark.parametrize("mode", get_args(Mode))
def test_no_request_finds_blocks_of_other_weights(
    checkpoint: Path, fresh: Callable[..., CompletionOutput], mode: Mode
) -> None:
    """It finds neither those computed before nor those that a kept request fills later."""
    with make_llm(checkpoint, start=False) as llm:
        prompt = [3] * 40
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        handles = run_by_hand(llm, [prompt], long)
        for _ in range(3 if mode != "wait" else 70):
            llm._driver.step()
        llm.update_parameters(random_tensors(LLAMA, seed=1), mode=mode)
        for _ in range(40):
            llm._driver.step()
        [whole] = finish(llm, handles)
        known = [*prompt, *whole.outputs[0].token_ids]
        for tokens in (prompt, known):
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
            [output] = llm.generate([tokens], params, use_tqdm=False)
            assert output.metrics is not None
            hits = output.metrics.num_cached_tokens
            # What is computed anew belongs to the new weights, and may be found.
            assert (hits or 0) > 0 if mode == "recompute" or tokens is known else hits == 0
            expected = fresh(1, tokens, temperature=0.0, max_tokens=6)
            assert bits(output.outputs[0]) == bits(expected)
        invariants(llm)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_scores_of_a_prompt_come_from_one_set_of_weights(
    checkpoint: Path, plain: LLM, mode: Mode
) -> None:
    prompts = [[1, 2, 3, 4] * 20, [9, 8, 7]]
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    with make_llm(checkpoint, start=False, **SETTINGS["recompute"]) as llm:
        handles = run_by_hand(llm, prompts, params)
        for _ in range(3):
            llm._driver.step()
        llm.update_parameters(random_tensors(LLAMA, seed=1), mode=mode)
        outputs = finish(llm, handles)
        invariants(llm)
    plain.update_parameters(random_tensors(LLAMA, seed=1))
    expected = plain.generate(prompts, params, use_tqdm=False)
    assert outputs[0].prompt_logprobs == expected[0].prompt_logprobs
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert outputs[0].outputs[0].weights_versions == [1] * 4


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_prefix_that_is_computed_for_a_pin_starts_over(
    checkpoint: Path, fresh: Callable[..., CompletionOutput], mode: Mode
) -> None:
    prefix = [2, 4, 6, 8] * 20
    with make_llm(checkpoint, start=False, **SETTINGS["recompute"]) as llm:
        with llm._driver.pinning(llm._prepare_prefix(prefix, None)) as answer:
            for _ in range(3):
                llm._driver.step()
            assert not answer.done()
            llm.update_parameters(random_tensors(LLAMA, seed=1), mode=mode)
            pin_id = llm._driver.wait(answer)
        with pytest.raises(RuntimeError, match=r"prefixes of the old ones are pinned \(1\)"):
            llm.update_parameters(random_tensors(LLAMA), mode=mode)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
        [output] = llm.generate([[*prefix, 5]], params, use_tqdm=False)
        assert output.metrics is not None and output.metrics.num_cached_tokens == 80
        expected = fresh(1, [*prefix, 5], temperature=0.0, max_tokens=6)
        assert bits(output.outputs[0]) == bits(expected)
        llm._driver.wait(llm._driver.unpin(pin_id))
        invariants(llm)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_beams_go_on_with_other_weights(checkpoint: Path, mode: Mode) -> None:
    """Weights of equal numbers change no hypothesis; other ones are on record for each token."""
    params = BeamSearchParams(3, max_tokens=12, ignore_eos=True)
    with make_llm(checkpoint, start=False, **SETTINGS["swap"]) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        for seed in (0, 1):
            handles = run_by_hand(llm, PROMPTS, params)
            for _ in range(6):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode=mode)
            outputs = finish(llm, handles)
            for output, known in zip(outputs, expected, strict=True):
                for hypothesis, same in zip(output.outputs, known.outputs, strict=True):
                    versions = hypothesis.weights_versions
                    assert len(versions) == 12 and versions == sorted(versions)
                    if seed == 0:
                        assert hypothesis.token_ids == same.token_ids
                        assert hypothesis.score == same.score
            assert len({*outputs[0].outputs[0].weights_versions}) == 2
        invariants(llm)


def test_an_update_that_is_refused_changes_nothing(checkpoint: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    wrong: dict[str, Any] = random_tensors(LLAMA, seed=1)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:5]
    wrong["other"] = np.zeros(3, np.float32)
    del wrong["lm_head.weight"]
    with make_llm(checkpoint, start=False) as llm:
        expected = finish(llm, run_by_hand(llm, PROMPTS, greedy))
        handles = run_by_hand(llm, PROMPTS, greedy)
        for mode in ("keep", "recompute"):
            for _ in range(4):
                llm._driver.step()
            with pytest.raises(CheckpointError) as caught:
                llm.update_parameters(wrong, mode=mode)
            for name in ("(3 problems)", "'model.norm.weight'", "'other'", "'lm_head.weight'"):
                assert name in str(caught.value)
            infinite = random_tensors(LLAMA, seed=1)
            infinite["model.norm.weight"][0] = np.nan
            infinite["lm_head.weight"][1] = np.inf
            with pytest.raises(CheckpointError) as caught:
                llm.update_parameters(infinite, mode=mode, check_finite=True)
            assert all(name in str(caught.value) for name in ("'model.norm.w", "'lm_head.w"))
        outputs = finish(llm, handles)
        assert [bits(each.outputs[0]) for each in outputs] == [
            bits(each.outputs[0]) for each in expected
        ]
        assert llm._engine.weights_version == 0 == outputs[0].weights_version
        assert outputs[0].metrics is not None and outputs[0].metrics.num_preemptions == 0


# Pauses


GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def test_no_step_runs_while_the_engine_is_paused(checkpoint: Path) -> None:
    with make_llm(checkpoint, start=False) as llm:
        [expected] = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
        handles = run_by_hand(llm, [PROMPTS[1]], GREEDY)
        llm._driver.step()
        for _ in range(2):
            llm.pause()
        assert llm.is_paused
        handles += run_by_hand(llm, [PROMPTS[1]], GREEDY)
        num_steps = llm._engine.num_steps
        while llm._driver.step():
            pass
        assert llm._engine.num_steps == num_steps and len(llm._engine.groups) == 2
        llm.resume()
        with pytest.raises(RuntimeError, match="the engine is not paused"):
            llm.resume()
        for output in finish(llm, handles):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_weights_are_replaced_while_the_engine_is_paused(checkpoint: Path) -> None:
    """Every mode does so without a step; only what would have to run first is refused."""
    with make_llm(checkpoint, start=False) as llm:
        llm.pause()
        assert llm.update_parameters(random_tensors(LLAMA)) == 1
        llm.sleep()
        llm.wake_up()
        assert llm.is_paused
        handles = run_by_hand(llm, PROMPTS, GREEDY)
        assert llm.update_parameters(random_tensors(LLAMA, seed=1), mode="keep") == 2
        assert llm.update_parameters(random_tensors(LLAMA, seed=2), mode="recompute") == 3
        refused: list[Callable[[], object]] = [
            lambda: llm.update_parameters(random_tensors(LLAMA)),
            llm.sleep,
        ]
        for call in refused:
            with pytest.raises(RuntimeError, match="the engine is paused with 3 of them: resume"):
                call()
        assert llm._engine.num_steps == 0 and not handles[0][1]
        assert llm.update_parameters(random_tensors(LLAMA), mode="abort") == 4
        assert [updates[0][1].outputs[0].finish_reason for _, updates in handles] == ["abort"] * 3
        assert llm.is_paused and llm._engine.num_steps == 0
        llm.resume()
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        invariants(llm)


def test_a_drain_ends_a_pause(checkpoint: Path) -> None:
    with make_llm(checkpoint, start=False) as llm:
        llm.pause()
        handles = run_by_hand(llm, PROMPTS, GREEDY)
        llm._driver.step()
        assert llm._engine.groups and llm.drain() and not llm.is_paused
        assert all(updates[0][1].outputs[0].finish_reason == "length" for _, updates in handles)
        with pytest.raises(ShuttingDown):
            llm.pause()


def test_a_pause_and_its_end_come_from_different_threads(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm, ThreadPoolExecutor(2) as pool:
        llm.pause()
        requested = pool.submit(llm.generate, PROMPTS, GREEDY, use_tqdm=False)
        vectors = pool.submit(llm.embed, [[1, 2, 3]], use_tqdm=False)
        wait_until(lambda: len(llm._driver.turns.live) == 4, "the requests are there")
        assert llm._driver.step_age is None and llm._driver.healthy
        stream = llm.stream(PROMPTS[0], GREEDY)
        stream.close()
        wait_until(lambda: len(llm._driver.turns.live) == 4, "the stream has ended")
        assert llm.update_parameters(random_tensors(LLAMA, seed=1), mode="recompute") == 1
        assert not requested.done() and not vectors.done()
        llm.resume()
        outputs = requested.result(60)
        assert [output.outputs[0].weights_versions for output in outputs] == [[1] * 10] * 3
        assert vectors.result(60).shape == (1, 64)
        llm.pause()  # and the end of the program does not hang


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_update_leaves_the_requests_of_an_incident_to_its_snapshot(
    checkpoint: Path, mode: Mode
) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=0, ignore_eos=True)
    with make_llm(checkpoint, start=False, max_num_batched_tokens=16) as llm:
        ring, walk = IncidentRing(50, keeps_token_ids=True), Walk()
        llm._engine.events = Both(ring, Recorder(walk.follow))
        handles = run_by_hand(llm, PROMPTS, [GREEDY, scored, scored])
        for num_steps in (3, 4):  # the third prompt is partly computed, and then all are
            for _ in range(num_steps):
                llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=1), mode=mode)
            scheduler = llm._engine.scheduler
            waiting = [each for group in scheduler.waiting for each in group.unfinished]
            assert len(waiting) == (3 if mode == "recompute" else num_steps == 3)
            assert {key for key, each in walk.sequences.items() if not each.is_running} == {
                sequence.sequence_id for sequence in waiting
            }
            incident = ring.read_ring("test")
            again = Walk()
            for record in json.loads(json.dumps(incident.records)):
                again.follow(record)
            assert again.sequences == walk.sequences and incident.num_steps == 0
            assert incident.why_not_replayable
        finish(llm, handles)
        assert not walk.sequences


def test_an_async_engine_is_paused_and_updated(checkpoint: Path, plain: LLM) -> None:
    async def run() -> tuple[RequestOutput, RequestOutput]:
        async with make_kind(AsyncLLM, checkpoint) as llm:
            await llm.pause()
            held = asyncio.create_task(anext(llm.stream(PROMPTS[0], GREEDY)))
            streamed = llm.generate(PROMPTS[0], GREEDY)
            following = asyncio.create_task(anext(streamed))
            while len(llm._driver.turns.live) < 2:
                await asyncio.sleep(0.01)
            assert await llm.update_parameters(random_tensors(LLAMA, seed=1), mode="keep") == 1
            with pytest.raises(RuntimeError, match="paused with 2 of them"):
                await llm.update_parameters(random_tensors(LLAMA, seed=1))
            assert llm.is_paused and not held.done() and not following.done()
            await llm.resume()
            with pytest.raises(RuntimeError, match="the engine is not paused"):
                await llm.resume()
            first = await following
            last = [output async for output in streamed]
            return await held, (last or [first])[-1]

    chunk, whole = asyncio.run(run())
    assert chunk.outputs[0].weights_versions == [1] * len(chunk.outputs[0].token_ids)
    assert whole.outputs[0].weights_versions == [1] * 10
    plain.update_parameters(random_tensors(LLAMA, seed=1))
    [expected] = plain.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    assert whole.outputs[0].token_ids == expected.outputs[0].token_ids


# The event log


@pytest.fixture(scope="module")
def asynchronous_run(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[RequestOutput]]:
    """Returns a log of requests that three updates meet, with the arrays of their weights, and what
    users saw.
    """
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    drawn = SamplingParams(temperature=1.2, seed=3, n=2, max_tokens=30, ignore_eos=True)
    with make_llm(checkpoint, start=False, event_log=str(path), event_log_weights=True) as llm:
        handles = run_by_hand(llm, PROMPTS[:2], drawn)
        modes: tuple[Mode, ...] = ("keep", "recompute", "wait")
        for seed, mode in zip((1, 2, 1), modes, strict=True):
            for _ in range(8):
                llm._driver.step()
            handles += run_by_hand(llm, PROMPTS[2:], drawn)
            llm._driver.step()
            llm.update_parameters(random_tensors(LLAMA, seed=seed), mode=mode)
        outputs = finish(llm, handles)
        outputs += llm.generate(PROMPTS, drawn, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()  # with the weights of the checkpoint
        outputs += llm.generate(PROMPTS[1:], drawn, use_tqdm=False)
    return path, outputs


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_has_the_updates_of_its_run(
    asynchronous_run: tuple[Path, list[RequestOutput]],
) -> None:
    path, outputs = asynchronous_run
    updates = [record for record in records_of(path) if record["event"] == "update"]
    assert [(update["version"], update["mode"]) for update in updates] == [
        (1, "keep"),
        (2, "recompute"),
        (3, "wait"),
        (4, "wait"),
    ]
    assert "checksum" not in updates[3]
    first, second, third = [update["checksum"] for update in updates[:3]]
    assert first == third != second
    directory = Path(f"{path}.weights")
    assert {each.name for each in directory.iterdir()} == {first, second}
    for checksum, seed in ((first, 1), (second, 2)):
        file = directory / checksum / "model.safetensors"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for name, array in load_file(file).items():
            np.testing.assert_array_equal(array, random_tensors(LLAMA, seed=seed)[name])
    assert {*outputs[0].outputs[0].weights_versions} == {0, 1, 2}
    assert {*outputs[-1].outputs[1].weights_versions} == {4}
    assert {*outputs[-3].outputs[1].weights_versions} == {3}
    with pytest.raises(ConfigError, match="exists, and a log never overwrites a file"):
        check_new(path)


def test_a_run_with_updates_is_replayed(
    asynchronous_run: tuple[Path, list[RequestOutput]], tmp_path: Path
) -> None:
    path, outputs = asynchronous_run
    with when_used():
        report = replay(path, progress=False)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    assert report == Report(report.num_steps, num_tokens, None, None)
    walk = Walk()
    drawn: dict[int, list[Any]] = {}
    for record in records_of(path):
        walk.follow(record)
        drawn |= {sequence_id: sequence.token_ids for sequence_id, sequence in walk.ended.items()}
    users = [sample.token_ids for output in outputs for sample in output.outputs]
    assert sorted(drawn.values()) == sorted(users)
    with when_used():
        assert replay(path, progress=False, until=12).num_steps == 12


def test_the_weights_of_a_replay_are_found_by_their_checksum(
    asynchronous_run: tuple[Path, list[RequestOutput]], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    shutil.copy(asynchronous_run[0], path)
    directories = [random_checkpoint(tmp_path / str(seed), LLAMA, seed=seed) for seed in (0, 1, 2)]
    with pytest.raises(EventLogError, match=r"no arrays of them in .*run\.jsonl\.weights: name"):
        replay(path, progress=False)
    with when_used():
        assert replay(path, progress=False, until=8).difference is None  # before the first
        report = replay(path, progress=False, weights=directories)
        assert report.difference is None and report.ending is None
        with pytest.raises(EventLogError) as caught:
            replay(path, progress=False, weights=[directories[0], directories[1], tmp_path])
    updates = [record for record in records_of(path) if record["event"] == "update"]
    message = str(caught.value)
    assert f"no weights with the checksum {updates[1]['checksum']}" in message
    assert f"{directories[1]} has {updates[0]['checksum']}" in message
    assert f"{tmp_path} cannot be used" in message


def test_a_model_in_memory_is_kept_with_its_log(tmp_path: Path) -> None:
    """Whoever replays the log needs nothing else."""
    path = tmp_path / "run.jsonl"
    settings: dict[str, Any] = {**BLOCKS_OF_16, "dtype": "float32", "event_log": str(path)}
    with (
        when_used(),
        LLM.from_parameters(
            LLAMA, random_tensors(LLAMA, seed=4), event_log_weights=True, **settings
        ) as llm,
    ):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.update_parameters(random_tensors(LLAMA, seed=1))
        llm.update_parameters(random_tensors(LLAMA, seed=4))  # those of the start
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(list(Path(f"{path}.weights").iterdir())) == 2
    with when_used():
        report = replay(path, progress=False)
    assert (report.num_tokens, report.difference, report.ending) == (60, None, None)


def test_a_changed_update_is_found(
    asynchronous_run: tuple[Path, list[RequestOutput]], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    records = records_of(asynchronous_run[0])
    place = next(n for n, record in enumerate(records) if record["event"] == "update")
    shutil.copytree(f"{asynchronous_run[0]}.weights", f"{path}.weights")

    def replay_with(**fields: Any) -> str | None:
        changed = [*records[:place], records[place] | fields, *records[place + 1 :]]
        path.write_text("".join(json.dumps(record) + "\n" for record in changed))
        with when_used():
            return replay(path, progress=False).difference

    assert "preempted of its update" in str(replay_with(mode="recompute"))
    assert "version" in str(replay_with(version=7))
    for fields in ({"mode": "now"}, {"mode": "wait"}):
        with pytest.raises(EventLogError, match="this update cannot be replayed"):
            replay_with(**fields)
    with pytest.raises(EventLogError, match="an update to weights with the checksum 3"):
        replay_with(checksum=3)
