"""Keys and values in eight bits: the formats against numpy, attention over them against float64,
and engines that keep them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxpage import LLM, SamplingParams
from jaxpage.device.pages.kv_pages import bytes_per_layer, page_dtype
from jaxpage.models.base import KVSpec
from pallas_kernels import copy_blocks, paged_attention, write_kv
from tests.support.attention import SHARED_BACKENDS, dequantize, make_case, oracle, quantize, run
from tests.support.engines import LLAMA, LogitsWitness, invariants, make_llm
from tests.support.executables import when_used
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

DTYPES = ("int8", "uint8", "float8_e4m3fn")
# The bytes of uint8 are those of float8_e4m3fn.
ON_BACKENDS = [
    (dtype, backend)
    for backend in SHARED_BACKENDS
    for dtype in (DTYPES if backend == "reference" else DTYPES[:2])
]


@functools.partial(jax.jit, static_argnames="dtype")
def write_pages(k_TKH, v_TKH, slots_T, *, dtype, num_blocks=5, block_size=4):
    """Returns k_pages, v_pages, k_scale, v_scale after a write into new pages."""
    shape = (num_blocks, block_size, *k_TKH.shape[1:])
    pages, scale = jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.float32)
    return write_kv(k_TKH, v_TKH, pages, pages, slots_T, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_fills_exactly_its_slots_and_their_scales(dtype):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 3, 2, 8)) * [[[[1]], [[50]], [[0.01]]]]).astype(np.float32)
    v[1, 0] = 0.0
    slots = np.array([7, 16, 9], np.int32)
    actual = [np.asarray(array) for array in write_pages(k, v, slots, dtype=dtype)]
    for new, pages, scales in ((k, actual[0], actual[2]), (v, actual[1], actual[3])):
        expected_pages, expected_scales = (
            np.zeros((20, 2, 8), pages.dtype),
            np.zeros((20, 2), np.float32),
        )
        expected_pages[slots], expected_scales[slots] = quantize(new, dtype)
        np.testing.assert_array_equal(
            pages.reshape(20, 2, 8).view(np.int8), expected_pages.view(np.int8)
        )
        np.testing.assert_array_equal(scales.reshape(20, 2), expected_scales)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=8, max_size=8))
@example([0.0] * 8)
@example([1e-45] * 8)
@example([1e30, -1e30, 1e22, 3e27, 1e-3, -7e29, 0.0, 5e28])
def test_what_is_read_is_near_what_was_written(values):
    x = np.array(values, np.float32).reshape(1, 1, 8)
    for dtype in ("int8", "uint8"):
        k_pages, v_pages, k_scale, v_scale = map(
            np.asarray, write_pages(x, -x, np.array([6], np.int32), dtype=dtype)
        )
        scale = k_scale[1, 2].astype(np.float64)[:, None]
        error = np.abs(dequantize(k_pages, k_scale)[1, 2] - x[0])
        bound = scale / 2 if dtype == "int8" else np.maximum(np.abs(x[0]) / 16.0, scale / 1024)
        assert (error <= bound * (1 + 1e-6)).all()
        np.testing.assert_array_equal(dequantize(v_pages, v_scale), -dequantize(k_pages, k_scale))


@pytest.mark.parametrize(("dtype", "backend"), ON_BACKENDS)
@pytest.mark.parametrize("wrong", few([np.nan, np.inf, -np.inf], [np.nan, np.inf]))
def test_what_is_no_number_stays_none(dtype, backend, wrong):
    """A vector with one bad entry gives NaN wherever it is seen, in its head, and never a
    number.
    """
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 2, 2, 16)).astype(np.float32)
    v[1, 0, 3] = wrong
    k_pages, v_pages, k_scale, v_scale = write_pages(k, v, np.array([4, 5], np.int32), dtype=dtype)
    q = rng.standard_normal((2, 2, 16)).astype(np.float32)
    table, context, start = (
        np.array([[1]], np.int32),
        np.array([2], np.int32),
        np.array([0, 2], np.int32),
    )
    out = np.asarray(
        run(
            q,
            k_pages,
            v_pages,
            table,
            context,
            start,
            scale=0.3,
            backend=backend,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    )
    assert np.isnan(out[1, 0]).all() and np.isfinite(out[1, 1]).all()


def quantized_case(dtype: str, **options):
    """Returns a case, its pages quantised by the write, and the same case as numpy says that it is
    read.
    """
    case = make_case(1, [5, 70, 0, 130], [5, 1, 0, 17], **options)
    spread = np.exp(np.random.default_rng(2).standard_normal((*case.k_pages.shape[:3], 1)))
    case.k_pages, case.v_pages = (
        (case.k_pages * spread).astype(np.float32),
        (case.v_pages / spread).astype(np.float32),
    )
    num_blocks, block_size = case.k_pages.shape[:2]
    flat = [pages.reshape(-1, *pages.shape[2:]) for pages in (case.k_pages, case.v_pages)]
    shape = jnp.zeros(case.k_pages.shape, dtype), jnp.zeros(case.k_pages.shape[:3], jnp.float32)
    slots = np.arange(num_blocks * block_size, dtype=np.int32)
    k_pages, v_pages, k_scale, v_scale = jax.jit(write_kv)(
        *flat, shape[0], shape[0], slots, k_scale=shape[1], v_scale=shape[1]
    )
    stored = dataclasses.replace(case, k_pages=k_pages, v_pages=v_pages)
    read = dataclasses.replace(
        case,
        k_pages=dequantize(*quantize(case.k_pages, dtype)),
        v_pages=dequantize(*quantize(case.v_pages, dtype)),
    )
    return stored, {"k_scale": k_scale, "v_scale": v_scale}, read


@pytest.mark.parametrize(("dtype", "backend"), ON_BACKENDS)
@pytest.mark.parametrize(
    "options", few([{}, {"sliding_window": 9}], [{"sliding_window": 9}]), ids=str
)
def test_attention_over_quantized_pages_matches_float64(backend, dtype, options):
    stored, scales, read = quantized_case(dtype)
    actual = run(*stored.arrays, scale=0.3, backend=backend, **options, **scales)
    np.testing.assert_allclose(actual, oracle(read, scale=0.3, **options), atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_small_weights_times_small_scales_are_no_zeros_in_float16(dtype):
    """One position has nearly all the weight and no value, as the first token of a text
    often has.
    """
    case = make_case(3, [70], [1], dtype="float16")
    case.q_TNH[..., 0], case.k_pages[..., 0] = 7.0, 0.0
    case.q_TNH[..., 1:] = 0.0
    first = case.block_table_BM[0, 0]
    case.k_pages[first, 0, :, 0], case.v_pages[first, 0] = 1.0, 0.0
    (k_pages, k_scale), (v_pages, v_scale) = (
        quantize(x, dtype) for x in (case.k_pages, case.v_pages * np.float32(0.01))
    )
    stored = dataclasses.replace(
        case, k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale
    )
    expected = oracle(stored, scale=1.0)
    actual = run(*stored.arrays, scale=1.0, backend="triton", **stored.scales)
    assert np.abs(np.asarray(actual, np.float64) - expected).max() < 0.01 * np.abs(expected).max()


MUTATIONS = {
    "no scale of keys": lambda k, v: (np.ones_like(k), v),
    "no scale of values": lambda k, v: (k, np.ones_like(v)),
    "keys' scale for values": lambda k, v: (k, k),
    "values' scale for keys": lambda k, v: (v, v),
    "another head's": lambda k, v: (np.roll(k, 1, axis=2), np.roll(v, 1, axis=2)),
    "another slot's": lambda k, v: (np.roll(k, 1, axis=1), np.roll(v, 1, axis=1)),
    "another block's": lambda k, v: (np.roll(k, 1, axis=0), np.roll(v, 1, axis=0)),
}


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize("mutation", few(MUTATIONS, ["keys' scale for values", "another slot's"]))
def test_a_planted_mistake_is_seen(backend, mutation):
    stored, scales, read = quantized_case("int8")
    k_scale, v_scale = MUTATIONS[mutation](*map(np.asarray, scales.values()))
    actual = run(*stored.arrays, scale=0.3, backend=backend, k_scale=k_scale, v_scale=v_scale)
    assert np.abs(np.asarray(actual) - oracle(read, scale=0.3)).max() > 1e-2


@pytest.mark.parametrize("backend", SHARED_BACKENDS)
@pytest.mark.parametrize("dtype", few(["int8", "uint8"], ["uint8"]))
def test_what_nobody_sees_may_have_any_scale(backend, dtype):
    stored, scales, _ = quantized_case(dtype)
    options = {"scale": 0.3, "sliding_window": 20, "backend": backend}
    clean = np.asarray(run(*stored.arrays, **options, **scales))
    poisoned = {name: np.full_like(scale, np.nan) for name, scale in scales.items()}
    for row, (length, num_new) in enumerate(
        zip(stored.context_len_B, np.diff(stored.query_start), strict=True)
    ):
        for position in range(max(0, length - num_new - 19), length):
            slot = stored.block_table_BM[row, position // 8], position % 8
            for name, scale in scales.items():
                poisoned[name][slot] = scale[slot]
    np.testing.assert_array_equal(run(*stored.arrays, **options, **poisoned), clean)


def test_copied_blocks_take_their_scales_along():
    stored, scales, read = quantized_case("uint8")
    pages = (stored.k_pages, stored.v_pages, scales["k_scale"], scales["v_scale"])
    used = np.unique(stored.block_table_BM[stored.block_table_BM > 0])
    room = jax.tree.map(lambda array: jnp.concatenate([array, jnp.zeros_like(array)]), pages)
    moved = used + len(stored.k_pages)
    k_pages, v_pages, k_scale, v_scale = copy_blocks(room, used, moved)
    new_place = dict(zip(used.tolist(), moved.tolist(), strict=True)) | {0: 0}
    table = np.vectorize(new_place.__getitem__, otypes=[np.int32])(stored.block_table_BM)
    case = dataclasses.replace(stored, k_pages=k_pages, v_pages=v_pages, block_table_BM=table)
    actual = run(*case.arrays, scale=0.3, backend="scan", k_scale=k_scale, v_scale=v_scale)
    np.testing.assert_allclose(actual, oracle(read, scale=0.3), atol=1e-5)


@pytest.mark.parametrize(("operation", "dtype"), [("write", "int8"), ("copy", "uint8")])
def test_donated_pages_are_changed_in_place(operation, dtype):
    page = jax.ShapeDtypeStruct((512, 16, 4, 64), dtype)
    scale = jax.ShapeDtypeStruct((512, 16, 4), jnp.float32)
    new, index = (
        jax.ShapeDtypeStruct((8, 4, 64), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )

    def write(pages, k_TKH, v_TKH, slots_T):
        k_pages, v_pages, k_scale, v_scale = pages
        return write_kv(k_TKH, v_TKH, k_pages, v_pages, slots_T, k_scale=k_scale, v_scale=v_scale)

    function, arguments = (
        (write, (new, new, index)) if operation == "write" else (copy_blocks, (index, index))
    )
    analysis = (
        jax.jit(function, donate_argnums=0)
        .lower((page, page, scale, scale), *arguments)
        .compile()
        .memory_analysis()
    )
    pages_bytes = 2 * 512 * 16 * 4 * (64 + 4)
    assert analysis.alias_size_in_bytes == pages_bytes
    assert analysis.temp_size_in_bytes < pages_bytes / 8


def test_refusals_name_the_argument():
    case = make_case(9, [4, 4], [1, 1])
    shape = case.k_pages.shape
    attend = functools.partial(paged_attention, scale=1.0)
    scale, bits = np.ones(shape[:3], np.float32), np.zeros(shape, np.int8)
    stored = dataclasses.replace(case, k_pages=bits, v_pages=bits)
    for error, message, case_, scales in (
        (
            ValueError,
            "k_scale goes with pages of int8, float8_e4m3fn, uint8, but k_pages hold float32",
            case,
            {},
        ),
        (
            ValueError,
            "v_pages hold int8, which means nothing without v_scale",
            stored,
            {"v_scale": None},
        ),
        (
            ValueError,
            r"k_scale must have one entry per slot and head, \(.*, 8, 2\)",
            stored,
            {"k_scale": scale[:, :1]},
        ),
        (
            TypeError,
            "v_scale must hold float32, but holds float16",
            stored,
            {"v_scale": scale.astype(np.float16)},
        ),
        (TypeError, "must have one type", dataclasses.replace(stored, v_pages=case.v_pages), {}),
        (
            TypeError,
            "must hold floats",
            dataclasses.replace(stored, k_pages=bits + 0j, v_pages=bits + 0j),
            {},
        ),
    ):
        given_scales = {"k_scale": scale, "v_scale": scale, **scales}
        with pytest.raises(error, match=message):
            attend(*case_.arrays, **given_scales)
        new = np.zeros((1, *shape[2:]), np.float32)
        with pytest.raises(error, match=message):
            write_kv(new, new, case_.k_pages, case_.v_pages, np.zeros(1, np.int32), **given_scales)


def test_bytes_of_a_block_count_the_scales():
    kv = KVSpec(num_layers=3, num_kv_heads=2, head_dim=64, sliding_windows=(None,) * 3)
    sizes = {
        name: sum(bytes_per_layer(kv, 16, page_dtype(name, "bfloat16")))
        for name in ("auto", "int8", "fp8")
    }
    assert sizes == {
        "auto": 3 * 2 * 16 * 2 * 64 * 2,
        "int8": 3 * 2 * 16 * 2 * 68,
        "fp8": 3 * 2 * 16 * 2 * 68,
    }


PROMPTS = (
    "Once upon a time there lived a lazy milkmaid in a quiet farm at the end of a long road, "
    "and everybody called her",
    "It was a bright cold morning, and the captain walked up and down the deck with his hands "
    "behind him",
    "The old house",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# Two sequences do not fit to their end, so that one is preempted.
SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 18,
    "max_model_len": 66,
}


def greedy(llm: LLM) -> tuple[list[tuple[int, list[int]]], dict]:
    """Returns the length of each prompt with the tokens drawn, and the logits that they were drawn
    from.
    """
    witness = LogitsWitness(llm)
    outputs = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    invariants(llm)
    assert llm.stats()["num_preemptions_total"]["recompute"] > 0
    return [
        (len(output.prompt_token_ids), output.outputs[0].token_ids) for output in outputs
    ], witness.logits


@pytest.fixture(scope="module")
def in_float():
    with make_llm("demo", **SMALL) as llm:
        return greedy(llm)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "largest", "mean"),
    few([("int8", 0.15, 0.012), ("fp8", 0.5, 0.05)], [("fp8", 0.5, 0.05)]),
)
def test_an_engine_says_nearly_the_same(in_float, kv_cache_dtype, largest, mean):
    """While both have drawn the same tokens, logits are close but not equal."""
    with make_llm("demo", **SMALL, kv_cache_dtype=kv_cache_dtype) as llm:
        pages = jax.tree.leaves(llm._engine.runner._pages)
        block_bytes = 4 * (2 * 4 * 2 * (64 + 4))
        assert (
            sum(page[0].nbytes for page in pages) == block_bytes
            and llm.memory.pool_bytes == 18 * block_bytes
        )
        outputs, logits = greedy(llm)
    (expected, expected_logits), differences, num_same = in_float, [], 0
    for sequence_id, ((length, ours), (_, theirs)) in enumerate(
        zip(outputs, expected, strict=True)
    ):
        same = [*map(operator.eq, ours, theirs), False].index(False)
        num_same += same
        places = [(sequence_id, length + index) for index in range(min(same + 1, len(ours)))]
        differences += [np.abs(logits[place] - expected_logits[place]) for place in places]
    assert num_same > 0.8 * len(PROMPTS) * GREEDY.max_tokens
    assert 1e-3 < np.max(differences) < largest and np.mean(differences) < mean


def test_more_fits_and_the_table_says_why(tmp_path, capsys):
    random_checkpoint(tmp_path, LLAMA)
    numbers = {}
    for kv_cache_dtype, shown in (
        ("auto", "float32"),
        ("fp8", "fp8, a float32 scale per token and head"),
    ):
        settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 2**18}
        with when_used(), LLM(str(tmp_path), kv_cache_dtype=kv_cache_dtype, **settings) as llm:
            numbers[kv_cache_dtype] = llm.memory.num_blocks
        assert re.search(f"KV dtype +{shown}\n", capsys.readouterr().err)
    assert numbers == {
        "auto": 2**18 // (2 * 2 * 16 * 2 * 64),
        "fp8": 2**18 // (2 * 2 * 16 * 2 * (16 + 4)),
    }
