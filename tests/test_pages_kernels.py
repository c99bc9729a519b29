"""Writing and moving pages: the Triton kernels, interpreted, and XLA's scatters, against numpy;
each oracle sees what is planted.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    compat,
    copy_blocks,
    copy_slots,
    gather_blocks,
    is_quantized,
    quantized_pages,
    rotate_and_write,
    scatter_blocks,
    write_kv,
)
from pallas_kernels.compat import describe_gpu
from pallas_kernels.triton import move as triton_move
from pallas_kernels.triton import rotary_write, rows
from pallas_kernels.triton import write as triton_write
from tests.support.sweeps import few

P, S, K, H, T = 6, 4, 3, 20, 7
DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn")
BACKENDS = {
    "reference": {"backend": "reference"},
    "triton": {"backend": "triton", "interpret": True},
}
E4M3 = ml_dtypes.float8_e4m3fn


def bits(array):
    array = np.ascontiguousarray(array)
    return array.reshape(len(array), -1).view(np.uint8)


def same(actual, expected):
    for array, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert array.dtype == other.dtype and array.shape == other.shape
        np.testing.assert_array_equal(bits(array), bits(other))


# Writing


def quantize(x, dtype):
    """Returns what is stored, and its scale: the formats as `quantized_pages` documents them, in
    numpy.
    """
    if not is_quantized(dtype):
        return x.astype(dtype), None
    factor = np.float32(1 / 127) if dtype == "int8" else np.float32(1 / 448)
    scale = np.maximum(np.abs(x).max(-1) * factor, np.float32(2.0**-100))
    scaled = x / scale[..., None]
    return (
        np.rint(scaled).astype(np.int8) if dtype == "int8" else scaled.astype(E4M3).view(dtype)
    ), scale


def new_pages(dtype, seed=0, width=H):
    """Makes k_pages, v_pages and, of quantised pages, k_scale and v_scale, all holding
    something.
    """
    rng = np.random.default_rng(seed)
    pages = [
        rng.integers(0, 100, (P, S, K, width)).astype(np.float32).astype(dtype) for _ in range(2)
    ]
    return pages + [
        rng.random((P, S, K)).astype(np.float32) for _ in range(2 * is_quantized(dtype))
    ]


def vectors(seed, width=H):
    rng = np.random.default_rng(seed)
    k, v = (
        rng.standard_normal((2, T, K, width)) * np.exp(2 * rng.standard_normal((2, T, K, 1)))
    ).astype(np.float32)
    v[0, 1] = 0.0
    return k, v


@functools.partial(jax.jit, static_argnames="backend")
def write(k_TKH, v_TKH, pages, slots_T, *, backend):
    scales = dict(zip(("k_scale", "v_scale"), pages[2:], strict=False))
    return write_kv(k_TKH, v_TKH, *pages[:2], slots_T, **scales, **BACKENDS[backend])


def check_write(function, dtype, slots, seed=0, width=H):
    """Checks every slot outside the null block, to the bit; in it what was there or what some
    padding token brought.
    """
    (k, v), pages = vectors(seed, width), new_pages(dtype, seed, width)
    actual = [
        np.asarray(array).reshape(P * S, K, -1)
        for array in function(k, v, pages, np.array(slots, np.int32))
    ]
    updates = [quantize(k, dtype), quantize(v, dtype)]
    for array, old, new in zip(
        actual,
        pages,
        [value for value, _ in updates] + [scale for _, scale in updates],
        strict=False,
    ):
        expected, null = old.reshape(P * S, K, -1).copy(), {}
        for token, slot in enumerate(slots):
            value = new[token].reshape(K, -1)
            if 0 <= slot < S:
                null.setdefault(slot, []).append(bits(value).tobytes())
            elif slot < P * S:
                expected[slot] = value
        np.testing.assert_array_equal(bits(array[S:]), bits(expected[S:]))
        for slot in range(S):
            assert bits(array[slot]).tobytes() in null.get(slot, [bits(expected[slot]).tobytes()])
    return actual


SLOTS = [S, 23, 0, 9, 24, 0, 3]  # the first and the last, padding, and one after the pages


@pytest.mark.parametrize("dtype", few(DTYPES, ["float32", "bfloat16", "int8", "uint8"]))
@settings(max_examples=12)
@given(
    real=st.lists(st.integers(S, P * S - 1), unique=True, max_size=T),
    others=st.lists(st.integers(0, S - 1) | st.integers(P * S, 2**31 - 1), min_size=T, max_size=T),
    seed=st.integers(0, 99),
)
def test_a_write_fills_exactly_its_slots(dtype, real, others, seed):
    slots = np.random.default_rng(seed).permutation(real + others[len(real) :]).tolist()
    actual = {
        backend: check_write(functools.partial(write, backend=backend), dtype, slots, seed)
        for backend in BACKENDS
    }
    same([array[S:] for array in actual["triton"]], [array[S:] for array in actual["reference"]])


@pytest.mark.parametrize("width", few([80, 96, 128], [96]))
def test_head_dims_and_heads_are_masked(width, monkeypatch):
    """A program has one head, and then all of them."""
    for tile in (1, 2048):
        monkeypatch.setattr(triton_write, "TILE", tile)
        for dtype in ("float32", "int8"):
            check_write(
                functools.partial(write.__wrapped__, backend="triton"), dtype, SLOTS, width=width
            )


def swap(k, v, pages, slots):
    return write(v, k, pages, slots, backend="triton")


def off_by_one(k, v, pages, slots):
    return write(k, v, pages, slots + 1, backend="triton")


def scale_of_another_head(k, v, pages, slots):
    k_pages, v_pages, k_scale, v_scale = write(k, v, pages, slots, backend="triton")
    return k_pages, v_pages, k_scale[:, :, ::-1], v_scale


def scale_of_the_other(k, v, pages, slots):
    k_pages, v_pages, k_scale, v_scale = write(k, v, pages, slots, backend="triton")
    return k_pages, v_pages, v_scale, k_scale


def wrap_around(k, v, pages, slots):
    return write(k, v, pages, slots % (P * S - 1), backend="triton")


@pytest.mark.parametrize(
    "wrong",
    [swap, off_by_one, scale_of_another_head, scale_of_the_other, wrap_around],
    ids=lambda f: f.__name__,
)
def test_a_planted_mistake_in_a_write_is_seen(wrong):
    check_write(functools.partial(write, backend="triton"), "int8", SLOTS)
    with pytest.raises(AssertionError):
        check_write(wrong, "int8", SLOTS)


@functools.partial(jax.jit, static_argnames="dtype")
def quantize_twice(x, *, dtype):
    return triton_write.quantize(x, jnp.dtype(dtype)), quantized_pages.quantize(x, dtype)


@given(st.lists(st.floats(width=32), min_size=16, max_size=16))
@example(
    [
        127.0,
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        63.5,
        -64.5,
        0.0,
        -0.0,
        1e-45,
        -1e-38,
        126.5,
        -127.0,
        3.4999998,
        2.5000002,
    ]
)
@example([3.4e38, -3.4e38, *[1e-45] * 14])
@example([float("nan"), *[1.0] * 15])
@example([float("-inf"), float("inf"), *[1.0] * 14])
def test_quantising_in_a_kernel_gives_the_same_bits(values):
    x = np.array(values, np.float32).reshape(2, 8)
    for dtype in ("int8", "uint8", "float8_e4m3fn"):
        (codes, scale), (expected, expected_scale) = quantize_twice(x, dtype=dtype)
        np.testing.assert_array_equal(scale, expected_scale)  # NaN is NaN
        finite = np.isfinite(expected_scale)
        np.testing.assert_array_equal(bits(codes)[finite], bits(expected)[finite])
        read = quantized_pages.dequantize(codes, scale)
        assert np.isnan(np.asarray(read)[~finite]).all()


# Rotating and writing

N, E = 6, 6  # query heads; pairs of a head, whose last numbers are not turned


def heads_and_angles(seed, dtype, width=H):
    """Returns heads of queries, keys and values, the angles, and all in float64."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((T, N + 2 * K, width)), dtype)
    angles = rng.uniform(0, 100, (T, E))
    cos, sin = (np.asarray(function(angles), np.float32) for function in (np.cos, np.sin))
    return x, cos, sin


@functools.partial(jax.jit, static_argnames="function")
def rotate_then_write(x, cos, sin, pages, slots_T, *, function):
    scales = dict(zip(("k_scale", "v_scale"), pages[2:], strict=False))
    return function(x, cos, sin, *pages[:2], slots_T, **scales)


fused = functools.partial(rotate_and_write, backend="triton", interpret=True)


def one_after_the_other(x, cos, sin, k_pages, v_pages, slots_T, **scales):
    """Computes as layers did before: two rotations, and a write."""
    flat = x.reshape(T, -1)
    q, k, v = rows.split_and_rotate(flat, cos, sin, K, x.shape[2], interpret=True)
    return q, write_kv(k, v, k_pages, v_pages, slots_T, **scales, **BACKENDS["triton"])


def check_rotation(dtype, pages_dtype, width=H):
    """Checks queries and keys against float64 to a rounding, values and all other slots to
    the bit.
    """
    x, cos, sin = heads_and_angles(3, dtype, width)
    pages, slots = new_pages(pages_dtype, 3, width), np.array(SLOTS, np.int32)
    q, actual = rotate_then_write(x, cos, sin, pages, slots, function=fused)
    wide = np.asarray(x, np.float64)
    first, second = wide[..., :E], wide[..., E : 2 * E]
    cos_T1E, sin_T1E = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    rotated = [first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E]
    expected = np.concatenate([*rotated, wide[..., 2 * E :]], -1)
    tolerance = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(
        np.asarray(q, np.float64), expected[:, :N], rtol=tolerance, atol=tolerance
    )
    numbers = np.asarray(x, np.float32)
    for index, (array, old) in enumerate(zip(actual, pages, strict=True)):
        slots_now, new = (np.asarray(each).reshape(P * S, K, -1) for each in (array, old))
        new = new.copy()
        is_key, is_scale = index % 2 == 0, index > 1
        for token, slot in enumerate(SLOTS):
            if S <= slot < P * S and not is_key:
                new[slot] = quantize(numbers[token, N + K :], pages_dtype)[is_scale].reshape(K, -1)
            elif S <= slot < P * S:
                near = quantize(expected[token, N : N + K].astype(np.float32), pages_dtype)[
                    is_scale
                ]
                new[slot] = slots_now[slot]
                near_values, wished = (
                    np.asarray(each.view(E4M3) if each.dtype == "uint8" else each, np.float64)
                    for each in (slots_now[slot], near.reshape(K, -1))
                )
                step = 1 if pages_dtype == "int8" and not is_scale else 0
                step = step or (0.13 * np.abs(wished) if "8" in pages_dtype and not is_scale else 0)
                np.testing.assert_array_less(
                    np.abs(near_values - wished), step + 2 * tolerance * (1 + np.abs(wished))
                )
        np.testing.assert_array_equal(bits(slots_now[S:]), bits(new[S:]))
    return q, actual


@pytest.mark.parametrize(
    ("dtype", "pages_dtype"),
    few(
        itertools.product(
            ["bfloat16", "float32", "float16"], ["as x", "int8", "uint8", "float8_e4m3fn"]
        ),
        [("bfloat16", "as x"), ("float32", "int8"), ("float16", "uint8")],
    ),
)
def test_queries_and_keys_are_rotated_and_pages_written_in_one_launch(dtype, pages_dtype):
    pages_dtype = dtype if pages_dtype == "as x" else pages_dtype
    actual = check_rotation(dtype, pages_dtype)
    x, cos, sin = heads_and_angles(3, dtype)
    before = rotate_then_write(
        x,
        cos,
        sin,
        new_pages(pages_dtype, 3),
        np.array(SLOTS, np.int32),
        function=one_after_the_other,
    )
    same(actual[0], before[0])
    same(
        [each.reshape(P * S, -1)[S:] for each in actual[1]],
        [each.reshape(P * S, -1)[S:] for each in before[1]],
    )


@pytest.mark.parametrize("tile", few([1, 32, 2048], [1]))
def test_heads_of_a_program_are_all_of_a_kind(tile, monkeypatch):
    monkeypatch.setattr(rotary_write, "TILE", tile)
    for width in (20, 16):
        rotary_write.rotate_and_write.clear_cache()
        rotate_then_write.clear_cache()
        check_rotation("float32", "float32", width)


@pytest.mark.parametrize("mistake", ["sign", "values", "head"])
def test_a_planted_mistake_in_a_rotation_is_seen(mistake, monkeypatch):
    turn = rotary_write._turn

    def wrong(x_MH, x_ref, cos_ref, sin_ref, token, at_M1, at_1H, norm):
        if mistake == "sign":
            return turn(x_MH, x_ref, sin_ref, cos_ref, token, at_M1, at_1H, norm)
        if mistake == "values":
            return x_MH
        return turn(x_MH, x_ref, cos_ref, sin_ref, token, at_M1 + 1, at_1H, norm)

    monkeypatch.setattr(rotary_write, "_turn", wrong)
    rotary_write.rotate_and_write.clear_cache()
    rotate_then_write.clear_cache()
    with pytest.raises(AssertionError):
        check_rotation("float32", "float32")
    rotary_write.rotate_and_write.clear_cache()
    rotate_then_write.clear_cache()


def check_norms(dtype, offset):
    """Checks normed and rotated queries and keys against float64 to a rounding, and all that is
    written against the kernels one after the other to the bit.
    """
    x, cos, sin = heads_and_angles(4, dtype)
    pages, slots = new_pages(dtype, 4), np.array(SLOTS, np.int32)
    scales = np.random.default_rng(5).uniform(0.5, 2, (2, H)).astype(np.float32)
    norms = dict(
        zip(("query_scale_H", "key_scale_H"), jnp.asarray(scales, dtype), strict=True),
        epsilon=1e-3,
        offset=offset,
    )
    q, actual = jax.jit(functools.partial(fused, **norms))(x, cos, sin, *pages, slots)

    @jax.jit
    def in_turn(x, cos, sin, pages, slots):
        parts = jnp.split(x, [N, N + K], axis=1)
        normed = [
            rows.rms_norm(part.reshape(-1, H), scale, 1e-3, offset, interpret=True)
            for part, scale in zip(parts[:2], jnp.asarray(scales, dtype), strict=True)
        ]
        heads = [*(each.reshape(T, -1, H) for each in normed), parts[2]]
        return one_after_the_other(jnp.concatenate(heads, axis=1), cos, sin, *pages, slots)

    separate_q, separate_pages = in_turn(x, cos, sin, pages, slots)
    same(q, separate_q)
    same(*([each.reshape(P * S, -1)[S:] for each in both] for both in (actual, separate_pages)))
    wide = np.asarray(x, np.float64)[:, : N + K]
    scale_MH = np.repeat(np.asarray(jnp.asarray(scales, dtype), np.float64), (N, K), axis=0)
    wide = (scale_MH + offset) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    first, second = wide[..., :E], wide[..., E : 2 * E]
    cos_T1E, sin_T1E = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    rotated = [first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E]
    expected = np.concatenate([*rotated, wide[..., 2 * E :]], -1)
    tolerance = {"float32": 2e-6, "bfloat16": 2e-2}[dtype]
    options = {"rtol": tolerance, "atol": 2 * tolerance}
    np.testing.assert_allclose(np.asarray(q, np.float64), expected[:, :N], **options)
    keys = np.asarray(actual[0], np.float64).reshape(P * S, K, H)
    for token, slot in enumerate(SLOTS):
        if S <= slot < P * S:
            np.testing.assert_allclose(keys[slot], expected[token, N:], **options)


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1.0), ("bfloat16", 0.0)])
def test_heads_are_normed_in_the_same_launch(dtype, offset):
    check_norms(dtype, offset)


@pytest.mark.parametrize("mistake", ["key", "offset", "other half"])
def test_a_planted_mistake_in_a_norm_of_heads_is_seen(mistake, monkeypatch):
    scale_head = rotary_write._scale_head

    def wrong(x_MH, at_1H, has_1H, **options):
        if mistake == "key":
            options["is_query"] = True
        if mistake == "offset":
            options["offset"] = 0.0
        if mistake == "other half":
            at_1H = jnp.arange(at_1H.shape[-1])[None, :]
        return scale_head(x_MH, at_1H, has_1H, **options)

    monkeypatch.setattr(rotary_write, "_scale_head", wrong)
    rotary_write.rotate_and_write.clear_cache()
    with pytest.raises(AssertionError):
        check_norms("float32", 1.0)
    rotary_write.rotate_and_write.clear_cache()


def test_rotations_that_no_kernel_takes_are_refused():
    x, cos, sin = heads_and_angles(3, "float32")
    pages, slots = new_pages("float32"), np.array(SLOTS, np.int32)
    scale = jnp.ones(H)
    with pytest.raises(ValueError, match="must be given both, or neither"):
        fused(x, cos, sin, *pages, slots, query_scale_H=scale)
    with pytest.raises(ValueError, match=r"key_scale_H \(19,\) must have one number for each"):
        fused(x, cos, sin, *pages, slots, query_scale_H=scale, key_scale_H=scale[1:])
    with pytest.raises(NotImplementedError, match="reference: it has no such kernel"):
        rotate_and_write(x, cos, sin, *pages, slots, backend="reference")
    with pytest.raises(ValueError, match="must have more than 2 x 3 heads"):
        rotate_and_write(x[:, :6], cos, sin, *pages, slots, backend="triton", interpret=True)


# Moving


def mixed_pages(seed=0):
    """Makes layers whose arrays differ in type and rank, one of them as wide as two tiles and a
    bit.
    """
    rng = np.random.default_rng(seed)
    made = [
        ("int8", (K, H)),
        ("float32", (K,)),
        ("bfloat16", (2, 16)),
        ("float8_e4m3fn", (1, 8)),
        ("int8", (K, 100)),
    ]
    leaves = [
        rng.integers(0, 100, (P, S, *shape)).astype(np.float32).astype(dtype)
        for dtype, shape in made
    ]
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    return {"k": leaves[0], "scale": leaves[1]}, leaves[2], (leaves[3], None, leaves[4])


@functools.partial(jax.jit, static_argnames=("operation", "backend"))
def move(pages, *arguments, operation, backend):
    return operation(pages, *arguments, **BACKENDS[backend])


copies = {
    (operation, backend): functools.partial(move, operation=operation, backend=backend)
    for operation in (copy_blocks, copy_slots)
    for backend in BACKENDS
}


def check_copy(function, by_slot, pairs, seed=0):
    pages = mixed_pages(seed)
    source, destination = np.array(pairs, np.int32).reshape(-1, 2).T
    actual = function(pages, source, destination)
    for new, old in zip(jax.tree.leaves(actual), jax.tree.leaves(pages), strict=True):
        rows = np.asarray(old).reshape(P * S if by_slot else P, -1)
        expected, inside = rows.copy(), (destination >= 0) & (destination < len(rows))
        expected[destination[inside]] = rows[np.clip(source[inside], 0, len(rows) - 1)]
        same(np.asarray(new), expected.reshape(old.shape))


# a circle, two that are left out, a source that is clamped
CHAIN = [(1, 2), (2, 3), (3, 1), (4, 99), (5, -1), (-1, 4)]


def pairs_of(num_rows):
    source = st.integers(0, num_rows - 1)
    real = st.lists(
        st.tuples(source, st.integers(1, num_rows + 1)), max_size=6, unique_by=lambda pair: pair[1]
    )
    return real.map(lambda pairs: pairs + [(0, 0)] * (6 - len(pairs)))


@pytest.mark.parametrize(
    ("operation", "backend"), copies, ids=lambda value: getattr(value, "__name__", value)
)
@settings(max_examples=15)
@given(data=st.data())
def test_a_copy_reads_all_before_it_writes(operation, backend, data):
    by_slot = operation is copy_slots
    pairs = data.draw(pairs_of(P * S if by_slot else P))
    for each in (CHAIN, pairs):
        check_copy(copies[operation, backend], by_slot, each, seed=len(each))


def one_after_another(pages, source, destination):
    for first, other in zip(source, destination, strict=True):
        pages = jax.tree.map(
            lambda old, first=first, other=other: jnp.asarray(old).at[other].set(old[first]), pages
        )
    return pages


def the_other_way(pages, source, destination):
    return copies[copy_blocks, "triton"](pages, np.minimum(destination, P - 1), source)


def a_layer_forgotten(pages, source, destination):
    return *copies[copy_blocks, "triton"](pages, source, destination)[:2], pages[2]


@pytest.mark.parametrize(
    "wrong", [one_after_another, the_other_way, a_layer_forgotten], ids=lambda f: f.__name__
)
def test_a_planted_mistake_in_a_copy_is_seen(wrong):
    check_copy(copies[copy_blocks, "triton"], False, CHAIN)
    with pytest.raises(AssertionError):
        check_copy(wrong, False, CHAIN)


def test_slots_are_not_blocks():
    with pytest.raises(AssertionError):
        check_copy(copies[copy_blocks, "triton"], True, CHAIN)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10)
@given(
    blocks=st.lists(st.integers(1, P - 1), min_size=4, max_size=4, unique=True),
    padding=st.integers(0, 4),
)
def test_blocks_leave_and_come_back_to_the_bit(backend, blocks, padding):
    blocks = np.array(blocks[padding:] + [0] * padding, np.int32)
    pages, others = mixed_pages(1), mixed_pages(2)
    contents = move(pages, blocks, operation=gather_blocks, backend=backend)
    expected = np.concatenate([bits(leaf) for leaf in jax.tree.leaves(pages)], axis=1)
    np.testing.assert_array_equal(contents, expected[blocks])
    back = move(others, blocks, np.asarray(contents), operation=scatter_blocks, backend=backend)
    for new, old, brought in zip(*map(jax.tree.leaves, (back, others, pages)), strict=True):
        filled = np.array(old)
        filled[blocks] = np.asarray(brought)[blocks]
        same(np.asarray(new), filled)


def test_more_arrays_than_a_launch_takes(monkeypatch):
    monkeypatch.setattr(triton_move, "MAX_ARRAYS", 2)
    monkeypatch.setattr(triton_move, "IN_FLIGHT", 1)
    monkeypatch.setattr(triton_move, "TILE_BYTES", 64)
    pages, blocks = mixed_pages(), np.array([5, 1, 0], np.int32)
    both = [
        scatter_blocks(mixed_pages(3), blocks, gather_blocks(pages, blocks, **options), **options)
        for options in BACKENDS.values()
    ]
    same(*both)
    check_copy(functools.partial(copy_slots, interpret=True), True, CHAIN)


def test_nothing_to_do_is_done():
    none = np.zeros(0, np.int32)
    for options in BACKENDS.values():
        pages = mixed_pages()
        same(copy_blocks(pages, none, none, **options), pages)
        assert gather_blocks(pages, none, **options).shape == (
            0,
            sum(bits(leaf).shape[1] for leaf in jax.tree.leaves(pages)),
        )
        new, pages = np.zeros((0, K, H), np.float32), jnp.asarray(new_pages("float32"))
        same(write_kv(new, new, *pages, none, **options), tuple(pages))


# What is compiled


def operations(dtypes, width=128, layers=2):
    """Yields each operation on pages of these types, with arguments as shapes and the launches that
    it takes.
    """
    index = jax.ShapeDtypeStruct((16,), jnp.int32)
    new = jax.ShapeDtypeStruct((16, 8, width), jnp.bfloat16)
    for dtype in dtypes:
        page = jax.ShapeDtypeStruct((512, 16, 8, width), dtype)
        scales = [jax.ShapeDtypeStruct((512, 16, 8), jnp.float32)] * 2 * is_quantized(dtype)
        pages = [[page, page, *scales] for _ in range(layers)]
        contents = jax.eval_shape(gather_blocks, pages, index)
        launches = 2 + 2 * is_quantized(dtype)
        yield f"write {dtype}", write_one, (pages[0], new, new, index), 1
        yield f"copy_blocks {dtype}", copy_blocks, (pages, index, index), launches
        yield f"copy_slots {dtype}", copy_slots, (pages, index, index), launches
        yield f"gather_blocks {dtype}", gather_blocks, (pages, index), 1
        yield f"scatter_blocks {dtype}", scatter_blocks, (pages, index, contents), 1


def write_one(pages, k_TKH, v_TKH, slots_T, **options):
    scales = dict(zip(("k_scale", "v_scale"), pages[2:], strict=False))
    return write_kv(k_TKH, v_TKH, *pages[:2], slots_T, **scales, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_donated_pages_are_changed_in_place(backend):
    """Pages are on CPU; XLA makes float32 of whole arrays of bfloat16 there, so that these are left
    out.
    """
    for name, function, (pages, *arguments), _ in operations(("uint8",), layers=1):
        if name.startswith("gather_blocks"):
            continue
        donating = jax.jit(functools.partial(function, **BACKENDS[backend]), donate_argnums=0)
        analysis = donating.lower(pages, *arguments).compile().memory_analysis()
        pages_bytes = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)
        )
        assert analysis.alias_size_in_bytes == pages_bytes, name
        assert analysis.temp_size_in_bytes < pages_bytes / 8, name


@pytest.mark.skipif(
    not compat.MOSAIC_INTERPRETABLE, reason="Mosaic's interpreter comes with jax 0.11"
)
def test_mosaic_leaves_pages_to_plain_xla_which_takes_no_interpreter():
    for name, function, arguments, _ in operations(("bfloat16", "uint8"), layers=1):
        programs = (
            jax.make_jaxpr(functools.partial(function, **options))(*arguments)
            for options in ({"backend": "mosaic", "interpret": True}, BACKENDS["reference"])
        )
        assert len(set(map(str, programs))) == 1, name


@pytest.mark.parametrize("width", few([80, 128], [80]))
def test_kernels_lower_for_cuda_in_few_launches(width):
    with describe_gpu():
        # one byte more or less is the same kernel
        for name, function, arguments, launches in operations(("bfloat16", "int8"), width):
            traced = jax.jit(functools.partial(function, backend="triton")).trace(*arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("__gpu$xla.gpu.triton") == launches, name
            aliased = 0 if name.startswith("gather_blocks") else len(jax.tree.leaves(arguments[0]))
            assert text.count("output_operand_alias<") == aliased, name


def test_auto_is_the_kernel_on_a_gpu():
    """Pages that Triton cannot address are copied by a set for GPUs that leaves copies to XLA."""

    def kernels(pages, **options):
        index = jax.ShapeDtypeStruct((1,), jnp.int32)
        operation = functools.partial(copy_blocks, **options)
        return str(jax.make_jaxpr(operation)(pages, index, index)).count("pallas_call")

    small, large = (
        jax.ShapeDtypeStruct((blocks, 16, 8, 128), jnp.int8) for blocks in (64, 2**17 + 1)
    )
    larger = jax.ShapeDtypeStruct((2**18 + 1, 16, 8, 128), jnp.int8)
    assert kernels(small) == 0
    with describe_gpu():
        assert kernels(small) == 2 and kernels(larger) == 2 and kernels(large, backend="scan") == 0
        assert kernels(large) == 0 == kernels(large, backend="mosaic")
        with pytest.raises(
            NotImplementedError,
            match=r"copy_blocks takes this call: triton: .* int8 \(131073, 16384\) has",
        ):
            kernels(large, backend="triton")
        many = jax.ShapeDtypeStruct(
            (3 * 2**12,), jnp.int32
        )  # whose bytes are too many for one array, though the pages are not
        wide = jax.ShapeDtypeStruct((16, 2**18), jnp.uint8)
        with pytest.raises(NotImplementedError, match=r"triton: .* uint8 \(12288, 262144\) has"):
            jax.eval_shape(functools.partial(gather_blocks, backend="triton"), wide, many)


def test_refusals_name_the_argument():
    index, pages = np.zeros(2, np.int32), new_pages("float32")
    new = np.zeros((2, K, H), np.float32)
    for error, message, arguments, options in (
        (
            ValueError,
            "backend must be 'auto' or one of triton, .*, reference, not 'xla'",
            (new, new, *pages, index),
            {"backend": "xla"},
        ),
        (
            NotImplementedError,
            "reference: no kernel, so it takes neither interpret",
            (new, new, *pages, index),
            {"backend": "reference", "interpret": True},
        ),
        (
            ValueError,
            r"v_TKH must have one vector .* \(2, 3, 20\), but is \(1, 3, 20\)",
            (new, new[1:], *pages, index),
            {},
        ),
        (
            TypeError,
            "k_TKH must hold floats, but holds int32",
            (new.astype(np.int32), new, *pages, index),
            {},
        ),
        (
            TypeError,
            "slots_T must hold integers along one axis, but is float32",
            (new, new, *pages, new[0, 0]),
            {},
        ),
        (ValueError, "must be alike", (new, new, pages[0], pages[1][1:], index), {}),
        (ValueError, "v_pages must go with v_TKH", (new, None, *pages, index), {}),
        (
            ValueError,
            "a multiple of 128 wide",
            (*(new[:, :1],) * 2, pages[0][:, :, :2], None, index),
            {},
        ),
        (
            ValueError,
            r"k_pages must have 4 axes and not be empty, but its shape is \(4, 3, 20\)",
            (new, new, pages[0][0], pages[1], index),
            {},
        ),
    ):
        with pytest.raises(error, match=message):
            write_kv(*arguments, **options)
    with pytest.raises(
        ValueError, match=r"source and destination must be alike, .* \(2,\) and \(1,\)"
    ):
        copy_blocks(pages, index, index[1:])
    with pytest.raises(
        ValueError, match=r"contents must be uint8 \(2, 1920\), but are uint8 \(2, 5\)"
    ):
        scatter_blocks(pages, index, np.zeros((2, 5), np.uint8))
    pool = np.zeros((3, 2, 4), np.float32)
    for error, message, operation, arguments in (
        (
            ValueError,
            r"pages must be alike .* \[\(3, 2, 4\), \(2, 2, 4\)\]",
            copy_blocks,
            ((pool, pool[1:]), index, index),
        ),
        (
            ValueError,
            r"first 2 axes .* \[\(3, 2, 4\), \(3, 1, 4\)\]",
            copy_slots,
            ((pool, pool[:, 1:]), index, index),
        ),
        (
            ValueError,
            r"pages must be alike .* \[\(\)\]",
            copy_blocks,
            (np.float32(1), index, index),
        ),
        (ValueError, r"not empty, .* \[\(0, 2, 4\)\]", gather_blocks, (pool[:0], index)),
        (ValueError, "pages must have at least one array", gather_blocks, ((), index)),
        (
            TypeError,
            "pages must hold integers or floats, but an array holds bool",
            gather_blocks,
            (pool > 0, index),
        ),
        (
            ValueError,
            r"blocks must have one axis, but its shape is \(1, 2\)",
            gather_blocks,
            (pool, index[None]),
        ),
        (
            TypeError,
            "source must hold integers, but holds float32",
            copy_blocks,
            (pool, pool[0, 0], index),
        ),
    ):
        with pytest.raises(error, match=message):
            operation(*arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_arrays_and_narrow_integers_do(backend):
    """The call is not compiled; the pool has more slots than eight bits count."""
    pages = np.arange(2 * 40 * 4 * 1 * 16, dtype=np.float32).reshape(2, 40, 4, 1, 16)
    actual = write_kv(
        pages[0, 0, :2], pages[1, 0, :2], *pages, np.array([5, 9], np.int8), **BACKENDS[backend]
    )
    expected = pages.copy().reshape(2, 160, 1, 16)
    expected[:, [5, 9]] = pages[:, 0, :2]
    np.testing.assert_array_equal(np.stack(actual).reshape(expected.shape), expected)
    moved = copy_blocks(
        pages[0], np.array([1], np.uint8), np.array([2], np.int8), **BACKENDS[backend]
    )
    np.testing.assert_array_equal(moved, pages[0, [0, 1, 1, *range(3, 40)]])
