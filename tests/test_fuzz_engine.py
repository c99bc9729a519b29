"""The fuzzer of engines: lives of engines that are right pass, and mistakes that are planted are
found and shrunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from jaxpage.driver import Driver
from jaxpage.driver.driver import EmbeddingHandle, Pinning
from jaxpage.driver.handle import LATER, Change
from jaxpage.driver.turns import Turns
from jaxpage.engine import Engine
from jaxpage.engine.calls.scoring import continuation_logprobs
from jaxpage.engine.picture_encoder import PictureEncoder
from jaxpage.memory import CachedBlocks
from jaxpage.outputs import CompletionOutput, Logprob
from jaxpage.scheduling.running_set import RunningSet
from jaxpage.step.embedded import EmbeddedSpan
from jaxpage.step.update import Mode
from tests.support import fuzz_cases
from tests.support.engines import BLOCKS_OF_16
from tests.support.fuzz_cases import Ask, Case, Event, random_case, random_shapes, shrunk
from tests.support.fuzz_models import MODELS
from tests.support.fuzzing import Fuzzer
from tests.support.performance import Performance, WrongBehaviour
from tests.support.stage import RealTime

SETTINGS = {**BLOCKS_OF_16, "dtype": "float32", "max_model_len": 96, "num_blocks": 19}
GREEDY = {"temperature": 0.0, "seed": 1, "ignore_eos": True}
# A request of 33 tokens, two of whose blocks another finds; one that runs for long; a short one;
# and
# one that fills a third block.
ASKS = (
    Ask(tuple(range(3, 36)), {**GREEDY, "max_tokens": 4, "logprobs": 2}),
    Ask((7, 8, 9), {**GREEDY, "max_tokens": 12}),
    Ask((5, 6), {"seed": -3, "max_tokens": 3, "n": 2, "logprobs": 1}),
    Ask(tuple(range(3, 36)), {**GREEDY, "max_tokens": 24}),
)
UPDATE = Event(2, "update", (), (1, "numpy", "wait"))


def case(*events: Event, is_async: bool = False) -> Case:
    return Case(SETTINGS, ASKS, events, "llama", is_async)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    made = Fuzzer(tmp_path_factory.mktemp("fuzz"), tolerance=1e-4)
    yield made
    made.close()


def answers_drains_while_requests_are_held(patch: pytest.MonkeyPatch) -> None:
    def answer(turns: Turns) -> None:
        while turns._drained and not any(each.reporter for each in turns.live.values()):
            turns.answer(turns._drained.pop(), None)

    patch.setattr(Turns, "_answer_drains", answer)


def leaves_held_requests_that_end(patch: pytest.MonkeyPatch) -> None:
    end_one = Turns.end_one

    def end(turns: Turns, handle: Any, why: Any = None) -> None:
        if handle.reporter is None:
            handle.is_over = True
        else:
            end_one(turns, handle, why)

    patch.setattr(Turns, "end_one", end)


def keeps_pins_that_nobody_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pinning, "withdraw", lambda pinning, engine: None)


def aborts_what_runs_alone(patch: pytest.MonkeyPatch) -> None:
    abort = Driver.abort

    def abort_running(driver: Driver, handle: Any) -> Any:
        return (
            driver.call(lambda engine: None) if handle.reporter is None else abort(driver, handle)
        )

    patch.setattr(Driver, "abort", abort_running)


def sleeps_while_vectors_are_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EmbeddingHandle, "reads_weights", False)


def deletes_what_it_has_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "share_weights", lambda engine: engine.runner.parameters)


def looks_at_no_withdrawal(patch: pytest.MonkeyPatch) -> None:
    def begin(turns: Turns, change: Change[Any], *, abort: bool, tells: bool) -> object:
        if turns.change is not None:
            raise RuntimeError("Other weights, or sleep, are on their way already")
        turns.change = change
        turns._later.add(change.answer)
        return LATER

    patch.setattr(Turns, "begin_change", begin)


def scores_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    def scores(outputs: Any, pairs: Any, *, single: bool) -> Any:
        (output,), ((prompt, _),) = outputs, pairs
        return [entry.logprob for entry in continuation_logprobs(output, len(prompt))]

    patch.setattr("jaxpage.llm.scores_of", scores)


def finds_blocks_of_old_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "reset_prefix_cache", lambda engine: None)


def recomputes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningSet, "start_over", lambda groups, chosen: None)


def shares_what_kept_requests_fill(patch: pytest.MonkeyPatch) -> None:
    clear = CachedBlocks.clear

    def forget(cached: CachedBlocks) -> None:
        clear(cached)
        cached._old.clear()

    patch.setattr(CachedBlocks, "clear", forget)


def steps_while_paused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "_can_step", property(lambda turns: turns._has_work))


LIVES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Case, str]] = {
    "drain": (
        answers_drains_while_requests_are_held,
        case(
            Event(0, "stream", (1,), (99, 0, "whole")),
            UPDATE,
            Event(3, "generate", (0,)),
            Event(4, "drain", (), (60.0,)),
        ),
        "drain returned True, and a request runs",
    ),
    "interrupted request": (
        leaves_held_requests_that_end,
        case(
            Event(0, "stream", (1,), (99, 0, "whole")),
            UPDATE,
            Event(3, "generate", (0, 2), interrupted_after=1),
        ),
        "drain returned False at the end",
    ),
    "interrupted pin": (
        keeps_pins_that_nobody_waits_for,
        case(
            Event(0, "stream", (1,), (99, 0, "whole")),
            UPDATE,
            Event(3, "pin", (0,), (2,), interrupted_after=0),
        ),
        "pinned blocks",
    ),
    "abort": (
        aborts_what_runs_alone,
        case(
            Event(0, "stream", (1,), (99, 0, "whole")),
            UPDATE,
            Event(3, "generate", (2,), aborted_after=1),
            Event(3, "generate", (0,)),
            is_async=True,
        ),
        "it was aborted by its id, and ends with 'length'",
    ),
    "embed": (
        sleeps_while_vectors_are_computed,
        case(
            Event(0, "embed", (0, 1, 2), ("mean",)),
            Event(1, "sleep", (), (2, 1)),
            Event(1, "score", (0, 1)),
        ),
        "embed of turn 0: RuntimeError",
    ),
    "held weights": (
        deletes_what_it_has_shared,
        case(
            Event(0, "hold"),
            Event(1, "sleep", (), (1, 2)),
            Event(6, "update", (), (0, "held", "abort")),
            Event(6, "generate", (0,)),
        ),
        "arrays that the caller holds were deleted",
    ),
    "withdrawn update": (
        looks_at_no_withdrawal,
        case(
            dataclasses.replace(UPDATE, interrupted_after=0),
            Event(2, "sleep", (), (1, 0)),
        ),
        "sleep of turn 2: RuntimeError: Other weights, or sleep, are on their way already",
    ),
    "aborted score": (
        scores_what_was_aborted,
        case(Event(0, "score", (0, 1)), Event(0, "update", (), (1, "numpy", "abort"))),
        "score of turn 0: ValueError",
    ),
    "old blocks": (
        finds_blocks_of_old_weights,
        case(
            Event(0, "generate", (0,)),
            dataclasses.replace(UPDATE, at=20),
            Event(30, "generate", (0,)),
        ),
        "and alone",
    ),
    "recomputed request": (
        recomputes_nothing,
        case(
            Event(0, "generate", (1,)),
            Event(3, "update", (), (1, "numpy", "recompute")),
            Event(5, "update", (), (2, "numpy", "recompute")),
        ),
        "of version 1: ",
    ),
    "kept request": (
        shares_what_kept_requests_fill,
        case(
            Event(0, "generate", (3,)),
            Event(3, "update", (), (1, "numpy", "keep")),
            Event(30, "generate", (0,)),
        ),
        "and alone",
    ),
    "pause": (
        steps_while_paused,
        case(Event(0, "generate", (0, 1, 2)), Event(2, "pause", (), (8,))),
        "a step runs while the engine is paused",
    ),
}


def takes_any_picture_for_any_other(patch: pytest.MonkeyPatch) -> None:
    def content_ids(span: EmbeddedSpan) -> list[int]:
        return [2**32 + span.offset + row for row in range(span.length)]

    patch.setattr(EmbeddedSpan, "content_ids", property(content_ids))


def keeps_rows_of_old_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PictureEncoder, "clear", lambda encoder: None)


def seeing(*events: Event) -> Case:
    """Returns two requests that differ in a picture alone."""
    asks = tuple(
        Ask(tuple(range(3, 36)), {**GREEDY, "max_tokens": 4}, pictures=((5, seed, 2),))
        for seed in (1, 2)
    )
    return Case(SETTINGS, asks, events, "smolvlm")


SEEING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Case]] = {
    "another picture": (
        takes_any_picture_for_any_other,
        seeing(Event(0, "generate", (0,)), Event(20, "generate", (1,))),
    ),
    "old rows": (
        keeps_rows_of_old_weights,
        seeing(
            Event(0, "generate", (0,)),
            dataclasses.replace(UPDATE, at=20),
            Event(30, "generate", (0,)),
        ),
    ),
}
LIVES |= {name: (plant, life, "and alone") for name, (plant, life) in SEEING.items()}


@pytest.mark.parametrize("name", LIVES)
def test_lives_pass_and_planted_mistakes_are_found(
    name: str, fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, life, problem = LIVES[name]
    assert fuzzer.failure(life) == ""
    plant(monkeypatch)
    assert problem in fuzzer.failure(life)
    assert not fuzzer.refused


def test_calls_on_threads_pass_while_a_signal_interrupts_one(fuzzer: Fuzzer) -> None:
    calls = [
        Event(0, "stream", (1,), (3, 2, "whole")),
        UPDATE,
        Event(3, "generate", (0, 2)),
        Event(4, "generate", (1, 0), interrupted_after=1),
        Event(5, "sleep", (), (1, 2)),
        Event(5, "embed", (0, 1), ("last",)),
    ]
    assert fuzzer.failure(dataclasses.replace(case(*calls), in_threads=True)) == ""


class Waiting(Performance):
    """Makes a call that takes 0.3 s; the engine is in a turn meanwhile, or is not."""

    async def _perform(self, number: int, actor: Any) -> None:
        time.sleep(0.3)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_call_waits_for_a_turn_and_not_for_an_idle_engine(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are compiled in turns, which takes a minute where many programs share a core."""
    monkeypatch.setattr("tests.support.performance.MAX_SECONDS", 0.1)
    llm = SimpleNamespace(is_paused=False, is_sleeping=False)
    engine: Any = SimpleNamespace(llm=llm, is_busy=is_busy, watch=lambda: None, version=0)
    event = Event(0, "generate", (0,))
    waiting = Waiting(case(event), RealTime(), [engine], [])
    outcome = contextlib.nullcontext() if is_busy else pytest.raises(WrongBehaviour, match="ended")
    with outcome:
        waiting.play_in_threads()
        assert waiting.actors[0].is_over


def test_a_case_is_shrunk_to_what_fails() -> None:
    rng = random.Random(5)
    pin = Event(9, "pin", (1,), (3,), interrupted_after=2)
    large = dataclasses.replace(random_case(rng, *random_shapes(rng)), asks=ASKS)
    events = (Event(0, "generate", (0, 1)), pin, Event(9, "update", (), (1, "jax", "wait")))
    large = dataclasses.replace(large, events=events, is_async=True)

    def fails(smaller: Case) -> str:
        names = [event.name for event in smaller.events if event.interrupted_after is not None]
        return "pinned" * ("pin" in names)

    small = shrunk(large, fails, seconds=60)
    assert small.events == (dataclasses.replace(pin, at=0, asks=(0,)),)
    assert small.asks == (Ask((7,), {"max_tokens": 12, "seed": 1}),)
    assert not small.is_async
    assert small.settings.keys() <= {*fuzz_cases.NEEDED}


def test_a_program_makes_its_case_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    cases: list[Case] = []
    run_cases = contextlib.nullcontext(cases.append)
    monkeypatch.setattr("tools.fuzz_engine.run_cases", lambda: run_cases)
    drawn = [random_case(rng, *random_shapes(rng)) for _ in range(20)]
    for case in drawn:
        exec(case.program())
    assert cases == drawn


def test_everything_that_has_a_life_is_drawn() -> None:
    rng = random.Random(1)
    cases = [random_case(rng, *random_shapes(rng)) for _ in range(800)]
    events = [event for case in cases for event in case.events]
    assert {case.model for case in cases} == MODELS.keys()
    assert {case.num_engines for case in cases} == {1, 2}
    assert {case.is_async for case in cases} == {False, True}
    assert {event.name for event in events} == {
        *("generate", "stream", "pin", "reset", "score", "embed"),
        *("update", "hold", "sleep", "pause", "drain"),
    }
    assert {event.details for event in events if event.name == "update"} == {
        (number, form, mode)
        for number in range(fuzz_cases.NUM_SETS)
        for form in ("numpy", "jax", "held")
        for mode in get_args(Mode)
    }
    assert any(event.aborted_after is not None for event in events)
    interrupted = {event.name for event in events if event.interrupted_after is not None}
    assert interrupted >= {"generate", "stream", "pin", "score", "embed", "update", "sleep"}
    settings = [case.settings for case in cases]
    drafting = [case["speculative_config"] for case in settings if "speculative_config" in case]
    trees = {case["method"] for case in drafting if isinstance(case, dict) and case.get("tree")}
    assert trees == {"draft_model", "eagle3", "mtp", "suffix"} and "auto" in drafting
    assert any("enable_lora" in case and "speculative_config" in case for case in settings)
    assert any("tensor_parallel_size" in case and "speculative_config" in case for case in settings)
    assert any("swap_space_blocks" in case for case in settings)
    assert any(ask.is_vectors for case in cases for ask in case.asks)
    assert {len(ask.pictures) for case in cases for ask in case.asks} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("cumulative_logprob", -1.5, "cumulative_logprob is -1.5, and alone -1.0"),
        ("cumulative_logprob", None, "cumulative_logprob is None, and alone -1.0"),
        ("logprobs", [{4: Logprob(-1.0, 9)}], "rank 0 of token 4 is 9, and alone 2"),
        ("logprobs", [{4: Logprob(-1.1, 2)}], "log probability 0 of token 4 is -1.1"),
        ("logprobs", None, "0 log probabilities, and alone 1"),
        ("token_ids", [5], "token_ids is [5]"),
        ("score", 2.0, "score is 2.0, and alone None"),
    ],
)
def test_another_output_is_found(fuzzer: Fuzzer, field: str, value: Any, problem: str) -> None:
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=[4],
        cumulative_logprob=-1.0,
        logprobs=[{4: Logprob(-1.0, 2)}],
        finish_reason="length",
    )
    assert fuzzer._whole_differs(output, output) == ""
    assert problem in fuzzer._whole_differs(dataclasses.replace(output, **{field: value}), output)
