"""Paged attention against a float64 loop over tokens, the bits it promises, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    Arguments,
    AttentionOptions,
    Call,
    copy_blocks,
    paged_attention,
    write_and_attend,
    write_kv,
)
from pallas_kernels.sets import SETS, XLA_BACKENDS
from tests.support.attention import SHARED_BACKENDS, make_case, oracle, run
from tests.support.sweeps import few

ROWS = [
    pytest.param([1, 17, 64, 90], [1, 1, 1, 1], id="decode"),
    pytest.param([20, 40, 0, 7], [20, 33, 0, 7], id="chunks"),
    pytest.param([5, 70, 0, 30], [5, 1, 0, 17], id="mixed-with-an-empty-row"),
]


PROMPTS = pytest.param([80, 3, 70], [80, 3, 33])  # the first two rows begin a sequence


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize(("contexts", "queries"), ROWS)
@pytest.mark.parametrize(
    ("heads", "options"),
    few(
        itertools.product(
            [(4, 2), (3, 3), (6, 1)], [{}, {"sliding_window": 9}, {"logit_softcap": 2.0}]
        ),
        [((4, 2), {}), ((3, 3), {"sliding_window": 9}), ((6, 1), {"logit_softcap": 2.0})],
    ),
    ids=str,
)
def test_every_backend_matches_float64(backend, contexts, queries, heads, options):
    one_shape = {"padding": 64 - sum(queries), "num_blocks": 32, "table_width": 13}
    case = make_case(1, contexts, queries, heads=heads, **one_shape)
    actual = run(*case.arrays, scale=0.3, backend=backend, **options)
    np.testing.assert_allclose(actual, oracle(case, scale=0.3, **options), atol=2e-6)


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize(("contexts", "queries"), [ROWS[0], ROWS[2]])
def test_sinks_take_their_share_of_every_softmax(backend, contexts, queries):
    """There are high ones, low ones and one that is none.

    A mistake is planted: those of the heads beside.
    """
    case = make_case(
        1, contexts, queries, heads=(6, 2), padding=64 - sum(queries), num_blocks=32, table_width=13
    )
    sinks = np.array([-np.inf, 0.5, 3.0, -1.0, 9.0, 2.0], np.float32)
    options = {"scale": 0.3, "sliding_window": 9}
    actual = run(*case.arrays, **options, sinks=sinks, backend=backend)
    np.testing.assert_allclose(actual, oracle(case, **options, sinks=sinks), atol=2e-6)
    for wrong in (np.roll(sinks, 1), sinks[[3, 4, 5, 0, 1, 2]], None):
        assert np.abs(np.asarray(actual) - oracle(case, **options, sinks=wrong)).max() > 1e-2


SLOPES = np.array([0.5, 0.3, 0.1, 0.03, 0.01, 0.0], np.float32)


@pytest.mark.parametrize(
    "backend", [name for name in SHARED_BACKENDS if "alibi_slopes" in SETS[name].honours]
)
@pytest.mark.parametrize(
    ("contexts", "queries", "options"),
    few(
        [
            (*rows.values, options)
            for rows in (ROWS[0], ROWS[2])
            for options in ({}, {"sliding_window": 9}, {"logit_softcap": 2.0})
        ],
        [(*ROWS[0].values, {"logit_softcap": 2.0}), (*ROWS[2].values, {"sliding_window": 9})],
    ),
    ids=str,
)
def test_alibi_lowers_scores_by_distance(backend, contexts, queries, options):
    """Mistakes are planted: slopes of the heads beside, or none."""
    one_shape = {"padding": 64 - sum(queries), "num_blocks": 32, "table_width": 13}
    case = make_case(1, contexts, queries, heads=(6, 2), **one_shape)
    actual = run(*case.arrays, scale=0.3, **options, alibi_slopes=SLOPES, backend=backend)
    expected = oracle(case, scale=0.3, **options, alibi_slopes=SLOPES)
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    for wrong in (np.roll(SLOPES, 1), SLOPES[[3, 4, 5, 0, 1, 2]], None):
        other = oracle(case, scale=0.3, **options, alibi_slopes=wrong)
        assert np.abs(np.asarray(actual) - other).max() > 1e-2


@pytest.mark.parametrize(
    "backend", [name for name in SHARED_BACKENDS if "last_seen_T" in SETS[name].honours]
)
@pytest.mark.parametrize(
    ("contexts", "queries", "options", "page_dtype"),
    few(
        [
            (*rows.values, options, page_dtype)
            for rows in (ROWS[2], PROMPTS)
            for options in ({}, {"sliding_window": 9})
            for page_dtype in ("float32", "bfloat16")
        ],
        [
            *((*ROWS[2].values, {}, "bfloat16"), (*PROMPTS.values, {}, "float32")),
            (*PROMPTS.values, {"sliding_window": 9}, "bfloat16"),
        ],
    ),
    ids=str,
)
def test_a_token_may_see_later_ones(backend, contexts, queries, options, page_dtype):
    """Mistakes are planted: the causal order, the whole context, and what the next token sees."""
    one_shape = {"padding": 128 - sum(queries), "num_blocks": 64, "table_width": 13}
    types = {"dtype": page_dtype, "page_dtype": page_dtype}
    case = make_case(1, contexts, queries, heads=(6, 2), width=32, **one_shape, **types)
    last = np.random.default_rng(3).integers(0, 90, 128).astype(np.int32)
    actual = run(*case.arrays, scale=0.3, **options, last_seen_T=last, backend=backend)
    expected = oracle(case, scale=0.3, **options, last_seen_T=last)
    tolerance = 2e-6 if page_dtype == "float32" else 0.03
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=tolerance)
    for wrong in (None, np.full(128, 99), np.roll(last, 1)):
        other = oracle(case, scale=0.3, **options, last_seen_T=wrong)
        assert np.abs(np.asarray(actual, np.float32) - other).max() > 0.1


@pytest.mark.parametrize(
    "backend", [name for name in SHARED_BACKENDS if "attention_chunk" in SETS[name].honours]
)
@pytest.mark.parametrize("chunk", few([1, 9, 64], [1, 9]))
def test_a_token_sees_its_own_chunk_of_positions(backend, chunk):
    """Mistakes are planted: chunks of another size, a window of this one, and the whole context."""
    case = make_case(
        1, [101, 64, 9, 70], [1, 33, 9, 21], heads=(6, 2), num_blocks=64, table_width=26
    )
    actual = run(*case.arrays, scale=0.3, attention_chunk=chunk, backend=backend)
    np.testing.assert_allclose(actual, oracle(case, scale=0.3, attention_chunk=chunk), atol=2e-6)
    for wrong in ({"attention_chunk": chunk + 1}, {"sliding_window": chunk + 1}, {}):
        assert np.abs(np.asarray(actual) - oracle(case, scale=0.3, **wrong)).max() > 1e-2


def test_every_set_takes_a_chunk_that_no_row_is_longer_than():
    case = vars(make_case(9, [4, 4], [1, 1]))
    max_length = case["block_table_BM"].shape[1] * case["k_pages"].shape[1]
    for chunk in (max_length - 1, max_length):
        arguments = Arguments(**case, options=AttentionOptions(scale=1.0, attention_chunk=chunk))
        refused = SETS["triton"].refusal(
            jax.devices()[0], Call(interpret=True, attention=arguments)
        )
        assert (refused is None) == (chunk == max_length), refused


@pytest.mark.parametrize(
    ("page_dtype", "backend"),
    few(
        itertools.product(["float32", "int8", "uint8"], SHARED_BACKENDS),
        [("int8", "triton"), ("int8", "cpu")],
    ),
)
def test_values_within_the_keys(backend, page_dtype):
    """Queries and new keys are written in the same call; padding gives zeros.

    A mistake is planted: another width.
    """
    case = make_case(
        1,
        [20, 40, 0, 7],
        [4, 33, 0, 7],
        heads=(6, 1),
        width=48,
        num_blocks=32,
        page_dtype=page_dtype,
    )
    within = dataclasses.replace(case, v_pages=case.k_pages, v_scale=case.k_scale)
    interpret = {"interpret": backend == "triton"}
    arrays = (case.q_TNH, case.k_pages, None, *case.arrays[3:])
    options = {"scale": 0.2, "logit_softcap": 20.0}
    scales = {} if case.k_scale is None else {"k_scale": case.k_scale}
    actual = run(*arrays, **options, **scales, value_width=32, backend=backend)
    expected = oracle(within, **options)
    assert actual.shape == (47, 6, 32) and not np.any(actual[44:])
    np.testing.assert_allclose(actual, expected[..., :32], atol=1e-5)
    assert np.abs(np.asarray(actual) - expected[..., 16:]).max() > 1e-2
    new = np.random.default_rng(0).standard_normal((3, 1, 48)).astype(np.float32)
    slots = np.array([8, 9, 100])
    fields = dict(
        zip(
            ("q_TNH", "k_pages", "block_table_BM", "context_len_B", "query_start"),
            (arrays[0], arrays[1], *arrays[3:]),
            strict=True,
        )
    )
    fields = {name: jnp.asarray(array) for name, array in (fields | scales).items()}
    arguments = Arguments(
        v_pages=None, **fields, options=AttentionOptions(**options, value_width=32)
    )
    out, pages = write_and_attend(new, None, slots, arguments, backend=backend, **interpret)
    alone = write_kv(
        new,
        None,
        fields["k_pages"],
        None,
        slots,
        k_scale=fields.get("k_scale"),
        backend=backend,
        **interpret,
    )
    for page, other in zip(pages, alone, strict=True):
        assert (page is None) == (other is None)
        if page is not None:
            np.testing.assert_array_equal(page, other)
    fields["k_pages"] = pages[0]
    fields |= {"k_scale": pages[2]} if scales else {}
    again = paged_attention(
        v_pages=None, **fields, **options, value_width=32, backend=backend, **interpret
    )
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("block_size", few([1, 2, 32, 128], [1, 128]))
def test_block_sizes(block_size):
    case = make_case(2, [200, 3], [20, 3], block_size=block_size)
    np.testing.assert_allclose(
        run(*case.arrays, scale=0.25, backend="scan"), oracle(case, scale=0.25), atol=2e-6
    )


def test_one_token_rows_with_the_promise_of_it():
    case = make_case(3, [1, 30, 129, 7], [1, 1, 1, 1], padding=0)
    actual = run(*case.arrays, scale=0.25, backend="scan", max_query_len=1)
    np.testing.assert_allclose(actual, oracle(case, scale=0.25), atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "scan"])
def test_tree_mask_takes_the_place_of_the_causal_order(backend):
    case = make_case(4, [20, 11], [4, 3])
    tree = np.zeros((len(case.q_TNH), 4), bool)
    tree[0:4] = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    tree[4:7] = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]]
    for slopes in (None, SLOPES[:4]):
        actual = run(
            *case.arrays, scale=0.25, tree_mask_TQ=tree, alibi_slopes=slopes, backend=backend
        )
        expected = oracle(case, scale=0.25, tree_mask_TQ=tree, alibi_slopes=slopes)
        np.testing.assert_allclose(actual, expected, atol=2e-6)
        assert (
            np.abs(np.asarray(actual) - oracle(case, scale=0.25, alibi_slopes=slopes)).max() > 1e-2
        )


def random_tree(rng, num_tokens):
    """Returns the token before each token, -1 for the first."""
    return [-1, *(int(rng.integers(max(0, index - 4), index)) for index in range(1, num_tokens))]


def branch(parents, token):
    """Returns the tokens from the first to this one."""
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path[::-1]


def tree_case(seed, contexts, queries, **form):
    """Makes a call whose rows are random trees: the case, its mask and the trees."""
    rng = np.random.default_rng(seed)
    case = make_case(seed, contexts, queries, **form)
    trees = [random_tree(rng, count) for count in queries]
    mask = np.zeros((len(case.q_TNH), max(queries)), bool)
    for first, tree in zip(case.query_start, trees, strict=False):
        for token in range(len(tree)):
            mask[first + token, branch(tree, token)] = True
    return case, mask, trees


def on_its_own(case, row, path):
    """Makes the case with one branch of a row's tree moved to where its tokens would stand without
    the others.
    """
    alone = dataclasses.replace(
        case,
        **{
            name: getattr(case, name).copy()
            for name in ("q_TNH", "k_pages", "v_pages", "context_len_B", "query_start")
        },
    )
    start, stop = case.query_start[row : row + 2]
    first, block_size = case.context_len_B[row] - (stop - start), case.k_pages.shape[1]
    names = ("k_pages", "v_pages", *case.scales)
    for depth, token in enumerate(path):
        (to, here), (source, there) = (
            divmod(first + place, block_size) for place in (depth, token)
        )
        for name in names:
            pages = getattr(alone, name) if name.endswith("pages") else getattr(alone, name).copy()
            pages[case.block_table_BM[row, to], here] = getattr(case, name)[
                case.block_table_BM[row, source], there
            ]
            setattr(alone, name, pages)
        alone.q_TNH[start + depth] = case.q_TNH[start + token]
    alone.context_len_B[row] = first + len(path)
    alone.query_start[row + 1 :] = start + len(path)  # the rows after it are empty
    alone.context_len_B[row + 1 :] = 0
    return alone


TREE_FORMS = {
    "usual": {},
    "blocks of 1": {"heads": (3, 3), "block_size": 1},
    "blocks of 128": {"heads": (8, 1), "block_size": 128, "width": 32},
    "int8": {"page_dtype": "int8", "block_size": 16},
    "alibi": {"heads": (6, 2), "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("name", few(TREE_FORMS, ["blocks of 1", "int8", "alibi"]))
def test_a_token_of_a_tree_has_the_bits_of_its_branch_alone(name):
    """Trees go across the edges of blocks and of tiles of 64 positions, and begin a context."""
    form = {**TREE_FORMS[name]}
    options = {"scale": 0.3, "alibi_slopes": form.pop("alibi_slopes", None)}
    case, mask, trees = tree_case(11, [70, 20, 9], [20, 16, 9], **form)
    actual = np.asarray(
        run(*case.arrays, **case.scales, **options, backend="scan", tree_mask_TQ=mask)
    )
    np.testing.assert_allclose(actual, oracle(case, **options, tree_mask_TQ=mask), atol=5e-6)
    assert any(np.diff(tree).tolist() != [1] * (len(tree) - 1) for tree in trees)
    for row, tree in enumerate(trees):
        start = case.query_start[row]
        for leaf in sorted(set(range(len(tree))) - set(tree)):
            path = branch(tree, leaf)
            alone = on_its_own(case, row, path)
            # as rows that decode have it, and all of the branch at once
            for count in (1, len(path)):
                arrays = list(alone.arrays)
                if count == 1:
                    place = start + len(path) - 1
                    arrays[0] = alone.q_TNH[place : place + 1].repeat(
                        len(case.context_len_B), axis=0
                    )
                    arrays[3] = arrays[3][[row] * len(case.context_len_B)]
                    arrays[4] = alone.context_len_B[[row] * len(case.context_len_B)]
                    arrays[5] = np.arange(len(case.context_len_B) + 1, dtype=np.int32)
                plain = run(
                    *arrays,
                    **alone.scales,
                    **options,
                    backend="scan",
                    max_query_len=1 if count == 1 else 20,
                )
                expected = (
                    np.asarray(plain)[:1]
                    if count == 1
                    else np.asarray(plain)[start : start + len(path)]
                )
                np.testing.assert_array_equal(actual[start + np.array(path[-count:])], expected)


MUTATIONS = {
    "values read as keys": lambda case: dataclasses.replace(case, v_pages=case.k_pages),
    "table rows swapped": lambda case: dataclasses.replace(
        case, block_table_BM=case.block_table_BM[::-1]
    ),
    "length off by one": lambda case: dataclasses.replace(
        case, context_len_B=case.context_len_B - 1
    ),
    "heads shifted": lambda case: dataclasses.replace(case, q_TNH=np.roll(case.q_TNH, 1, axis=1)),
    "blocks reversed": lambda case: dataclasses.replace(
        case, block_table_BM=case.block_table_BM[:, ::-1]
    ),
}


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_planted_mistake_is_seen(backend, mutation):
    case = make_case(5, [33, 40], [2, 7])
    actual = run(*MUTATIONS[mutation](case).arrays, scale=0.3, backend=backend)
    assert np.abs(np.asarray(actual) - oracle(case, scale=0.3)).max() > 1e-2


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
def test_what_nobody_sees_may_be_nan(backend):
    case = make_case(6, [10, 70], [3, 1])
    clean = np.asarray(run(*case.arrays, scale=0.3, backend=backend))
    for row, length in enumerate(case.context_len_B):
        for position in range(length, case.block_table_BM.shape[1] * 8):
            block = case.block_table_BM[row, position // 8]
            case.k_pages[block, position % 8] = case.v_pages[block, position % 8] = np.nan
    np.testing.assert_array_equal(run(*case.arrays, scale=0.3, backend=backend), clean)


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize(
    ("contexts", "queries"),
    few(
        [([200, 70, 9], [1, 1, 1]), ([200, 150, 30], [20, 1, 30])],
        [([200, 150, 30], [20, 1, 30])],
    ),
)
def test_what_no_window_reaches_may_be_nan(backend, contexts, queries):
    """Blocks that every window has left are replaced by the null block, and nothing is known of
    what that holds.
    """
    window, block_size = 9, 8
    case = make_case(6, contexts, queries)
    options = {"scale": 0.3, "sliding_window": window, "backend": backend}
    clean = np.asarray(run(*case.arrays, **options))
    np.testing.assert_allclose(clean, oracle(case, scale=0.3, sliding_window=window), atol=2e-6)
    poisoned = [np.full_like(pages, np.nan) for pages in (case.k_pages, case.v_pages)]
    table = np.zeros_like(case.block_table_BM)
    for row, (length, num_new) in enumerate(zip(contexts, queries, strict=True)):
        for position in range(max(0, length - num_new - window + 1), length):
            block = table[row, position // block_size] = case.block_table_BM[
                row, position // block_size
            ]
            for pages, clean_pages in zip(poisoned, (case.k_pages, case.v_pages), strict=True):
                pages[block, position % block_size] = clean_pages[block, position % block_size]
    case = dataclasses.replace(case, k_pages=poisoned[0], v_pages=poisoned[1], block_table_BM=table)
    np.testing.assert_array_equal(run(*case.arrays, **options), clean)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 24)), min_size=2, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_any_rows(rows, seed):
    contexts = [before + new for before, new in rows]
    queries = [new for _, new in rows]
    case = make_case(seed, contexts, queries, padding=100 - sum(queries), table_width=16)
    blocks = np.zeros((60, *case.k_pages.shape[1:]), np.float32)  # one shape for all examples
    for name in ("k_pages", "v_pages"):
        padded = blocks.copy()
        padded[: len(getattr(case, name))] = getattr(case, name)
        setattr(case, name, padded)
    if len(rows) < 4:
        missing = 4 - len(rows)
        case.block_table_BM = np.pad(case.block_table_BM, ((0, missing), (0, 0)))
        case.context_len_B = np.pad(case.context_len_B, (0, missing))
        case.query_start = np.pad(case.query_start, (0, missing), mode="edge")
    np.testing.assert_allclose(
        run(*case.arrays, scale=0.3, backend="scan"), oracle(case, scale=0.3), atol=3e-6
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), few([(4, 2), (2, 2), (8, 1)], [(4, 2)]))
def test_a_token_is_a_function_of_its_row_to_the_last_bit(num_heads, num_kv_heads):
    """The same row has other block sizes, table widths, neighbours and chunkings."""
    heads = num_heads, num_kv_heads
    rng = np.random.default_rng(7)
    length, width = 150, 32
    keys, values = rng.standard_normal((2, length, heads[1], width)).astype(np.float32)
    query = rng.standard_normal((heads[0], width)).astype(np.float32)
    seen = set()
    for block_size in (1, 128):
        for others, queries, hint in (
            ([40], 1, 1),
            ([90, 400, 3], 1, 1),
            ([40], 16, None),
            ([10] * 15, 5, None),
        ):
            case = make_case(
                8,
                [length, *others],
                [queries, *[1] * len(others)],
                heads=heads,
                width=width,
                block_size=block_size,
            )
            for position in range(length):
                block = case.block_table_BM[0, position // block_size]
                case.k_pages[block, position % block_size] = keys[position]
                case.v_pages[block, position % block_size] = values[position]
            case.q_TNH[queries - 1] = query
            if hint:
                case.q_TNH = case.q_TNH[: len(others) + 1]
            out = run(*case.arrays, scale=0.3, backend="scan", max_query_len=hint)
            seen.add(np.asarray(out)[queries - 1].tobytes())
    assert len(seen) == 1


def test_refusals_name_the_argument():
    case = make_case(9, [4, 4], [1, 1])
    with pytest.raises(ValueError, match="backend must be .*'auto'.*nonsense"):
        paged_attention(*case.arrays, scale=1.0, backend="nonsense")
    with pytest.raises(
        NotImplementedError,
        match="scan: a tree mask with a sliding window; .*"
        "reference: a tree mask with a sliding window",
    ):
        paged_attention(
            *case.arrays, scale=1.0, sliding_window=3, tree_mask_TQ=np.ones((5, 1), bool)
        )
    case.query_start = case.query_start[:-1]
    with pytest.raises(ValueError, match="query_start must have 3 entries"):
        paged_attention(*case.arrays, scale=1.0)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AttentionOptions)])
def test_an_option_is_in_the_definition_and_refused_by_name_where_a_set_does_not_compute_it(name):
    assert name in SETS["reference"].honours
    case = vars(make_case(9, [4, 4], [1, 1]))
    zeros = np.zeros(4, np.float32)
    arrays = {"sinks": zeros, "alibi_slopes": zeros, "tree_mask_TQ": np.ones((5, 1), bool)}
    arrays["last_seen_T"] = np.zeros(5, np.int32)
    options = {"scale": 1.0, name: arrays.get(name, 3)}
    if name == "value_width":
        case["v_pages"] = None
    call = Call(
        page_dtype="float32", attention=Arguments(**case, options=AttentionOptions(**options))
    )
    without = dataclasses.replace(SETS["reference"], honours=SETS["reference"].honours - {name})
    assert SETS["reference"].refusal(None, call) is None
    assert without.refusal(None, call) == f"{name}: its attention has no such option"


def test_a_gpu_gets_plain_xla_only_where_it_is_requested_by_name(monkeypatch):
    case = make_case(9, [4, 4], [1, 1])
    old = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
    monkeypatch.setattr(jax, "devices", lambda: [old])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    by_name = " or ".join(XLA_BACKENDS)
    with pytest.raises(
        NotImplementedError, match=f"triton: needs a GPU .* has 7.5; mosaic: .* by name: {by_name};"
    ):
        paged_attention(*case.arrays, scale=0.3)
    actual = paged_attention(*case.arrays, scale=0.3, backend="scan")
    np.testing.assert_allclose(actual, oracle(case, scale=0.3), atol=2e-6)
    with pytest.raises(
        NotImplementedError, match="triton: needs a GPU of .* 8.0 or more, but Tesla T4 has 7.5"
    ):
        paged_attention(*case.arrays, scale=0.3, backend="triton")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q_TNH": np.float32(1)}, ValueError, "q_TNH must have 3 axes"),
        ({"q_TNH": np.zeros((5, 0, 16), np.float32)}, ValueError, "0 query heads"),
        (
            {"k_pages": np.zeros((3, 8, 0, 16), np.float32)},
            ValueError,
            r"k_pages must not be empty.*\(3, 8, 0, 16\)",
        ),
        (
            {"block_table_BM": np.zeros((2, 0), np.int32)},
            ValueError,
            r"block_table_BM must not be empty.*\(2, 0\)",
        ),
        ({"tree_mask_TQ": np.zeros((5, 0), bool)}, ValueError, r"tree_mask_TQ .*\(5, 0\)"),
        (
            {"sinks": np.zeros(3, np.float32)},
            ValueError,
            r"sinks must hold a float for each of 4 .*\(3,\)",
        ),
        ({"value_width": 4}, ValueError, "either v_pages or value_width"),
        ({"v_pages": None}, ValueError, "either v_pages or value_width"),
        (
            {"v_pages": None, "value_width": 17},
            ValueError,
            "value_width must be at most .* 16, not 17",
        ),
        ({"scale": "x"}, TypeError, "scale must be a number.*'x'"),
        ({"scale": jnp.float32(1)}, TypeError, "scale must be a number"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, not nan"),
        ({"sliding_window": 1.5}, TypeError, "sliding_window must be an integer.*1.5"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, not 0"),
        ({"logit_softcap": 0.0}, ValueError, "logit_softcap must be above 0, not 0.0"),
        ({"max_query_len": 2.5}, TypeError, "max_query_len must be an integer.*2.5"),
        ({"max_query_len": 0}, ValueError, "max_query_len must be at least 1, not 0"),
    ],
)
def test_what_is_no_call_is_refused_by_name(changes, error, text):
    arguments = vars(make_case(9, [4, 4], [1, 1])) | {"scale": 1.0} | changes
    with pytest.raises(error, match=text):
        paged_attention(
            **{
                name: value
                for name, value in arguments.items()
                if value is not None or name == "v_pages"
            }
        )


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
def test_a_call_without_tokens_or_rows_gives_zeros(backend):
    interpret = backend == "triton"
    for contexts, queries, padding in (([9, 4], [0, 0], 0), ([], [], 2)):
        case = make_case(9, contexts or [1], queries or [0], padding=padding)
        if not contexts:
            case.block_table_BM, case.context_len_B = (
                case.block_table_BM[:0],
                case.context_len_B[:0],
            )
            case.query_start = case.query_start[:1]
        actual = paged_attention(*case.arrays, scale=1.0, backend=backend, interpret=interpret)
        assert actual.shape == case.q_TNH.shape
        assert actual.dtype == case.q_TNH.dtype
        assert not np.any(actual)


@pytest.mark.parametrize("integers", few(["int64", "int8", "uint8"], ["uint8"]))
def test_numpy_arrays_of_any_integers_do(integers):
    """The call is not compiled, and has more query tokens than the narrowest of these types
    counts.
    """
    case = make_case(9, [120, 20], [100, 20], padding=20)
    expected = oracle(case, scale=0.25)
    for name in ("block_table_BM", "context_len_B", "query_start"):
        setattr(case, name, getattr(case, name).astype(integers))
    actual = paged_attention(*case.arrays, scale=np.float64(0.25), backend="scan")
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_kernels_refuse_64_bits_and_xla_does_not():
    case = make_case(9, [4, 4], [1, 1])
    pages = np.ones((3, 2, 1, 8), np.float32)
    jax.config.update("jax_enable_x64", True)
    try:
        actual = paged_attention(*case.arrays, scale=0.5)
        with pytest.raises(
            NotImplementedError, match="triton: jax_enable_x64.*mosaic: jax_enable_x64"
        ):
            paged_attention(*case.arrays, scale=0.5, interpret=True)
        with pytest.raises(NotImplementedError, match="triton: jax_enable_x64"):
            write_kv(pages[0], pages[1], pages, pages, np.array([1, 2]), interpret=True)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, oracle(case, scale=0.5), atol=1e-5)


@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_tokens", [3, 0])
def test_writing_and_attending_in_one_call(num_tokens, page_dtype):
    """It gives what `write_kv` and `paged_attention` do one after the other, with their names and
    defaults.
    """
    case = make_case(9, [4, 12], [num_tokens, 0], page_dtype=page_dtype, padding=0)
    k, v = np.random.default_rng(0).standard_normal((2, num_tokens, 2, 16)).astype(np.float32)
    slots = np.arange(8, 8 + num_tokens)
    pages = write_kv(k, v, case.k_pages, case.v_pages, slots, **case.scales)
    scales = dict(zip(case.scales, pages[2:], strict=True))
    options = {"scale": 0.3, "sinks": np.array([1.0, -1.0, 0.5, 2.0], np.float32)}
    expected = paged_attention(case.q_TNH, *pages[:2], *case.arrays[3:], **options, **scales)
    out, actual = write_and_attend(
        k, v, slots, Arguments(**vars(case), options=AttentionOptions(**options))
    )
    for array, other in zip((out, *actual), (expected, *pages), strict=True):
        np.testing.assert_array_equal(array, other)
    with pytest.raises(ValueError, match=r"v_TKH must have one vector .* \(1, 2, 16\)"):
        arguments = Arguments(**vars(case), options=AttentionOptions(scale=0.3))
        write_and_attend(np.zeros((3, 2, 16)), np.zeros((1, 2, 16)), np.arange(3), arguments)


def test_write_kv_fills_exactly_its_slots():
    rng = np.random.default_rng(10)
    k_pages, v_pages = rng.standard_normal((2, 5, 4, 2, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    slots = np.array([7, 16, 9], np.int32)
    expected = [pages.reshape(20, 2, 8).copy() for pages in (k_pages, v_pages)]
    for index, slot in enumerate(slots):
        expected[0][slot], expected[1][slot] = k[index], v[index]
    actual = write_kv(
        jnp.asarray(k), jnp.asarray(v), jnp.asarray(k_pages), jnp.asarray(v_pages), slots
    )
    for pages, slots in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(pages).reshape(20, 2, 8), slots)


def test_copy_blocks_reads_before_it_writes():
    pages = jnp.arange(5 * 2).reshape(5, 2)
    actual = copy_blocks({"k": pages}, np.array([1, 2, 0]), np.array([2, 3, 0]))["k"]
    np.testing.assert_array_equal(actual, np.asarray(pages)[[0, 1, 1, 2, 4]])


@pytest.mark.parametrize("operation", ["write", "copy"])
def test_donated_pages_are_changed_in_place(operation):
    shape = jax.ShapeDtypeStruct((512, 16, 4, 64), jnp.float32)
    new = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)
    index = jax.ShapeDtypeStruct((8,), jnp.int32)
    if operation == "write":
        compiled = (
            jax.jit(write_kv, donate_argnums=(2, 3)).lower(new, new, shape, shape, index).compile()
        )
        pages_bytes = 2 * 512 * 16 * 4 * 64 * 4
    else:
        compiled = jax.jit(copy_blocks, donate_argnums=0).lower(shape, index, index).compile()
        pages_bytes = 512 * 16 * 4 * 64 * 4
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == pages_bytes
    assert analysis.temp_size_in_bytes < pages_bytes / 8
