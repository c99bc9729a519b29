"""Aborted requests that go on: the same tokens and bits as without the abort, and one error for
those that are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxpage import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.assembly import Built
from jaxpage.driver import Handle
from jaxpage.errors import RequestGone, UnsupportedError
from jaxpage.outputs import RequestOutput
from jaxpage.replay import Report, replay
from jaxpage.replay.log_walk import Walk
from tests.support.engines import ENGINES, LLAMA, invariants, make_kind, make_llm
from tests.support.executables import when_used
from tests.support.notebooks import as_text, executed
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.running import serving, wait_until
from tests.support.sweeps import few

pytestmark = pytest.mark.usefixtures("largest_shapes")

ROOT = Path(__file__).parent.parent
PROMPTS = [[1, 2, 3, 4] * 9, [7, 8, 9], [5] * 20]
SHARED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0.0, prompt_logprobs=1, **SHARED),
    SamplingParams(temperature=1.3, top_p=0.9, **SHARED),
    SamplingParams(temperature=1.1, n=3, stop_token_ids=[*range(0, 257, 19)], **SHARED),
]
# Steps before each abort: of prompts that are partly computed, of samples of which some have ended.
ABORTS = [[0, 2, 1], [5, 0, 9, 14]]
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: ENGINES[name] for name in ("recompute", "swap", "fair and mixed")},  # type: ignore[dict-item]
    "n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


def prepare_seeded(llm: LLM, params: list[Any]) -> list[Any]:
    """Prepares requests, which have the seeds that an engine would draw for its first ones."""
    return llm._prepare(
        PROMPTS,
        [dataclasses.replace(sampling, seed=index) for index, sampling in enumerate(params)],
    )


def begin(llm: LLM, requests: list[Any], names: list[str] | None = None) -> list[Any]:
    """Begins requests on an engine stepped by hand; returns lists that get their outputs."""
    handles = []
    for index, request in enumerate(requests):
        updates: list[Any] = []
        name = names[index] if names else None
        handles.append((Handle(request, updates.extend, is_kept=True, name=name), updates))
    added = llm._driver.add([handle for handle, _ in handles])
    llm._driver.turns.run_commands()
    added.result()
    return handles


def outputs_of(handles: list[Any]) -> list[RequestOutput]:
    return [output for _, updates in handles for _, output in updates]


def run(llm: LLM, requests: list[Any], aborts: list[int]) -> list[RequestOutput]:
    """Runs requests, all of which are aborted after so many steps, and after so many more."""
    handles = begin(llm, requests)
    ended: dict[str, RequestOutput] = {}
    order = [handle.request_id for handle, _ in handles]
    for num_steps in aborts:
        for _ in range(num_steps):
            llm._driver.step()
        for handle, _ in handles:
            llm._driver.abort(handle)
        llm._driver.turns.run_commands()
        assert not llm._engine.has_unfinished and not llm._driver.turns.live
        ids = []
        for output in outputs_of(handles):
            reasons = {sample.finish_reason for sample in output.outputs}
            if "abort" in reasons:
                ids.append(output.request_id)
            else:
                ended[output.request_id] = output
        handles = begin(llm, [llm._find_aborted(name) for name in ids], ids)
    while llm._driver.step():
        llm._engine.scheduler.check()
    ended |= {output.request_id: output for output in outputs_of(handles)}
    return [ended[name] for name in order]


def plain_output(output: RequestOutput) -> RequestOutput:
    return dataclasses.replace(output, request_id="", metrics=None)


@pytest.mark.parametrize("name", few(SETTINGS, ["recompute", "swap"]))
def test_a_request_goes_on_as_if_it_had_never_been_aborted(checkpoint: Path, name: str) -> None:
    with make_llm(checkpoint, start=False, **SETTINGS[name]) as llm:
        requests = prepare_seeded(llm, PARAMS)
        expected = [plain_output(output) for output in run(llm, requests, [])]
        lengths = {len(sample.token_ids) for sample in expected[2].outputs}
        assert len(lengths) > 1, "some samples end before others"
        for aborts in ABORTS:
            assert [plain_output(output) for output in run(llm, requests, aborts)] == expected
        invariants(llm)


def test_texts_and_grammars_go_on(tmp_path: Path) -> None:
    """So do stop strings that are half there, budgets for reasoning, and the smallest number of
    tokens.
    """
    params = [
        SamplingParams(
            seed=1, max_tokens=40, stop=["the w", "xyz"], min_tokens=9, repetition_penalty=1.2
        ),
        SamplingParams(seed=2, max_tokens=40, structured_outputs={"regex": "[a-z ]{20,30}[.]"}),
        SamplingParams(seed=3, max_tokens=30, thinking_token_budget=7, n=2),
    ]
    log = tmp_path / "run.jsonl"
    with make_llm("demo", start=False, event_log=str(log)) as llm:
        requests = llm._prepare(["Once upon a time", "A cat", "<think> Then"], params)
        expected = [plain_output(output) for output in run(llm, requests, [])]
        finish_reasons = [output.outputs[0].finish_reason for output in expected]
        assert "stop" in finish_reasons
        for aborts in ([1, 4], [3, 6, 5, 1]):
            assert [plain_output(output) for output in run(llm, requests, aborts)] == expected
    walk = Walk()
    for line in log.read_text().splitlines():
        walk.follow(json.loads(line))
    assert not walk.sequences and not walk.arrivals
    with when_used():
        report = replay(log, progress=False)
    assert report == Report(report.num_steps, report.num_tokens, None, None)


def test_a_request_goes_on_under_other_weights(checkpoint: Path) -> None:
    """It continues as a request that begins with its prompt and tokens, and has both versions."""
    params = SamplingParams(temperature=1.3, seed=5, prompt_logprobs=1, **SHARED)
    with make_llm(checkpoint, start=False) as llm:
        [(_, updates)] = begin(llm, llm._prepare(PROMPTS[0], params))
        for _ in range(9):
            llm._driver.step()
        assert llm.update_parameters(random_tensors(LLAMA, seed=1), mode="abort") == 1
        [(_, part)] = updates
        [sample] = part.outputs
        num_tokens = len(sample.token_ids)
        assert sample.finish_reason == "abort" and 0 < num_tokens < 24
        [whole] = llm.continue_request(part.request_id, use_tqdm=False)
        [longer] = whole.outputs
        assert longer.token_ids[:num_tokens] == sample.token_ids
        assert longer.weights_versions == [0] * num_tokens + [1] * (24 - num_tokens)
        assert whole.prompt_logprobs == part.prompt_logprobs and whole.weights_version == 1
        more = dataclasses.replace(params, max_tokens=24 - num_tokens, prompt_logprobs=None)
        prompt = PROMPTS[0] + sample.token_ids
        [fresh] = llm.generate([prompt], more, use_tqdm=False)
        assert longer.token_ids[num_tokens:] == fresh.outputs[0].token_ids
        assert longer.logprobs is not None
        assert longer.logprobs[num_tokens:] == fresh.outputs[0].logprobs
        invariants(llm)


def test_what_is_gone_is_one_error(checkpoint: Path) -> None:
    drawn = SamplingParams(**SHARED)  # the engine draws its seed
    with make_llm(checkpoint, start=False, max_aborted_requests=2) as llm:
        names = []
        for params in (drawn, drawn, drawn, BeamSearchParams(beam_width=2, max_tokens=20)):
            [(handle, _)] = begin(llm, llm._prepare(PROMPTS[1], params))
            for _ in range(3):
                llm._driver.step()
            llm._driver.end([handle])
            llm._driver.turns.run_commands()
            names.append(handle.request_id)
        for name in ("nothing", names[0], names[1]):
            with pytest.raises(
                RequestGone, match=f"{name}.*the last 2 .*max_aborted_requests is 2"
            ):
                llm.continue_request([names[2], name], use_tqdm=False)
        with pytest.raises(UnsupportedError, match=r"beam search \(beam_width=2\) cannot be cont"):
            llm.continue_request(names[3], use_tqdm=False)
        with pytest.raises(TypeError, match="request_id must be a string, got 7"):
            llm.continue_request([7], use_tqdm=False)  # type: ignore[list-item]
        with pytest.raises(RequestGone):  # and then neither goes on
            llm.continue_request([names[2], names[2]], use_tqdm=False)
        aborted = llm._find_aborted(names[2]).aborted
        assert aborted is not None and aborted.request is not None
        [output] = llm.continue_request([names[2]], use_tqdm=False)
        seeded = dataclasses.replace(drawn, seed=aborted.request.seed)
        [expected] = llm.generate([PROMPTS[1]], seeded, use_tqdm=False)
        assert output.request_id == names[2] and output.outputs == expected.outputs
        with pytest.raises(RequestGone):
            llm.continue_request(names[2], use_tqdm=False)
        with llm.stream(PROMPTS[1], drawn) as stream:
            name = next(stream).request_id
        [streamed] = llm.continue_request(name, use_tqdm=False)
        assert len(streamed.outputs[0].token_ids) == 24
        assert not llm._driver.turns.aborted._requests.keys() - {names[3]}
    with make_llm(checkpoint, start=False, max_aborted_requests=0) as llm:
        with llm.stream(PROMPTS[1], drawn) as stream:
            name = next(stream).request_id
        with pytest.raises(RequestGone, match="none is kept .max_aborted_requests is 0"):
            llm.continue_request(name)


def test_coroutines_continue_by_their_own_ids(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.1, seed=4, max_tokens=60, ignore_eos=True)

    async def last_of(outputs: Any) -> RequestOutput:
        return [output async for output in outputs][-1]

    async def abort_in_the_middle(llm: AsyncLLM, outputs: Any) -> RequestOutput:
        first = await anext(outputs)
        with pytest.raises(ValueError, match="running already"):
            await anext(llm.continue_request("a"))
        await llm.abort(first.request_id)
        return await last_of(outputs)

    async def check() -> None:
        async with make_kind(AsyncLLM, checkpoint) as llm:
            expected = await last_of(llm.generate(PROMPTS[0], params, "a"))
            with pytest.raises(RequestGone, match="'a' cannot be continued"):
                await anext(llm.continue_request("a"))
            part = await abort_in_the_middle(llm, llm.generate(PROMPTS[0], params, "a"))
            assert part.outputs[0].finish_reason == "abort"
            part = await abort_in_the_middle(llm, llm.continue_request("a"))
            whole = await last_of(llm.continue_request("a"))
            assert whole.request_id == "a" and whole.outputs == expected.outputs
            async with contextlib.aclosing(llm.stream(PROMPTS[0], params, "left")) as stream:
                await anext(stream)
            left = await last_of(llm.continue_request("left"))
            assert left.outputs == expected.outputs

    asyncio.run(check())


def test_requests_over_http_are_aborted_and_go_on(checkpoint: Path, tmp_path: Path) -> None:
    """They have the arrays that they ask for, whether a call, an update or a client that left ended
    them.
    """
    body = {"model": "demo", "prompt_token_ids": PROMPTS[0], "logprobs": 1, "prompt_logprobs": 0}
    body |= {"n": 2, "max_tokens": 40, "ignore_eos": True, "temperature": 1.1, "seed": 6}
    fixed = {"id": "", "created": 0, "request_id": "", "usage": None}
    random_checkpoint(tmp_path / "w" / "0", LLAMA)
    with make_llm(checkpoint) as llm:
        built = Built(llm._engine, None, {}, llm.spec, llm._model)
        with (
            serving(built, weights_directory=str(tmp_path / "w")) as running,
            httpx.Client(base_url=running.address, timeout=60) as client,
        ):
            expected = client.post("/v1/generate", json=body).json() | fixed
            with ThreadPoolExecutor(1) as pool:
                named = body | {"request_id": "mine"}
                with steps_of(running, 9):
                    cut = pool.submit(client.post, "/v1/generate", json=named)
                order = {"request_ids": ["mine", "other"]}
                assert client.post("/abort_requests", json=order).json() == {"aborted": 1}
                part = cut.result().json()
                assert {choice["finish_reason"] for choice in part["choices"]} == {"abort"}
                assert part["request_id"] == "mine"
                more = {"model": "demo", "continue_from": "mine"}
                with steps_of(running, 7):
                    replaced = pool.submit(client.post, "/v1/generate", json=more)
                update = {"path": "0", "mode": "abort"}
                assert client.post("/v1/update_weights", json=update).is_success
                assert replaced.result().json()["error"]["code"] == "weights_replaced"
                with steps_of(running, 5), pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/generate", json=more, timeout=0.5)
                wait_until(lambda: not running.loop.turns.live, "the client has left")
                running.loop.resume().result()
                whole = client.post("/v1/generate", json=more).json()
            versions = [choice.pop("weights_versions") for choice in whole["choices"]]
            assert all({version for version, _ in spans} == {0, 1} for spans in versions)
            for choice in expected["choices"]:
                del choice["weights_versions"]
            fixed |= {"system_fingerprint": "", "weights_version": 0}
            assert whole | fixed == expected | fixed
            gone = client.post("/v1/generate", json=more)
            assert (gone.status_code, gone.json()["error"]["code"]) == (
                404,
                "request_not_found",
            )
            for wrong, param in (
                ({**more, "prompt_token_ids": [1]}, "prompt_token_ids"),
                ({**more, "n": 2}, "n"),
                ({**more, "request_id": "a"}, "request_id"),
                ({"model": "demo"}, "prompt_token_ids"),
                ({**more, "continue_from": "a b"}, "continue_from"),
            ):
                refused = client.post("/v1/generate", json=wrong)
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["param"] == param
            refused = client.post("/abort_requests", json={"request_ids": "mine"})
            assert refused.status_code == 400 and "must be a list of strings" in refused.text


@pytest.mark.sweep
def test_the_notebook_prints_what_it_shows():
    path = ROOT / "examples" / "reinforcement_learning.ipynb"
    assert path.read_text(encoding="utf-8") == as_text(executed(path))


@contextlib.contextmanager
def steps_of(running: Any, num_steps: int) -> Iterator[None]:
    """Lets the engine take so many steps within the context, and then pauses it."""
    engine, loop = running.engine, running.loop
    stop = engine.num_steps + num_steps
    paused = threading.Event()

    def step(commands_wait: Callable[[], bool]) -> bool:
        if engine.num_steps < stop:
            return True
        loop.pause()
        paused.set()
        return False

    loop.before_step = step
    if loop.is_paused:
        loop.resume().result()
    yield
    assert paused.wait(60)
    loop.before_step = None
