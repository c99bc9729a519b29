"""Figure 15's measurement: what it sums up is what block tables of that shape must share."""

from __future__ import annotations

import json

import pytest

from jaxpage.bench import sharing
from jaxpage.bench.workloads import WorkItem
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint

SIZE, PROMPT, OUTPUT = 16, 40, 30


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with make_llm(random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA), enable_prefix_caching=False) as llm:
        yield llm
        invariants(llm)


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def test_parallel_sampling_shares_the_full_blocks_of_the_prompt(llm):
    """Step by step from the lengths alone, for one request of four samples."""
    saving = sharing.measure(llm, [WorkItem(tuple(range(1, PROMPT + 1)), OUTPUT)], "parallel sampling", 4)
    splits = [sample.split for sample in llm.memory_report().samples][-(OUTPUT - 1) :]  # after the prompt's step
    wanted = [(3 * (PROMPT // SIZE), 4 * blocks(PROMPT + 1 + step)) for step in range(OUTPUT - 1)]
    assert [(split.saved_blocks, split.unshared_blocks) for split in splits] == wanted
    assert saving.peak_blocks == 4 * blocks(PROMPT + OUTPUT - 1) - 3 * (PROMPT // SIZE)
    assert 0 < saving.saved_by_sharing <= max(saved / unshared for saved, unshared in wanted)


def test_written_prompts_have_the_lengths_that_were_asked_for(llm):
    workload = [WorkItem((7,), 3), WorkItem(tuple(range(20)), 5)]
    written = sharing.written_prompts(llm, workload)
    assert [(len(item.prompt_token_ids), item.num_output_tokens) for item in written] == [(1, 3), (20, 5)]
    assert [item.prompt_token_ids[0] for item in written] == [7, 0]


def test_beams_share_more_than_samples(capsys):
    sharing.main(["figure15", "--num-prompts", "2", "--seed", "3"])
    printed = capsys.readouterr().out
    results = json.loads(printed.splitlines()[-1])["results"]
    by_method = {(result["method"], result["width"]): result["saved_by_sharing"] for result in results}
    assert len(by_method) == 6 and "6.1 / 8.5 / 9.8" in printed
    for width in sharing.WIDTHS:
        assert 0 < by_method["parallel sampling", width] < by_method["beam search", width] < 1


@pytest.mark.parametrize(
    "words", [["figure99"], ["figure15", "--num-prompts", "0"], ["figure15", "--model", "nowhere"]]
)
def test_wrong_use_exits_with_two(words, capsys):
    with pytest.raises(SystemExit) as exit_of:
        sharing.main(words)
    assert exit_of.value.code == 2 and "error" in capsys.readouterr().err
