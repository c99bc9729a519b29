"""Golden tests: the walk-throughs of the PagedAttention paper (SOSP 2023, arXiv 2309.06180), with
the numbers that it prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jaxpage import LLM, BeamSearchParams
from jaxpage.memory import BlockManager, BlockPool, BlockTables, MemorySplit
from jaxpage.step.plan import StepPlan, StepResult
from tests.support.engines import LLAMA, make_llm
from tests.support.fake_device import FakeDevice
from tests.support.random_checkpoints import random_checkpoint

A, B = 1, 2  # the paper's requests
FOUR_SCORE = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
BEST_OF_TIMES = ["It", "was", "the", "best", "of", "times", "it", "was"]


class Story:
    """Sequences that write words into paged memory, block size 4, one word per token."""

    def __init__(self, free_order: list[int], num_blocks: int = 10) -> None:
        self.pool = BlockPool(num_blocks, free_order=free_order)
        self.manager = BlockManager([BlockTables(self.pool, 4)])
        self.pages = FakeDevice(num_blocks, 4)
        self.lengths: dict[int, int] = {}

    def write(self, sequence_id: int, words: list) -> tuple[tuple[int, int], ...]:
        """Appends words and returns the block copies that this took."""
        start = self.lengths.get(sequence_id, 0)
        copies = self.manager.reserve(sequence_id, start, start + len(words))
        self.pages.copy(copies)
        self.pages.write(self.manager.block_tables(sequence_id)[0], start, words)
        self.lengths[sequence_id] = start + len(words)
        self.manager.check()
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        self.manager.fork(parent_id, child_id)
        self.lengths[child_id] = self.lengths[parent_id]

    def release(self, sequence_id: int) -> None:
        self.manager.release(sequence_id)
        del self.lengths[sequence_id]

    def read(self, sequence_id: int) -> list:
        return self.pages.read(self.manager.block_tables(sequence_id)[0], self.lengths[sequence_id])

    def table(self, sequence_id: int) -> list[tuple[int, int]]:
        """Returns the block table as the paper draws it: (physical block, number of filled slots).

        It goes by logical block.

        The filled slots are counted in the pages, not derived from the length.
        """
        empty = self.pages.slots[0][0]
        return [
            (block, sum(word != empty for word in self.pages.slots[block]))
            for block in self.manager.block_tables(sequence_id)[0]
        ]

    def usage(self) -> MemorySplit:
        return self.manager.usage(self.lengths)


def test_figure_5_and_6_one_request():
    story = Story(free_order=[7, 1, 3])
    story.write(A, FOUR_SCORE[:7])  # 1: the prompt takes logical blocks 0 and 1
    assert story.table(A) == [(7, 4), (1, 3)]
    story.write(
        A, FOUR_SCORE[7:8]
    )  # 2: the first word that is generated goes into the slot that is left: #filled 3 -> 4
    assert story.table(A) == [(7, 4), (1, 4)]
    story.write(A, FOUR_SCORE[8:9])  # 3: the next one takes a new block
    assert story.table(A) == [(7, 4), (1, 4), (3, 1)]
    # figure 5: the query "forth" reads three blocks that are not contiguous
    story.write(A, FOUR_SCORE[9:])
    assert story.pages.slots[7] == ["Four", "score", "and", "seven"]
    assert story.pages.slots[1] == ["years", "ago", "our", "fathers"]
    assert story.pages.slots[3][:2] == ["brought", "forth"]
    assert story.read(A) == FOUR_SCORE


def test_figure_7_two_requests_interleave():
    story = Story(free_order=[7, 1, 5, 2, 3])
    story.write(A, FOUR_SCORE[:7])
    story.write(B, BEST_OF_TIMES[:6])
    assert story.table(A) == [(7, 4), (1, 3)]
    assert story.table(B) == [(5, 4), (2, 2)]
    for step in range(2):
        story.write(A, [FOUR_SCORE[7 + step]])
        story.write(B, [BEST_OF_TIMES[6 + step]])
    assert story.table(A) == [(7, 4), (1, 4), (3, 1)]
    assert story.table(B) == [(5, 4), (2, 4)]
    assert story.read(A) == FOUR_SCORE[:9]
    assert story.read(B) == BEST_OF_TIMES


def test_figure_8_parallel_sampling_copies_on_write_once():
    story = Story(free_order=[7, 1, 3])
    a1, a2 = 1, 2
    story.write(a1, FOUR_SCORE[:7])
    story.fork(a1, a2)
    assert story.manager.block_tables(a1)[0] == story.manager.block_tables(a2)[0] == (7, 1)
    assert (story.pool.ref_count(7), story.pool.ref_count(1)) == (2, 2)
    assert (story.usage().saved_blocks, story.usage().unshared_blocks) == (2, 4)
    # A1 writes first: its last block is copied to block 3
    assert story.write(a1, ["fathers"]) == ((1, 3),)
    assert (story.pool.ref_count(7), story.pool.ref_count(1), story.pool.ref_count(3)) == (2, 1, 1)
    num_free = story.pool.num_free
    # A2 writes in place: nobody else reads block 1 any more
    assert story.write(a2, ["mothers"]) == ()
    assert story.pool.num_free == num_free
    assert story.manager.block_tables(a1)[0] == (7, 3)
    assert story.manager.block_tables(a2)[0] == (7, 1)
    # block 7 for two
    assert (story.usage().saved_blocks, story.usage().saved_by_sharing) == (1, 0.25)
    assert story.read(a1) == [*FOUR_SCORE[:7], "fathers"]
    assert story.read(a2) == [*FOUR_SCORE[:7], "mothers"]


def test_figure_9_beam_search_shares_and_frees():
    """The beam width is 4.

    The paper numbers blocks from 0; here block 0 is the null block, so every number is one higher.
    """

    def ours(*blocks: int) -> list[int]:
        return [block + 1 for block in blocks]

    # Before the dotted line: candidate 0 holds blocks 0 1 3 5, candidate 1 0 1 3 6, candidate 2 0 1
    # 3 7, candidate 3 0 2 4 8.
    story = Story(free_order=ours(0, 1, 3, 5, 6, 7, 2, 4, 8, 9, 10, 11, 12), num_blocks=14)
    story.write(0, [f"prompt {i}" for i in range(4)])  # block 0
    story.fork(0, 3)
    story.write(0, [f"shared {i}" for i in range(8)])  # blocks 1 and 3
    story.fork(0, 1)
    story.fork(0, 2)
    for candidate in (0, 1, 2):
        story.write(candidate, [f"beam {candidate} {i}" for i in range(4)])  # blocks 5, 6, 7
    story.write(3, [f"beam 3 {i}" for i in range(12)])  # blocks 2, 4, 8
    before = {0: [0, 1, 3, 5], 1: [0, 1, 3, 6], 2: [0, 1, 3, 7], 3: [0, 2, 4, 8]}
    assert {c: list(story.manager.block_tables(c)[0]) for c in before} == {
        c: ours(*b) for c, b in before.items()
    }
    assert [story.pool.ref_count(block) for block in ours(*range(9))] == [4, 3, 1, 3, 1, 1, 1, 1, 1]
    # nine blocks for four times four
    assert (story.usage().saved_blocks, story.usage().unshared_blocks) == (7, 16)

    # The four likeliest continuations come from candidates 1 (two of them) and 2 (two): 0 and 3 are
    # not extended.
    free_before = story.pool.num_free
    survivors = {10: 1, 11: 1, 12: 2, 13: 2}
    for child, parent in survivors.items():
        story.fork(parent, child)
    for candidate in before:
        story.release(candidate)
    # freed
    assert [block for block in ours(*range(9)) if story.pool.ref_count(block) == 0] == ours(
        2, 4, 5, 8
    )
    assert story.pool.num_free == free_before + 4
    # whole blocks: nothing to copy
    assert [story.write(child, [f"next {child}"]) for child in survivors] == [()] * 4

    # All share blocks 0, 1, 3; candidates 0 and 1 share 6, candidates 2 and 3 share 7; each has a
    # new block of 9 to 12.
    after = {10: [0, 1, 3, 6, 9], 11: [0, 1, 3, 6, 10], 12: [0, 1, 3, 7, 11], 13: [0, 1, 3, 7, 12]}
    assert {c: list(story.manager.block_tables(c)[0]) for c in after} == {
        c: ours(*b) for c, b in after.items()
    }
    assert [story.pool.ref_count(block) for block in ours(0, 1, 3, 6, 7, 9, 10, 11, 12)] == [
        4,
        4,
        4,
        2,
        2,
        1,
        1,
        1,
        1,
    ]
    # nine for four times five
    assert (story.usage().saved_blocks, story.usage().saved_by_sharing) == (11, 11 / 20)
    for child, parent in survivors.items():
        prefix = [f"prompt {i}" for i in range(4)] + [f"shared {i}" for i in range(8)]
        assert story.read(child) == [
            *prefix,
            *(f"beam {parent} {i}" for i in range(4)),
            f"next {child}",
        ]


@dataclass(frozen=True)
class Contiguous:
    """Does what systems before paging do: a request reserves its longest length in one piece."""

    max_length: int
    num_prompt: int
    num_to_come: int  # tokens that it will really generate after the current one

    def kinds(self) -> tuple[int, int, int, int]:
        """Returns (prompt states, slot of the current token, reserved for tokens to come, never
        used).
        """
        return (
            self.num_prompt,
            1,
            self.num_to_come,
            self.max_length - self.num_prompt - 1 - self.num_to_come,
        )


@pytest.mark.parametrize(
    ("request_", "printed"),
    [(Contiguous(2048, 7, 2), (7, 1, 2, 2038)), (Contiguous(512, 3, 1), (3, 1, 1, 507))],
    ids=["A", "B"],
)
def test_figure_3_waste_of_reservation_and_of_paging(request_, printed):
    """The same two requests are in one contiguous piece, as printed, and in blocks, whose waste is
    below one block at every step.
    """
    assert request_.kinds() == printed
    assert sum(request_.kinds()) == request_.max_length
    story = Story(free_order=[])
    story.write(A, ["prompt"] * request_.num_prompt)
    for num_generated in range(1, 2 + request_.num_to_come):
        story.write(A, ["word"])
        used = story.usage()
        assert used.token_slots == request_.num_prompt + num_generated
        assert used.reserved_slots == 0
        assert used.internal_fragmentation_slots == -used.token_slots % 4 < 4
        assert (
            used.token_slots + used.internal_fragmentation_slots + used.free_slots
            == used.num_slots
            == 36
        )


def test_figure_3_both_requests_at_once():
    story = Story(free_order=[])
    story.write(A, ["prompt"] * 7 + ["current"])
    story.write(B, ["prompt"] * 3 + ["current"])
    # 12 slots for 12 tokens in three blocks; the reservations hold 2560 slots for the same.
    assert story.usage().kinds == {
        "token states": 12,
        "reserved": 0,
        "internal fragmentation": 0,
        "free": 24,
    }
    story.write(A, ["to come"] * 2)
    story.write(B, ["to come"])
    assert story.usage().kinds == {
        "token states": 15,
        "reserved": 0,
        "internal fragmentation": 5,
        "free": 16,
    }
    assert story.usage().saved_by_sharing == 0.0


@pytest.mark.parametrize(("num_samples", "printed"), [(2, 6.09), (4, 8.53), (6, 9.79)])
def test_figure_15_parallel_sampling_saves_the_prompt(num_samples, printed):
    """Section 3: the prompts take 12 % of the memory (of which k - 1 of k copies are saved).

    Figure 15a prints what was measured.
    """
    story = Story(free_order=[], num_blocks=1000)
    story.write(0, ["prompt"] * 4 * 12)
    for sample in range(1, num_samples):
        story.fork(0, sample)
    for sample in range(num_samples):
        story.write(sample, ["word"] * 4 * 88)
    split = story.usage()
    assert (split.unshared_blocks, split.saved_blocks) == (
        100 * num_samples,
        12 * (num_samples - 1),
    )
    assert 100 * split.saved_by_sharing == pytest.approx(printed, abs=0.5)


CONTINUES = {20: -0.001}  # the only likely token
# of figure 9, by output token: what follows the beams, by the first token that they part with
SCRIPT = {
    0: {None: {10: -1.0, 11: -1.1, 12: -1.2, 13: -1.3}},
    8: {10: {30: -0.1, 31: -0.2, 32: -0.3}, 11: {33: -0.1}, 12: {}, 13: {}},
    12: {30: {}, 31: {40: -0.1, 41: -0.2}, 32: {40: -0.15, 41: -0.25}, 33: {}},
}


def script(num_output: int, known: list[int]) -> dict[int, float]:
    """Returns the likely tokens after a beam."""
    if num_output not in SCRIPT:
        return CONTINUES
    return next(
        likely for token, likely in SCRIPT[num_output].items() if token in (None, *known[-9:])
    )


def draw_as_scripted(engine: Any, result: StepResult) -> StepResult:
    """Draws candidates as the figure wants them in place of what the model says."""
    sequences = {s.sequence_id: s for group in engine.scheduler.running for s in group.unfinished}
    top_ids, top_logprobs = result.top_token_ids.copy(), result.top_logprobs.copy()
    for draw, sample in enumerate(engine.plan.samples):
        sequence = sequences[sample.sequence_id]
        likely = script(sequence.num_output_tokens, sequence.token_ids)
        others = [token for token in range(100, 200) if token not in likely]
        top_ids[draw] = [*likely, *others][: top_ids.shape[1]]
        top_logprobs[draw] = [*likely.values(), *([-50.0] * len(others))][: top_ids.shape[1]]
    return replace(result, top_token_ids=top_ids, top_logprobs=top_logprobs)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)
    with make_llm(directory, block_size=4, num_blocks=65, enable_prefix_caching=False) as llm:
        yield llm


def stepped(
    llm: LLM, prompt: list[int], max_tokens: int
) -> Iterator[tuple[StepPlan, dict[int, tuple[int, ...]]]]:
    """Yields a search of width 4: each step's plan, and then the block tables.

    They are by the last token that tells a beam from others.
    """
    engine: Any = llm._engine
    build = engine.builder.build

    def note(plan: StepPlan, *masks: Any) -> Any:
        engine.plan = plan
        return build(plan, *masks)

    engine.builder.build = note
    reporter = engine.add(
        "figure 9", engine.prepare(None, prompt, BeamSearchParams(4, max_tokens, ignore_eos=True))
    )
    (group,) = engine.scheduler.waiting
    while engine.has_unfinished:
        engine.step()
        tables = {}
        for sequence in group.unfinished:
            names = [token for token in sequence.output_token_ids if token != 20]
            tables[tuple(names)] = engine.scheduler.block_manager.block_tables(
                sequence.sequence_id
            )[0]
        yield engine.plan, tables
    assert len(reporter.whole().outputs) == 4
    engine.scheduler.check()
    engine.builder.build = build


def test_figure_9_through_the_engine(llm, monkeypatch):
    """A beam search whose candidates make it the paper's shares the same blocks."""
    engine, pool = llm._engine, llm._engine.scheduler.block_manager.groups[0].pool
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: draw_as_scripted(engine, run(batch)))
    steps = list(stepped(llm, [1, 2, 3, 4], 15))
    assert all(not plan.copies for plan, _ in steps), "beams part where blocks end: nothing to copy"
    assert pool.num_free == pool.num_usable

    first = steps[0][1]
    # all share the prompt's block
    assert len(first) == 4 and len(set(first.values())) == 1 and len(first[10,]) == 1
    # sixteen tokens are known: the paper's candidates 0 to 3 hold four blocks each
    before = steps[11][1]
    assert list(before) == [(10, 30), (11, 33), (10, 31), (10, 32)]
    figure = dict(
        zip(
            [(10, 30), (10, 31), (10, 32), (11, 33)],
            [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]],
            strict=True,
        )
    )
    place = {
        ours: theirs
        for name, table in before.items()
        for ours, theirs in zip(table, figure[name], strict=True)
    }
    assert len(place) == len(set(place.values())) == 9
    # 0 and 3 are not extended; 1 and 2 are, twice each; each of the four has begun a new block
    after = steps[13][1]
    assert set(after) == {(10, 31, 40), (10, 31, 41), (10, 32, 40), (10, 32, 41)}
    places = {name: [place.get(block) for block in table[:4]] for name, table in after.items()}
    assert places == {name: figure[name[:2]] for name in after}
    assert len({table[4] for table in after.values()}) == 4
    held = {block for table in after.values() for block in table}
    # freed
    assert sorted(theirs for ours, theirs in place.items() if ours not in held) == [2, 4, 5, 8]


def test_beams_copy_the_last_partial_block_and_nothing_else(llm):
    """All beams that share it but one copy it when they write to it.

    Whole blocks are shared for good, and in the end all is free.
    """
    pool = llm._engine.scheduler.block_manager.groups[0].pool
    num_copies = 0
    shared: dict[int, list[int]] = {}  # by last block: the positions of who shares it before a step
    for plan, tables in stepped(llm, [7, 3, 9, 2, 5, 8], 30):
        sources = [source for source, _ in plan.copies]
        for source in set(sources):
            sharers = shared[source]
            assert sources.count(source) == len(sharers) - 1 and all(
                position % 4 for position in sharers
            )
        partly = {block for block, sharers in shared.items() if len(sharers) > 1 and sharers[0] % 4}
        assert set(sources) == partly
        num_copies += len(sources)
        shared = {}
        for row in plan.rows:
            assert row.context_length <= 4 * len(row.block_tables[0]) < row.context_length + 4
        for table in tables.values():
            shared.setdefault(table[-1], []).append(plan.rows[0].context_length)
        assert {block for table in tables.values() for block in table} == {
            block for block in range(1, pool.num_blocks) if pool.ref_count(block)
        }
    assert num_copies > 10 and pool.num_free == pool.num_usable
