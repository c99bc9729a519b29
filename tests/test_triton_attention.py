"""The Triton backend in the interpreter: against float64 over real shapes cut small, to the bit,
with mistakes planted in the kernel.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import AttentionOptions, Tiles, paged_attention
from pallas_kernels.compat import describe_gpu
from pallas_kernels.query_tiles import query_cut
from pallas_kernels.sets import triton
from pallas_kernels.tiles import Shape
from pallas_kernels.triton import attention as triton_kernel
from pallas_kernels.triton import reduce as triton_reduce
from tests.support.attention import Case, make_case, oracle, run
from tests.support.sweeps import examples, few
from tools.lab.kernel_lab.specs import SPECS

SMALL = Tiles(query_rows=16, context=16, max_splits=3, split_context=32, num_warps=4, num_stages=3)
UNSPLIT = dataclasses.replace(SMALL, max_splits=1)


def random_tree(seed: int, num_tokens: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).random((num_tokens, width)) < 0.4


def kind(spec) -> tuple:
    """Returns all by which the kernel can tell cut shapes apart; groups and widths in
    decode alone.
    """
    steps = (
        "decode" if spec.max_query_len == 1 else "verify" if spec.max_query_len <= 64 else "chunk"
    )
    heads = (
        (spec.num_heads // spec.num_kv_heads, spec.head_dim)
        if steps == "decode"
        else len(set(spec.queries))
    )
    return heads, spec.sliding_window is not None, spec.tree, spec.sinks, spec.page_dtype, steps


KINDS = {kind(spec): spec for spec in SPECS}.values()
WORDS = ("decode in blocks", "gpt-oss-20b decode", "opt-13b", "chunk 2048+2048", "tree")


@pytest.mark.parametrize(
    "spec",
    few(KINDS, [spec for spec in KINDS if any(word in spec.name for word in WORDS)]),
    ids=lambda spec: spec.name,
)
def test_real_shapes_cut_small(spec):
    small = spec.cut(queries=20)
    case = make_case(
        1,
        small.contexts,
        small.queries,
        heads=(small.num_heads, small.num_kv_heads),
        width=small.head_dim,
        block_size=small.block_size,
        page_dtype="float32" if small.page_dtype == small.dtype else small.page_dtype,
    )
    options = {"scale": small.head_dim**-0.5, "sliding_window": small.sliding_window}
    if small.tree:
        options["tree_mask_TQ"] = random_tree(2, len(case.q_TNH), small.max_query_len)
    if small.sinks:
        options["sinks"] = (
            np.random.default_rng(2).standard_normal(small.num_heads).astype(np.float32)
        )
    actual = run(
        *case.arrays, **case.scales, **options, max_query_len=small.max_query_len, backend="triton"
    )
    tolerance = 1e-5 if case.scales else 3e-6  # of values of ten
    np.testing.assert_allclose(actual, oracle(case, **options), atol=tolerance, rtol=tolerance)


FORMS = [
    (32, (3, 1), 8, "float32", "bfloat16", 3e-6),
    (80, (8, 1), 16, "bfloat16", "bfloat16", 2e-2),
    (96, (2, 2), 128, "float16", "float16", 2e-3),
    (256, (7, 1), 32, "bfloat16", "float8_e4m3fn", 2e-2),
    (64, (14, 2), 16, "float16", "int8", 5e-3),
    (128, (2, 1), 64, "bfloat16", "uint8", 2e-2),
    (32, (64, 1), 1, "float32", "float16", 3e-6),
    (16, (2, 2), 16, "bfloat16", "float32", 2e-2),
]


@pytest.mark.parametrize(
    ("width", "heads", "block_size", "dtype", "page_dtype", "tolerance"),
    few(FORMS, FORMS[3:6]),
)
def test_widths_groups_blocks_and_types(width, heads, block_size, dtype, page_dtype, tolerance):
    group = heads[0] // heads[1]
    tiles = dataclasses.replace(SMALL, query_rows=max(16, group))
    case = make_case(
        3,
        [70, 0, 9, 33],
        [5, 0, 9, 1],
        heads=heads,
        width=width,
        block_size=block_size,
        dtype=dtype,
        page_dtype=page_dtype,
    )
    options = {
        "scale": width**-0.5 if width > 16 else -0.3,
        "logit_softcap": 5.0 if group == 8 else None,
    }
    actual = run(*case.arrays, **case.scales, **options, tiles=tiles, backend="triton")
    assert actual.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), oracle(case, **options), atol=tolerance, rtol=tolerance
    )


TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}


@pytest.mark.parametrize(
    ("dtype", "page_dtype"),
    few(
        itertools.product(triton.QUERY_DTYPES, triton.PAGE_DTYPES),
        [],  # the test above has each type once as queries' and once as pages'
    ),
)
def test_every_pair_of_types(dtype, page_dtype):
    case = make_case(3, [37], [1], heads=(2, 1), padding=1, dtype=dtype, page_dtype=page_dtype)
    actual = run(
        *case.arrays, **case.scales, scale=0.25, tiles=UNSPLIT, max_query_len=1, backend="triton"
    )
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), oracle(case, scale=0.25), atol=tolerance, rtol=tolerance
    )


def fill_rows(case: Case, num_rows: int) -> Case:
    """Returns the case with empty rows after its own, so that cases of any number of rows share a
    compiled shape.
    """
    missing = num_rows - len(case.context_len_B)
    return dataclasses.replace(
        case,
        block_table_BM=np.pad(case.block_table_BM, ((0, missing), (0, 0))),
        context_len_B=np.pad(case.context_len_B, (0, missing)),
        query_start=np.pad(case.query_start, (0, missing), mode="edge"),
    )


@examples(10)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=4),
    way=st.sampled_from(
        [("causal", SMALL), ("causal", UNSPLIT), ("window", UNSPLIT), ("tree", SMALL)]
    ),
    seed=st.integers(0, 2**16),
)
def test_any_rows(rows, way, seed):
    """Block tables, lengths and masks are random; NaN is in every slot that no row has; the padding
    gives zeros.
    """
    mask, tiles = way
    contexts, queries = [before + new for before, new in rows], [new for _, new in rows]
    options = {"padding": 84 - sum(queries), "table_width": 16, "num_blocks": 62}
    case = fill_rows(make_case(seed, contexts, queries, **options), 4)
    held = np.zeros(case.k_pages.shape[:2], bool)
    for row, length in enumerate(case.context_len_B):
        position = np.arange(length)
        held[case.block_table_BM[row, position // 8], position % 8] = True
    case.k_pages[~held] = case.v_pages[~held] = np.nan
    masks = {
        "causal": {},
        "window": {"sliding_window": 17},
        "tree": {"tree_mask_TQ": random_tree(seed, len(case.q_TNH), 20)},
    }[mask]
    actual = np.asarray(run(*case.arrays, scale=0.3, backend="triton", tiles=tiles, **masks))
    np.testing.assert_allclose(actual, oracle(case, scale=0.3, **masks), atol=3e-6)
    assert not actual[case.query_start[-1] :].any()


@pytest.mark.parametrize(
    ("heads", "width", "value_width", "dtype", "page_dtype"),
    few(
        [
            (20, 576, 512, "bfloat16", "bfloat16"),
            (32, 48, 32, "float16", "int8"),
            (8, 40, 24, "float32", "float32"),
        ],
        [(32, 48, 32, "float16", "int8")],
    ),
)
def test_values_within_the_keys_of_any_width(heads, width, value_width, dtype, page_dtype):
    """The heads of one row have several programs, and splits."""
    types = {"dtype": dtype, "page_dtype": page_dtype}
    case = make_case(3, [70, 0, 9, 33], [5, 0, 9, 1], heads=(heads, 1), width=width, **types)
    within = dataclasses.replace(case, v_pages=case.k_pages, v_scale=case.k_scale)
    expected = oracle(within, scale=0.1)[..., :value_width]
    scales = {} if case.k_scale is None else {"k_scale": case.k_scale}
    arrays = (case.q_TNH, case.k_pages, None, *case.arrays[3:])
    actual = run(
        *arrays, **scales, scale=0.1, value_width=value_width, tiles=SMALL, backend="triton"
    )
    assert actual.shape == expected.shape
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("num_tokens", few([1, 5], [5]))
def test_a_row_has_the_same_bits_in_any_company(num_tokens):
    """There are other rows, more rows, a wider table, a bigger pool, and another place in the
    batch.
    """
    rng = np.random.default_rng(7)
    length = 150
    keys, values = rng.standard_normal((2, length, 2, 16)).astype(np.float32)
    queries = rng.standard_normal((num_tokens, 6, 16)).astype(np.float32)
    seen = set()
    for before, after, options in (
        ([], [], {}),
        ([1, 90], [400, 7, 7], {"table_width": 60, "num_blocks": 90}),
    ):
        contexts, place = [*before, length, *after], len(before)
        case = make_case(
            8,
            contexts,
            [num_tokens if c == length else 1 for c in contexts],
            heads=(6, 2),
            **options,
        )
        at = case.block_table_BM[place, np.arange(length) // 8], np.arange(length) % 8
        case.k_pages[at], case.v_pages[at] = keys, values
        tokens = slice(case.query_start[place], case.query_start[place + 1])
        case.q_TNH[tokens] = queries
        actual = run(
            *case.arrays, scale=0.3, tiles=SMALL, max_query_len=num_tokens, backend="triton"
        )
        seen.add(np.asarray(actual)[tokens].tobytes())
    assert len(seen) == 1


def test_a_context_is_cut_by_its_own_length():
    """There are at most three splits, of 32 positions at least, each of whole turns of 16."""
    case = make_case(1, [1, 32, 33, 96, 97, 200, 0], [1, 1, 1, 1, 1, 1, 0])

    @jax.jit
    def schedule(*arrays):
        names = ("q_TNH", "k_pages", "v_pages", "block_table_BM", "context_len_B", "query_start")
        named = dict(zip(names, arrays, strict=True))
        arguments = triton.Arguments(**named, options=AttentionOptions(scale=1.0), max_query_len=1)
        return triton._schedule(arguments, query_cut(arguments, 1), SMALL)

    schedule_RF, splits_T = schedule(*case.arrays)
    assert splits_T.tolist() == [1, 1, 2, 3, 3, 3, 0, 0, 0]
    assert schedule_RF[:, 7].tolist() == [2, 2, 2, 2, 3, 5, 2]


def switch(function, **changes):
    """Returns the function with a config in which some options are wrong."""

    def wrong(*positional, **keywords):
        positional = [
            dataclasses.replace(value, options=dataclasses.replace(value.options, **changes))
            if isinstance(value, triton_kernel.Config)
            else value
            for value in positional
        ]
        return function(*positional, **keywords)

    return wrong


def kernel_with(**wrong):
    """Returns the kernel with one operand taken from elsewhere."""
    names = ("schedule", "q", "k", "v", "table", "tree", "k_scale", "v_scale", "sinks")
    right = triton_kernel.kernel

    def mistaken(*refs, config):
        operands = dict(zip(names, refs, strict=False))
        operands |= {
            name: None if other is None else operands[other] for name, other in wrong.items()
        }
        return right(*operands.values(), *refs[len(names) :], config=config)

    return mistaken


def shorter(schedule):
    def wrong(*arguments, **order):
        schedule_RF, splits_T = schedule(*arguments, **order)
        return schedule_RF.at[:, 6].add(-1), splits_T

    return wrong


MISTAKES = {  # name: what is wrong, where, and the mistake made of what is right
    "values read as keys": (triton_kernel, "kernel", lambda right: kernel_with(k="v")),
    "no scale of keys": (triton_kernel, "kernel", lambda right: kernel_with(k_scale=None)),
    "no scale of values": (triton_kernel, "kernel", lambda right: kernel_with(v_scale=None)),
    "table rows swapped": (
        triton_kernel,
        "_place",
        lambda right: lambda t, row, *others: right(t, 1 - row, *others),
    ),
    "wrong key/value head": (
        triton_kernel,
        "_read",
        lambda right: lambda p, at, h, *others: right(p, at, 1 - h, *others),
    ),
    "length off by one": (triton, "_schedule", shorter),
    "mask transposed": (triton, "mask_words", lambda right: lambda tree: right(tree.T)),
    "nothing masked": (
        triton_kernel,
        "_stretches",
        lambda right: (
            lambda *others, **tree: [(low, high, False) for low, high, _ in right(*others, **tree)]
        ),
    ),
    "first turn skipped": (
        triton_kernel,
        "_stretches",
        lambda right: lambda tile, first, *others, **tree: right(tile, first + 1, *others, **tree),
    ),
    "a split dropped": (
        triton_reduce,
        "reduce_splits",
        lambda right: lambda o, w, s, *r, **k: right(o, w, s - 1, *r, **k),
    ),
    "window off by one": (
        triton_kernel,
        "_find_visible",
        lambda right: switch(right, sliding_window=10),
    ),
    "no sinks": (triton_kernel, "kernel", lambda right: kernel_with(sinks=None)),
    "sinks in every split": (
        triton_kernel,
        "start",
        lambda right: lambda sinks, head_A, used_A: right(sinks, head_A, jnp.ones_like(used_A)),
    ),
    "no softcap": (triton_kernel, "_scores", lambda right: switch(right, logit_softcap=None)),
}


def calls() -> dict[str, tuple[Case, dict]]:
    """Yields calls that have one feature each and the rest in common: two rows, of seven tokens
    each, two heads, three splits.
    """
    case = make_case(5, [33, 80], [7, 7], heads=(4, 2), padding=0)
    eight = make_case(5, [33, 80], [7, 7], heads=(4, 2), padding=0, page_dtype="int8")
    tree = random_tree(1, 14, 14) | np.eye(14, dtype=bool)
    tree[7:, :7] = tree[:7, :7]
    return {
        "plain": (case, {}),
        "scales": (eight, {}),
        "tree": (case, {"tree_mask_TQ": tree}),
        "window": (case, {"sliding_window": 9}),
        "softcap": (case, {"logit_softcap": 1.0}),
        "sinks": (case, {"sinks": np.array([1.0, -1.0, 4.0, 2.0], np.float32)}),
    }


def error_of(feature: str) -> float:
    """Returns the largest difference from float64, traced anew."""
    case, options = calls()[feature]
    triton._attend.clear_cache()
    actual = paged_attention(
        *case.arrays,
        scale=0.3,
        backend="triton",
        interpret=True,
        tiles=SMALL,
        **options,
        **case.scales,
    )
    return np.abs(np.asarray(actual) - oracle(case, scale=0.3, **options)).max()


@pytest.mark.parametrize("feature", few(calls(), ["plain", "tree"]))
def test_without_a_mistake_all_is_right(feature):
    assert error_of(feature) < 1e-5


@pytest.mark.parametrize("mistake", few(MISTAKES, ["length off by one", "mask transposed"]))
def test_a_mistake_in_the_kernel_is_seen(mistake, monkeypatch):
    module, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    words = {
        "scale of": "scales",
        "mask ": "tree",
        "window": "window",
        "softcap": "softcap",
        "sinks": "sinks",
    }
    feature = next((value for word, value in words.items() if word in mistake), "plain")
    try:
        error = error_of(feature)
    finally:
        triton._attend.clear_cache()
    assert not error < 1e-2, f"{mistake}: {error}"


def arrays_of(q: tuple, pages: tuple, dtype="bfloat16", page_dtype="bfloat16", rows=4) -> tuple:
    shape = jax.ShapeDtypeStruct
    table, context, start = (shape(each, jnp.int32) for each in ((rows, 64), (rows,), (rows + 1,)))
    return (
        shape(q, dtype),
        shape(pages, page_dtype),
        shape(pages, page_dtype),
        table,
        context,
        start,
    )


def scales_of(pages: tuple) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(pages[:3], jnp.float32) for name in ("k_scale", "v_scale")}


PAGES = (300, 16, 8, 128)
TREE = {"tree_mask_TQ": jax.ShapeDtypeStruct((68, 17), jnp.bool_)}
LOWERED = {
    "decode": (arrays_of((4, 32, 128), PAGES), {}, {"max_query_len": 1}, 2),
    "verify a tree, int8": (
        arrays_of((68, 32, 128), PAGES, page_dtype="int8"),
        scales_of(PAGES) | TREE,
        {"max_query_len": 17},
        2,
    ),
    "chunk, window, float8": (
        arrays_of((512, 32, 128), PAGES, page_dtype="uint8"),
        scales_of(PAGES),
        {"sliding_window": 100},
        1,
    ),
    "80 wide, softcap, float32": (
        arrays_of((512, 7, 80), (300, 8, 1, 80), "float32", "float32"),
        {},
        {"logit_softcap": 9.0},
        1,
    ),
    "float8 as such": (
        arrays_of((4, 6, 96), (300, 128, 2, 96), "float16", "float8_e4m3fn"),
        scales_of((300, 128, 2)),
        {"max_query_len": 1},
        2,
    ),
}


@pytest.mark.parametrize("name", few(LOWERED, ["verify a tree, int8", "chunk, window, float8"]))
def test_it_lowers_for_cuda_once_for_all_layers(name):
    arrays, keywords, options, num_kernels = LOWERED[name]

    def layers(arrays, keywords):
        return [
            paged_attention(*arrays, scale=0.1, backend="triton", **keywords, **options)
            for _ in range(3)
        ]

    with describe_gpu():
        text = jax.jit(layers).trace(arrays, keywords).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == num_kernels
    assert text.count("call @_attend") == 3


@pytest.mark.parametrize("steps", ["decode", "verify", "chunk"])
@pytest.mark.parametrize("group", [1, 3, 7, 14, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_there_are_tiles_for_every_shape(steps, group, dtype):
    for width in (32, 80, 128, 256):
        shape = Shape(
            kind=steps, group=group, head_dim=width, block_size=16, dtype=dtype, page_dtype="int8"
        )
        assert triton.heuristic(shape).query_rows >= group


def test_refusals_have_reasons():
    def refusal(
        match, q=(4, 32, 128), pages=PAGES, dtype="bfloat16", page_dtype="bfloat16", **options
    ):
        call = jax.jit(
            lambda *arrays, **scales: paged_attention(*arrays, **scales, scale=1.0, **options)
        )
        keywords = scales_of(pages) if page_dtype in ("int8", "uint8") else {}
        with pytest.raises(NotImplementedError, match=f"triton: {match}"):
            call.trace(*arrays_of(q, pages, dtype, page_dtype), **keywords)

    options = {"backend": "triton"}
    refusal("k_pages with heads 320 wide", q=(4, 32, 320), pages=(300, 16, 8, 320), **options)
    refusal("k_pages with blocks of 24 slots", pages=(300, 24, 8, 128), **options)
    refusal("k_pages of float8_e5m2", page_dtype="float8_e5m2", **options)
    refusal("q_TNH of float8_e4m3fn", dtype="float8_e4m3fn", **options)
    refusal(
        "q_TNH with 96 heads for one of k_pages", q=(4, 96, 128), pages=(300, 16, 1, 128), **options
    )
    refusal(
        "k_pages of 2147483648 one-byte elements",
        pages=(2**17, 16, 8, 128),
        page_dtype="uint8",
        **options,
    )
    refusal(
        "a tree mask with a sliding window",
        tree_mask_TQ=np.ones((4, 1), bool),
        sliding_window=3,
        **options,
    )
    refusal(
        "tiles.query_rows of 16: the 32 query heads",
        pages=(300, 16, 1, 128),
        tiles=SMALL,
        **options,
    )
