"""Several decode steps in one executable change nothing: tokens, text, log probabilities and ends
are those of one at a time, to the last bit; and requests that need the host between two tokens go
one at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.assembly.planning import engine_spec
from jaxpage.device import steps
from jaxpage.device.hardware import DeviceSpec
from jaxpage.device.inputs.step_inputs import at_step
from jaxpage.engine.engine import Engine
from jaxpage.errors import ConfigError, EventLogError
from jaxpage.replay import replay
from jaxpage.scheduling import running_set
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.draft import PLACEHOLDER
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.token_masks import mask_of
from tests.support.engines import (
    LLAMA,
    engines_by_name,
    invariants,
    make_llm,
    run_giving_way,
    tokens_of,
)
from tests.support.family_names import FAMILY_OF
from tests.support.model_configs import MODELS, config_json
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer
from tests.test_speculation import PROMPTS, REQUESTS, everything

pytestmark = pytest.mark.usefixtures("usual_pages", "largest_shapes")

NUM_STEPS = 4
SMALL_POOL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 80,
    "enable_prefix_caching": False,
}
ENGINES: dict[str, dict[str, Any]] = {
    "without": {"max_num_batched_tokens": 32},
    "roomy": {"max_num_batched_tokens": 32, "num_scheduler_steps": NUM_STEPS},
    "mixed": {
        "max_num_batched_tokens": 32,
        "num_scheduler_steps": NUM_STEPS,
        "enable_mixed_steps": True,
    },
    "recomputing": {
        **SMALL_POOL,
        "block_size": 1,
        "num_blocks": 81,
        "num_scheduler_steps": NUM_STEPS,
    },
    "swapping": {
        **SMALL_POOL,
        **{
            "block_size": 4,
            "num_blocks": 21,
            "preemption_mode": "swap",
            "num_scheduler_steps": NUM_STEPS,
        },
    },
    "auto": {"max_num_batched_tokens": 32, "num_scheduler_steps": "auto"},
}
HOSTLESS = [
    index for index, each in enumerate(REQUESTS) if index in (0, 1, 2, 3, 11, 12, 13, 14)
]  # need no host between tokens
HELD = {
    name: {12, 14} if "ing" in name else set() for name in ENGINES
}  # of these, those that need more room than there is

CACHED = [*range(30, 63)]  # two full blocks of 16, and a token
LENGTH = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
HOSTED = [
    SamplingParams(**LENGTH),  # does not need the host: it joins those that do several steps
    *(
        SamplingParams(**LENGTH, **each)
        for each in (
            {"allowed_token_ids": (200, 201, 202)},
            {"repetition_penalty": 1.8, "presence_penalty": 1.0},
            {"logit_bias": {90: 20.0}},
            {"bad_words": ["a", "10", "b a"]},
            {"min_tokens": 5, "stop_token_ids": (*range(256),)},
            {"structured_outputs": {"regex": "(ab|ba){4}"}},
        )
    ),
    BeamSearchParams(beam_width=2, max_tokens=6),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA))


@pytest.fixture(scope="module")
def engines(directory):
    with engines_by_name(ENGINES, lambda name: directory) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engines):
    return everything(engines("without").generate(PROMPTS, REQUESTS, use_tqdm=False))


def ask(llm: LLM, indices: list[int]) -> list[Any]:
    outputs = llm.generate(
        [PROMPTS[index] for index in indices],
        [REQUESTS[index] for index in indices],
        use_tqdm=False,
    )
    return everything(outputs)


def count_decoded(llm: LLM) -> tuple[int, int]:
    """Returns the rows of steps that decode, and the tokens that they gave."""
    stats = llm.stats()
    return stats["decode_rows_total"], stats["decode_tokens_total"]


@pytest.mark.parametrize("engine", few(["roomy", "recomputing", "swapping"], ["roomy", "swapping"]))
def test_nothing_changes(engine, engines, expected):
    """Requests are greedy and seeded, have several samples and log probabilities, and go to the
    last position; some are preempted.
    """
    llm = engines(engine)
    before, (rows, tokens) = llm.stats()["num_preemptions_total"], count_decoded(llm)
    chosen = [index for index in HOSTLESS if index not in HELD[engine]]
    assert ask(llm, chosen) == [expected[index] for index in chosen]
    more_rows, more_tokens = count_decoded(llm)
    assert (more_tokens - tokens) / (more_rows - rows) > (2 if engine == "roomy" else 1.2)
    stats = llm.stats()
    assert stats["spec_decode_num_draft_tokens_total"] == stats["spec_decode_num_drafts_total"] == 0
    if engine != "roomy":
        assert stats["num_preemptions_total"][
            "swap" if engine == "swapping" else "recompute"
        ] > sum(before.values())
    invariants(llm)


def test_what_needs_the_host_goes_one_at_a_time(engines, expected):
    """Grammars, penalties, bad words, min_tokens, biases and beams do, alone, and with them
    whatever decodes beside them.
    """
    llm = engines("roomy")
    for index in sorted({*range(len(REQUESTS))} - {*HOSTLESS}):
        rows, tokens = count_decoded(llm)
        assert ask(llm, [index]) == [expected[index]]
        more_rows, more_tokens = count_decoded(llm)
        assert more_tokens - tokens == more_rows - rows > 0
    assert ask(llm, [*range(len(REQUESTS))]) == expected
    beam = BeamSearchParams(beam_width=2, max_tokens=6)
    both = [
        llm.generate([PROMPTS[1], PROMPTS[0]], [beam, REQUESTS[0]], use_tqdm=False)
        for llm in map(engines, ("without", "roomy"))
    ]
    assert everything(both[0]) == everything(both[1])
    invariants(llm)


def output_of_hosted(engine: Engine, hosted: Any, prompt: list[int], steps_before: int) -> Any:
    """Returns the output of a request that comes when another one has decoded for so many steps."""
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add("plain", engine.prepare(None, PROMPTS[0], plain))
    for _ in range(steps_before):
        engine.step()
    reporter = engine.add("hosted", engine.prepare(None, prompt, hosted))
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    return reporter.whole()


@pytest.mark.parametrize(
    ("engine", "prompt"), [("roomy", CACHED), ("mixed", [70])], ids=["cached", "one token"]
)
def test_what_needs_the_host_may_be_admitted_in_a_step_that_decodes(engine, prompt, engines):
    """A prompt that is cached but for its last token, or that has no other, gets its first token
    beside those that decode.
    """
    plain, several = engines("without"), engines(engine)
    several.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    for hosted in HOSTED:
        expected = everything(plain.generate([prompt], hosted, use_tqdm=False))
        assert everything([output_of_hosted(several._engine, hosted, prompt, 2)]) == expected, (
            hosted
        )
    invariants(several)


def test_what_needs_the_host_may_come_back_in_a_step_that_decodes(engines):
    plain, llm = engines("without"), engines("swapping")
    for hosted in HOSTED:
        expected = everything(plain.generate([[70, 71]], hosted, use_tqdm=False))
        prepared = (
            llm._engine.prepare(None, PROMPTS[0], REQUESTS[0]),
            llm._engine.prepare(None, [70, 71], hosted),
        )
        _, reporter = [llm._engine.add(f"{index}", each) for index, each in enumerate(prepared)]
        run_giving_way(llm._engine, 5)
        assert everything([reporter.whole()]) == expected, hosted
    invariants(llm)


@pytest.mark.parametrize("needs", ["parameter", "suppressed", "mask"])
def test_a_step_of_several_tokens_with_masks_is_refused(needs, engines):
    """Its masks would be filed by draw and read by row, so no request could be sure of its own."""
    builder = engines("roomy")._engine.builder
    params = SamplingParams(allowed_token_ids=(5,)) if needs == "parameter" else SamplingParams()
    suppressed = (7,) if needs == "suppressed" else ()
    samples = [
        Sample(0, index, 9, params, 0, 0, 1 + index, suppressed_token_ids=suppressed)
        for index in range(2)
    ]
    plan = StepPlan(1, (Row(9, 0, (3, PLACEHOLDER), ((1,),), parents=(0,)),), tuple(samples))
    masks = {1: mask_of((5,), builder.vocab_size)} if needs == "mask" else {}
    with pytest.raises(ValueError, match=r"sequences \[9\] need the host between two tokens"):
        builder.build(plan, masks)


def test_a_step_has_as_many_tokens_as_are_wanted(engines, monkeypatch):
    """The longest row decides how many steps are made; no token is computed after the last."""
    llm, plans = engines("roomy"), []
    build = llm._engine.builder.build

    def build_noted(plan: StepPlan, *masks: Any) -> Any:
        plans.append([len(row.token_ids) for row in plan.rows if row.start >= len(PROMPTS[0])])
        return build(plan, *masks)

    monkeypatch.setattr(llm._engine.builder, "build", build_noted)
    for length in (1, 2, 5, 6, 9):
        plans.clear()
        params = dataclasses.replace(REQUESTS[0], max_tokens=length)
        llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert [sum(each) for each in plans if each] == [4] * ((length - 1) // 4) + [
            (length - 1) % 4
        ] * ((length - 1) % 4 > 0)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_cuts_inside_a_step(include, engines, expected):
    whole = expected[1][1][0]
    texts = sorted({whole.text[index : index + 3] for index in range(len(whole.text) - 2)})
    requests = [
        dataclasses.replace(REQUESTS[1], stop=(text,), include_stop_str_in_output=include)
        for text in texts
    ]
    requests += [
        dataclasses.replace(REQUESTS[1], stop_token_ids=(token_id,))
        for token_id in whole.token_ids[::3]
    ]
    outputs = [
        everything(engines(name).generate([PROMPTS[1]] * len(requests), requests, use_tqdm=False))
        for name in ("without", "roomy")
    ]
    assert outputs[0] == outputs[1]
    assert {len(each[1][0].token_ids) % NUM_STEPS for each in outputs[0]} == {0, 1, 2, 3}
    assert all(each[1][0].finish_reason == "stop" for each in outputs[0])
    invariants(engines("roomy"))


@pytest.mark.parametrize("engine", few(["recomputing", "swapping"], ["swapping"]))
def test_who_gives_way_in_the_middle_goes_on(engine, engines, expected):
    llm, chosen = engines(engine), [0, 2]
    for step in (2, 4, 5):
        prepared = [llm._engine.prepare(None, PROMPTS[index], REQUESTS[index]) for index in chosen]
        reporters = [
            llm._engine.add(f"{step} {index}", each) for index, each in enumerate(prepared)
        ]
        run_giving_way(llm._engine, step)
        assert everything([reporter.whole() for reporter in reporters]) == [
            expected[index] for index in chosen
        ]
    invariants(llm)


def test_what_it_cached_is_what_others_find(engines, expected):
    llm = engines("roomy")
    chosen = [1, 2, 3]
    ask(llm, chosen)
    longer = [[*PROMPTS[index], *expected[index][1][0].token_ids] for index in chosen]
    before = llm.stats()["prefix_cache_hits_total"]
    actual = llm.generate(longer, [REQUESTS[index] for index in chosen], use_tqdm=False)
    assert llm.stats()["prefix_cache_hits_total"] > before + 16
    plain = engines("without")
    plain.reset_prefix_cache()
    expected_outputs = plain.generate(longer, [REQUESTS[index] for index in chosen], use_tqdm=False)
    assert everything(actual) == everything(expected_outputs)


def test_a_log_of_it_is_replayed(directory, expected, tmp_path):
    path = tmp_path / "log"
    with make_llm(directory, **ENGINES["swapping"], event_log=str(path)) as llm:
        chosen = [0, 2, 11]
        assert ask(llm, chosen) == [expected[index] for index in chosen]
    assert '"drafts":[[0,[-1,-1,-1]]' in path.read_text()
    report = replay(str(path))
    assert report.difference is None and report.num_tokens > 60
    path.write_text(
        path.read_text().replace('"drafts":[[0,[-1,-1,-1]]', '"drafts":[[0,[-1,5,-1]]', 1)
    )
    with pytest.raises(EventLogError, match="a step of several has -1 for each of its tokens"):
        replay(str(path))


def lengths_of_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collects the tokens of each row, step by step, from now on."""
    lengths: list[list[int]] = []
    build = engine.builder.build

    def build_noted(plan: StepPlan, *others: Any) -> Any:
        lengths.append([len(row.token_ids) for row in plan.rows])
        return build(plan, *others)

    monkeypatch.setattr(engine.builder, "build", build_noted)
    return lengths


def test_auto_changes_nothing(engines, expected, monkeypatch):
    """There are more requests than rows, with and without a need of the host, and two that nobody
    waits for.
    """
    auto = engines("auto")
    monkeypatch.setattr(running_set, "STEPS_FOR_ONE_MORE", 1)
    assert ask(auto, [*range(len(REQUESTS))]) == expected
    rows, tokens = count_decoded(auto)
    assert ask(auto, [1, 11]) == [expected[index] for index in (1, 11)]
    more_rows, more_tokens = count_decoded(auto)
    assert more_tokens - tokens > 2 * (more_rows - rows)
    invariants(engines("auto"))


def test_auto_takes_more_steps_the_longer_nobody_has_come(engines, monkeypatch):
    """There is one for every 16 steps since the last arrival.

    The chunk of the prompt counts as a step.
    """
    engine, params = (
        engines("auto")._engine,
        SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True),
    )
    lengths = lengths_of_plans(engine, monkeypatch)
    engine.add("first", engine.prepare(None, [7, 8, 9], params))
    while sum(map(sum, lengths)) < 3 + 90:
        engine.step()
    assert lengths == [[3], *[[1]] * 31, *[[2]] * 8, *[[3]] * 6, *[[4]] * 7]
    engine.add("second", engine.prepare(None, [7, 8], params))
    del lengths[:]
    while engine.has_unfinished:
        engine.step()
    assert lengths[:3] == [[2], [1, 1], [1, 1]]
    assert sum(map(sum, lengths)) == 2 + 98 + (98 - 93)  # the prompt, and all tokens but the first
    invariants(engines("auto"))


@pytest.mark.parametrize("waits", ["queue", "chunks", "preempted"])
def test_auto_takes_one_step_while_anybody_waits(waits, engines, monkeypatch):
    monkeypatch.setattr(running_set, "STEPS_FOR_ONE_MORE", 1)
    engine, params = (
        engines("auto")._engine,
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    )
    for index in range(2):
        engine.add(f"{index}", engine.prepare(None, [7, 8, 9], params))
    while (
        not engine.running
        or min(group.sequences[0].num_output_tokens for group in engine.running) < 5
    ):
        engine.step()
    lengths = lengths_of_plans(engine, monkeypatch)
    engine.step()
    assert lengths == [[NUM_STEPS, NUM_STEPS]]
    if waits == "preempted":
        engine.scheduler.give_way()
        engine.step()
        assert lengths[1:] == [[1]]
    elif waits == "queue":
        short = dataclasses.replace(params, max_tokens=3)
        for index in range(3):
            engine.add(f"late {index}", engine.prepare(None, [7, 8, 9], short))
        while engine.scheduler.num_waiting:
            engine.step()
        assert {length for each in lengths[2:] for length in each} == {1, 3}
    else:
        engine.add("long", engine.prepare(None, [*range(5, 105)], params))
        while engine.scheduler.running[-1].sequences[0].num_computed_tokens < 100:
            engine.step()
        assert [each for each in lengths[1:] if len(each) == 2] == [[1, 1]] * 3
    while engine.has_unfinished:
        engine.step()
    invariants(engines("auto"))


def test_a_log_of_auto_is_replayed(directory, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_spec, "STEPS_ON_CPU", NUM_STEPS)
    monkeypatch.setattr(running_set, "STEPS_FOR_ONE_MORE", 2)
    path = tmp_path / "log"
    settings = {**ENGINES["auto"], "block_size": "auto", "event_log": str(path)}
    with make_llm(directory, **settings) as llm:
        assert ask(llm, [0, 2, 11]) == [expected[index] for index in (0, 2, 11)]
    assert {
        f'"drafts":[[0,[{",".join(["-1"] * count)}]]' in path.read_text() for count in (1, 3)
    } == {True}
    assert '"block_size":16' in path.read_text()
    assert replay(str(path)).difference is None
    monkeypatch.setattr(running_set, "STEPS_FOR_ONE_MORE", 3)
    assert replay(str(path)).difference


def test_auto_is_several_where_the_host_takes_a_share():
    for name, number in {"cpu (x)": 1, "gpu (NVIDIA H100)": 8, "tpu (TPU v5e)": 8}.items():
        device = DeviceSpec(name, 2**30)
        assert engine_spec.choose_num_steps(EngineConfig(), device) == number
        drafting = EngineConfig(speculative_config={"method": "ngram"})
        assert engine_spec.choose_num_steps(drafting, device) == 1
        assert engine_spec.choose_num_steps(EngineConfig(num_scheduler_steps=3), device) == 3


def forgets_the_token(inputs: Any, index: Any, token_ids_B: Any) -> Any:
    """Goes on with the first token in every step."""
    first = inputs.token_ids_T[inputs.query_start[:-1]]
    return at_step(inputs, index, first)


def forgets_the_place(inputs: Any, index: Any, token_ids_B: Any) -> Any:
    """Draws with the noise of the first step in every step."""
    now = at_step(inputs, index, token_ids_B)
    first = at_step(inputs, jnp.int32(0), token_ids_B).draws
    return now._replace(draws=now.draws._replace(drawn_position_R=first.drawn_position_R))


def writes_to_one_slot(inputs: Any, index: Any, token_ids_B: Any) -> Any:
    now = at_step(inputs, index, token_ids_B)
    return now._replace(slots_ZT=at_step(inputs, jnp.int32(0), token_ids_B).slots_ZT)


OF_FAMILY = {FAMILY_OF[config_json(name)["architectures"][0]]: name for name in reversed(MODELS)}


@pytest.mark.parametrize("backend", ["auto", pytest.param("scan", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", few(OF_FAMILY, ["gemma2"]))
def test_no_family_has_other_bits_in_several_steps(family, backend, tmp_path):
    """XLA may round otherwise what it takes out of the loop over the steps.

    A bias of nothing is computed one step at a time.

    On a CPU norms are XLA's with scan alone, and they differ only where they are compiled as for
    users (`--optimized`).
    """
    random_checkpoint(tmp_path, config_json(OF_FAMILY[family]))
    several = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True, logprobs=3)
    single = dataclasses.replace(several, logit_bias={5: 0.0})
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 60, "num_blocks": 20}
    settings = {**sizes, "num_scheduler_steps": NUM_STEPS, "attention_backend": backend}
    with make_llm(tmp_path, **settings) as llm:
        expected = llm.generate([3, 1, 4, 1, 5], single, use_tqdm=False)
        rows, tokens = count_decoded(llm)
        assert tokens == rows == 12
        assert tokens_of(llm.generate([3, 1, 4, 1, 5], several, use_tqdm=False)) == tokens_of(
            expected
        )
        assert count_decoded(llm) == (rows + 3, tokens + 12)


@pytest.mark.parametrize(
    "mistake",
    few([forgets_the_token, forgets_the_place, writes_to_one_slot], [writes_to_one_slot]),
)
def test_a_planted_mistake_is_seen(mistake, directory, expected, monkeypatch):
    monkeypatch.setattr(steps, "at_step", mistake)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_scheduler_steps": NUM_STEPS}
    with make_llm(directory, **small) as llm:
        assert ask(llm, [0, 1, 2]) != [expected[index] for index in (0, 1, 2)]


def test_wrong_settings():
    for value in (0, 33, "many"):
        with pytest.raises(ConfigError, match="num_scheduler_steps"):
            EngineConfig(num_scheduler_steps=value)
    with pytest.raises(
        ConfigError, match="num_scheduler_steps: cannot be 2 with a speculative_config"
    ):
        EngineConfig(
            num_scheduler_steps=2,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )


def test_a_request_that_is_aborted_between_two_steps_is_gone(engines):
    llm = engines("roomy")
    with llm.stream(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ) as stream:
        first = [next(stream) for _ in range(3)]
    assert max(len(each.outputs[0].token_ids) for each in first) == NUM_STEPS
    invariants(llm)
