"""Layers that see a window have blocks of their own: as many as they see, and no token shows it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning.cache_groups import cache_groups, group_of_layers
from jaxpage.assembly.planning.sizing import MemoryPlan, WindowBlocks
from jaxpage.models.base import KVSpec
from jaxpage.serving.inspector.state import Inspector
from jaxpage.step.plan import Row, StepPlan
from tests.support.engines import invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.test_plan import plan_of

WINDOW, BLOCK_SIZE = 8, 4
pytestmark = pytest.mark.usefixtures("decode_as_chunks")
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": BLOCK_SIZE,
    "max_model_len": 192,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = [
    np.random.default_rng(5).integers(1, 257, length).tolist() for length in (70, 5, 40, 90, 2)
]
LENGTH = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("qwen"), QWEN)


def texts(llm: LLM) -> list[list[list[int]]]:
    params = [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    invariants(llm)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def reference_texts(model):
    """Returns the texts of an engine that has room for all, with blocks of 16 and other chunks."""
    with make_llm(model, num_blocks=129) as llm:
        assert [group.sliding_window for group in llm.spec.groups] == [None, WINDOW]
        return texts(llm)


# 80 blocks for the full layer hold one of the longest and a part of another.
@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "recompute", "speculative_config": DRAFTS},
        {"preemption_mode": "swap"},
    ],
    ids=["recomputed, with drafts", "swapped"],
)
def test_tokens_do_not_depend_on_the_pools(model, reference_texts, settings):
    with make_llm(model, **SETTINGS, **settings, num_blocks=81) as llm:
        full, window = llm._engine.scheduler.block_manager.groups
        assert (full.pool.num_usable, window.pool.num_usable) == (80, 4 * window.max_blocks(192))
        assert (
            window.max_blocks(192)
            == (WINDOW + 16 - 1) // BLOCK_SIZE + 2
            < full.max_blocks(192)
            == 48
        )
        assert texts(llm) == reference_texts, "the first round"
        assert texts(llm) == reference_texts, "with prefixes in the cache"
        stats = llm.stats()
        assert stats["prefix_cache_hits_total"] > 0
        assert stats["num_preemptions_total"][settings["preemption_mode"]] > 0


def test_a_pool_holds_what_would_not_fit_otherwise(model, reference_texts):
    """A sequence of 48 blocks fits in the bytes of 47 blocks of all layers: three of four layers
    keep 7 of them.
    """
    block_bytes = 4 * 2 * BLOCK_SIZE * 2 * 16 * 4
    with make_llm(
        model, **SETTINGS | {"num_blocks": None, "kv_cache_memory_bytes": 48 * block_bytes}
    ) as llm:
        assert llm.memory.block_bytes == block_bytes and llm.memory.pool_bytes <= 48 * block_bytes
        assert llm.memory.num_blocks > 1 + 2 * 48, "two of the longest, in what would hold none"
        assert texts(llm) == reference_texts
        assert (
            len(llm.generate([1] * 126, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == LENGTH
        )


def test_the_plan_says_what_windows_save(model, tmp_path, capsys):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "layer_types": ["full_attention"] * 4})
    )
    sizes = (
        "--max-num-seqs",
        "4",
        "--block-size",
        "4",
        "--max-num-batched-tokens",
        "16",
        "--max-model-len",
        "192",
    )
    mixed = plan_of(capsys, str(model), *sizes, "--num-blocks", "97")
    full = plan_of(capsys, str(tmp_path), *sizes, "--num-blocks", "97")
    assert (
        mixed["block_bytes"] == full["block_bytes"]
        and full["pool_bytes"] == 97 * full["block_bytes"]
    )
    assert mixed["pool_bytes"] == (97 + 3 * (1 + 4 * 7)) * full["block_bytes"] // 4
    assert mixed["users"] == full["users"] > 0


def test_a_block_of_another_group_is_refused(model):
    with make_llm(model, **SETTINGS, num_blocks=81) as llm:
        builder = llm._engine.builder
        row = Row(0, 0, (1,), ((1,), (81,)))
        batch = builder.build(StepPlan(0, (row,), ()))
        assert batch.num_rows == 1
        for wrong in (80, 109):
            with pytest.raises(ValueError, match="(slots_ZT|block_table_ZBM) has entries"):
                builder.build(StepPlan(0, (row._replace(block_tables=((1,), (wrong,))),), ()))
        for copies in (((1, 81),), ((80, 109),)):
            with pytest.raises(ValueError, match="copies .* leave the pools"):
                builder.build(StepPlan(0, (row,), (), copies=copies))


def test_the_inspector_shows_every_group(model):
    """Its reference counts are what the block tables add up to, while a window slides."""
    with make_llm(model, **SETTINGS, num_blocks=81) as llm:
        engine, inspector = llm._engine, Inspector()
        manager = engine.scheduler.block_manager
        engine.add("one", engine.prepare(None, PROMPTS[0], SEEDED))
        for _ in range(16):
            engine.step()
            snapshot = json.loads(json.dumps(inspector.inspect(engine)))
            (group,) = snapshot["pool"]["further_groups"]
            sequences = [
                sequence for request in snapshot["requests"] for sequence in request["sequences"]
            ]
            tables = {sequence["id"]: sequence["further_blocks"][0] for sequence in sequences}
            assert tables == {
                sequence: list(manager.block_tables(sequence)[1])
                for sequence in manager.sequence_ids
            }
            counted = Counter(block for table in tables.values() for block in table)
            ids = range(group["first_block"], group["first_block"] + group["num_blocks"])
            assert group["ref_counts"] == [counted[block] for block in ids] and any(
                group["ref_counts"]
            )
        assert 0 in tables[min(tables)] and len(tables) == 2, "something fell out of the window"
        engine.abort_all()


def test_layers_are_grouped_by_how_far_they_see():
    target = KVSpec(num_layers=4, num_kv_heads=2, head_dim=16, sliding_windows=(8, None, 32, 8))
    drafter = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, sliding_windows=(None, 64))
    groups = cache_groups((target, drafter), max_length=64, block_size=4, dtype="float32")
    assert [(group.sliding_window, group.layers) for group in groups] == [
        (None, (1, 4, 5)),
        (32, (2,)),
        (8, (0, 3)),
    ]
    layer = 2 * 4 * 2 * 16 * 4
    assert [group.block_bytes for group in groups] == [layer + 2 * layer // 2, layer, 2 * layer]
    assert group_of_layers(groups) == (2, 0, 1, 2, 0, 0)


@given(
    first=st.integers(1, 50),
    windows=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), max_size=3),
    num_bytes=st.integers(1, 5000),
)
def test_the_largest_pool_in_so_many_bytes(first, windows, num_bytes):
    plan = dataclasses.replace(
        MemoryPlan(
            device="cpu",
            available_bytes=10**6,
            weights_bytes=0,
            workspace_bytes=0,
            block_bytes=first + sum(size for size, _ in windows),
            block_size=4,
            num_blocks=0,
            max_model_len=64,
        ),
        windows=tuple(WindowBlocks(8, size, 1, maximum) for size, maximum in windows),
    )
    sizes = [
        num * first + sum(min(num, 1 + maximum) * size for size, maximum in windows)
        for num in range(num_bytes // first + 2)
    ]
    assert [plan.bytes_of(num) for num in range(len(sizes))] == sizes
    assert plan.max_blocks(num_bytes) == max(
        num for num, size in enumerate(sizes) if size <= num_bytes
    )
