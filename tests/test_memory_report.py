"""The split of the pool against sets of slots, its history against all that was seen, and the
report from engine to picture.
"""

from __future__ import annotations

import json
import struct
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import MemoryReport, SamplingParams, cli
from jaxpage.memory import MemoryHistory, MemorySplit
from jaxpage.memory.memory_split import split_memory
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes")
NUM_BLOCKS = 9  # usable ones: 1 to 9


@st.composite
def block_tables(draw: st.DrawFn, block_size: int) -> tuple[list[int], int, int]:
    """Returns some blocks, after null blocks where a window passed by, with tokens computed and
    known.
    """
    num_passed = draw(st.integers(0, 2))
    blocks = draw(st.lists(st.integers(1, NUM_BLOCKS), unique=True, max_size=5))
    slots = (num_passed + len(blocks)) * block_size
    num_computed = draw(st.integers(num_passed * block_size, slots))
    return [0] * num_passed + blocks, num_computed, draw(st.integers(num_computed, slots + 3))


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_the_split_counts_slots(data, block_size):
    tables = data.draw(st.lists(block_tables(block_size), max_size=4))
    pinned = [
        (blocks, computed)
        for blocks, computed, _ in data.draw(st.lists(block_tables(block_size), max_size=2))
    ]

    def slots(blocks: list[int], num_tokens: int) -> set[tuple[int, int]]:
        places = range(min(num_tokens, len(blocks) * block_size))
        return {
            (blocks[p // block_size], p % block_size)
            for p in places
            if blocks[p // block_size] != 0
        }

    every = [*tables, *((blocks, held, held) for blocks, held in pinned)]
    computed = set().union(*(slots(blocks, num_computed) for blocks, num_computed, _ in every))
    known = set().union(*(slots(blocks, num_known) for blocks, _, num_known in every))
    entries = [block for blocks, *_ in every for block in blocks if block]
    blocks_of_tables = [block for blocks, *_ in tables for block in blocks if block]
    num_free = NUM_BLOCKS - len(set(entries))
    assert split_memory(tables, block_size, num_free, pinned) == MemorySplit(
        token_slots=len(computed),
        reserved_slots=len(known - computed),
        internal_fragmentation_slots=len(set(entries)) * block_size - len(known),
        free_slots=num_free * block_size,
        shared_blocks=sum(entries.count(block) > 1 for block in set(entries)),
        saved_blocks=len(blocks_of_tables) - len(set(blocks_of_tables)),
        unshared_blocks=len(blocks_of_tables),
    )


def test_a_pin_saves_nothing_until_two_use_it():
    prefix, tables = ([1, 2], 7), [([1, 2, 3], 9, 10)]
    alone = split_memory([], 4, 7, [prefix])
    assert (alone.token_slots, alone.internal_fragmentation_slots) == (7, 1)
    assert (alone.shared_blocks, alone.saved_blocks, alone.saved_by_sharing) == (0, 0, 0.0)
    used = split_memory(tables, 4, 6, [prefix])
    assert (used.token_slots, used.shared_blocks, used.saved_blocks) == (9, 2, 0)
    twice = split_memory([*tables, ([1, 2, 4], 9, 10)], 4, 5, [prefix])
    assert (twice.shared_blocks, twice.saved_blocks, twice.saved_by_sharing) == (2, 2, 1 / 3)


def split_of(num_tokens: int, num_slots: int = 100, **sharing: int) -> MemorySplit:
    sharing = {"shared_blocks": 0, "saved_blocks": 0, "unshared_blocks": 0, **sharing}
    return MemorySplit(num_tokens, 0, 0, num_slots - num_tokens, **sharing)


def run(
    history: MemoryHistory, splits: list[MemorySplit], seconds: list[float]
) -> list[MemorySplit]:
    """Returns the steps that were looked at, of those that hold `splits` and take `seconds`."""
    seen: list[MemorySplit] = []

    def look() -> MemorySplit:
        seen.append(split)
        return split

    for split, each in zip(splits, seconds, strict=True):
        history.begin(look, used_blocks=split.token_slots, num_preempted=1)
        history.end(each)
    return seen


@given(st.integers(0, 300), st.sampled_from([2, 4, 8, 10]))
def test_samples_are_every_kth_step_however_many_there_are(num_steps, max_samples):
    splits, history = [split_of(step % 97) for step in range(num_steps)], MemoryHistory(max_samples)
    seen = run(history, splits, [0.5] * num_steps)
    report = history.report(num_blocks=100, block_size=1)
    interval = 1
    while -(-num_steps // interval) > max_samples:
        interval *= 2
    assert [sample.step for sample in report.samples] == list(range(0, num_steps, interval))
    assert [sample.split for sample in report.samples] == splits[::interval]
    assert [sample.seconds for sample in report.samples] == [
        0.5 * sample.step for sample in report.samples
    ]
    assert len(seen) <= max_samples * (1 + interval.bit_length() / 2), (
        "the tables are walked ever more rarely"
    )
    assert (report.num_steps, report.seconds, report.num_preemptions) == (
        num_steps,
        num_steps / 2,
        num_steps,
    )
    assert report.peak_blocks == max((split.token_slots for split in splits), default=0), (
        "of all steps"
    )


def test_means_are_over_time():
    history = MemoryHistory()
    run(
        history,
        [split_of(100, saved_blocks=30, unshared_blocks=60), split_of(20, unshared_blocks=20)],
        [1.0, 3.0],
    )
    report = history.report(num_blocks=100, block_size=1)
    assert report.mean_shares == pytest.approx(
        {"token states": 0.4, "reserved": 0, "internal fragmentation": 0, "free": 0.6}
    )
    assert report.saved_by_sharing == pytest.approx(30 / (60 + 3 * 20))
    table = str(report).splitlines()
    assert table[0] == "KV memory, mean of 2 steps: 100 blocks of 1 slots"
    assert [line.rsplit(maxsplit=1) for line in table[1:]] == [
        ["token states", "40.0%"],
        ["reserved", "0.0%"],
        ["internal fragmentation", "0.0%"],
        ["free", "60.0%"],
        ["peak use", "100.0%"],
        ["saved by sharing", "25.0%"],
        ["preemptions", "2"],
    ]


def test_a_step_that_failed_is_sampled_once_and_takes_no_time():
    history = MemoryHistory()
    history.begin(lambda: split_of(90), used_blocks=90, num_preempted=0)
    run(history, [split_of(10)], [2.0])
    report = history.report(num_blocks=100, block_size=1)
    assert [(sample.step, sample.split.token_slots) for sample in report.samples] == [(0, 10)]
    assert (report.num_steps, report.seconds, report.peak_blocks) == (1, 2.0, 90)


def test_a_report_of_nothing():
    report = MemoryHistory().report(num_blocks=4, block_size=16)
    assert report.mean_shares == {} and report.saved_by_sharing == 0.0 and report.samples == ()
    assert "peak use" in str(report) and json.dumps(report.as_dict())


@pytest.mark.parametrize("max_samples", [0, 3, -2])
def test_a_history_needs_an_even_number_of_samples(max_samples):
    with pytest.raises(ValueError, match="must be an even number from 2"):
        MemoryHistory(max_samples)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("memory") / "llama", LLAMA)


@pytest.fixture(scope="module")
def llm(model):
    with make_llm(
        model, num_blocks=14, max_model_len=64, dtype="float32", enable_prefix_caching=True
    ) as llm:
        yield llm


def test_the_report_of_an_engine(llm):
    """Three sequences of 20 prompt tokens decode to 32: what each step held is counted from the
    lengths alone.
    """
    llm.memory_report(reset=True)
    assert llm.memory_report().num_steps == 0
    before = llm.stats()["engine_steps_total"]
    prompts = [[seed + 7 * i for i in range(20)] for seed in (1, 2, 3)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
    )
    report = llm.memory_report()
    assert isinstance(report, MemoryReport)
    assert report.num_steps == llm.stats()["engine_steps_total"] - before == 12
    assert [sample.step for sample in report.samples] == list(range(12))
    assert all(earlier.seconds < later.seconds for earlier, later in pairwise(report.samples))
    for number, sample in enumerate(report.samples):
        # 60 prompt tokens fit in one step of 64, so step n has computed 20 + n - 1 tokens of each
        # and knows one more.
        num_computed = 20 + number - 1 if number else 0
        blocks, known = 3 * 2, 3 * (num_computed + 1 if number else 20)
        expected = (
            3 * num_computed,
            known - 3 * num_computed,
            16 * blocks - known,
            16 * (13 - blocks),
        )
        assert tuple(sample.split.kinds.values()) == expected, f"step {number}"
    assert (report.peak_blocks, report.num_blocks, report.num_preemptions) == (6, 13, 0)
    assert sum(report.mean_shares.values()) == pytest.approx(1.0)
    assert llm.memory_report(reset=True) == report and llm.memory_report().num_steps == 0


def test_an_engine_that_shares_a_prefix_says_what_it_saves(llm):
    """Three sequences share a prefix of two blocks: two blocks do for what would be six, next to a
    block of its own for each.
    """
    prefix = list(range(100, 132))
    llm.generate([[*prefix, 1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.memory_report(reset=True)
    prompts = [[*prefix, last] for last in (2, 3, 4)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    report = llm.memory_report(reset=True)
    assert report.saved_by_sharing == pytest.approx(4 / 9)
    assert {(s.split.shared_blocks, s.split.saved_blocks) for s in report.samples} == {(2, 4)}
    stats = llm.stats()
    assert (stats["kv_saved_by_sharing_blocks"], stats["kv_saved_by_sharing_perc"]) == (0, 0.0)


def test_preemptions_and_the_peak_are_those_of_the_run(llm):
    llm.memory_report(reset=True)
    before = llm.stats()["num_preemptions_total"]["recompute"]
    prompts = [[seed + i for i in range(40)] for seed in (1, 60, 120, 180)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False
    )
    report = llm.memory_report(reset=True)
    assert report.num_preemptions == llm.stats()["num_preemptions_total"]["recompute"] - before > 0
    assert report.peak_blocks == report.num_blocks == 13
    assert llm.memory_report().num_preemptions == 0


def test_the_picture_has_an_area_for_each_kind(llm, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    from jaxpage.bench import memory_plot

    history = MemoryHistory()
    run(
        history,
        [MemorySplit(50, 10, 20, 20, 8, 30, 110), MemorySplit(30, 10, 20, 40, 8, 0, 60)],
        [1.0, 3.0],
    )
    report = history.report(num_blocks=100, block_size=1)
    figure = memory_plot.draw(report, title="What the KV pool held")
    [axes] = figure.axes
    areas = {area.get_label(): area for area in axes.collections}
    assert list(areas) == [
        "token states 35.0%",
        "reserved 10.0%",
        "internal fragmentation 20.0%",
        "free 35.0%",
    ]
    heights = [float(area.get_paths()[0].vertices[:, 1].max()) for area in areas.values()]
    assert heights == pytest.approx([0.5, 0.6, 0.8, 1.0]), "stacked, as shares of the pool"
    corners = areas["token states 35.0%"].get_paths()[0].vertices.tolist()
    assert [1.0, 0.5] in corners and [1.0, 0.3] in corners, "a sample holds until the next"
    assert len({area.get_facecolor().tobytes() for area in areas.values()}) == 4
    [line] = axes.lines
    assert line.get_ydata().tolist() == [1.1, 0.6, 0.6] and line.get_xdata().tolist() == [
        0.0,
        1.0,
        4.0,
    ]
    assert axes.get_ylim()[1] > 1.1 and axes.get_title(loc="left") == "What the KV pool held"


def bench(model: Path, *words: str) -> int:
    workload = ["--num-prompts", "4", "--max-input", "20", "--max-output", "12"]
    limits = [
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "16",
        "--num-blocks",
        "33",
        "--max-model-len",
        "64",
    ]
    return cli.main(["bench", "throughput", "--model", str(model), *workload, *limits, *words])


def test_bench_throughput_reports_and_draws_its_memory(model, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    path = tmp_path / "memory.png"
    assert bench(model, "--plot", str(path)) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    memory = json.loads(line)["kv_memory"]
    assert memory["num_steps"] == json.loads(line)["num_steps"], "the warm-up is not in it"
    assert sum(memory["mean_shares"].values()) == pytest.approx(1.0) and memory["num_blocks"] == 32
    assert f"token states{memory['mean_shares']['token_states']:>22.1%}" in shown
    width, height = struct.unpack(">II", path.read_bytes()[16:24])  # of the header of a PNG file
    assert path.read_bytes().startswith(b"\x89PNG") and (width, height) == (1440, 750)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory.jpg", "--plot writes .png, .svg, .pdf, got 'memory.jpg'"),
        ("no/such/memory.png", "no such directory"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_at_once(path, message, capsys):
    pytest.importorskip("matplotlib", reason="without it the first refusal is another")
    assert bench(Path("no-such-model"), "--plot", path) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jaxpage.bench.memory_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(Path("no-such-model"), "--plot", "memory.png") == 2
    assert (
        "--plot needs matplotlib, which is not installed: pip install 'jaxpage[plot]'"
        in capsys.readouterr().err
    )
