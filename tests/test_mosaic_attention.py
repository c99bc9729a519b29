"""The Mosaic backend of paged attention: interpreted against float64, with NaN wherever nobody
looks; lowered for a GPU that is not there.

The interpreter simulates barriers and copies, looks for data races, and takes half a second for a
program; so there are few of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import Tiles, compat, paged_attention
from pallas_kernels.mosaic import jax_versions
from pallas_kernels.mosaic import kernel as mosaic_kernel
from pallas_kernels.sets import mosaic
from tests.support.attention import hidden, make_case, oracle
from tests.support.sweeps import few
from tools.lab.kernel_lab.specs import SPECS, Spec

# NaN, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

interpreted = pytest.mark.skipif(
    not compat.MOSAIC_INTERPRETABLE, reason="Mosaic's interpreter comes with jax 0.11"
)
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
TWO_CONSUMERS = Tiles(
    query_rows=128, context=64, max_splits=1, split_context=64, num_warps=8, num_stages=2
)
ONE_CONSUMER = Tiles(
    query_rows=64, context=64, max_splits=3, split_context=64, num_warps=4, num_stages=2
)


@pytest.fixture
def looks_for_races(monkeypatch):
    """Interprets with a look for data races, which fail."""
    parameters = jax_versions.mosaic_interpreter()
    monkeypatch.setattr(
        jax_versions,
        "mosaic_interpreter",
        lambda: dataclasses.replace(parameters, detect_races=True),
    )


def attend(case, tiles, **options):
    actual = paged_attention(
        *map(jnp.asarray, case.arrays), backend="mosaic", interpret=True, tiles=tiles, **options
    )
    return np.asarray(actual).astype(np.float64)


def small_case(seed, contexts, queries, *, dtype="bfloat16", **shape):
    return make_case(
        seed,
        contexts,
        queries,
        dtype=dtype,
        page_dtype=dtype,
        **{"width": 64, "block_size": 16, **shape},
    )


def tree_mask(num_tokens, width=40):
    """Returns a mask with bits after a row's tokens, too: they mean nothing."""
    mask = np.random.default_rng(3).random((num_tokens, width)) < 0.5
    mask[np.arange(num_tokens), np.arange(num_tokens) % width] = True
    return mask


CALLS = {
    "chunks of several tiles, one of none": dict(
        contexts=[150, 0, 20], queries=[100, 0, 20], heads=(2, 1), tiles=TWO_CONSUMERS
    ),
    "a window, seven heads to one": dict(
        contexts=[150, 20],
        queries=[30, 20],
        heads=(7, 1),
        tiles=TWO_CONSUMERS,
        options={"sliding_window": 30},
    ),
    "decode, split, with a window": dict(
        contexts=[300, 7],
        queries=[1, 1],
        tiles=ONE_CONSUMER,
        options={"sliding_window": 200, "max_query_len": 1},
    ),
    "softcap, float16, blocks of 128": dict(
        contexts=[200],
        queries=[9],
        heads=(1, 1),
        dtype="float16",
        width=128,
        block_size=128,
        tiles=ONE_CONSUMER,
        options={"logit_softcap": 2.0},
    ),
    "sinks, split": dict(
        contexts=[300, 7],
        queries=[1, 1],
        heads=(6, 2),
        tiles=ONE_CONSUMER,
        options={
            "sinks": np.array([1.0, -1.0, 4.0, 2.0, -np.inf, 0.0], np.float32),
            "max_query_len": 1,
        },
    ),
    "sinks, chunks": dict(
        contexts=[150, 20],
        queries=[100, 20],
        heads=(3, 1),
        tiles=TWO_CONSUMERS,
        options={"sinks": np.array([1.0, -1.0, 4.0], np.float32)},
    ),
    "a tree": dict(
        contexts=[100, 66], queries=[40, 3], heads=(6, 1), tiles=TWO_CONSUMERS, tree=True
    ),
}


@interpreted
@pytest.mark.usefixtures("looks_for_races")
@pytest.mark.parametrize("name", CALLS)
def test_float64_agrees_and_nothing_races(name):
    call = dict(CALLS[name])
    contexts, queries, tiles = call.pop("contexts"), call.pop("queries"), call.pop("tiles")
    options, tree = call.pop("options", {}), call.pop("tree", False)
    case = small_case(1, contexts, queries, **call)
    if tree:
        options["tree_mask_TQ"] = tree_mask(len(case.q_TNH))
    actual = attend(
        hidden(case, queries, options.get("sliding_window")), tiles, scale=0.2, **options
    )
    mask = {key: value for key, value in options.items() if key != "max_query_len"}
    expected = oracle(case, scale=0.2, **mask)
    np.testing.assert_allclose(
        actual, expected, atol=2 * EPSILON[call.get("dtype", "bfloat16")] * np.abs(expected).max()
    )


MUTATIONS = {
    "values read as keys": lambda case: dataclasses.replace(case, v_pages=case.k_pages),
    "table rows swapped": lambda case: dataclasses.replace(
        case, block_table_BM=case.block_table_BM[::-1]
    ),
    "length off by one": lambda case: dataclasses.replace(
        case, context_len_B=case.context_len_B - 1
    ),
    "heads shifted": lambda case: dataclasses.replace(case, q_TNH=np.roll(case.q_TNH, 1, axis=1)),
}


@interpreted
@pytest.mark.parametrize("mutation", [*MUTATIONS, "no masks", "values not cleaned"])
def test_a_planted_mistake_is_seen(mutation, monkeypatch):
    queries = [3, 3]
    case = small_case(2, [18, 40], queries, heads=(2, 1))
    expected = oracle(case, scale=0.2)
    if mutation == "no masks":
        monkeypatch.setattr(mosaic_kernel, "_mask", lambda plan, scores, *_: scores)
    elif mutation == "values not cleaned":
        monkeypatch.setattr(mosaic_kernel, "_clean", lambda *_: None)
        case = hidden(case, queries)
    else:
        case = MUTATIONS[mutation](case)
    actual = attend(
        case, dataclasses.replace(ONE_CONSUMER, max_splits=1), scale=0.2, max_query_len=3
    )
    assert not np.abs(actual - expected).max() < 0.05  # NaN is seen too


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before jax 0.12 the interpreter overlooks this race"
)
@pytest.mark.usefixtures("looks_for_races")
def test_consumers_that_do_not_meet_race_for_the_values(monkeypatch):
    monkeypatch.setattr(mosaic_kernel, "_hand_over", lambda *_: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend(small_case(2, [40], [40], heads=(2, 1)), TWO_CONSUMERS, scale=0.2)
    # After a failure the interpreter wants this, and has no public name for it.
    importlib.import_module(
        "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"
    ).reset_gpu_interpret_mode_state()


def describe(
    *,
    block_size=16,
    width=128,
    group=4,
    dtype="bfloat16",
    tokens=64,
    max_length=None,
    tree=0,
    **options,
):
    """Returns the arrays of a call, as shapes, and a function that makes it."""
    num_kv_heads, rows, blocks = 2, 4, 50
    pages = jax.ShapeDtypeStruct((blocks, block_size, num_kv_heads, width), dtype)
    arrays = [
        jax.ShapeDtypeStruct((tokens, group * num_kv_heads, width), dtype),
        pages,
        pages,
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 16), (rows,), (rows + 1,))),
    ]
    if tree:
        arrays.append(jax.ShapeDtypeStruct((tokens, tree), jnp.bool_))

    def call(*arguments):
        mask = {"tree_mask_TQ": arguments[6]} if tree else {}
        return paged_attention(
            *arguments[:6], scale=0.1, backend="mosaic", max_query_len=max_length, **mask, **options
        )

    return call, arrays


BLOCKS = zip(
    (8, 16, 32, 64, 128), itertools.cycle((64, 128)), itertools.cycle((1, 4, 8)), strict=False
)
LOWERED = [
    *(dict(block_size=block_size, width=width, group=group) for block_size, width, group in BLOCKS),
    dict(width=256, dtype="float16", group=7),
    dict(max_length=1, dtype="float16"),
    dict(max_length=1, width=256, block_size=32, sliding_window=100),
    dict(max_length=16, tree=64, logit_softcap=30.0),
    dict(max_length=9, tiles=dataclasses.replace(TWO_CONSUMERS, max_splits=4)),
    dict(sliding_window=100, tiles=dataclasses.replace(TWO_CONSUMERS, num_stages=1)),
    dict(block_size=32, logit_softcap=30.0, tiles=dataclasses.replace(ONE_CONSUMER, num_stages=4)),
]


@pytest.mark.parametrize("options", few(LOWERED, [LOWERED[1], *LOWERED[7:10]]), ids=str)
def test_lowers_for_a_gpu_that_is_not_there(options):
    call, arrays = describe(**options)
    with compat.describe_gpu():
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


def shapes_of(spec: Spec):
    tokens, blocks = sum(spec.queries), 1 + max(spec.contexts) // spec.block_size
    pages = jax.ShapeDtypeStruct(
        (blocks, spec.block_size, spec.num_kv_heads, spec.head_dim), spec.page_dtype
    )
    rows = len(spec.queries)
    queries = jax.ShapeDtypeStruct((tokens, spec.num_heads, spec.head_dim), spec.dtype)
    lists = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, blocks), (rows,), (rows + 1,))
    )
    mask = jax.ShapeDtypeStruct((tokens, spec.max_query_len), jnp.bool_) if spec.tree else None
    return queries, pages, pages, *lists, mask


@pytest.mark.parametrize("kind", ["decode", "verify", "chunk"])
def test_the_rule_fits_every_named_shape(kind):
    """One shape of each model and kind is enough: registers aside, nothing of it depends on the
    numbers of rows.
    """
    taken = {}
    for spec in SPECS:
        if kind in spec.name and spec.page_dtype == spec.dtype:
            taken.setdefault(
                (spec.num_heads, spec.num_kv_heads, spec.sliding_window, spec.tree), spec
            )

    def call(*arrays, spec):
        options = {"sliding_window": spec.sliding_window, "max_query_len": spec.max_query_len}
        return paged_attention(
            *arrays[:6], scale=0.1, backend="mosaic", tree_mask_TQ=arrays[6], **options
        )

    for spec in taken.values():
        out = jax.eval_shape(lambda *arrays, spec=spec: call(*arrays, spec=spec), *shapes_of(spec))
        assert out.shape == (sum(spec.queries), spec.num_heads, spec.head_dim), spec.name


def test_the_rule_fills_shared_memory_and_no_more():
    for width, block_size, kind in itertools.product(
        (64, 128, 256), (8, 16, 128), ("decode", "verify", "chunk")
    ):
        shape = mosaic.Shape(
            kind=kind,
            group=4,
            head_dim=width,
            block_size=block_size,
            dtype="bfloat16",
            page_dtype="bfloat16",
        )
        tiles = mosaic.heuristic(shape)
        assert tiles.num_warps * 16 == tiles.query_rows
        max_length = {"decode": 1, "verify": 8, "chunk": None}[kind]
        call, arrays = describe(width=width, block_size=block_size, max_length=max_length)
        assert jax.eval_shape(call, *arrays).shape == arrays[0].shape  # not refused


REFUSED = [
    (dict(dtype="float32"), "queries of float32"),
    (dict(width=96), "head width 96"),
    (dict(width=320), "head width 320"),
    (dict(block_size=4), "block size 4"),
    (dict(max_length=2, tree=8, sliding_window=4), "a tree mask with a sliding window"),
    (dict(tree=65), "tree_mask_TQ of width 65"),
    (
        dict(group=80, tiles=ONE_CONSUMER),
        "80 query heads on a key/value head, more than tiles.query_rows=64",
    ),
    (dict(tiles=dataclasses.replace(ONE_CONSUMER, query_rows=32)), "tiles.query_rows=32"),
    (
        dict(tiles=dataclasses.replace(ONE_CONSUMER, num_warps=8)),
        "tiles.num_warps=8: 64 query rows take 4",
    ),
    (dict(tiles=dataclasses.replace(ONE_CONSUMER, context=32)), "tiles.context=32"),
    (dict(block_size=24), "tiles.context=64: neither a multiple nor a part of the block size, 24"),
    (
        dict(width=256, tiles=dataclasses.replace(TWO_CONSUMERS, num_stages=3)),
        "bytes of shared memory.*num_stages=3",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refusals_name_the_argument_and_its_value(options, reason):
    call, arrays = describe(**options)
    with pytest.raises(NotImplementedError, match=f"mosaic: .*{reason}"):
        jax.eval_shape(call, *arrays)


@pytest.mark.parametrize(("dtype", "name"), [("float16", "float16"), ("uint8", "fp8")])
def test_pages_of_another_type_are_refused(dtype, name):
    case = small_case(1, [20], [2])
    scales = np.ones(case.k_pages.shape[:3], np.float32) if dtype == "uint8" else None
    with pytest.raises(NotImplementedError, match=f"pages of {name} under queries of bfloat16"):
        paged_attention(
            case.q_TNH,
            np.zeros(case.k_pages.shape, dtype),
            np.zeros(case.v_pages.shape, dtype),
            *case.arrays[3:],
            scale=1.0,
            k_scale=scales,
            v_scale=scales,
            backend="mosaic",
        )
    assert ml_dtypes.bfloat16 == case.q_TNH.dtype


@pytest.mark.skipif(compat.MOSAIC_INTERPRETABLE, reason="this jax has Mosaic's interpreter")
def test_without_an_interpreter_it_says_so():
    with pytest.raises(
        NotImplementedError, match="interpret=True, which Mosaic's kernels take from jax 0.11 on"
    ):
        attend(small_case(1, [20], [2]), ONE_CONSUMER, scale=1.0)
