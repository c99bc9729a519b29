"""BlockPool: what is handed out, in which order, and what check() sees."""

from __future__ import annotations

import pytest

from jaxpage.memory import BlockPool
from jaxpage.memory.block_pool import NULL_BLOCK


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = BlockPool(6)
    assert (pool.num_usable, pool.num_free) == (5, 5)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0
    pool.check()


def test_the_free_order_can_be_given_and_what_is_released_goes_last():
    pool = BlockPool(6, free_order=[4, 2])
    assert [pool.allocate(), pool.allocate()] == [4, 2]
    pool.release(4)
    assert [pool.allocate() for _ in range(4)] == [1, 3, 5, 4]


@pytest.mark.parametrize("free_order", [[1, 1], [0], [6], [-1]])
def test_a_wrong_free_order_is_refused(free_order):
    with pytest.raises(ValueError, match="free_order"):
        BlockPool(6, free_order=free_order)


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_free) == (0, 2)
    pool.check()


@pytest.mark.parametrize("misuse", ["release", "share"])
def test_a_free_block_can_be_neither_released_nor_shared(misuse):
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 1 is not in use"):
        getattr(pool, misuse)(1)


def test_an_empty_pool_hands_nothing_out():
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_kept_blocks_are_handed_out_last_the_least_recently_used_first():
    pool = BlockPool(5)
    first, second, third = (pool.allocate() for _ in range(3))
    for block in (first, second):
        pool.keep(block)
        assert not pool.is_writable(block)
    for block in (second, first, third):
        pool.release(block)
    assert (pool.num_free, pool.num_cached, pool.cached_blocks()) == (4, 2, [second, first])
    pool.check()
    assert [pool.allocate() for _ in range(3)] == [4, third, second]
    assert not pool.is_kept(second) and pool.is_writable(second) and pool.is_kept(first)
    pool.check()


def test_a_kept_block_comes_back_into_use_as_it_is():
    pool = BlockPool(4)
    block = pool.allocate()
    pool.keep(block)
    pool.release(block)
    pool.share(block)
    assert (pool.ref_count(block), pool.num_free, pool.num_cached) == (1, 2, 0) and pool.is_kept(
        block
    )
    pool.check()
    pool.release(block)
    pool.forget()
    assert (pool.num_free, pool.num_cached, pool.is_kept(block)) == (3, 0, False)
    pool.check()
    with pytest.raises(AssertionError, match="not in use and cannot be kept"):
        pool.keep(block)


def _hand_out_null(pool: BlockPool) -> None:
    pool._ref_counts[NULL_BLOCK] = 1


def _lose(pool: BlockPool) -> None:
    pool._free.popleft()


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def _free_while_used(pool: BlockPool) -> None:
    pool._free.append(pool.allocate())


def _make_cached_and_free(pool: BlockPool) -> None:
    pool._cached[1] = None


def _hold_and_free(pool: BlockPool) -> None:
    pool._is_kept[1] = True


@pytest.mark.parametrize(
    "damage",
    [_hand_out_null, _lose, _free_twice, _free_while_used, _make_cached_and_free, _hold_and_free],
)
def test_check_sees_damage(damage):
    pool = BlockPool(4)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()
