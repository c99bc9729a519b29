"""The prefix cache: a state machine against the content of the pages, planted mistakes, and single
cases.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, NamedTuple

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
    CachedBlocks,
    Pin,
    Prefix,
    PrefixIndex,
)
from jaxpage.memory.prefix_index import blake2b_256
from jaxpage.scheduling import Scheduler
from jaxpage.scheduling.running_set import RunningSet
from tests.support.fake_device import (
    Driver,
    FakeDevice,
    alone,
    check_cached,
    context_of,
    make_group,
)
from tests.support.sweeps import few
from tests.test_scheduler import STATE_MACHINE as SCHEDULER_STATE_MACHINE
from tests.test_scheduler import Caching, make_driver


def four_bits(content: bytes) -> bytes:
    """Returns a hash that collides all the time."""
    return bytes([hashlib.blake2b(content, digest_size=1).digest()[0] & 15])


class Known(NamedTuple):
    """Models a sequence: what it holds, whether all of it was committed, and what the cache needs
    of it.
    """

    tokens: list[int]
    salt: str | None
    digests: list[bytes]


COMMON = (0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1)


class CachedTables(RuleBasedStateMachine):
    """Grows sequences over two token ids that often begin alike, so that prefixes meet.

    The pages know after which tokens each slot was computed. What `find` gives must be in the
    pages, computed after the same tokens under the same salt, and be all that is there: in every
    cache group, as far back as its layers see.
    """

    manager_class: type[BlockManager] = BlockManager
    tables_class: type[BlockTables] = BlockTables
    cached_class: type[CachedBlocks] = CachedBlocks
    index_class: type[PrefixIndex] = PrefixIndex
    collides = False
    # of the cache groups that there may be
    windows: tuple[tuple[int | None, ...], ...] = ((None,),)

    @initialize(data=st.data(), block_size=st.sampled_from([1, 2, 3]))
    def start(self, data: st.DataObject, block_size: int) -> None:
        index = self.index_class(block_size, four_bits if self.collides else blake2b_256)
        groups, first = [], 1
        for window in data.draw(st.sampled_from(self.windows)):
            stop = first + data.draw(st.integers(3, 13))
            pool = BlockPool(stop, first=first)
            groups.append(self.tables_class(pool, block_size, sliding_window=window, max_tokens=16))
            first = stop
        self.manager = self.manager_class(groups, index)
        if self.cached_class is not CachedBlocks:
            self.manager.cached = self.cached_class(groups, index)
        self.pages = FakeDevice(first, block_size)
        self.known: dict[int, Known] = {}
        # what was computed when the windows slid: nothing before it is written again
        self.slid: dict[int, int] = {}
        self.next_id = 0

    def kept(self) -> set[int]:
        return {block for group in self.manager.groups for block in group.pool.kept_blocks()}

    def num_free(self) -> list[int]:
        return [group.pool.num_free for group in self.manager.groups]

    def tables(self, sequence_id: int) -> list[tuple[int, ...]]:
        return [group.block_table(sequence_id) for group in self.manager.groups]

    def fill(self, sequence_id: int, start: int, stop: int) -> None:
        known = self.known[sequence_id]
        for table in self.tables(sequence_id):
            self.pages.write(table, start, known.tokens[start:stop], known.salt)

    def write(self, sequence_id: int, start: int, stop: int) -> bool:
        """Computes the next tokens of a sequence, if there is room. They are not committed."""
        manager, span = self.manager, (sequence_id, start, stop)
        if not manager.has_room([span]):
            return False
        cached = self.kept()
        self.pages.copy(manager.reserve(*span))
        written = [
            table[start // manager.block_size : manager.blocks_for(stop)]
            for table in self.tables(sequence_id)
        ]
        assert all(len(blocks) == len(written[0]) for blocks in written), (
            "a group has no block for what is written"
        )
        evicted = cached - self.kept()
        every = {block for table in self.tables(sequence_id) for block in table}
        with_it = len(manager.groups) > 1  # what went with an evicted block is evicted, too
        assert (with_it or evicted <= every) and not (cached - evicted) & set().union(*written), (
            "what is cached never changes"
        )
        self.fill(sequence_id, start, stop)
        return True

    @rule(
        common=st.sampled_from([0, 3, 6, 12, 12]),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "a", "b"]),
        computes=st.sampled_from([16, 16, 16, 7]),
    )
    def begin(self, common: int, tail: list[int], salt: str | None, computes: int) -> None:
        tokens = [*COMMON[:common], *tail]
        manager, known = self.manager, Known(tokens, salt, [])
        prefix = manager.find(tokens, known.digests, salt)
        self.check_found(known, prefix)
        needed = manager.num_to_begin([(len(tokens), prefix)])
        if not manager.fits(needed):
            return
        self.next_id += 1
        self.known[self.next_id] = known
        num_free = self.num_free()
        self.pages.copy(manager.begin([(self.next_id, len(tokens), prefix)]))
        taken = [before - after for before, after in zip(num_free, self.num_free(), strict=True)]
        # A block that is evicted may set others free, which went with it.
        assert (
            taken == list(needed)
            if len(taken) == 1
            else all(a <= b for a, b in zip(taken, needed, strict=True))
        )
        self.slid[self.next_id] = prefix.num_tokens
        assert self.write(self.next_id, prefix.num_tokens, len(tokens)), (
            "what was counted was too little"
        )
        self.commit(self.next_id, max(prefix.num_tokens, min(computes, len(tokens))))

    def check_found(self, known: Known, prefix: Prefix) -> None:
        size, groups = self.manager.block_size, self.manager.groups
        contexts = [
            context_of(known.tokens[:stop], known.salt)
            for stop in range(size, len(known.tokens), size)
        ]  # the last token is never found
        num_blocks = prefix.num_tokens // size
        for group, blocks in zip(groups, prefix.blocks, strict=True):
            passed = group.num_passed(prefix.num_tokens) if group is not groups[0] else 0
            assert blocks[:passed] == [0] * passed and len(blocks) == num_blocks
            tokens = [self.pages.contexts[block][-1] for block in blocks[passed:]]
            assert tokens == contexts[passed:num_blocks], "another prefix was found"
        if self.collides:
            return
        there = [
            {self.pages.contexts[block][-1] for block in group.pool.kept_blocks()}
            for group in groups
        ]
        maximum = next((i for i, c in enumerate(contexts) if c not in there[0]), len(contexts))
        while maximum and not all(
            set(contexts[group.num_passed(maximum * size) : maximum]) <= held
            for group, held in zip(groups[1:], there[1:], strict=True)
        ):
            maximum -= 1
        assert num_blocks == maximum

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        known = self.known[sequence_id]
        self.manager.cache(sequence_id, num_tokens, known.tokens, known.digests, known.salt)

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.known)))

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        commits=st.sampled_from([True, True, False]),
    )
    def extend(self, data: st.DataObject, tokens: list[int], commits: bool) -> None:
        sequence_id = self.some(data)
        known = self.known[sequence_id]
        before = len(known.tokens)
        known.tokens.extend(tokens)
        if not self.write(sequence_id, before, len(known.tokens)):
            del known.tokens[before:]
        elif commits:
            self.commit(sequence_id, len(known.tokens))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def commit_some(self, data: st.DataObject) -> None:
        sequence_id = self.some(data)
        self.commit(sequence_id, data.draw(st.integers(0, len(self.known[sequence_id].tokens))))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent_id = self.some(data)
        self.next_id += 1
        self.manager.fork(parent_id, self.next_id)
        tokens, salt, digests = self.known[parent_id]
        self.known[self.next_id] = Known(tokens.copy(), salt, digests.copy())
        self.slid[self.next_id] = self.slid[parent_id]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        sequence_id = self.some(data)
        self.slid[sequence_id] = len(self.known[sequence_id].tokens)
        self.manager.slide(sequence_id, self.slid[sequence_id])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """Takes known tokens back, even cached ones, and writes another in their place."""
        sequence_id = self.some(data)
        known = self.known[sequence_id]
        num_tokens = data.draw(st.integers(self.slid[sequence_id], len(known.tokens)))
        self.manager.trim(sequence_id, num_tokens)
        del known.tokens[num_tokens:], known.digests[num_tokens // self.manager.block_size :]
        known.tokens.append(data.draw(st.integers(0, 1)))
        if not self.write(sequence_id, num_tokens, num_tokens + 1):
            known.tokens.pop()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = self.some(data)
        self.manager.release(sequence_id)
        del self.known[sequence_id]

    @precondition(lambda self: self.next_id % 5 == 4)
    @rule()
    def forget_cached(self) -> None:
        self.manager.forget_cached()

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        check_cached(self.manager, self.pages)
        for sequence_id, (tokens, salt, _) in self.known.items():
            for group in self.manager.groups:
                table, seen = group.block_table(sequence_id), 0
                if group.sliding_window is not None:
                    seen = max(0, self.slid[sequence_id] - group.sliding_window)
                assert self.pages.read(table, len(tokens))[seen:] == tokens[seen:]
                assert self.pages.context(table, len(tokens), salt) == context_of(tokens, salt)

    def teardown(self) -> None:
        for sequence_id in list(getattr(self, "known", ())):
            self.manager.release(sequence_id)
        if hasattr(self, "manager"):
            assert self.manager.num_free == self.manager.num_usable
            self.manager.check()


STATE_MACHINE = settings(stateful_step_count=30)


GROUPS = ((None, 3), (None, 2, 5), (None, 1), (4,), (5, 2))


@pytest.mark.parametrize(
    ("collides", "windows"),
    few(
        itertools.product([False, True], [((None,),), GROUPS]),
        [(False, GROUPS), (True, ((None,),))],
    ),
)
def test_cached_tables_agree_with_the_pages(collides, windows):
    machine = type("Tables", (CachedTables,), {"collides": collides, "windows": windows})
    run_state_machine_as_test(machine, settings=STATE_MACHINE)


class CachesPartialBlocks(BlockManager):
    def cache(self, sequence_id, num_computed, token_ids, digests, salt):
        full = self.blocks_for(num_computed) * self.block_size
        super().cache(sequence_id, full, [*token_ids, *[0] * self.block_size], digests, salt)


class WritesCachedBlocks(BlockTables):
    def _unshare(self, blocks, start, stop):
        self.pool.is_writable = lambda block: self.pool.ref_count(block) == 1
        return super()._unshare(blocks, start, stop)

    def num_new_blocks(self, sequence_id, start, stop):
        self.pool.is_writable = lambda block: self.pool.ref_count(block) == 1
        return super().num_new_blocks(sequence_id, start, stop)


class ForgetsToForget(BlockTables):
    """Hands an evicted block out and leaves it in the index."""

    def _allocate(self):
        return self.pool.allocate()


class ReleasesTheHeadFirst(BlockTables):
    def _give_up(self, blocks, num_kept):
        given_up = blocks[num_kept:]
        del blocks[num_kept:]
        for block in given_up:
            self.pool.release(block)


class TakesTheWholePrompt(BlockManager):
    def find(self, token_ids, digests, salt):
        return super().find([*token_ids, 0], digests, salt)


class CountsRevivedBlocksAsFree(BlockTables):
    def num_revived(self, blocks):
        return 0


class KeepsOwnBlockAfterAnothers(BlockManager):
    """Holds two blocks for one content, and caches what follows the second after nothing that the
    index has.
    """

    def cache(self, sequence_id, num_computed, token_ids, digests, salt):
        (group,) = self.groups
        table, pool = group.tables[sequence_id], group.pool
        before = list(table.blocks)
        super().cache(sequence_id, num_computed, token_ids, digests, salt)
        for index, block in enumerate(before):
            if table.blocks[index] != block:
                pool.release(table.blocks[index])
                pool._free.remove(block)
                pool._ref_counts[block] = 1
                table.blocks[index], table.frozen = block, None


class HashesWithoutParent(PrefixIndex):
    def extend(self, digests, token_ids, salt, num_blocks):
        size = self.block_size
        for index in range(len(digests), num_blocks):
            digests.append(
                self._hash(repr((salt, token_ids[index * size : (index + 1) * size])).encode())
            )
        return digests

    def _holds(self, block, parent, token_ids):
        return self._entries[block].token_ids == token_ids

    def check(self):
        pass


class IgnoresTheSalt(PrefixIndex):
    def extend(self, digests, token_ids, salt, num_blocks):
        return super().extend(digests, token_ids, None, num_blocks)

    def match(self, digests, token_ids, salt):
        return super().match(digests, token_ids, None)

    def register(self, block, digest, parent, token_ids):
        return super().register(
            block, digest, None if isinstance(parent, str) else parent, token_ids
        )


class TrustsTheHash(PrefixIndex):
    def _holds(self, block, parent, token_ids):
        return True


class ComparesTheBlockAlone(PrefixIndex):
    def _holds(self, block, parent, token_ids):
        return self._entries[block].token_ids == token_ids


class LosesWhatGoesWithIt(CachedBlocks):
    """Hands a block of the first group out anew, and those of the others that go with it stay."""

    def _forget(self, block):
        for with_it in self.index.forget(block):
            self._first.pool.unkeep(with_it)


class TakesAnyBlockBeside(CachedBlocks):
    """Takes a hit of the first group for one of all, if only its last block has the others."""

    def _has_attached(self, number, blocks):
        return blocks[-1] in self._attached[number]

    def _find_attached_blocks(self, number, blocks):
        attached = self._attached[number]
        passed = self._num_passed(number, blocks)
        return [0] * passed + [
            attached.get(block, attached[blocks[-1]]) for block in blocks[passed:]
        ]


class GoesWithTheWrongBlock(CachedBlocks):
    def _attach(self, number, sequence_id, place, holder):
        super()._attach(number, sequence_id, max(0, place - 1), holder)


class StaysWhenItIsReused(CachedBlocks):
    """Finds a block of a further group that was handed out anew."""

    def _detach(self, number, block):
        pass


class AsksTheFirstGroupAlone(BlockManager):
    def has_room(self, spans):
        return self.groups[0].num_new_blocks_together(spans) <= self.groups[0].pool.num_free


class ForksTheFirstGroupAlone(BlockManager):
    def fork(self, parent_id, child_id):
        self.groups[0].fork(parent_id, child_id)
        for group in self.groups[1:]:
            group.tables[child_id] = group.tables[parent_id]


KINDS = {
    BlockManager: "manager_class",
    BlockTables: "tables_class",
    CachedBlocks: "cached_class",
    PrefixIndex: "index_class",
}


def mistaken_machine(mistake: type, collides: bool, windows: Any) -> type[CachedTables]:
    kind = next(name for of, name in KINDS.items() if issubclass(mistake, of))
    return type(
        "Mistaken", (CachedTables,), {kind: mistake, "collides": collides, "windows": windows}
    )


@pytest.mark.parametrize(
    ("mistake", "collides", "windows"),
    [
        *[
            (mistake, False, ((None,),))
            for mistake in (
                *(
                    CachesPartialBlocks,
                    WritesCachedBlocks,
                    ForgetsToForget,
                    ReleasesTheHeadFirst,
                    TakesTheWholePrompt,
                ),
                *(
                    CountsRevivedBlocksAsFree,
                    KeepsOwnBlockAfterAnothers,
                    HashesWithoutParent,
                    IgnoresTheSalt,
                ),
            )
        ],
        (TrustsTheHash, True, ((None,),)),
        (ComparesTheBlockAlone, True, ((None,),)),
        *[
            (mistake, False, GROUPS)
            for mistake in (
                *(GoesWithTheWrongBlock, StaysWhenItIsReused),
                *(AsksTheFirstGroupAlone, ForksTheFirstGroupAlone),
            )
        ],
        # these take thousands of steps to be seen
        *[
            pytest.param(mistake, False, GROUPS, marks=pytest.mark.sweep)
            for mistake in (LosesWhatGoesWithIt, TakesAnyBlockBeside)
        ],
    ],
)
def test_the_state_machine_sees_planted_mistakes(mistake, collides, windows):
    machine = mistaken_machine(mistake, collides, windows)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, CapacityError)):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=800)
        )


# ---- the scheduler with a cache: its own state machine is that of test_scheduler, half of whose
# examples cache


class KeepsTheIndexWhenPagesAreLost(Scheduler):
    def lose_pages(self):
        self.preempt_all()


class CachesBeforeTheStep(RunningSet):
    """Finds the prompt of a request as soon as it is admitted, though the step that computes it may
    never happen.
    """

    def _give_blocks(self, group, step):
        admitted = super()._give_blocks(group, step)
        if admitted:
            for s in group.unfinished:
                salt, known = group.request.params.cache_salt, s.num_known_tokens
                self.block_manager.cache(s.sequence_id, known, s.token_ids, s.block_digests, salt)
        return admitted


class CachesKnownForComputed(Scheduler):
    def _cache(self, group, sequence):
        salt, known = group.request.params.cache_salt, sequence.num_known_tokens
        self.block_manager.cache(
            sequence.sequence_id, known, sequence.token_ids, sequence.block_digests, salt
        )


class LeavesTheSaltOut(BlockManager):
    def find(self, token_ids, digests, salt):
        return super().find(token_ids, digests, None)

    def cache(self, sequence_id, num_computed, token_ids, digests, salt):
        super().cache(sequence_id, num_computed, token_ids, digests, None)


OF_THE_SCHEDULER = [
    ("scheduler_class", KeepsTheIndexWhenPagesAreLost),
    ("running_set_class", CachesBeforeTheStep),
    ("scheduler_class", CachesKnownForComputed),
    ("manager_class", LeavesTheSaltOut),
]
SEEN_ABOVE = [
    ("manager_class", CachesPartialBlocks),
    ("tables_class", CountsRevivedBlocksAsFree),
    ("manager_class", TakesTheWholePrompt),
    ("index_class", HashesWithoutParent),
    ("index_class", IgnoresTheSalt),
]


@pytest.mark.parametrize(("name", "mistake"), few(OF_THE_SCHEDULER + SEEN_ABOVE, OF_THE_SCHEDULER))
def test_the_state_machine_of_the_scheduler_sees_planted_mistakes(name, mistake):
    machine = type("Mistaken", (Caching,), {name: mistake})
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or what the confusion leads to
        run_state_machine_as_test(
            machine,
            settings=settings(SCHEDULER_STATE_MACHINE, phases=[Phase.generate], max_examples=800),
        )


def run_one(driver: Driver, request_id: str, prompt: list[int], **how: object):
    group = make_group(
        request_id, driver.new_sequence_id(), prompt, **{"max_tokens": 4, "ignore_eos": True, **how}
    )
    driver.scheduler.add(group)
    driver.run()
    assert group.sequences[0].output_token_ids == alone(group.request)
    return group


def test_a_prompt_starts_after_what_is_cached_and_leaves_a_token_to_compute():
    driver = make_driver(caching=True, block_size=4, max_tokens=16)
    prompt = list(range(24))
    assert run_one(driver, "first", prompt).num_cached_tokens == 0
    steps = len(driver.plans)
    again = run_one(driver, "again", prompt)
    # the sixth block holds the token whose logits are drawn from
    assert again.num_cached_tokens == 20
    assert [(row.start, len(row.token_ids)) for row in driver.plans[steps].rows] == [(20, 4)]
    longer = run_one(driver, "longer", [*prompt, *again.sequences[0].output_token_ids, 1])
    # the block with the output's first tokens was never full and computed
    assert longer.num_cached_tokens == 24
    counts = driver.scheduler.prefix_counts
    assert (counts.num_queried, counts.num_hits, counts.num_resumed_hits) == (
        24 + 24 + 29,
        20 + 24,
        0,
    )


def test_generated_tokens_are_found_too():
    driver = make_driver(caching=True, block_size=4)
    first = run_one(driver, "first", list(range(6)), max_tokens=11)
    turn = [*first.sequences[0].token_ids, 5, 5]
    assert (
        run_one(driver, "second turn", turn).num_cached_tokens == 16
    )  # the seventeenth token was drawn, never computed


def test_a_hit_that_leaves_one_token_decodes():
    driver = make_driver(caching=True, block_size=4, mixed=False)
    run_one(driver, "first", list(range(20)))
    running = make_group("running", 1, [9] * 4, max_tokens=12, ignore_eos=True)
    driver.scheduler.add(running)
    driver.step()
    hit = make_group("hit", 2, [*range(16), 3], max_tokens=3, ignore_eos=True)
    driver.scheduler.add(hit)
    driver.scheduler.add(make_group("prompt", 3, [8] * 10, max_tokens=3, ignore_eos=True))
    driver.run()  # asserts that no step has single tokens beside a chunk
    assert hit.num_cached_tokens == 16 and hit.sequences[0].output_token_ids == alone(hit.request)


def test_blocks_in_use_by_others_are_shared_and_cost_nothing():
    driver = make_driver(caching=True, num_blocks=9, block_size=4, max_tokens=32)
    scheduler, pool = driver.scheduler, driver.scheduler.block_manager.groups[0].pool
    prompt = [1, 2, 3, 4] * 5
    scheduler.add(make_group("old", 0, prompt, max_tokens=3, ignore_eos=True))
    driver.step()
    assert pool.num_free == 3
    scheduler.add(make_group("new", 1, [*prompt, 7, 7], max_tokens=3, ignore_eos=True))
    driver.step()  # the old one decodes
    driver.step()
    _, new = scheduler.running
    assert new.num_cached_tokens == 20 and pool.num_free == 1
    tables = [scheduler.block_manager.block_tables(i)[0] for i in (0, 1)]
    assert tables[0][:5] == tables[1][:5] and tables[0][5] != tables[1][5]
    assert scheduler.usage().shared_blocks == 5
    driver.run()
    assert scheduler.num_preemptions == {"recompute": 0, "swap": 0} and (
        pool.num_free,
        pool.num_cached,
    ) == (
        8,
        6,
    )  # the last one of new is full


def test_revived_blocks_count_as_taken():
    """Six blocks are cached, of eight: a prompt that starts with them and needs nine does not fit;
    one of eight does.
    """
    driver = make_driver(caching=True, num_blocks=9, block_size=2)
    run_one(driver, "first", [1, 2, 3] * 4, max_tokens=1)
    pool = driver.scheduler.block_manager.groups[0].pool
    assert (pool.num_free, pool.num_cached) == (8, 6)
    assert (
        run_one(driver, "second", [*[1, 2, 3] * 4, 9, 9, 9, 9], max_tokens=1).num_cached_tokens
        == 12
    )
    assert pool.num_cached == 8


def test_tails_are_evicted_before_heads_and_the_least_recently_used_first():
    driver = make_driver(caching=True, num_blocks=9, block_size=2)
    run_one(driver, "a", [1] * 8, max_tokens=1)
    run_one(driver, "b", [2] * 8, max_tokens=1)
    run_one(driver, "c", [3] * 4, max_tokens=1)  # takes two blocks: the tail of a
    # and the tail of b for the rest
    assert run_one(driver, "a again", [1] * 9, max_tokens=1).num_cached_tokens == 4
    pool = driver.scheduler.block_manager.groups[0].pool
    assert pool.num_cached == 8 - 1


def test_what_a_preempted_request_finds_again_is_counted_apart():
    driver = make_driver(caching=True, block_size=4, max_tokens=64)
    group = make_group("a", 0, range(30), max_tokens=8, ignore_eos=True)
    driver.scheduler.add(group)
    for _ in range(4):
        driver.step()
    driver.scheduler.preempt_all()
    driver.run()
    counts = driver.scheduler.prefix_counts
    assert (
        group.num_cached_tokens,
        counts.num_hits,
        counts.num_queried,
        counts.num_resumed_hits,
    ) == (0, 0, 30, 32)
    assert group.sequences[0].output_token_ids == alone(group.request)


def test_aborted_requests_leave_what_they_computed():
    driver = make_driver(caching=True, block_size=4, max_tokens=8)
    driver.scheduler.add(make_group("a", 0, range(30)))
    driver.step()
    driver.step()
    driver.scheduler.abort("a")
    assert run_one(driver, "b", list(range(30))).num_cached_tokens == 16


def test_equal_prompts_of_one_step_end_up_in_one_set_of_blocks():
    driver = make_driver(caching=True, block_size=4, max_tokens=64)
    for i in range(3):
        driver.scheduler.add(make_group(str(i), i, [1, 2, 3] * 4, max_tokens=3, ignore_eos=True))
    driver.step()
    pool = driver.scheduler.block_manager.groups[0].pool
    assert pool.num_usable - pool.num_free == 3 and driver.scheduler.usage().shared_blocks == 3
    driver.run()


def test_salts_keep_requests_apart():
    driver = make_driver(caching=True, block_size=4)
    prompt = list(range(24))
    run_one(driver, "plain", prompt)
    for i, salt in enumerate(["a", "b"]):
        assert run_one(driver, f"{i}", prompt, cache_salt=salt).num_cached_tokens == 0
        assert run_one(driver, f"{i} again", prompt, cache_salt=salt).num_cached_tokens == 20
    assert run_one(driver, "plain again", prompt).num_cached_tokens == 20


def test_without_an_index_nothing_is_kept():
    driver = make_driver(caching=False, block_size=4)
    run_one(driver, "a", list(range(24)))
    again = run_one(driver, "b", list(range(24)))
    assert (
        again.num_cached_tokens == 0
        and driver.scheduler.block_manager.groups[0].pool.num_cached == 0
    )
    assert driver.scheduler.prefix_counts.num_queried == 0 and not again.sequences[0].block_digests


def test_each_block_is_hashed_once_however_long_a_request_waits():
    calls: list[bytes] = []

    class Counting(PrefixIndex):
        def __init__(self, block_size, **settings):
            hashed = lambda content: calls.append(content) or blake2b_256(content)  # noqa: E731
            super().__init__(block_size, hashed, **settings)

        def check(self):
            pass

    driver = make_driver(caching=True, num_blocks=13, block_size=4, index_class=Counting)
    for i in range(3):
        driver.scheduler.add(make_group(str(i), i, [i] * 20, max_tokens=16, ignore_eos=True))
    driver.run()
    num_blocks = 3 * (35 // 4)
    assert len(calls) == num_blocks + 3  # the roots
    assert max(len(call) for call in calls) <= 32 + 4 * 4


def test_a_chain_ends_where_a_hash_collides():
    """Both chains have one digest per place: the second is not cached, and what is found is never
    the other's.
    """
    index = PrefixIndex(2, lambda content: b"same" if len(content) == 12 else b"root")
    manager = BlockManager([BlockTables(BlockPool(9), 2)], index)
    for sequence_id, tokens in enumerate([[1, 1, 2, 2], [3, 3, 2, 2]]):
        manager.reserve(sequence_id, 0, 4)
        manager.cache(sequence_id, 4, tokens, [], None)
        manager.check()
    assert len(index) == 1
    assert manager.find([1, 1, 9], [], None).blocks == ([manager.block_tables(0)[0][0]],)
    assert manager.find([3, 3, 9], [], None) == manager.nothing


def test_the_root_depends_on_the_salt_alone():
    index = PrefixIndex(2)
    digests = [index.extend([], [1, 2], salt, 1)[0] for salt in (None, "a", "b", "no salt")]
    assert len(set(digests)) == 4 and digests[0] == PrefixIndex(2).extend([], [1, 2], None, 1)[0]
    grown = index.extend(index.extend([], [1, 2, 3, 4], None, 1), [1, 2, 3, 4], None, 2)
    assert grown == index.extend([], [1, 2, 3, 4], None, 2) and grown[0] == digests[0]


def test_blocks_that_depend_on_the_next_token_are_found_before_it_alone():
    """They are not found before it is computed.

    Of a fork that goes on otherwise the shared block is not found.
    """
    manager = BlockManager([BlockTables(BlockPool(20), 2)], PrefixIndex(2, num_following=1))
    assert manager.cached is not None

    def compute(sequence_id: int, tokens: list[int], start: int, stop: int) -> None:
        manager.reserve(sequence_id, start, stop)
        manager.cache(sequence_id, stop, tokens, [], None)
        manager.check()

    compute(0, [1, 2, 3, 4, 5], 0, 4)
    assert len(manager.cached.index) == 1 == manager.num_to_cache(4)
    compute(0, [1, 2, 3, 4, 5], 4, 5)
    blocks = [*manager.block_tables(0)[0]]
    assert manager.find([1, 2, 3, 4, 5, 9], [], None).blocks == (blocks[:2],)
    assert manager.find([1, 2, 3, 4, 9], [], None).blocks == (blocks[:1],)
    compute(1, [7, 7], 0, 2)
    manager.fork(1, 2)
    compute(1, [7, 7, 1], 2, 3)
    compute(2, [7, 7, 2], 2, 3)
    assert manager.find([7, 7, 1, 0], [], None).num_tokens == 2
    assert manager.find([7, 7, 2, 0], [], None) == manager.nothing


def test_the_last_token_of_a_pin_is_computed_again_where_it_depends_on_the_next_one():
    """Request 1 continues the pinned tokens 1, 2 with another token than the request of the pin."""
    manager = BlockManager([BlockTables(BlockPool(20), 1)], PrefixIndex(1, num_following=1))
    manager.reserve(0, 0, 3)
    manager.cache(0, 3, [1, 2, 3], [], None)
    manager.pin(-1, 0, Pin((1, 2), None))
    tokens = [1, 2, 8, 9]
    pinned = manager.find_pinned(tokens, None)
    assert pinned.num_tokens == 1
    manager.begin([(1, len(tokens), pinned)])
    manager.cache(1, len(tokens), tokens, [], None)
    manager.check()
    assert manager.find([*tokens, 7], [], None).num_tokens == 3


def _point_elsewhere(index: PrefixIndex) -> None:
    index._block_of[next(iter(index._block_of))] = 7


def _lose_the_head(index: PrefixIndex) -> None:
    index.forget(1)


def _change_tokens(index: PrefixIndex) -> None:
    index._entries[1] = index._entries[1]._replace(token_ids=(8, 8))


def _shorten(index: PrefixIndex) -> None:
    index._entries[2] = index._entries[2]._replace(token_ids=(2,))


@pytest.mark.parametrize("damage", [_point_elsewhere, _lose_the_head, _change_tokens, _shorten])
def test_check_sees_damage(damage):
    manager = BlockManager([BlockTables(BlockPool(5), 2)], PrefixIndex(2))
    manager.reserve(0, 0, 4)
    manager.cache(0, 4, [1, 1, 2, 2], [], None)
    manager.check()
    damage(manager.cached.index)
    with pytest.raises(AssertionError):
        manager.check()


def test_cached_blocks_are_trimmed_before_they_are_written_again():
    manager = BlockManager([BlockTables(BlockPool(8), 2)], PrefixIndex(2))
    manager.reserve(0, 0, 6)
    manager.cache(0, 6, [1] * 6, [], None)
    assert manager.groups[0].tables[0].num_cached == 3, (
        "a block that is cached is not offered again"
    )
    with pytest.raises(ValueError, match="before cached ones: trim first"):
        manager.reserve(0, 1, 4)
    manager.trim(0, 1)
    head = manager.block_tables(0)[0][0]
    assert manager.reserve(0, 1, 4) == ((head, manager.block_tables(0)[0][0]),)
    manager.check()
    assert manager.find([1] * 7, [], None).blocks[0][0] == head, "what was cached is still there"
