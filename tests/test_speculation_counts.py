"""Counts of drafts, against counts by hand: in all, by position, and of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.cli.generate import _describe_drafts
from jaxpage.outputs import RequestMetrics
from jaxpage.speculation.counts import SpeculationCounts, Verified, count_verified_drafts
from jaxpage.step.edits import Append, Finish
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, SequenceGroup
from jaxpage.step.request import Sequence as Tokens
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.scripted import DRAFTING, Scripted, draft_with, without_drafts

pytestmark = pytest.mark.usefixtures("largest_shapes")

PROMPT = np.random.default_rng(1).integers(1, 257, 21).tolist()
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
NAMES = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_wasted_slots_total",
)
# By output tokens that are known: right and wrong drafts. The first token is drawn after the
# prompt; 2 of 3 drafts are right, which makes 4 tokens known; a step without drafts; all of 4 are
# right, which makes 10; of 4 right ones there is room for one before the last.
SCRIPT = {1: (2, 1), 5: (4, 0), 10: (4, 0)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, speculative_config=DRAFTING) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(llm):
    """Returns what the request is, with the prompt."""
    without_drafts(llm)
    tokens = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert tokens[7] not in tokens[:7], "a stop would come earlier than it is meant to"
    return [*PROMPT, *tokens]


def count(llm: LLM, text: list[int], params: Any) -> tuple[dict[str, Any], Any]:
    """Returns what a request adds to the counters, and the request."""
    first_id = llm._engine._num_sequences

    def script(sequence_id: int, known: int) -> tuple[int, int]:
        return SCRIPT.get(known - len(PROMPT), (0, 0))

    draft_with(llm._engine, Scripted({first_id: text}, script))
    before = llm.stats()
    output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    after = llm.stats()
    labelled = "spec_decode_num_accepted_tokens_per_pos_total"
    added = {
        name: after[name] - before[name]
        for name in (*NAMES, "decode_rows_total", "decode_tokens_total")
    }
    added[labelled] = {
        position: number - before[labelled].get(position, 0)
        for position, number in after[labelled].items()
    }
    lengths = "spec_decode_num_drafts_by_length_total"
    added[lengths] = {
        length: number - before[lengths].get(length, 0)
        for length, number in after[lengths].items()
        if number > before[lengths].get(length, 0)
    }
    return added, output


def test_a_request_by_hand(llm, text):
    added, output = count(llm, text, PARAMS)
    assert output.outputs[0].token_ids == text[len(PROMPT) :]
    assert added == {
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 3 + 4 + 1,
        "spec_decode_num_accepted_tokens_total": 2 + 4 + 1,
        "spec_decode_wasted_slots_total": 1,
        "spec_decode_num_accepted_tokens_per_pos_total": {0: 3, 1: 2, 2: 1, 3: 1},
        "spec_decode_num_drafts_by_length_total": {1: 1, 3: 1, 4: 1},
        "decode_rows_total": 4,
        "decode_tokens_total": 11,
    }
    metrics = output.metrics
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 8, 7)
    stats = llm.stats()
    assert (
        stats["spec_decode_draft_seconds_total"] > 0
        and stats["spec_decode_verify_seconds_total"] > 0
    )


def test_what_a_stop_cuts_off_is_not_accepted(llm, text):
    """The third of four right drafts ends the text: the fourth was right, and is no token of it."""
    stop = text[len(PROMPT) + 7]
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]
    )
    added, output = count(llm, text, params)
    assert output.outputs[0].token_ids == text[len(PROMPT) : len(PROMPT) + 8]
    assert [added[name] for name in NAMES] == [2, 3 + 4, 2 + 3, 2]
    assert added["spec_decode_num_accepted_tokens_per_pos_total"] == {0: 2, 1: 2, 2: 1, 3: 0}
    assert (added["decode_rows_total"], added["decode_tokens_total"]) == (3, 7)
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (7, 5)


def test_samples_count_together_and_requests_apart(llm, text):
    first_id = llm._engine._num_sequences
    draft_with(llm._engine, Scripted({first_id: text}, lambda *_: (4, 0)))
    params = [SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True), PARAMS]
    before = llm.stats()
    two, single = llm.generate([PROMPT, [5, 6, 7]], params, use_tqdm=False)
    assert two.outputs[0].token_ids == text[len(PROMPT) :]
    assert (
        two.metrics.num_drafts,
        two.metrics.num_draft_tokens,
        two.metrics.num_accepted_tokens,
    ) == (2, 8, 8)
    assert (
        single.metrics.num_drafts,
        single.metrics.num_draft_tokens,
        single.metrics.num_accepted_tokens,
    ) == (0, 0, 0)
    after = llm.stats()
    assert [after[name] - before[name] for name in NAMES] == [2, 8, 8, 0]
    # Every first token is drawn after a prompt: two of them in one step, which decodes nobody.
    assert after["decode_tokens_total"] - before["decode_tokens_total"] == 33
    assert after["decode_rows_total"] - before["decode_rows_total"] == 33 - 8


def test_without_drafts_there_is_nothing_to_count(llm):
    without_drafts(llm)
    before = llm.stats()
    outputs = llm.generate([PROMPT, [1, 2]], [PARAMS, BeamSearchParams(2, 5)], use_tqdm=False)
    after = llm.stats()
    assert all(after[name] == before[name] for name in NAMES)
    assert after["decode_rows_total"] - before["decode_rows_total"] == 11, "beams are not counted"
    assert after["decode_tokens_total"] - before["decode_tokens_total"] == 11
    assert all(output.metrics.num_drafts == 0 for output in outputs)


def test_names_of_an_engine_that_has_done_nothing():
    assert SpeculationCounts().snapshot() == {
        **dict.fromkeys(NAMES, 0),
        "spec_decode_num_accepted_tokens_per_pos_total": {},
        "spec_decode_num_drafts_by_length_total": {},
        "spec_decode_draft_seconds_total": 0.0,
        "spec_decode_verify_seconds_total": 0.0,
        "decode_rows_total": 0,
        "decode_tokens_total": 0,
        "tokens_per_target_step": 0.0,
    }


def group_of(*sequence_ids: int, num_prompt_tokens: int) -> dict[int, SequenceGroup]:
    prompt = tuple(range(1, 1 + num_prompt_tokens))
    request = Request(
        request_id="a",
        prompt=None,
        prompt_token_ids=prompt,
        params=PARAMS,
        seed=0,
        eos_token_ids=frozenset(),
        max_total_tokens=99,
    )
    tokens = [
        Tokens(sequence_id, 0, num_prompt_tokens, list(prompt)) for sequence_id in sequence_ids
    ]
    return dict.fromkeys(sequence_ids, SequenceGroup(request, tokens))


def plan_of(*rows: Row, draws: Sequence[tuple[int, int]]) -> StepPlan:
    samples = (Sample(row, offset, rows[row].sequence_id, PARAMS, 0, 0, 0) for row, offset in draws)
    return StepPlan(1, rows, tuple(samples))


def test_of_a_tree_a_position_is_a_depth():
    """There are two first drafts, and one after the second of them: positions 0 and 1, three
    tokens.
    """
    tree = Row(4, 9, (7, 1, 2, 3), ((1,),), parents=(0, 0, 2))
    plan = plan_of(tree, draws=[(0, offset) for offset in range(4)])
    edits = [
        Append(4, 2, drafted=True),
        Append(4, 3, drafted=True),
        Append(4, 8),
        Finish(4, "stop"),
    ]
    assert count_verified_drafts(plan, edits) == [Verified(4, 3, 2)]
    counts = SpeculationCounts()
    counts.add(plan, edits, group_of(4, num_prompt_tokens=5))
    assert counts.num_accepted_per_position == {0: 1, 1: 1}
    assert (counts.num_draft_tokens, counts.num_decode_rows, counts.num_decode_tokens) == (3, 1, 3)


def test_only_rows_that_decode_are_target_steps():
    """A prompt's last token and a token that is computed again draw nothing of a step that
    decodes.
    """
    groups = group_of(1, 2, 3, num_prompt_tokens=5)
    rows = (Row(1, 4, (5,), ((1,),)), Row(2, 6, (8,), ((2,),)), Row(3, 7, (8,), ((3,),)))
    plan = plan_of(*rows, draws=[(0, 0), (2, 0)])  # sequence 2 has more to compute
    counts = SpeculationCounts()
    counts.add(plan, [Append(1, 6), Append(3, 9)], groups)
    assert (
        counts.num_decode_rows,
        counts.num_decode_tokens,
        counts.snapshot()["tokens_per_target_step"],
    ) == (1, 1, 1)


def test_who_was_aborted_in_the_middle_of_a_step_is_passed_over():
    gone = Row(4, 9, (7, 1, 2), ((1,),), parents=(0, 1))
    plan = plan_of(
        gone,
        Row(5, 9, (7, 3), ((2,),), parents=(0,)),
        draws=[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)],
    )
    counts = SpeculationCounts()
    count = counts.add(
        plan, [Append(5, 3, drafted=True), Append(5, 8)], group_of(5, num_prompt_tokens=5)
    )
    assert count == [Verified(5, 1, 1)] and counts.num_accepted_per_position == {0: 1}
    assert (counts.num_drafts, counts.num_decode_rows, counts.num_decode_tokens) == (1, 1, 2)
    assert counts.add(plan, [], {}) == [] and counts.num_drafts == 1


def test_the_line_after_a_text_says_what_was_accepted():
    metrics = RequestMetrics(arrival_time=0.0)
    assert _describe_drafts(None) == _describe_drafts(metrics) == ""
    metrics = replace(metrics, num_drafts=3, num_draft_tokens=8, num_accepted_tokens=7)
    assert _describe_drafts(metrics) == "7 of 8 drafts accepted, "
