"""Prefixes that survive a restart: the same bits as computed, whatever is done to the files;
bounded; forgotten with other weights.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.assembly.planning import capacity
from jaxpage.errors import CapacityError, ConfigError, UnsupportedError
from jaxpage.prefix_store import PrefixFiles, StoredBlock
from tests.support.engines import LLAMA, SMALL_POOL, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [
    [(7 * i) % 250 + 1 for i in range(100)],
    [(7 * i) % 250 + 1 for i in range(60)] + [5] * 20,
    [9, 8, 7] * 10,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model") / "m", LLAMA)


def answers(
    llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm._engine.scheduler.block_manager.check()
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


def counts(llm: LLM) -> dict[str, int]:
    values = {
        name.removeprefix("prefix_files_"): count
        for name, count in llm.stats().items()
        if "prefix_files" in name
    }
    return {name.removesuffix("_blocks_total"): count for name, count in values.items()}


@pytest.fixture(scope="module")
def plain(model):
    with make_llm(model) as llm:
        return answers(llm)


@pytest.fixture
def full_directory(model, tmp_path, plain):
    """Fills a directory with blocks of the prompts."""
    with make_llm(model, prefix_cache_directory=str(tmp_path), preemption_mode="swap") as llm:
        assert answers(llm) == plain
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 6 + 2 + 2, (
        "full blocks; the second prompt's first three are the first's"
    )
    return tmp_path


def test_a_restart_finds_what_was_computed_with_the_same_bits(model, full_directory, plain):
    with make_llm(model, prefix_cache_directory=str(full_directory), preemption_mode="swap") as llm:
        assert answers(llm) == plain
        assert counts(llm) == {"written": 0, "restored": 6 + 1 + 1, "skipped": 0, "dropped": 0}
        assert llm.stats()["prefix_cache_hits_total"] == 16 * (6 + 4 + 1)
        index = llm._engine.scheduler.block_manager.cached.index
        digests = index.extend([], PROMPTS[0], None, 6)
        restored = llm._engine.runner.read_blocks([index.block_of(digest) for digest in digests])
    with make_llm(model, preemption_mode="swap") as llm:
        answers(llm)
        index = llm._engine.scheduler.block_manager.cached.index
        computed = llm._engine.runner.read_blocks([index.block_of(digest) for digest in digests])
    np.testing.assert_array_equal(restored, computed)


def test_a_small_pool_and_other_prompts_beside_it(model, full_directory, plain):
    """Blocks from files put nothing out of its place, and requests that are preempted find them as
    well.
    """
    with make_llm(
        model,
        **{**SMALL_POOL, "preemption_mode": "swap"},
        prefix_cache_directory=str(full_directory),
    ) as llm:
        for prompts in ([[3] * 90, *PROMPTS], PROMPTS, PROMPTS[::-1]):
            tokens = dict(zip(map(tuple, prompts), answers(llm, prompts), strict=True))
            assert [tokens[tuple(prompt)] for prompt in PROMPTS] == plain


def test_restored_blocks_that_no_request_uses_yet_are_evicted_from_the_end(model, full_directory):
    """The first block is found in memory, and a later one is restored: the chain ends up in
    order.
    """
    with make_llm(model, prefix_cache_directory=str(full_directory), start=False) as llm:
        engine = llm._engine
        for length in (20, 100):
            prepared = engine.prepare(None, PROMPTS[0][:length], PARAMS)
            engine.add(f"{length}", prepared)
            engine.scheduler.block_manager.check()
        assert counts(llm)["restored"] == 6


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "another's", "other tokens", "empty", "a directory"]
)
def test_damaged_and_foreign_files_are_skipped(damage, model, full_directory, plain):
    paths = sorted(full_directory.glob("*/*.safetensors"))
    contents = {path: path.read_bytes() for path in paths}
    for path, other in zip(paths, [*paths[1:], paths[0]], strict=True):
        data = contents[path]
        if damage == "a directory":
            path.unlink()
            path.mkdir()
            continue
        path.write_bytes(
            {
                "cut": data[:-1],
                "flipped": data[:-1] + bytes([data[-1] ^ 1]),
                "another's": contents[other],
                "other tokens": data.replace(
                    np.array(PROMPTS[0][:4], np.int32).tobytes(), b"\1" * 16
                ),
                "empty": b"",
            }[damage]
        )
    with make_llm(model, prefix_cache_directory=str(full_directory), preemption_mode="swap") as llm:
        assert answers(llm) == plain
        assert counts(llm)["skipped"] >= 1 or damage == "a directory", "which is no file of ours"
        assert counts(llm)["restored"] == 0 or damage == "other tokens"
    with make_llm(model, prefix_cache_directory=str(full_directory), preemption_mode="swap") as llm:
        assert answers(llm) == plain
        values = counts(llm)
        assert (values["restored"], values["skipped"]) == (8, 0) or damage == "a directory", (
            "all were written anew"
        )


def test_other_weights_find_nothing(model, full_directory, tmp_path, plain):
    other = random_checkpoint(tmp_path / "other", LLAMA, seed=1)
    with make_llm(other, prefix_cache_directory=str(full_directory), preemption_mode="swap") as llm:
        assert answers(llm) != plain and counts(llm)["restored"] == 0
    with make_llm(model, prefix_cache_directory=str(full_directory), preemption_mode="swap") as llm:
        llm.update_parameters(random_tensors(LLAMA, seed=1))
        assert answers(llm) != plain
        assert counts(llm) == {"written": 0, "restored": 0, "skipped": 0, "dropped": 0}, (
            "the key is that of other weights"
        )


def test_the_files_are_bounded_and_the_least_recently_used_go_first(tmp_path):
    blocks = [StoredBlock(bytes([index]) * 32, b"", (index,)) for index in range(8)]
    contents = np.arange(4000, dtype=np.uint8)
    (tmp_path / "key").mkdir(mode=0o755)
    files = PrefixFiles(tmp_path, "key", 40_000)
    for block in blocks:
        files.write(block, contents)
    files.close()
    assert files.counts.written == 8 and not (tmp_path / "key").stat().st_mode & 0o077
    sizes = [path.stat().st_size for path in (tmp_path / "key").glob("*.safetensors")]
    assert len(sizes) == 8 and files.num_bytes == sum(sizes)
    (tmp_path / "model").mkdir()
    foreign = tmp_path / "model" / "model.safetensors"
    foreign.write_bytes(bytes(100_000))
    (tmp_path / "key" / f"{blocks[7].digest.hex()}x.safetensors").mkdir()
    os.utime(foreign, (0, 0))
    left = tmp_path / "key" / f"{blocks[6].digest.hex()}.123"
    for path, age in ((left, 3600), (left.with_suffix(".124"), 0)):
        path.write_bytes(bytes(100_000))
        os.utime(path, (time.time() - age,) * 2)
    again = PrefixFiles(tmp_path, "other", 5 * 4500)
    again.close()
    assert not left.exists() and left.with_suffix(".124").exists(), (
        "of a process that ended, and of one that writes"
    )
    files = PrefixFiles(tmp_path, "key", 5 * 4500)
    np.testing.assert_array_equal(files.read(blocks[0]), contents)
    files.write(StoredBlock(b"\xff" * 32, b"", (9,)), contents)
    files.close()
    assert files.num_bytes <= 5 * 4500
    assert [files.has(block.digest) for block in blocks] == [True, *[False] * 4, True, True, True]
    assert foreign.stat().st_size == 100_000, "a file of another name stays"


def test_what_cannot_be_deleted_or_written_ends_no_thread(tmp_path):
    contents = np.arange(4000, dtype=np.uint8)
    files = PrefixFiles(tmp_path, "key", 5000)
    first, second, third = (StoredBlock(bytes([index]) * 32, b"", (index,)) for index in range(3))
    files.write(first, contents)
    files.close()
    files = PrefixFiles(tmp_path, "key", 5000)
    path = tmp_path / "key" / f"{first.digest.hex()}.safetensors"
    path.unlink()
    path.mkdir()  # what the least recently used file is by now
    files.write(second, contents)
    while not files.counts.written:
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "key")
    (tmp_path / "key").write_text("")
    files.write(third, contents)
    files.close()
    assert files.counts.dropped == 1
    (tmp_path / "key").unlink()
    files = PrefixFiles(tmp_path, "key", 50_000)
    files.write(third, contents)
    files.close()
    files = PrefixFiles(tmp_path, "key", 50_000)
    path = tmp_path / "key" / f"{third.digest.hex()}.safetensors"
    path.unlink()
    os.mkfifo(path)  # nobody ever writes to it
    assert files.read(third) is None and files.counts.skipped == 1 and not path.exists()
    files.close()


def test_swapped_blocks_lie_in_a_file_where_memory_has_no_room(model, tmp_path, monkeypatch):
    long = [[token] * 30 for token in range(1, 5)], replace(PARAMS, max_tokens=70)
    with make_llm(model) as llm:
        in_memory = answers(llm, *long)
    monkeypatch.setattr(capacity, "available_host_bytes", lambda: 0)
    settings = {"num_blocks": 17, "preemption_mode": "swap", "swap_space_blocks": 24}
    with pytest.raises(
        CapacityError,
        match=r"24 host blocks .* 0 B are free; .* Lower swap_space_blocks to 0 or less",
    ):
        make_llm(model, **settings)
    settings["prefix_cache_directory"] = str(tmp_path / "new")
    with pytest.raises(
        CapacityError,
        match=r"0 B are free, and of prefix_cache_directory and its disk 100.00 KiB; ",
    ):
        make_llm(model, **settings, prefix_cache_disk_bytes="100KiB")
    with make_llm(model, **settings) as llm:
        assert answers(llm, *long) == in_memory and llm.stats()["num_preemptions_total"]["swap"] > 0
        assert [type(pages._rows) for pages in llm._engine.runner._host_pages] == [np.memmap]
        assert llm._engine.events._files._max_bytes == 8 * 2**30 - llm.memory.host_pool_bytes
    assert not [path for path in tmp_path.glob("new/*") if path.is_file()], (
        "the file was nobody else's"
    )


def test_what_cannot_be_had_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="prefix_cache_directory .*cannot be used"):
        make_llm(model, prefix_cache_directory=str(tmp_path / "file"), preemption_mode="swap")
    for settings, text in (
        ({"event_log": str(tmp_path / "log")}, "not supported with event_log"),
        ({"enable_prefix_caching": False}, "nothing is cached"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=text):
            make_llm(model, prefix_cache_directory=str(tmp_path), **settings)
