"""Block tables: a state machine against a model that knows only which tokens each sequence has
written, and single cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxpage.errors import CapacityError
from jaxpage.memory import (
    BlockManager,
    BlockPool,
    BlockTables,
    PrefixIndex,
    block_manager,
)
from jaxpage.memory.block_pool import NULL_BLOCK
from jaxpage.memory.cached_blocks import CachedBlocks
from jaxpage.step.plan import StepPlan
from tests.support.fake_device import FakeDevice
from tests.support.sweeps import examples


def some_of(sequence_ids: Iterable[int]) -> st.SearchStrategy[list[int]]:
    """Returns all of them, or some in any order."""
    known = sorted(sequence_ids)
    return st.one_of(st.just(known), st.lists(st.sampled_from(known), min_size=1, unique=True))


class Tables(RuleBasedStateMachine):
    """Compares block tables with a model: for each sequence the tokens that it wrote or inherited.

    The pages hold what was really written, by block table. A block that is shared and written, a
    copy that is missing or late, a block in two hands: each shows as a token in the pages that the
    model does not have.
    """

    tables_class: type[BlockTables] = BlockTables

    @initialize(block_size=st.sampled_from([1, 2, 3, 8]), num_blocks=st.integers(4, 16))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.manager = self.tables_class(BlockPool(num_blocks), block_size, host_pool=BlockPool(8))
        self.pages = FakeDevice(num_blocks, block_size)
        self.tokens: dict[int, list[int]] = {}
        self.num_slots: dict[int, int] = {}  # that were reserved, at least
        self.swapped: dict[int, list[int]] = {}  # tokens of those that are in host memory
        self.next_token = 0
        self.next_id = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def write(self, sequence_id: int, start: int, num_tokens: int) -> None:
        manager, stop = self.manager, start + num_tokens
        num_new = manager.num_new_blocks(sequence_id, start, stop)
        num_free = manager.pool.num_free
        if sequence_id in manager.sequence_ids:
            assert manager.can_write(sequence_id, start) == (
                manager.num_new_blocks(sequence_id, start, start + 1) == 0
            )
        if num_new > num_free:
            with pytest.raises(CapacityError):
                manager.reserve(sequence_id, start, stop)
            assert manager.pool.num_free == num_free
            return
        expected_copies = self.count_copies(sequence_id, start)
        copies = manager.reserve(sequence_id, start, stop)
        assert num_free - manager.pool.num_free == num_new
        table = manager.block_table(sequence_id)
        assert [source for source, _ in copies] == expected_copies
        assert all(destination == table[start // manager.block_size] for _, destination in copies)
        self.pages.copy(copies)
        written = list(range(self.next_token, self.next_token + num_tokens))
        self.next_token += num_tokens
        self.pages.write(table, start, written)
        self.tokens[sequence_id] = self.tokens.get(sequence_id, [])[:start] + written
        self.num_slots[sequence_id] = max(stop, self.num_slots.get(sequence_id, 0))

    def count_copies(self, sequence_id: int, start: int) -> list[int]:
        """Returns the block that is shared and keeps the tokens before `start`, counted from the
        block tables alone.
        """
        entries = Counter(b for i in self.manager.sequence_ids for b in self.manager.block_table(i))
        if start % self.manager.block_size == 0 or sequence_id not in self.tokens:
            return []
        block = self.manager.block_table(sequence_id)[start // self.manager.block_size]
        return [block] if entries[block] > 1 else []

    @rule(num_tokens=st.integers(1, 12))
    def begin(self, num_tokens: int) -> None:
        self.write(self.new_id(), 0, num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def extend(self, data: st.DataObject, num_tokens: int) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.write(sequence_id, len(self.tokens[sequence_id]), num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def rewrite(self, data: st.DataObject, num_tokens: int) -> None:
        """Writes again from an earlier position, as after rejected drafts."""
        sequence_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.write(
            sequence_id, data.draw(st.integers(0, len(self.tokens[sequence_id]))), num_tokens
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent_id, child_id = data.draw(st.sampled_from(sorted(self.tokens))), self.new_id()
        num_free = self.manager.pool.num_free
        self.manager.fork(parent_id, child_id)
        assert self.manager.pool.num_free == num_free
        self.tokens[child_id] = self.tokens[parent_id].copy()
        self.num_slots[child_id] = self.num_slots[parent_id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.tokens)))
        num_tokens = data.draw(st.integers(0, len(self.tokens[sequence_id])))
        self.manager.trim(sequence_id, num_tokens)
        del self.tokens[sequence_id][num_tokens:]
        self.num_slots[sequence_id] = num_tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.release(sequence_id)
        del self.tokens[sequence_id], self.num_slots[sequence_id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend_together(self, data: st.DataObject) -> None:
        """Checks that a token for each of several sequences takes the blocks that were foretold."""
        chosen = data.draw(some_of(self.tokens))
        spans = [(i, len(self.tokens[i]), len(self.tokens[i]) + 1) for i in chosen]
        num_new, num_free = self.manager.num_new_blocks_together(spans), self.manager.pool.num_free
        if num_new <= num_free:
            for sequence_id in chosen:
                self.write(sequence_id, len(self.tokens[sequence_id]), 1)
            assert num_free - self.manager.pool.num_free == num_new

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        chosen = data.draw(some_of(self.tokens))
        for sequence_id in chosen:
            self.manager.trim(sequence_id, len(self.tokens[sequence_id]))
        blocks = {block for i in chosen for block in self.manager.block_table(i)}
        assert self.manager.can_swap_out(chosen) == (
            len(blocks) <= self.manager.swapped.pool.num_free
        )
        if self.manager.can_swap_out(chosen):
            moves = self.manager.swap_out(chosen)
            assert {block for block, _ in moves} == blocks and len(moves) == len(blocks), (
                "each block moves once"
            )
            self.pages.swap(StepPlan(0, (), (), swap_out=moves))
            self.swapped |= {i: self.tokens.pop(i) for i in chosen}
        for sequence_id in chosen:
            self.num_slots.pop(sequence_id)
            if sequence_id in self.tokens:
                self.num_slots[sequence_id] = len(self.tokens[sequence_id])

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        """Swaps in some of several that share blocks before the others; what is foretold holds for
        later growth, too.
        """
        chosen = data.draw(some_of(self.swapped))
        spans = [(i, len(self.swapped[i]), len(self.swapped[i]) + 1) for i in chosen]
        num_new, num_free = self.manager.num_swap_in_blocks(spans), self.manager.pool.num_free
        if num_new <= num_free:
            self.pages.swap(StepPlan(0, (), (), swap_in=self.manager.swap_in(chosen)))
            for sequence_id in chosen:
                self.tokens[sequence_id] = self.swapped.pop(sequence_id)
                self.num_slots[sequence_id] = len(self.tokens[sequence_id])
                self.write(sequence_id, len(self.tokens[sequence_id]), 1)
            assert num_free - self.manager.pool.num_free == num_new

    @invariant()
    def the_pages_hold_what_was_written(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        assert set(self.manager.sequence_ids) == set(self.tokens)
        for sequence_id, tokens in self.tokens.items():
            table = self.manager.block_table(sequence_id)
            assert len(table) == self.manager.blocks_for(self.num_slots[sequence_id])
            assert self.pages.read(table, len(tokens)) == tokens

    @invariant()
    def the_split_adds_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = BlockManager([self.manager])
        split = manager.usage(
            {sequence_id: len(tokens) for sequence_id, tokens in self.tokens.items()}
        )
        entries = Counter(b for i in self.tokens for b in self.manager.block_table(i))
        ids = range(self.manager.pool.num_blocks + 1)  # the null block first, and one too many
        assert set(filter(manager.is_used, ids)) == set(entries)
        # Every token of the model has a slot of its own unless it was inherited: all written values
        # differ.
        held = {
            (self.manager.block_table(i)[p // self.manager.block_size], p % self.manager.block_size)
            for i, tokens in self.tokens.items()
            for p in range(len(tokens))
        }
        assert split.token_slots == len(held)
        assert split.free_slots == self.manager.pool.num_free * self.manager.block_size
        assert split.num_slots == self.manager.pool.num_usable * self.manager.block_size
        assert split.shared_blocks == sum(count > 1 for count in entries.values())

    def teardown(self) -> None:
        for sequence_id in list(getattr(self, "tokens", ())):
            self.manager.release(sequence_id)
        if hasattr(self, "manager"):
            assert self.manager.pool.num_free == self.manager.pool.num_usable


STATE_MACHINE = examples(80, stateful_step_count=30)


def test_block_tables_agree_with_the_model():
    run_state_machine_as_test(Tables, settings=STATE_MACHINE)


class WritesSharedBlocks(BlockTables):
    def _unshare(self, blocks, start, stop):
        return ()

    def num_new_blocks(self, sequence_id, start, stop):
        num_blocks = len(self.tables[sequence_id].blocks) if sequence_id in self.tables else 0
        return max(0, self.blocks_for(stop) - num_blocks)


class ForgetsTheCopy(BlockTables):
    def reserve(self, sequence_id, start, stop):
        super().reserve(sequence_id, start, stop)
        return ()


class CopiesTheWrongWay(BlockTables):
    def reserve(self, sequence_id, start, stop):
        return tuple(
            (destination, source)
            for source, destination in super().reserve(sequence_id, start, stop)
        )


class UnsharesOnlyTheFirstBlock(BlockTables):
    def _unshare(self, blocks, start, stop):
        return super()._unshare(
            blocks, start, min(stop, (start // self.block_size + 1) * self.block_size)
        )


class ForksWithoutReference(BlockTables):
    def fork(self, parent_id, child_id):
        super().fork(parent_id, child_id)
        for block in self.tables[child_id].blocks[-1:]:
            self.pool.release(block)


class TrimsOneTooMany(BlockTables):
    def trim(self, sequence_id, num_tokens):
        super().trim(sequence_id, max(0, num_tokens - 1))


class KeepsAStaleTuple(BlockTables):
    def trim(self, sequence_id, num_tokens):
        before = self.block_table(sequence_id)
        super().trim(sequence_id, num_tokens)
        self.tables[sequence_id].frozen = before


class LeaksOnRelease(BlockTables):
    def release(self, sequence_id):
        self.tables.pop(sequence_id)


class LosesSharing(BlockTables):
    """Siblings that share a block get one each from the host."""

    def swap_in(self, sequence_ids):
        return [
            move
            for sequence_id in sequence_ids
            for move in super(LosesSharing, self).swap_in([sequence_id])
        ]


class SwapsSharedBlocksTwice(BlockTables):
    """Siblings that share a block get one each on the host."""

    def swap_out(self, sequence_ids):
        return [
            move
            for sequence_id in sequence_ids
            for move in super(SwapsSharedBlocksTwice, self).swap_out([sequence_id])
        ]


class ForetellsTooManyCopies(BlockTables):
    """Foretells that each of the sequences that share a block has to copy it."""

    def num_new_blocks_together(self, spans):
        return sum(self.num_new_blocks(*span) for span in spans)


class SharesTheTableItself(BlockTables):
    def fork(self, parent_id, child_id):
        super().fork(parent_id, child_id)
        self.tables[child_id].blocks = self.tables[parent_id].blocks


@pytest.mark.parametrize(
    "mistaken",
    [
        WritesSharedBlocks,
        ForgetsTheCopy,
        CopiesTheWrongWay,
        UnsharesOnlyTheFirstBlock,
        ForksWithoutReference,
        TrimsOneTooMany,
        KeepsAStaleTuple,
        LeaksOnRelease,
        SharesTheTableItself,
        LosesSharing,
        SwapsSharedBlocksTwice,
        ForetellsTooManyCopies,
    ],
)
def test_the_state_machine_sees_planted_mistakes(mistaken):
    machine = type("Mistaken", (Tables,), {"tables_class": mistaken})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=2000)
        )


def test_reserve_refuses_gaps_and_empty_ranges():
    manager = BlockTables(BlockPool(8), 4)
    with pytest.raises(ValueError, match="cannot reserve"):
        manager.reserve(1, 5, 6)
    with pytest.raises(ValueError, match="cannot reserve"):
        manager.reserve(1, 0, 0)
    assert not manager.sequence_ids
    manager.reserve(1, 0, 4)
    with pytest.raises(ValueError, match="cannot reserve"):
        manager.reserve(1, 5, 6)


def test_what_does_not_fit_is_refused_with_the_numbers():
    manager = BlockTables(BlockPool(3), 4)
    with pytest.raises(CapacityError, match="3 KV blocks are needed, 2 of 2 are free"):
        manager.reserve(1, 0, 9)
    assert not manager.sequence_ids


def make_cached_manager(num_blocks: int, *sequences: list[int]) -> BlockManager:
    """Returns a manager of blocks of 4, where each sequence is computed and cached; their ids count
    up from 0.
    """
    manager = BlockManager([BlockTables(BlockPool(num_blocks), 4)], PrefixIndex(4))
    for sequence_id, token_ids in enumerate(sequences):
        manager.begin([(sequence_id, len(token_ids), manager.nothing)])
        manager.cache(sequence_id, len(token_ids), token_ids, [], None)
    return manager


def test_a_block_that_is_free_and_cached_is_no_room_for_stored_ones():
    manager = make_cached_manager(3, [1, 2, 3, 4], [5, 6, 7, 8])
    assert manager.cached is not None
    pool = manager.groups[0].pool
    for sequence_id, has_room in ((0, False), (1, False)):
        manager.release(sequence_id)
        assert pool.num_free == pool.num_cached == sequence_id + 1
        assert manager.cached.has_room == has_room
    manager.forget_cached()
    assert manager.cached.has_room


class BringsOldBlocksBack(CachedBlocks):
    """Forgets what can be found, but not that sequences have computed it."""

    def clear(self) -> None:
        super().clear()
        self._old.clear()


@pytest.mark.parametrize("kind", [CachedBlocks, BringsOldBlocksBack])
def test_a_sequence_of_before_a_reset_adds_no_block_until_it_starts_over(kind, monkeypatch):
    """Neither the sequence, nor a fork of it, nor what comes back after a swap adds one."""
    monkeypatch.setattr(block_manager, "CachedBlocks", kind)
    groups = [BlockTables(BlockPool(20), 2, host_pool=BlockPool(9))]
    manager = BlockManager(groups, PrefixIndex(2))
    tokens = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 5]]
    for number, token_ids in enumerate(tokens):
        manager.begin([(number, 5, manager.nothing)])
        manager.cache(number, 4, token_ids, [], None)
    manager.swap_out([1])
    manager.forget_cached()
    manager.swap_in([1])
    manager.fork(0, 2)

    def num_found() -> list[int]:
        return [manager.find(token_ids, [], None).num_tokens for token_ids in tokens]

    for number, token_ids in enumerate((*tokens, tokens[0])):
        manager.cache(number, 4, token_ids, [], None)
    assert num_found() == ([0, 0] if kind is CachedBlocks else [4, 4])
    for number in range(3):
        manager.release(number)
    manager.begin([(0, 5, manager.nothing)])
    manager.cache(0, 4, tokens[0], [], None)
    assert num_found()[0] == 4
    manager.check()


def test_equal_blocks_of_one_step_become_one_in_each_group():
    groups = [BlockTables(BlockPool(10), 2), BlockTables(BlockPool(20, first=10), 2)]
    manager = BlockManager(groups, PrefixIndex(2))
    tokens = [1, 2, 3, 4, 5]
    manager.begin([(number, 5, manager.nothing) for number in range(2)])
    before = manager.num_free
    for number in range(2):
        manager.cache(number, 4, tokens, [], None)
    assert manager.num_free == before + 4
    for group in groups:
        first, second = (group.tables[number].blocks for number in range(2))
        assert first[:2] == second[:2] and first[2] != second[2]
    manager.check()


def test_who_writes_into_a_cached_block_again_has_it_cached_no_more():
    """Its own copy holds other tokens; they are noted when they are computed."""
    manager = make_cached_manager(6, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.cached is not None
    assert len(manager.reserve(0, 6, 8)) == 1
    manager.check()
    manager.cache(0, 8, [1, 2, 3, 4, 5, 6, 9, 9], [], None)
    manager.check()
    assert manager.find([1, 2, 3, 4, 5, 6, 9, 9, 0], [], None).num_tokens == 8


def test_a_child_needs_a_new_id_and_a_living_parent():
    manager = BlockTables(BlockPool(8), 4)
    manager.reserve(1, 0, 4)
    with pytest.raises(ValueError, match="sequence 1 has a block table"):
        manager.fork(1, 1)
    with pytest.raises(KeyError):
        manager.fork(2, 3)


def test_the_table_is_built_anew_only_when_it_changes():
    manager = BlockTables(BlockPool(8), 4)
    manager.reserve(1, 0, 5)
    table = manager.block_table(1)
    manager.reserve(1, 5, 8)
    assert manager.block_table(1) is table
    manager.reserve(1, 8, 9)
    assert manager.block_table(1) == (*table, 3)


def _count_one_too_many(tables: BlockTables) -> None:
    tables.pool.share(1)


def _repeat_a_block(tables: BlockTables) -> None:
    tables.pool.share(1)
    tables.tables[1].blocks.append(1)


def _end_with_the_null_block(tables: BlockTables) -> None:
    tables.tables[1].blocks.append(NULL_BLOCK)


def _change_the_order(tables: BlockTables) -> None:
    tables.tables[1].blocks.reverse()


def _swap_without_release(tables: BlockTables) -> None:
    tables.swapped.store([1], [tables.tables[1].blocks])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_count_one_too_many, "references and tables differ"),
        (_repeat_a_block, "a block is in a table twice"),
        (_end_with_the_null_block, "the null block is in a table"),
        (_change_the_order, "the tuple is not that of its blocks"),
        (_swap_without_release, "sequence 1 is in two pools"),
    ],
)
def test_check_sees_damage(damage, message):
    tables = BlockTables(BlockPool(8), 4, host_pool=BlockPool(8))
    tables.reserve(1, 0, 8)
    assert tables.block_table(1) == (1, 2)
    tables.check()
    damage(tables)
    with pytest.raises(AssertionError, match=message):
        tables.check()


def test_the_head_of_a_released_sequence_is_handed_out_last():
    manager = BlockTables(BlockPool(4), 1)
    manager.reserve(1, 0, 3)
    manager.release(1)
    manager.reserve(2, 0, 3)
    assert manager.block_table(2) == (3, 2, 1)


def test_the_split_counts_shared_slots_once_and_known_tokens_as_reserved():
    tables = BlockTables(BlockPool(11), 4)
    tables.reserve(1, 0, 10)
    tables.fork(1, 2)
    split = BlockManager([tables]).usage({1: 6, 2: 6}, {1: 9, 2: 9})
    assert (split.token_slots, split.reserved_slots, split.internal_fragmentation_slots) == (
        6,
        3,
        3,
    )
    assert (split.free_slots, split.shared_blocks, split.num_slots) == (28, 3, 40)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_slots(block_size):
    with pytest.raises(ValueError, match="block_size"):
        BlockTables(BlockPool(4), block_size)
