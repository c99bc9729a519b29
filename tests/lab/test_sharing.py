"""Figure 15's measurement: what it sums up is what block tables of that shape must share."""

from __future__ import annotations

import pytest

from jaxpage.bench.workloads import WorkItem
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tools.lab.paper import measured_sharing

SIZE, PROMPT, OUTPUT = 16, 40, 30


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with make_llm(
        random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA), enable_prefix_caching=False
    ) as llm:
        yield llm
        invariants(llm)


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def test_parallel_sampling_shares_the_full_blocks_of_the_prompt(llm):
    """The oracle goes step by step from the lengths alone, for one request of four samples."""
    saving = measured_sharing.measure(
        llm, [WorkItem(tuple(range(1, PROMPT + 1)), OUTPUT)], "parallel sampling", 4
    )
    # after the prompt's step
    splits = [sample.split for sample in llm.memory_report().samples][-(OUTPUT - 1) :]
    expected = [(3 * (PROMPT // SIZE), 4 * blocks(PROMPT + 1 + step)) for step in range(OUTPUT - 1)]
    assert [(split.saved_blocks, split.unshared_blocks) for split in splits] == expected
    assert saving.peak_blocks == 4 * blocks(PROMPT + OUTPUT - 1) - 3 * (PROMPT // SIZE)
    assert 0 < saving.saved_by_sharing <= max(saved / unshared for saved, unshared in expected)


def test_written_prompts_have_the_lengths_that_were_requested(llm):
    workload = [WorkItem((7,), 3), WorkItem(tuple(range(20)), 5)]
    written = measured_sharing.write_prompts(llm, workload)
    assert [(len(item.prompt_token_ids), item.num_output_tokens) for item in written] == [
        (1, 3),
        (20, 5),
    ]
    assert [item.prompt_token_ids[0] for item in written] == [7, 0]


def test_beams_share_more_than_samples(llm):
    workload = measured_sharing.write_prompts(llm, [WorkItem(tuple(range(1, 40)), 50)])
    samples, beams = (
        measured_sharing.measure(llm, workload, method, 4)
        for method in ("parallel sampling", "beam search")
    )
    assert 0 < samples.saved_by_sharing < beams.saved_by_sharing < 1
