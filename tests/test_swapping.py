"""Blocks that move to host memory and back: every bit of them, no other block, in the plan's order.

The oracle is bytes in numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import EngineConfig, SamplingParams
from jaxpage.assembly import build_engine
from jaxpage.assembly.planning import capacity
from jaxpage.device.inputs.buckets import BucketMenu, make_menu
from jaxpage.device.pages.host_pages import HostPages
from jaxpage.device.steps import StepOutput
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.runner import Runner
from jaxpage.errors import CapacityError
from jaxpage.memory import pool_ids
from jaxpage.step.plan import Row, Sample, StepPlan
from pallas_kernels import copy_blocks, gather_blocks, scatter_blocks
from tests.support.engines import LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint

NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_SWAPPED = 24, 15, 4


class ScaledPages(NamedTuple):
    """Has a layer whose leaves differ in type and rank."""

    k_pages: jax.Array
    v_pages: jax.Array
    k_scales: jax.Array


KINDS = {
    "float32": [(jnp.float32, (4, 2, 8))] * 4,
    "bfloat16": [(jnp.bfloat16, (4, 2, 8))] * 4,
    "scaled": [(jnp.int8, (4, 2, 8)), (jnp.float8_e4m3fn, (4, 2, 8)), (jnp.float32, (4, 2))] * 2,
}


def random_pages(kind, seed=0):
    """Makes pages of random bits: among them numbers of every kind, and such as are none."""
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.array(_random_bits(rng, np.dtype(dtype), (NUM_BLOCKS, *shape)))
        for dtype, shape in KINDS[kind]
    ]
    return (
        tuple(ScaledPages(*leaves[i : i + 3]) for i in (0, 3))
        if kind == "scaled"
        else tuple(leaves)
    )


def _random_bits(rng, dtype, shape):
    bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    if dtype == jnp.bfloat16:  # XLA:CPU moves them by way of float32, and all NaNs become one there
        words = bits.view(np.uint16)
        words[words & 0x7F80 == 0x7F80] = 0x7FC0
    return bits.view(dtype)


def bytes_of(pages):
    """Returns the pages as the model has them: [P, bytes of a block]."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(pages)]
    return np.concatenate([leaf.reshape(len(leaf), -1).view(np.uint8) for leaf in leaves], axis=1)


class Moves:
    """Stands for executables without a model: a step draws nothing and leaves the pages as they
    are.
    """

    _gather = staticmethod(jax.jit(gather_blocks))
    _scatter = staticmethod(jax.jit(scatter_blocks, donate_argnums=0))
    _copy = staticmethod(jax.jit(copy_blocks, donate_argnums=0))

    def copy(self, pages, group, pairs):
        return self._copy(pages, pairs[:, 0], pairs[:, 1])

    def gather(self, pages, group, blocks):
        return self._gather(pages, blocks)

    def scatter(self, pages, group, blocks, contents):
        return self._scatter(pages, blocks, contents)

    def step(self, bucket, draft_depth=None):
        nothing = np.zeros((bucket.num_rows, 5), np.int32)
        return lambda parameters, pages, packed, processor_inputs: (
            StepOutput(nothing, nothing, nothing),
            pages,
        )


def make_runner(kind="float32", runner=Runner, seed=0):
    """Makes a runner whose blocks, on both sides, hold random bits."""
    pages = random_pages(kind, seed)
    host_pages = HostPages(NUM_HOST_BLOCKS, bytes_of(pages).shape[1])
    made = runner({}, lambda: pages, Moves(), [host_pages])
    host_blocks = np.arange(NUM_HOST_BLOCKS + 1, dtype=np.int32)
    host_pages.store(host_blocks, bytes_of(random_pages(kind, seed + 1))[host_blocks])
    return made


BUILDER = BatchBuilder(
    dataclasses.replace(make_menu(2, 16), num_copies=3, num_swapped=NUM_SWAPPED),
    table_width=4,
    block_size=4,
    blocks=pool_ids([NUM_BLOCKS]),
    vocab_size=10,
    host_blocks=pool_ids([NUM_HOST_BLOCKS + 1]),
)


def plan_of(**moves):
    return StepPlan(
        0, (Row(0, 0, (1,), ((1,),)),), (), **{name: tuple(pairs) for name, pairs in moves.items()}
    )


def run(runner, plan):
    runner.run(BUILDER.build(plan))


def state(runner):
    """Returns what both sides hold, without the null blocks."""
    return bytes_of(runner._pages)[1:], runner._host_pages[0].load(
        np.arange(1, NUM_HOST_BLOCKS + 1, dtype=np.int32)
    )


ORDER = ("swap_out", "swap_in", "copies")


def model(device, host, plan, order=ORDER):
    """Runs the plan on rows of bytes, one move after the other."""
    device, host = device.copy(), host.copy()
    sides = {"swap_out": (device, host), "swap_in": (host, device), "copies": (device, device)}
    for name in order:
        source, destination = sides[name]
        for from_block, to_block in getattr(plan, name):
            destination[to_block - 1] = source[from_block - 1]
    return device, host


def assert_agrees(runner, *plans):
    expected_arrays = state(runner)
    for plan in plans:
        expected_arrays = model(*expected_arrays, plan)
        run(runner, plan)
    for actual, expected in zip(state(runner), expected_arrays, strict=True):
        np.testing.assert_array_equal(actual, expected)


# ---- blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, NUM_SWAPPED, 2 * NUM_SWAPPED + 3])
def test_blocks_come_back_bit_by_bit_and_no_other_changes(kind, count):
    rng = np.random.default_rng(count)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    host_blocks = (rng.permutation(NUM_HOST_BLOCKS) + 1).tolist()[:count]
    sources, destinations = blocks[:count], blocks[count : 2 * count]
    runner = make_runner(kind)
    device, host = state(runner)
    run(runner, plan_of(swap_out=zip(sources, host_blocks, strict=True)))
    after, host_after = state(runner)
    np.testing.assert_array_equal(after, device)
    host[np.array(host_blocks) - 1] = device[np.array(sources) - 1]
    np.testing.assert_array_equal(host_after, host)

    runner._pages = jax.tree.map(
        lambda leaf: leaf.at[np.array(sources)].set(jnp.array(-1, leaf.dtype)), runner._pages
    )
    garbage = bytes_of(runner._pages)[1:]
    run(runner, plan_of(swap_in=zip(host_blocks, destinations, strict=True)))
    expected = garbage.copy()
    expected[np.array(destinations) - 1] = device[np.array(sources) - 1]
    np.testing.assert_array_equal(state(runner)[0], expected)
    assert not np.array_equal(expected, garbage)


def test_gathered_bytes_are_those_of_the_pages():
    """They are in their order, too, by which a block of another engine would be read."""
    pages = random_pages("scaled")
    blocks = np.array([5, 2, 5, 0], np.int32)
    np.testing.assert_array_equal(np.asarray(Moves._gather(pages, blocks)), bytes_of(pages)[blocks])


@st.composite
def plans(draw):
    """Draws moves as a scheduler may order them: no destination twice, and no copy reads what a
    copy of the plan writes.
    """
    blocks, host_blocks = st.integers(1, NUM_BLOCKS - 1), st.integers(1, NUM_HOST_BLOCKS)

    def pairs(source, destination):
        return draw(
            st.lists(st.tuples(source, destination), max_size=9, unique_by=lambda pair: pair[1])
        )

    copies = pairs(blocks, blocks)
    written = {destination for _, destination in copies}
    copies = [pair for pair in copies if pair[0] not in written]
    return plan_of(
        swap_out=pairs(blocks, host_blocks), swap_in=pairs(host_blocks, blocks), copies=copies
    )


@given(st.lists(plans(), min_size=1, max_size=4), st.sampled_from(list(KINDS)))
def test_any_plans_do_what_the_model_says(steps, kind):
    assert_agrees(make_runner(kind), *steps)


# ---- order

# Block 1 is freed by swapping out and is a copy's destination; block 2 is freed, filled from the
# host, and is that copy's source.
ORDERED = plan_of(swap_out=[(1, 1), (2, 2)], swap_in=[(3, 2)], copies=[(2, 1)])


def test_a_block_that_is_freed_and_filled_in_one_step():
    runner = make_runner()
    device, host = state(runner)
    assert_agrees(runner, ORDERED)
    after, host_after = state(runner)
    np.testing.assert_array_equal(host_after[:2], device[:2])
    np.testing.assert_array_equal(after[:2], host[[2, 2]])


class OtherOrder(Runner):
    """Makes the mistake that the plan above is there for."""

    order = ORDER

    def run(self, batch):
        for name in self.order:
            super().run(
                dataclasses.replace(batch, **{other: () for other in ORDER if other != name})
            )


@pytest.mark.parametrize("order", list(itertools.permutations(ORDER)), ids="-".join)
def test_only_the_right_order_agrees_with_the_model(order):
    class Mutant(OtherOrder):
        pass

    Mutant.order = order
    if order == ORDER:
        assert_agrees(make_runner(runner=Mutant), ORDERED)
    else:
        with pytest.raises(AssertionError):
            assert_agrees(make_runner(runner=Mutant), ORDERED)


class PadsWithTheFirstBlock(Moves):
    def scatter(self, pages, group, blocks, contents):
        return Moves._scatter(pages, np.where(blocks == 0, 1, blocks), contents)


def test_padding_that_reached_a_block_would_be_seen():
    runner = make_runner()
    runner.executables = PadsWithTheFirstBlock()
    with pytest.raises(AssertionError):
        assert_agrees(runner, plan_of(swap_in=[(3, 2)]))


# ---- ids


@pytest.mark.parametrize(
    "moves",
    [
        {"swap_out": [(0, 1)]},
        {"swap_out": [(1, 0)]},
        {"swap_out": [(-1, 1)]},
        {"swap_out": [(NUM_BLOCKS, 1)]},
        {"swap_out": [(1, NUM_HOST_BLOCKS + 1)]},
        {"swap_in": [(0, 1)]},
        {"swap_in": [(1, 0)]},
        {"swap_in": [(NUM_HOST_BLOCKS + 1, 1)]},
        {"swap_in": [(1, 1), (2, NUM_BLOCKS)]},
        {"copies": [(NUM_BLOCKS, 1)]},
        {"copies": [(1, -1)]},
        {"copies": [(1, 0)]},
    ],
    ids=str,
)
def test_ids_outside_of_a_pool_are_refused(moves):
    with pytest.raises(ValueError, match=rf"{next(iter(moves))} .* leave the pools: ids are 1 to "):
        BUILDER.build(plan_of(**moves))


def test_the_last_ids_of_both_pools_are_honoured():
    last = (NUM_BLOCKS - 1, NUM_HOST_BLOCKS)
    assert_agrees(
        make_runner(),
        plan_of(swap_out=[last]),
        plan_of(swap_in=[last[::-1]], copies=[(last[0], 1)]),
    )


def test_without_host_blocks_every_swap_is_refused():
    builder = BatchBuilder(
        BucketMenu(*[BUILDER.menu.decode] * 2),
        table_width=4,
        block_size=4,
        blocks=[range(1, 9)],
        vocab_size=9,
    )
    with pytest.raises(ValueError, match="leave the pools"):
        builder.build(plan_of(swap_out=[(1, 1)]))


# ---- failure and end


class FailsLate(Moves):
    """Fails the second batch of a swap-in: some blocks are there, others are not, and no page is
    missing.
    """

    calls = 0

    def scatter(self, pages, group, blocks, contents):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("planted")
        return Moves._scatter(pages, blocks, contents)


def test_a_step_that_stops_half_way_loses_the_pages_and_not_the_host():
    runner = make_runner()
    _, host = state(runner)
    runner.executables = FailsLate()
    with pytest.raises(RuntimeError, match="planted"):
        run(runner, plan_of(swap_in=[(block, block) for block in range(1, NUM_SWAPPED + 2)]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(runner._pages))
    runner._new_pages = lambda: random_pages("float32", seed=9)
    runner.rebuild_pages()
    np.testing.assert_array_equal(state(runner)[1], host)
    assert_agrees(runner, plan_of(swap_in=[(4, 7)]))


def test_closing_frees_the_memory_of_the_host():
    runner = make_runner()
    runner.executables.close = lambda: None
    rows = weakref.ref(runner._host_pages[0]._rows)
    assert rows() is not None
    runner.close()
    assert rows() is None


# ---- the engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


def test_a_sequence_that_was_away_goes_on_to_the_last_bit(directory):
    """Compiled steps compute a prompt, swap it out, write over it, swap it in to other blocks, and
    decode.
    """
    prompt, stranger = np.random.default_rng(0).integers(1, 257, (2, 40)).tolist()

    def step(tokens, start, table, **moves):
        params, stop = SamplingParams(temperature=0.0), start + len(tokens)
        sample = Sample(0, len(tokens) - 1, 0, params, 0, 0, stop, num_logprobs=5)
        row = Row(0, start, tuple(tokens), (table,))
        return runner.run(builder.build(StepPlan(0, (row,), (sample,), **moves)))

    settings = {"num_blocks": 33, "preemption_mode": "auto", "largest_shapes": True}
    with make_llm(directory, at_start=True, **settings) as llm:
        runner, builder = llm._engine.runner, llm._engine.builder
        assert len(builder.host_blocks[0]) == llm.memory.num_host_blocks == 32
        before = llm.stats()["compile_total"]
        token = int(step(prompt, 0, (1, 2, 3)).token_ids[0])
        expected = step([token], 40, (1, 2, 3))
        step(stranger, 0, (1, 2, 3), swap_out=((1, 5), (2, 32), (3, 1)))
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._pages)]
        actual = step([token], 40, (9, 32, 4), swap_in=((5, 9), (32, 32), (1, 4)))
        # nothing was copied
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._pages)] == places
        other = step([token], 40, (1, 2, 3))
        assert llm.stats()["compile_total"] == before
    for field, another in zip(
        dataclasses.astuple(actual), dataclasses.astuple(expected), strict=True
    ):
        np.testing.assert_array_equal(field, another)
    # the stranger's blocks are not the prompt's
    assert not np.array_equal(other.logprobs, expected.logprobs)


@pytest.mark.parametrize(
    "settings",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "auto", "swap_space_blocks": 0}],
    ids=str,
)
def test_who_does_not_swap_compiles_nothing_for_it(directory, settings):
    with make_llm(directory, num_blocks=33, **settings) as llm:
        assert llm.memory.num_host_blocks == llm._engine.builder.menu.num_swapped == 0
        assert {"gather 0", "scatter 0"}.isdisjoint(llm._engine.runner.executables._table)


@pytest.mark.usefixtures("compiled_when_used")
def test_as_many_host_blocks_as_asked_for_or_a_refusal(directory, monkeypatch):
    def build_noted(**settings):
        small = EngineConfig(
            model=str(directory), num_blocks=33, max_num_seqs=4, max_num_batched_tokens=64
        )
        build_noted = build_engine(small.model_copy(update=settings))
        build_noted.engine.runner.close()
        return build_noted.memory.num_host_blocks

    assert build_noted(swap_space_blocks=5, preemption_mode="swap") == 5
    with pytest.raises(CapacityError, match="2147483647 host blocks .* Lower swap_space_blocks"):
        build_noted(swap_space_blocks=2**31 - 1)
    monkeypatch.setattr(capacity, "available_host_bytes", lambda: 0)
    assert build_noted() == 0
    with pytest.raises(
        CapacityError,
        match="preemption_mode is 'swap', but the host's free memory holds no block of 8.00 KiB",
    ):
        build_noted(preemption_mode="swap")


def test_a_batch_of_swaps_is_about_two_mebibytes_and_at_least_a_block():
    sizes = (1, 64 * 2**10, 384 * 2**10, 2**21, 2**21 + 1, 2**30)
    menus = [make_menu(2, 64).swapping(size) for size in sizes]
    assert [menu.num_swapped for menu in menus] == [64, 32, 4, 1, 1, 1]
