"""The engine and its front door: what users ask comes out exactly, and nothing is left over,
whatever happens on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.decoding import SamplingStrategy
from jaxpage.device import executables
from jaxpage.device.inputs.buckets import make_menu
from jaxpage.device.waiting import Waiting
from jaxpage.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineFailed,
    ModelNotFoundError,
    ShuttingDown,
    UnsupportedError,
)
from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.step.request import Sequence, SequenceGroup
from tests.support.engines import LLAMA, free_blocks, invariants, make_llm
from tests.support.executables import when_used
from tests.support.gates import Gate
from tests.support.model_configs import config_json
from tests.support.random_checkpoints import random_checkpoint, random_tensors
from tests.support.running import wait_until
from tests.support.scripted import DRAFTING, Scripted, draft_with

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=150)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, num_blocks=33, at_start=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    yield
    invariants(llm)


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 257, length).tolist() for length in lengths]


def one(llm, prompt, params):
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_an_engine_for_one_text_compiles_what_its_steps_ask_for(llm, directory):
    """It draws the tokens of an engine that compiles every shape before it is ready."""
    short, long = prompts_of(4, 40)
    settings = {"num_blocks": 33, "at_start": True, "first": lambda menu: menu.of_one_text(4)}
    with make_llm(directory, **settings) as other:
        table = other._engine.runner.executables._table

        def use():
            return {key for key, entry in table.items() if not isinstance(entry, Waiting)}

        assert use() == {"pages"}
        assert one(other, short, GREEDY) == one(llm, short, GREEDY)
        assert use() == {"pages", *other._engine.builder.menu.of_one_text(4)}
        assert one(other, long, GREEDY) == one(llm, long, GREEDY)
        assert use() < table.keys(), "no block was copied"


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(None, 1), (1, 1), (2, 1), (5, 2)])
def test_an_engine_for_one_text_compiles_few_shapes_at_once(
    num_cpus, num_threads, directory, monkeypatch
):
    """A shape that comes later would take time of the first step."""
    calls = []
    monkeypatch.setattr(os, "cpu_count", lambda: num_cpus)

    def note(self, keys, *, waits=False, num_threads=None):
        calls.append(([*keys], num_threads))

    monkeypatch.setattr(executables.Executables, "_make_in_background", note)
    expected = []

    def first(menu):
        expected.extend(reversed(menu.by_first_use()))
        return expected

    with make_llm(directory, num_blocks=33, at_start=True, first=first):
        assert len(expected) > 2 and calls == [([], None), (expected, num_threads)]


def test_one_thread_makes_executables_in_order():
    table, order, is_second_made = object.__new__(executables.Executables), [], threading.Event()

    def make(key):
        order.append(key)
        if key == "first":
            assert not is_second_made.wait(0.1)
        else:
            is_second_made.set()

    table._until_closed = contextlib.ExitStack()
    table._table = {key: Waiting(functools.partial(make, key)) for key in ("second", "first")}
    table._make_in_background(["first", "second"], waits=True, num_threads=1)
    assert order == ["first", "second"]


def test_the_shapes_of_one_text_are_those_of_its_first_steps():
    menu = make_menu(2, 256, num_drafts=(3,), max_verified_tokens=8, num_steps=4)
    for num_tokens, largest in ((5, 64), (64, 64), (65, 128), (256, 256), (1000, 256)):
        prompt, *others = menu.of_one_text(num_tokens)
        assert prompt.num_tokens == largest and prompt.max_query_len > 1
        assert others == [menu.decode[0], menu.multi_step[0], menu.verify[0]]
    assert menu.of_one_text(1) == [menu.decode[0], menu.multi_step[0], menu.verify[0]]
    assert {*menu.of_one_text(5)} < {*menu.by_first_use()} == {*menu.buckets}


def test_what_is_waited_for_is_made_once_however_many_ask():
    """If it fails, whoever asks next tries again. A job may hold weights, which are let go."""
    made = []

    def make():
        made.append(threading.get_ident())
        if len(made) == 1:
            raise RuntimeError("the first time")
        return object()

    waiting = Waiting(make)
    with pytest.raises(RuntimeError, match="the first time"):
        waiting.result()
    with ThreadPoolExecutor(4) as pool:
        results = {*pool.map(lambda _: waiting.result(), range(8))}
    assert len(results) == 1 and len(made) == 2
    job = weakref.ref(make)
    del make
    gc.collect()
    assert job() is None


def test_of_several_prompts_the_refused_one_has_its_number(llm):
    for prompts, notes in (([[1], [10**6]], ["This is prompt 1 of 2."]), ([[10**6]], [])):
        with pytest.raises(ValueError, match="1000000") as refused:
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert getattr(refused.value, "__notes__", []) == notes


def test_forms_of_prompts_and_order_of_outputs(llm):
    first, second = prompts_of(4, 9)
    both = llm.generate([first, {"prompt_token_ids": second}], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in both] == [first, second]
    assert (
        llm.generate(first, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        == both[0].outputs[0].token_ids
    )
    assert (
        llm.generate({"prompt_token_ids": second}, GREEDY, use_tqdm=False)[0].outputs[0]
        == both[1].outputs[0]
    )
    assert llm.generate([], GREEDY) == []
    for same in (
        np.array(first),
        jnp.array(first),
        [np.int32(token) for token in first],
        {"prompt_token_ids": np.array(first)},
        {"prompt_token_ids": jnp.array(first)},
        tuple(first),
    ):
        assert one(llm, same, GREEDY) == both[0].outputs[0]
    lengths = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (7, 1)
    ]
    assert [
        len(o.outputs[0].token_ids) for o in llm.generate([first, second], lengths, use_tqdm=False)
    ] == [7, 1]


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (None, GREEDY, TypeError, "prompts must be a string, a list of token ids"),
        ([None], GREEDY, TypeError, "a prompt must be"),
        ([[1, 2], []], GREEDY, ValueError, "no tokens"),
        ([[1, 2.0]], GREEDY, TypeError, "a prompt must be"),
        ([[1, True]], GREEDY, TypeError, "a prompt must be"),
        ([[1, 257]], GREEDY, ValueError, "prompt_token_ids has 257, but .* 0 to 256"),
        ([[1, -1]], GREEDY, ValueError, "prompt_token_ids has -1"),
        ([[1] * 256], GREEDY, ValueError, "256 tokens, which leaves no room .* 256"),
        ("text", GREEDY, ValueError, "no tokenizer"),
        ({"prompt_ids": [1]}, GREEDY, TypeError, "unknown keys"),
        (
            {"prompt_token_ids": 5},
            GREEDY,
            TypeError,
            "'prompt_token_ids' must be a list of integers",
        ),
        ([[1]], SamplingParams(stop="x"), ValueError, r"stop=\['x'\] needs text"),
        ([[1]], SamplingParams(stop_token_ids=[257]), ValueError, "stop_token_ids has 257"),
        ([[1]], SamplingParams(n=5), CapacityError, "5 sequences at once; max_num_seqs is 4"),
        (
            [[1]],
            BeamSearchParams(beam_width=64),
            UnsupportedError,
            "beam_width=64 with 1 .* needs 65 candidates .* 64",
        ),
        (
            [[1]],
            BeamSearchParams(2, None, 200.0),
            ValueError,
            "length_penalty=200.0: 255 tokens to this power is too large",
        ),
        ([[1], [2]], [GREEDY], ValueError, "1 params for 2 prompts"),
        ([[1]], {"temperature": 0}, TypeError, "not dict"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(llm, prompts, params, error, message):
    steps = llm.stats()["engine_steps_total"]
    with pytest.raises(error, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises((error, ValueError)):  # at the call, not at the first chunk
        llm.stream(prompts, params)
    assert llm.stats()["engine_steps_total"] == steps


def test_the_keyword_of_vllm_is_taken_too(llm):
    assert (
        llm.generate([5], sampling_params=GREEDY)[0].outputs == llm.generate([5], GREEDY)[0].outputs
    )
    for call in (llm.generate, llm.chat, AsyncLLM.generate):
        with pytest.raises(
            TypeError,
            match=f"^{call.__qualname__} takes params or sampling_params, its other name, and",
        ):
            call([5], params=GREEDY, sampling_params=GREEDY)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sampling_param'"):
        llm.generate([5], sampling_param=GREEDY)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(directory, llm):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with make_llm(directory, num_blocks=5, max_model_len=None, max_num_seqs=2) as small:
        assert small.memory.max_model_len == 64  # what the pool can hold
        assert len(one(small, [5] * 60, params).token_ids) == 4
    with pytest.raises(
        CapacityError, match=r"max_model_len = 200 .* 64 slots .* Lower max_model_len to 64"
    ):
        make_llm(directory, num_blocks=5, max_model_len=200)
    with pytest.raises(
        ConfigError, match="max_model_len is 300, but the model's positions end at 256"
    ):
        make_llm(directory, max_model_len=300)
    with pytest.raises(CapacityError, match=r"KV blocks take .* available"):
        make_llm(directory, num_blocks=2**30)


def test_a_length_beyond_what_an_indexer_chooses_is_refused_with_the_reason(tmp_path):
    random_checkpoint(tmp_path, config_json("glm-moe-dsa-shared"))
    with pytest.raises(ConfigError, match="max_model_len is 65, .* end at 64 .*index_topk"):
        make_llm(tmp_path, max_model_len=65)


def test_seeds(llm, directory):
    prompt = prompts_of(8)[0]
    drawn = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=2**64 - 1)
    first, second = (
        output.outputs[0].token_ids for output in llm.generate([prompt] * 2, drawn, use_tqdm=False)
    )
    assert first != second
    assert one(llm, prompt, seeded).token_ids == one(llm, prompt, seeded).token_ids != first
    runs = []
    for seed in (0, 0, 1):
        with make_llm(directory, seed=seed) as fresh:
            runs.append([one(fresh, prompt, drawn).token_ids for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]


def test_a_closed_stream_frees_its_blocks(llm, by_hand):
    before = free_blocks(llm)
    stream = llm.stream(prompts_of(50)[0], GREEDY)
    next(stream)
    assert free_blocks(llm) < before
    other = one(llm, prompts_of(7)[0], GREEDY)  # another call in the middle of a stream
    stream.close()
    assert free_blocks(llm) == before
    assert other == one(llm, prompts_of(7)[0], GREEDY)
    del stream
    assert list(llm.stream([1, 2], GREEDY))
    llm.stream([1, 2, 3], GREEDY)  # nobody takes it
    unstarted = llm.stream([1, 2, 3], GREEDY)
    unstarted.close()
    with llm.stream([1, 2, 3], GREEDY) as begun:
        next(begun)
    assert list(begun) == [] and free_blocks(llm) == before


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("scheduler", "plan"),
        ("builder", "build"),
        ("runner", "run"),
        ("scheduler", "commit"),
        ("speculator", "forget"),
    ],
)
def test_a_stream_may_be_dropped_in_the_middle_of_a_step(llm, by_hand, monkeypatch, part, method):
    """The garbage collector frees it wherever memory is allocated, or a generator that holds it and
    closes it then.

    Its request ends with the step, and no other request notices.
    """

    def holding():
        with llm.stream(prompts[2], GREEDY) as stream:
            yield next(stream)

    prompts, before = prompts_of(30, 40, 20), free_blocks(llm)
    expected = [one(llm, prompt, GREEDY) for prompt in prompts]
    others = [llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)]
    pieces = [[next(stream)] for stream in others]
    others.append(holding())
    next(others[2])
    real = getattr(getattr(llm._engine, part), method)

    def dropping(*args):
        if len(others) > 2:
            others.pop()
        result = real(*args)
        if len(others) > 1:
            others.pop()
        return result

    monkeypatch.setattr(getattr(llm._engine, part), method, dropping)
    assert one(llm, prompts[1], GREEDY) == expected[1]
    pieces[0] += others[0]
    assert [token for piece in pieces[0] for token in piece.outputs[0].token_ids] == expected[
        0
    ].token_ids
    assert len(others) == 1 and free_blocks(llm) == before
    invariants(llm)


def test_a_second_call_does_not_wait_for_the_first(llm, monkeypatch):
    """It runs with the next step, however many the first one has before it."""
    num_steps, added, ended, begun = itertools.count(1), [], [], threading.Event()
    step, add = llm._engine.step, llm._engine.add

    def counted():
        groups, number = step(), next(num_steps)
        ended.extend(number for group in groups if group.finished)
        if number == 5:
            begun.set()
        return groups

    def noted(*args):
        added.append(next(num_steps))
        return add(*args)

    monkeypatch.setattr(llm._engine, "step", counted)
    monkeypatch.setattr(llm._engine, "add", noted)
    first = threading.Thread(target=one, args=(llm, [1, 2, 3], LONG))
    first.start()
    assert begun.wait(60)
    one(llm, [4, 5], dataclasses.replace(GREEDY, max_tokens=1))
    first.join()
    assert ended[0] == added[1] + 1 and ended[1] > added[0] + 150


def long_one_runs(llm):
    """Returns whether the engine has a request with LONG, so that its caller waits."""
    return any(handle.request.params == LONG for handle in llm._driver.turns.live.values())


def signal_in_step(llm, monkeypatch, number, nth=0, *, after=False):
    """Sends the process a signal while the engine's thread is in the nth step of a request with
    LONG.
    """
    real, calls = llm._engine.runner.run, itertools.count()

    def run(batch):
        is_it = long_one_runs(llm) and next(calls) == nth
        if is_it and not after:
            os.kill(os.getpid(), number)
        result = real(batch)
        if is_it and after:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(llm._engine.runner, "run", run)


@pytest.mark.parametrize("moment", ["before the step", "after the step"])
def test_an_interrupt_leaves_the_engine_usable(llm, moment, monkeypatch):
    prompts = prompts_of(30, 5, 60)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    signal_in_step(llm, monkeypatch, signal.SIGINT, 5, after=moment == "after the step")
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, LONG, use_tqdm=False)
    invariants(llm)
    monkeypatch.undo()
    assert [o.outputs for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == [
        o.outputs for o in expected
    ]


def test_an_interrupt_while_other_weights_wait_for_what_runs(llm, monkeypatch):
    """The step that it comes in is taken to its end; the old weights stay in use."""
    expected, gate = one(llm, prompts_of(40)[0], GREEDY), Gate(monkeypatch, llm._engine)
    version = llm._engine.weights_version
    with llm.stream(prompts_of(40)[0], GREEDY) as stream:
        gate.permits.release()
        first = next(stream)
        gate.wait_before_step(2)  # nothing reads the inbox from here on

        def interrupt():
            wait_until(llm._driver.turns.inbox.qsize, "the weights wait")
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            llm.update_parameters(random_tensors(LLAMA))
        interrupting.join()
        gate.open()
        remaining = [token_id for chunk in stream for token_id in chunk.outputs[0].token_ids]
    assert [*first.outputs[0].token_ids, *remaining] == expected.token_ids
    assert llm.generate([5], GREEDY, use_tqdm=False)[0].weights_version == version


@contextlib.contextmanager
def weights_that_wait(llm, gate):
    """Starts a stream for which other weights wait, with the engine before the fourth step."""
    stream = llm.stream([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=30))
    gate.permits.release()
    next(stream)
    weights = llm._prepare_weights(random_tensors(LLAMA), check_finite=False, mode="wait")
    with llm._driver.replacing(weights) as version:
        gate.permits.release(2)
        gate.wait_before_step(4)
        assert llm._driver.turns.change is not None  # the weights wait
        yield
        gate.open()
        llm._driver.wait(version)
    assert len(list(stream)) == 29


CALLS = {
    "generate": lambda llm: llm.generate([[4, 5], [6]], LONG, use_tqdm=False),
    "stream": lambda llm: next(llm.stream([4, 5], LONG)),
    "pin_prefix": lambda llm: llm.pin_prefix(list(range(1, 40))),
    "embed": lambda llm: llm.embed([[4, 5], [6]], use_tqdm=False),
    "score": lambda llm: llm.score([4, 5], [6, 7]),
    "update_parameters": lambda llm: llm.update_parameters(random_tensors(LLAMA)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_while_other_weights_wait_leaves_nothing(llm, monkeypatch, call):
    """Nothing of it runs later, and no pin is in the way of the next update."""
    version, gate = llm._engine.weights_version, Gate(monkeypatch, llm._engine)
    turns, came = llm._driver.turns, []

    def handler(number, frame):
        came.append(number)
        raise TimeoutError("from a signal handler")

    def interrupt():
        wait_until(turns.inbox.qsize, "the order is there")
        gate.permits.release()
        wait_until(lambda: turns._held, "the order waits for the weights")
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with weights_that_wait(llm, gate):
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with pytest.raises(TimeoutError, match="from a signal handler"):
                CALLS[call](llm)
            interrupting.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    num_steps = llm.stats()["engine_steps_total"]
    invariants(llm)
    assert came and llm.stats()["engine_steps_total"] == num_steps
    llm.update_parameters(random_tensors(LLAMA))  # those of the checkpoint
    assert llm._engine.weights_version == version + 2


def test_another_stream_survives_an_interrupt(llm, monkeypatch):
    expected = one(llm, prompts_of(40)[0], GREEDY)
    stream = llm.stream(prompts_of(40)[0], GREEDY)
    pieces = [next(stream).outputs[0].token_ids]
    signal_in_step(llm, monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        one(llm, prompts_of(9)[0], LONG)
    pieces += [chunk.outputs[0].token_ids for chunk in stream]
    assert list(itertools.chain.from_iterable(pieces)) == expected.token_ids


class Stop(BaseException):
    """Is an exception of a program's own, as SystemExit is."""


@pytest.mark.parametrize("raised", [TimeoutError, Stop, None])
@pytest.mark.parametrize("method", ["plan", "run", "commit"])
def test_a_handler_of_the_program_meets_a_waiting_caller(llm, monkeypatch, raised, method):
    """It may call the LLM, and raise what it likes: the call that it comes in ends with that, and
    no other request notices.
    """
    prompts, handled, came = prompts_of(30, 40), [], []
    expected = [one(llm, prompt, GREEDY) for prompt in prompts]
    owner = llm._engine.runner if method == "run" else llm._engine.scheduler
    real = getattr(owner, method)

    def signalling(*args):
        if not came and long_one_runs(llm):
            came.append(True)
            os.kill(os.getpid(), signal.SIGALRM)
        return real(*args)

    def handler(number, frame):
        handled.append((llm.stats()["num_requests_running"], one(llm, prompts[0], GREEDY)))
        if raised is not None:
            raise raised

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with llm.stream(prompts[0], GREEDY) as stream:
            pieces = [next(stream)]
            monkeypatch.setattr(owner, method, signalling)
            with contextlib.nullcontext() if raised is None else pytest.raises(raised):
                assert one(llm, prompts[1], LONG).token_ids[:12] == expected[1].token_ids
            pieces += stream
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected[
        0
    ].token_ids
    assert [output for _, output in handled] == [expected[0]] and one(
        llm, prompts[1], GREEDY
    ) == expected[1]


def test_a_finaliser_in_a_step_can_end_a_stream_and_nothing_else(llm, monkeypatch):
    """The engine's thread runs it, where a call would wait for itself and is refused.

    A stream that it drops ends.
    """
    prompts, errors = prompts_of(30, 40), []
    expected, before = one(llm, prompts[0], GREEDY), free_blocks(llm)
    gate = Gate(monkeypatch, llm._engine)
    dropped = [llm.stream(prompts[1], dataclasses.replace(GREEDY, max_tokens=200))]
    real = llm._engine.scheduler.commit

    def commit(*args):
        if dropped:
            dropped.clear()
            for call in (lambda: one(llm, prompts[0], GREEDY), llm.stats, llm.reset_prefix_cache):
                try:
                    errors.append(call())
                except RuntimeError as error:
                    errors.append(str(error))
        return real(*args)

    monkeypatch.setattr(llm._engine.scheduler, "commit", commit)
    gate.open()
    assert one(llm, prompts[0], GREEDY) == expected and free_blocks(llm) == before
    assert (
        "in the middle of its own step" in errors[0] == errors[2]
        and errors[1]["num_requests_running"] > 0
    )


def test_an_error_keeps_the_callers_line_and_its_cause(llm, monkeypatch):
    """It reads as if the call had raised it itself."""
    monkeypatch.setattr(llm._engine.scheduler, "plan", lambda drafts: 1 / 0)
    with pytest.raises(EngineFailed, match="failed during generation") as caught:
        one(llm, [1, 2, 3], GREEDY)
    names = [entry.name for entry in caught.traceback]
    assert names[0] == "test_an_error_keeps_the_callers_line_and_its_cause" and "generate" in names
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(CapacityError) as caught:
        one(llm, [1], SamplingParams(n=5))
    assert caught.traceback[0].name == names[0]


def test_a_program_may_end_without_a_shutdown(directory):
    """It ends at once, and prints nothing."""
    program = f"""
import threading
from jaxpage import SamplingParams
from tests.support.engines import make_llm
params = SamplingParams(max_tokens=200, ignore_eos=True)
llm = make_llm({str(directory)!r}, num_blocks=33, largest_shapes=True)
stream = llm.stream([1, 2, 3], params)
next(stream)
threading.Thread(target=lambda: [llm.generate([[1, 2, 3]] * 3, params, use_tqdm=False) for _ in range(999)], daemon=True).start()
llm.generate([1], params, use_tqdm=False)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")


def test_an_engine_ends_with_the_last_reference(directory):
    """The reference is to its LLM, or to what the LLM gave."""
    dropped = make_llm(directory, num_blocks=33)
    thread, engine = dropped._driver._thread, weakref.ref(dropped._engine)
    stream = dropped.stream([1, 2, 3], GREEDY)
    del dropped
    gc.collect()
    assert len(list(stream)) == 12 and thread.is_alive()
    del stream
    gc.collect()
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and engine() is None


def test_a_real_ctrl_c(llm):
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate(prompts_of(60, 50, 9), GREEDY, use_tqdm=False)
    invariants(llm)
    assert len(one(llm, [3, 4], GREEDY).token_ids) == 12


def test_a_failed_step_ends_what_runs_and_the_engine_serves_on(llm, monkeypatch, caplog):
    prompts = prompts_of(30, 5)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    runner, calls = llm._engine.runner, itertools.count()
    real = runner.run

    def failing(batch):
        if next(calls) == 4:
            runner.executables.step(batch.bucket)(runner._parameters, runner._pages, batch.packed)
            raise RuntimeError("RESOURCE_EXHAUSTED: planted")
        return real(batch)

    monkeypatch.setattr(runner, "run", failing)
    failed = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in failed] == ["error", "error"]
    assert "planted" in caplog.text
    assert [o.outputs for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == [
        o.outputs for o in expected
    ]


def test_an_exception_of_one_request_ends_that_request(llm, monkeypatch, caplog):
    prompts = prompts_of(30, 5, 9)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    real, calls = SamplingStrategy.advance, itertools.count()

    def failing(self, *arguments):
        if next(calls) == 7:
            raise KeyError("planted")
        return real(self, *arguments)

    monkeypatch.setattr(SamplingStrategy, "advance", failing)
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    ended = [output for output in outputs if output.finish_reason == "error"]
    assert len(ended) == 1 and ended[0].stop_reason == "KeyError: 'planted'"
    assert (
        sum(output == alone.outputs[0] for output, alone in zip(outputs, expected, strict=True))
        == 2
    )


def test_tokens_are_counted_when_they_are_there(llm, monkeypatch):
    llm.reset_prefix_cache()
    before = llm.stats()
    one(llm, prompts_of(40)[0], GREEDY)
    after = llm.stats()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 12
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 40
    monkeypatch.setattr(llm._engine.runner, "run", lambda batch: 1 / 0)
    llm.generate(prompts_of(3), GREEDY, use_tqdm=False)
    failed = llm.stats()
    for name in ("generation_tokens_total", "prompt_tokens_total", "engine_steps_total"):
        assert failed[name] == after[name]


def cached_tokens(llm, prompt, params=GREEDY):
    return llm.generate(prompt, params, use_tqdm=False)[0].metrics.num_cached_tokens


def test_what_was_computed_before_is_found_and_counted(llm):
    llm.reset_prefix_cache()
    before = llm.stats()
    assert before["num_blocks_cached"] == 0
    prompt = prompts_of(50, seed=77)[0]
    expected = one(llm, prompt, GREEDY)
    turn = [*prompt, *expected.token_ids, 5]
    outputs = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in (prompt, prompt[:48], turn)]
    assert [output.metrics.num_cached_tokens for output in outputs] == [48, 32, 48]
    assert outputs[0].outputs[0] == expected
    after = llm.stats()
    hits, queries = (
        after[f"prefix_cache_{name}_total"] - before[f"prefix_cache_{name}_total"]
        for name in ("hits", "queries")
    )
    assert (hits, queries) == (48 + 32 + 48, 50 + 50 + 48 + 63)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == queries - hits
    assert after["num_blocks_cached"] == 4 and after["num_blocks_free"] == after["num_blocks_total"]
    llm.reset_prefix_cache()
    assert cached_tokens(llm, prompt) == 0


WITH_LOGPROBS = dataclasses.replace(GREEDY, logprobs=0)  # which show every bit


def fail_once(llm, monkeypatch, prompt):
    """Fails a step that takes the pages with it."""
    runner = llm._engine.runner

    def failing(batch):
        runner.executables.step(batch.bucket)(runner._parameters, runner._pages, batch.packed)
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", failing)
        assert one(llm, prompt, GREEDY).finish_reason == "error"


def break_once(llm, monkeypatch, prompt):
    """Breaks a step, which can neither be taken nor be failed."""
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.scheduler, "commit", lambda *_: 1 / 0)
        with pytest.raises(EngineFailed):
            one(llm, prompt, GREEDY)


@pytest.mark.parametrize("lose", [fail_once, break_once])
def test_the_cache_goes_with_the_pages(llm, monkeypatch, lose):
    prompt = prompts_of(50, seed=80)[0]
    expected = one(llm, prompt, WITH_LOGPROBS)
    assert cached_tokens(llm, prompt) == 48
    lose(llm, monkeypatch, prompt[:20])
    assert llm.stats()["num_blocks_cached"] == 0
    output = llm.generate(prompt, WITH_LOGPROBS, use_tqdm=False)[0]
    assert output.metrics.num_cached_tokens == 0 and output.outputs[0] == expected


def test_numbers_that_are_none_end_only_their_request(llm, monkeypatch):
    prompts = prompts_of(30, 5)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    runner = llm._engine.runner
    real, calls = runner.run, itertools.count()

    def without_a_number(batch):
        result = real(batch)
        if next(calls) != 3:
            return result
        token_ids = result.token_ids.copy()
        token_ids[0] = -1  # what the sampler says when the logits are not finite
        return dataclasses.replace(result, token_ids=token_ids)

    monkeypatch.setattr(runner, "run", without_a_number)
    ended, other = (output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False))
    assert ended.finish_reason == "error" and "not finite" in ended.stop_reason
    assert other == expected[1].outputs[0]
    assert cached_tokens(llm, prompts[0]) == 0  # what made the numbers bad may be in the pages


def test_nothing_compiles_after_start_up(llm):
    before = llm.stats()["compile_total"]
    rng = np.random.default_rng(5)
    with _jax_compilations() as compilations:
        for _ in range(6):
            prompts = prompts_of(*rng.integers(1, 180, 7), seed=int(rng.integers(99)))
            params = [
                SamplingParams(
                    temperature=float(rng.choice([0.0, 1.0])),
                    top_k=int(rng.integers(0, 9)),
                    top_p=float(rng.uniform(0.5, 1)),
                    min_p=float(rng.uniform(0, 0.2)),
                    logprobs=rng.choice([None, 2]),
                    max_tokens=int(rng.integers(1, 40)),
                )
                for _ in prompts
            ]
            llm.generate(prompts, params, use_tqdm=False)
    assert compilations == []
    assert llm.stats()["compile_total"] == before


def test_a_compilation_would_be_counted(llm):
    before = llm.stats()["compile_total"]
    jax.jit(lambda x: x * 3 + len(str(before)))(np.ones(before % 7 + 2)).block_until_ready()
    assert llm.stats()["compile_total"] > before


class _jax_compilations(list):
    """Counts what JAX compiles inside the block, by its own monitoring."""

    def __enter__(self):
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: self.append(name) if self._open and "compile" in name else None
        )
        return self

    def __exit__(self, *_):
        self._open = False


@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (2, 16), (4, 64), (7, 100), (64, 256)])
def test_every_plan_within_the_limits_has_a_bucket(rows, tokens):
    menu = make_menu(rows, tokens)
    for count in range(1, rows + 1):
        bucket = menu.choose([1] * count)
        assert bucket in menu.decode and bucket.num_rows >= max(2, count)
    for count in range(1, min(menu.max_chunk_rows, rows) + 1):
        for total in range(count + 1, tokens + 1):
            bucket = menu.choose([total - count + 1] + [1] * (count - 1))
            assert bucket in menu.chunk and bucket.num_tokens >= total and bucket.num_rows >= count
    with pytest.raises(ValueError, match="no bucket holds"):
        menu.choose([2] * (tokens + 1))


def test_plans_of_a_long_run_stay_within_the_menu(llm, monkeypatch):
    builder = llm._engine.builder
    real, seen = builder.build, set()
    monkeypatch.setattr(
        builder,
        "build",
        lambda plan, *masks: seen.add((batch := real(plan, *masks)).bucket) or batch,
    )
    llm.generate(prompts_of(*range(1, 200, 9)), GREEDY, use_tqdm=False)
    assert seen == set(builder.menu.buckets)


def test_writes_go_in_place(llm):
    """No executable may hold a second copy of the pool, or even of one layer's pages."""
    pool = llm.memory.pool_bytes
    for bucket in llm._engine.builder.menu.buckets:
        analysis = llm._engine.runner.executables.step(bucket).executable.memory_analysis()
        assert analysis.alias_size_in_bytes >= pool
    before = [page.unsafe_buffer_pointer() for page in _pages(llm)]
    one(llm, prompts_of(30)[0], GREEDY)
    assert [page.unsafe_buffer_pointer() for page in _pages(llm)] == before


def _pages(llm):
    return jax.tree.leaves(llm._engine.runner._pages)


def test_the_null_block_reaches_no_output(llm):
    prompt = prompts_of(21)[0]
    expected = one(llm, prompt, GREEDY)
    runner = llm._engine.runner
    runner._pages = jax.tree.map(lambda page: page.at[0].set(float("nan")), runner._pages)
    assert one(llm, prompt, GREEDY) == expected


def test_shutdown_ends_what_runs(directory, llm):
    other = make_llm(directory)
    stream = other.stream([1, 2, 3], GREEDY)
    next(stream)
    other.shutdown()
    assert other.stats()["num_requests_running"] == 0
    with pytest.raises(RuntimeError, match="shut down"):
        next(stream)


def test_a_drain_waits_for_what_runs_and_takes_nothing_in(directory, monkeypatch):
    with make_llm(directory) as other:
        stream = other.stream([1, 2, 3], GREEDY)
        assert other.drain() and len(list(stream)) == 12
        with pytest.raises(ShuttingDown, match="The engine is shutting down"):
            other.generate([1], GREEDY, use_tqdm=False)
    with make_llm(directory) as other:
        gate = Gate(monkeypatch, other._engine)
        stream = other.stream([1, 2, 3], GREEDY)
        opening = threading.Timer(0.3, gate.open)
        opening.start()
        assert not other.drain(timeout=0.05)
        with pytest.raises(ShuttingDown, match="the time to finish was over"):
            list(stream)


def test_after_shutdown_and_as_context_manager(directory, llm):
    with make_llm(directory) as other:
        assert one(other, [1, 2, 3], GREEDY).token_ids == one(llm, [1, 2, 3], GREEDY).token_ids
    with pytest.raises(RuntimeError, match="shut down"):
        other.generate([1], GREEDY)
    other.shutdown()


def test_from_config(directory, tmp_path, llm):
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {directory}\nmax_num_seqs: 2\nmax_num_batched_tokens: 16\nnum_blocks: 20\n"
    )
    with when_used(), LLM.from_config(path, max_model_len=64, use_tqdm=False) as configured:
        assert (configured.config.max_num_seqs, configured.config.max_model_len) == (2, 64)
        assert one(configured, [1, 2, 3], GREEDY).token_ids == one(llm, [1, 2, 3], GREEDY).token_ids


def test_settings_that_are_not_honoured_are_refused(directory):
    with pytest.raises(UnsupportedError, match="attention_backend"):
        LLM(str(directory), use_tqdm=False, attention_backend="cuda")
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(str(directory), use_tqdm=False, max_num_seq=3)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_an_error(directory, llm, capfd):
    one(llm, [1, 2, 3], GREEDY)
    if (child := os.fork()) == 0:
        try:
            one(llm, [1, 2, 3], GREEDY)
        except RuntimeError as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (
        f"an LLM was made in process {os.getpid()}, from which this one was forked"
        in capfd.readouterr().err
    )


def test_model_files_that_do_not_fit_together(tmp_path):
    for values, message in (
        ({"temperature": "hot"}, "generation_config.json: temperature must be"),
        ({"top_p": 2}, "generation_config.json: top_p must be"),
        ({"do_sample": "no"}, "do_sample must be true or false"),
    ):
        strange = random_checkpoint(tmp_path / message[-9:], LLAMA, generation_config=values)
        with pytest.raises(CheckpointError, match=message):
            make_llm(strange)
    small = random_checkpoint(tmp_path / "small", LLAMA)
    with pytest.raises(ModelNotFoundError):
        make_llm(small, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        make_llm(small, tokenizer=str(small))
    with pytest.raises(CheckpointError, match="token id 2047, but the model's ids end at 256"):
        make_llm(small, tokenizer="demo")


def test_ends_of_sequence_beyond_the_vocabulary_hurt_nobody(tmp_path, llm):
    odd = random_checkpoint(tmp_path / "odd", LLAMA, generation_config={"eos_token_id": [2, 999]})
    with make_llm(odd) as other:
        params = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=3)
        assert one(other, [1, 2, 3], params).finish_reason in ("length", "stop")


def test_priorities_are_refused_unless_the_policy_looks_at_them(llm, directory):
    with pytest.raises(UnsupportedError, match="priority=3 needs scheduling_policy='priority'"):
        llm.generate([1, 2], SamplingParams(priority=3))
    with make_llm(
        directory, num_blocks=33, scheduling_policy="priority", max_num_seqs=1, start=False
    ) as ranked:
        streams = [
            ranked.stream(prompt, SamplingParams(max_tokens=4, priority=p))
            for p, prompt in ((2, [1]), (1, [2]))
        ]
        next(streams[0])  # there is one seat: the other one has been served before
        scheduler = ranked._engine.scheduler
        assert [
            group.request.params.priority for group in (*scheduler.running, *scheduler.waiting)
        ] == [2]
        for stream in streams:
            list(stream)
        invariants(ranked)


def test_a_pinned_prefix_is_shared_and_stays(llm):
    system, (end,) = prompts_of(37, seed=3)[0], prompts_of(9, seed=4)
    expected = one(llm, [*system, *end], GREEDY).token_ids
    with llm.pin_prefix(system) as pinned:
        assert (pinned.num_tokens, pinned.released) == (37, False)
        assert llm.stats()["num_blocks_pinned"] == 3
        llm.reset_prefix_cache()
        for prompt, num_found in (
            ([*system, *end], 37),
            (system, 36),
            (system[:20], 19),
            ([*system[:35], 0, 0], 32),
        ):
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            assert output.metrics.num_cached_tokens == num_found
            llm.reset_prefix_cache()
        assert one(llm, [*system, *end], GREEDY).token_ids == expected
        assert llm.stats()["num_blocks_total"] - free_blocks(llm) == 3
        salted = llm.generate(
            [*system, *end], dataclasses.replace(GREEDY, cache_salt="s"), use_tqdm=False
        )[0]
        assert salted.metrics.num_cached_tokens == 0 and salted.outputs[0].token_ids == expected
    assert pinned.released and free_blocks(llm) == llm.stats()["num_blocks_total"]
    pinned.release()


def test_pins_leave_room_for_what_was_accepted(llm, by_hand):
    (prompt,) = prompts_of(100)
    # may need 16 of 32 blocks
    with llm.stream(prompt, dataclasses.replace(GREEDY, max_tokens=150)) as stream:
        next(stream)
        with llm.pin_prefix(prompts_of(250, seed=1)[0]) as pinned:  # takes the other 16
            with pytest.raises(
                CapacityError,
                match="cannot be pinned now: request '.*' may need 16 KV blocks, and 15",
            ):
                llm.pin_prefix(prompts_of(5, seed=2)[0])
            with pytest.raises(CapacityError, match="the pool has 32, of which 16 are pinned"):
                llm._engine.scheduler.add(_too_long(llm))
        list(stream)
    for prefix, message in (
        ([], "one prefix, not 0"),
        (prompts_of(255)[0], "leaves no room for a prompt after it"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.pin_prefix(prefix)
    assert pinned.released


def _too_long(llm):
    """Returns a request that would need more than the 16 blocks that a pin has left.

    Admission clips those that users can make.
    """
    request = llm._engine.admission.admit("too long", llm._engine.prepare(None, [1] * 250, GREEDY))
    object.__setattr__(request, "max_total_tokens", 17 * 16 + 2)
    return SequenceGroup(request, [Sequence(10**6, 0, 250, [1] * 250)])


def test_a_prefix_whose_last_chunk_is_one_token_is_pinned_without_drafts(directory):
    """A right draft would take it past its end, and there would be nothing to pin."""
    (prompt,) = prompts_of(65)  # after a step of 64 tokens it looks like one that decodes
    with make_llm(directory, speculative_config=DRAFTING, largest_shapes=True) as llm:
        text = [*prompt, *one(llm, prompt, GREEDY).token_ids]
        llm.reset_prefix_cache()
        draft_with(llm._engine, Scripted(dict.fromkeys(range(9), text), lambda *_: (4, 0)))
        with llm.pin_prefix(prompt) as pinned:
            assert pinned.num_tokens == 65
        assert llm.stats()["spec_decode_num_drafts_total"] == 0
        assert one(llm, prompt, GREEDY).token_ids == text[65:]
        assert llm.stats()["spec_decode_num_accepted_tokens_total"] > 0, "nobody drafted right"


def test_pins_go_with_the_pages(llm, caplog):
    pinned = llm.pin_prefix(prompts_of(20)[0])
    llm._engine.rebuild_pages()
    assert pinned.released and "1 pinned prefixes are lost" in caplog.text


def test_a_plan_that_is_not_finished_loses_the_pages(directory, monkeypatch):
    """Its moves are in the tables, and not in the pages: what ran ends, and nothing of it is found
    again.
    """
    settings = {"num_blocks": 18, "preemption_mode": "swap", "largest_shapes": True}
    params = dataclasses.replace(GREEDY, max_tokens=60)
    prompts = prompts_of(60, 61, 62)
    with make_llm(directory, **settings) as llm:
        expected = [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        assert llm.stats()["num_preemptions_total"]["swap"] > 0
        freeze = PlanBuilder.freeze

        def fails_once(step, *others):
            if step.swap_out:
                monkeypatch.undo()
                raise OSError("in the middle of planning")
            return freeze(step, *others)

        monkeypatch.setattr(PlanBuilder, "freeze", fails_once)
        with pytest.raises(EngineFailed) as caught:
            llm.generate(prompts, params, use_tqdm=False)
        assert str(caught.value.__cause__) == "in the middle of planning"
        invariants(llm)
        assert llm.stats()["num_blocks_cached"] == 0
        assert [
            output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
        ] == expected
        invariants(llm)
