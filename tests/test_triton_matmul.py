"""The grouped product of the Triton backend in the interpreter: against float64, with mistakes
planted, and lowered for CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.compat import describe_gpu
from pallas_kernels.quantized_matmul import (
    batch_invariant_matmul,
    grouped_matmul,
    has_grouped_matmul,
    quantized_matmul,
)
from pallas_kernels.quantized_weight import FP4, QuantizedWeight
from pallas_kernels.triton import matmul, matmul_tiles
from tests.support.sweeps import few

NUM_ROWS = 40
# Groups without rows, with one, with exactly a tile of 16 or of 32; and rows of no group at the
# end.
COUNTS = (
    [0, 16, 1, 0, 17, 0],
    [40, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 40],
    [32, 0, 0, 1, 0, 7],
    [0, 0, 0, 0, 0, 0],
)
# of the sum of the products' sizes
TOLERANCE = {"float32": 3e-7, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def options(**more):
    return {"backend": "triton", "interpret": True, **more}


def make_weight(code, shape, group_size, extra=None, seed=0):
    """Returns a weight, and the numbers that it stands for in float64.

    extra: "zero", "minimum", or "blocks" of five outputs that share scales.
    """
    rng = np.random.default_rng(seed)
    num_groups, num_out, num_in = shape
    bits = rng.integers(
        0, 256, (num_groups, num_out, num_in // (2 if code in matmul_tiles.PACKED else 1))
    ).astype(np.uint8)
    if code == "fp8":
        bits[(bits & 127) == 127] = 3
        codes = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif code == "int8":
        bits = bits.view(np.int8)
        codes = bits.astype(np.float64)
    else:
        codes = np.stack([bits & 15, bits >> 4], axis=-1).reshape(shape)
        codes = (
            np.array(FP4)[codes]
            if code == "fp4"
            else codes - (0.0 if extra in ("zero", "minimum") else 8.0)
        )
    row = np.arange(num_out) // (5 if extra == "blocks" else 1)
    of_groups = (num_groups, row[-1] + 1, -(-num_in // group_size))
    scale = rng.uniform(0.5, 2, of_groups).astype(np.float32)
    zero = rng.integers(0, 16, of_groups).astype(np.float32) if extra == "zero" else None
    minimum = rng.standard_normal(of_groups).astype(np.float32) if extra == "minimum" else None

    def by_input(values):
        return np.repeat(values[:, row], group_size, axis=2)[:, :, :num_in].astype(np.float64)

    exact = (codes - (0 if zero is None else by_input(zero))) * by_input(scale)
    exact += 0 if minimum is None else by_input(minimum)
    arrays = (None if each is None else jnp.asarray(each) for each in (bits, scale, zero))
    extras = (None if minimum is None else jnp.asarray(minimum), row if extra == "blocks" else None)
    return QuantizedWeight(*arrays, code, group_size, *extras), exact


def error_of(actual, x, exact, counts):
    """Returns the largest error, as a share of the sum of the absolute values that are added up."""
    group = np.repeat(np.arange(len(counts)), counts)
    x, actual = (
        np.asarray(x, np.float64)[: len(group)],
        np.asarray(actual, np.float64)[: len(group)],
    )
    expected = np.einsum("PI,POI->PO", x, exact[group])
    size = np.einsum("PI,POI->PO", np.abs(x), np.abs(exact[group]))
    return np.max(np.abs(actual - expected) / size, initial=0)


def rows_of(dtype, num_in, num_rows=NUM_ROWS):
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, num_in)), dtype)


# By name: code, type of x, outputs, inputs, inputs that share a scale, and what else there is.
# Hardly any width is a whole number of turns or of blocks.
CODES = {
    "int8, scales of outputs": ("int8", "bfloat16", 40, 96, 96),
    "int8 groups": ("int8", "float32", 96, 352, 32),
    "int8 groups of no power of two": ("int8", "bfloat16", 32, 768, 384),
    "int8 zeros of outputs": ("int8", "float16", 64, 200, 200, "zero"),
    "int4 zeros of outputs": ("int4", "bfloat16", 40, 70, 70, "zero"),
    "int4 groups": ("int4", "bfloat16", 96, 352, 32),
    "int4 zeros": ("int4", "float32", 72, 192, 64, "zero"),
    "int4 minima": ("int4", "bfloat16", 72, 192, 32, "minimum"),
    "fp8 blocks": ("fp8", "bfloat16", 23, 320, 64, "blocks"),
    "fp4 groups": ("fp4", "float32", 96, 352, 32),
    "fp4 small groups": ("fp4", "float16", 32, 96, 16),
}


@pytest.mark.parametrize(
    "name",
    few(
        CODES,
        [
            *("int8, scales of outputs", "int8 zeros of outputs", "int4 minima"),
            *("fp8 blocks", "fp4 small groups"),
        ],
    ),
)
def test_weights_of_few_bits(name):
    code, dtype, num_out, num_in, *form = CODES[name]
    weight, exact = make_weight(code, (6, num_out, num_in), *form)
    x_PI = rows_of(dtype, num_in)
    actual = grouped_matmul(x_PI, weight, jnp.array(COUNTS[0]), result="float32", **options())
    assert error_of(actual, x_PI, exact, COUNTS[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "num_out", "num_in"), [("float32", 72, 352), ("bfloat16", 130, 96)]
)
def test_rows_of_any_groups(dtype, num_out, num_in, monkeypatch):
    """The inputs are shared by splits, some of which get none, in the first case."""
    monkeypatch.setattr(matmul_tiles, "MIN_TURNS", 1)
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.standard_normal((6, num_out, num_in)), dtype)
    x_PI = rows_of(dtype, num_in)
    cut = matmul_tiles.heuristic((NUM_ROWS, num_in), (6, num_out), dtype, None, roomy=True)
    assert cut.splits == (8 if dtype == "float32" else 1)
    for counts in COUNTS:
        actual = grouped_matmul(x_PI, weight, jnp.array(counts), **options())
        assert actual.dtype == dtype
        exact = np.asarray(weight, np.float64)
        assert error_of(actual, x_PI, exact, counts) < TOLERANCE[dtype], counts


def test_integers_are_added_up_exactly():
    rng = np.random.default_rng(4)
    x_PI, weight = (
        rng.integers(-128, 128, shape).astype(np.int8) for shape in ((NUM_ROWS, 352), (6, 72, 352))
    )
    actual = grouped_matmul(
        jnp.asarray(x_PI), jnp.asarray(weight), jnp.array(COUNTS[0]), result="int32", **options()
    )
    group = np.repeat(np.arange(6), COUNTS[0])
    expected = np.einsum(
        "PI,POI->PO", x_PI[: len(group)].astype(np.int64), weight[group].astype(np.int64)
    )
    np.testing.assert_array_equal(actual[: len(group)], expected)


def test_every_bit_pattern_of_one_byte_and_of_four_bits():
    """GPUs below 8.9 decode float8 so, and all decode fp4."""
    bits = np.arange(256)
    expected = bits.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(matmul._float8(jnp.asarray(bits)), expected)
    np.testing.assert_array_equal(matmul._float4(jnp.arange(16)), np.array(FP4, np.float32))


def test_gpus_that_do_not_convert_float8_decode_it(monkeypatch):
    weight, exact = make_weight("fp8", (1, 24, 64), 32)
    x_PI = rows_of("float32", 64, 3)
    monkeypatch.setattr(matmul, "capability", lambda _: (8, 0))
    text = str(
        jax.make_jaxpr(lambda x: grouped_matmul(x, weight, jnp.array([3]), **options()))(x_PI)
    )
    assert "f8_e4m3fn" not in text
    actual = grouped_matmul(x_PI, weight, jnp.array([3]), **options())
    assert error_of(actual, x_PI, exact, [3]) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("code", "num_rows", "group_size", "extra", "kernel"),
    [
        ("int8", 3, 64, None, False),  # one scale of each output: after the product
        ("fp8", 3, 64, None, False),
        ("int4", 3, 32, None, True),
        ("int8", 3, 64, "zero", True),
        ("int8", 513, 32, None, False),  # many rows: the weight is made once
        ("int8", 3, 24, None, False),  # no group that the kernel takes
    ],
)
def test_a_product_with_one_weight(code, num_rows, group_size, extra, kernel):
    stacked, exact = make_weight(code, (1, 40, 64), group_size, extra)
    weight = jax.tree.map(lambda each: each[0] if hasattr(each, "shape") else each, stacked)
    if code == "fp8":
        weight = weight._replace(
            values=jax.lax.bitcast_convert_type(weight.values, jnp.float8_e4m3fn)
        )
    for dtype in ("float32", "bfloat16"):
        x_TI = rows_of(dtype, 64, num_rows)

        def multiply(x):
            return quantized_matmul(x, weight, result="float32", **options())

        assert ("grouped_matmul" in str(jax.make_jaxpr(multiply)(x_TI))) == kernel
        assert error_of(multiply(x_TI), x_TI, exact, [num_rows]) < TOLERANCE[dtype]


def test_a_row_has_the_same_bits_in_any_company():
    """There are other rows and other counts of them, in another place, where the shapes are the
    same.
    """
    weight, _ = make_weight("int4", (6, 96, 352), 32)
    x_PI, seen = np.asarray(rows_of("float32", 352)), set()
    for place, counts in (
        (5, [5, 30, 0, 0, 0, 5]),
        (0, [0, 1, 0, 39, 0, 0]),
        (39, [0, 40, 0, 0, 0, 0]),
    ):
        shifted = np.random.default_rng(place).standard_normal(x_PI.shape).astype(np.float32)
        shifted[place] = x_PI[7]
        actual = grouped_matmul(jnp.asarray(shifted), weight, jnp.array(counts), **options())
        seen.add(np.asarray(actual)[place].tobytes())
    assert len(seen) == 1


def test_groups_of_inputs_that_no_turn_holds_are_refused_with_the_reason():
    weight, _ = make_weight("int8", (6, 40, 96), 48)
    with pytest.raises(
        NotImplementedError, match=r"triton: a scale for each 48 inputs \(powers of two .*128, only"
    ):
        grouped_matmul(rows_of("bfloat16", 96), weight, jnp.array(COUNTS[0]), **options())
    with pytest.raises(
        NotImplementedError, match="grouped_matmul .* reference: it has no such kernel"
    ):
        grouped_matmul(rows_of("bfloat16", 96), weight, jnp.array(COUNTS[0]), backend="reference")


@pytest.mark.parametrize(
    ("num_rows", "name"),
    few(
        itertools.product([64, 4096], CODES),
        [
            (64, "fp8 blocks"),
            (64, "fp4 small groups"),
            (4096, "int4 minima"),
            (4096, "int8 groups"),
        ],
    ),
)
def test_it_lowers_for_cuda_once_for_all_layers(num_rows, name):
    code, _, _, _, group_size, *form = CODES[name]
    shape = (8, 256, 768)
    weight, _ = make_weight(code, shape, shape[2] if "outputs" in name else group_size, *form)

    def layers(x, counts):
        return [grouped_matmul(x, weight, counts, backend="triton") for _ in range(3)]

    with describe_gpu():
        arguments = (
            jax.ShapeDtypeStruct((num_rows, shape[2]), jnp.bfloat16),
            jax.ShapeDtypeStruct((8,), jnp.int32),
        )
        text = jax.jit(layers).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert text.count("call @_sum_segments") == 3


@pytest.mark.parametrize(("num_rows", "launches"), [(8, 2), (4096, 1)])
def test_so_does_a_product_in_segments_of_which_few_rows_are_added_up_by_a_second_kernel(
    num_rows, launches
):
    weight, _ = make_weight("int8", (8, 256, 2048), 2048)

    def multiply(x, counts):
        return batch_invariant_matmul(x, weight, counts, backend="triton")

    with describe_gpu():
        arguments = (
            jax.ShapeDtypeStruct((num_rows, 2048), jnp.bfloat16),
            jax.ShapeDtypeStruct((8,), jnp.int32),
        )
        text = jax.jit(multiply).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == launches


@pytest.mark.parametrize(("capability", "converts"), [("8.0", False), ("8.9", True)])
def test_float8_is_decoded_from_its_bits_where_the_gpu_cannot_convert_it(capability, converts):
    weight, _ = make_weight("fp8", (8, 256, 768), 128, "blocks")

    def multiply(x, counts):
        return grouped_matmul(x, weight, counts, backend="triton")

    arguments = (
        jax.ShapeDtypeStruct((64, 768), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    with describe_gpu(capability=capability):
        text = str(jax.make_jaxpr(multiply)(*arguments))
    assert ("new_dtype=float8_e4m3fn" in text) == converts


@pytest.mark.parametrize("described", [False, True])
def test_the_kernels_of_a_gpu_that_is_described_are_found(described):
    with describe_gpu() if described else contextlib.nullcontext():
        assert has_grouped_matmul() == described


def kernel_with(**wrong):
    """Returns the kernel with some operands exchanged for others, or for None."""
    names = ("count", "x", "values", "scale", "zero", "minimum", "scale_row")
    right = matmul.kernel

    def mistaken(*refs, config):
        operands = dict(zip(names, refs, strict=False))
        operands |= {name: other and operands[other] for name, other in wrong.items()}
        return right(*operands.values(), *refs[len(names) :], config=config)

    return mistaken


def configure(**wrong):
    """Returns the kernel with some fields of its config, or of the config's cut, changed."""
    right = matmul.kernel

    def mistaken(*refs, config):
        cut = {name: value for name, value in wrong.items() if hasattr(config.cut, name)}
        fields = {name: value(config) for name, value in wrong.items() if name not in cut}
        return right(
            *refs,
            config=dataclasses.replace(
                config, cut=dataclasses.replace(config.cut, **cut), **fields
            ),
        )

    return mistaken


def move(field, by):
    right = matmul._place

    def mistaken(*arguments):
        place = list(right(*arguments))
        place[field] += by
        return place

    return mistaken


MISTAKES = {  # name: the call that shows it, where it is, and what makes it
    "weights of the next expert": ("int8 groups", "_place", lambda: move(0, 1)),
    "rows off by one": ("int8 groups", "_place", lambda: move(1, 1)),
    "the last row of a tile left out": ("int8 groups", "_place", lambda: move(2, -1)),
    "no zeros": ("int4 zeros", "kernel", lambda: kernel_with(zero=None)),
    "no minima": ("int4 minima", "kernel", lambda: kernel_with(minimum=None)),
    "scales for zeros": ("int4 zeros", "kernel", lambda: kernel_with(zero="scale")),
    "no scales": ("int8, scales of outputs", "kernel", lambda: kernel_with(scale=None)),
    "each output a row of scales of its own": (
        "fp8 blocks",
        "kernel",
        lambda: kernel_with(scale_row=None),
    ),
    "scales of a wrong group": (
        "int8 groups",
        "kernel",
        lambda: configure(scale_group=lambda c: 64),
    ),
    "the last inputs left out": (
        "int8 groups",
        "kernel",
        lambda: configure(num_in=lambda c: c.num_in - 2),
    ),
    "a split left out": ("int8 groups", "kernel", lambda: configure(splits=3)),
    "halves exchanged": (
        "int4 groups",
        "_decode",
        lambda right=matmul._decode: lambda codes, config, high: right(codes, config, not high),
    ),
    "fp4 read as int4": (
        "fp4 groups",
        "_decode",
        lambda right=matmul._decode: (
            lambda codes, config, high: right(codes, dataclasses.replace(config, code="int4"), high)
        ),
    ),
}


@pytest.mark.parametrize("mistake", few(MISTAKES, ["a split left out", "halves exchanged"]))
def test_a_mistake_in_the_kernel_is_seen(mistake, monkeypatch):
    name, where, make = MISTAKES[mistake]
    monkeypatch.setattr(matmul, where, make())
    code, _, num_out, num_in, *form = CODES[name]
    weight, exact = make_weight(code, (6, num_out, num_in), *form)
    x_PI = rows_of("float32", num_in)
    matmul._sum_segments.clear_cache()
    try:
        actual = grouped_matmul(x_PI, weight, jnp.array(COUNTS[0]), **options())
        error = error_of(actual, x_PI, exact, COUNTS[0])
    finally:
        matmul._sum_segments.clear_cache()
    assert not error < 1e-3, f"{mistake}: {error}"
