"""The kernels for CPUs between products: one call against the same in float64, among any other
rows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.attention import ROW_KERNELS
from jaxpage.device.packing import Padding, multiply_packed, run_fusion
from jaxpage.layers.activations import gate
from jaxpage.layers.fusion import AddAndNorm, AddSum, Gate, Multiply, Norm
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.norms import LayerNorm, RMSNorm, add_and_norm, norm_of_sum
from jaxpage.layers.packed import PackedLinear
from jaxpage.layers.rope import Rope
from jaxpage.layers.trace_scope import LayerKernels, TraceScope
from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes
from jaxpage.models.parts.decoder import Block
from pallas_kernels.cpu import library, packed, rows
from pallas_kernels.cpu.bidirectional import attend_bidirectional
from pallas_kernels.quantized_weight import QuantizedWeight
from tests.support.sweeps import few

# 300 rows are shared among threads; the other widths do not fill their last vector.
WIDTHS = (64, 100, 7)
# An error of float32, and half of the last bit of bfloat16.
CLOSE = {"float32": 4e-6, "bfloat16": 2.0**-8}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if library.load().reason:
        pytest.skip(f"no kernels: {library.load().reason}")


def check(call: Callable[[Any], Any], x: jax.Array, expected: Callable[[Any], Any]) -> None:
    """Checks that the numbers are those of float64, and that a row's bits are the same alone and
    among others.
    """
    result = np.asarray(call(x))
    assert result.dtype == x.dtype
    exact = expected(np.asarray(x, np.float64))
    error = np.abs(result.astype(np.float64) - exact) / (1 + np.abs(exact))
    assert error.max() <= CLOSE[x.dtype.name]
    np.testing.assert_array_equal(call(x[-3:]), result[-3:])
    assert call(x[:0]).shape[0] == 0


def numbers(dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 4, dtype)


@pytest.mark.parametrize(
    ("width", "dtype"),
    few(
        itertools.product(WIDTHS, DTYPES),
        [(64, "float32"), (100, "bfloat16"), (7, "float32")],
    ),
)
def test_one_call_multiplies_by_gates(width: int, dtype: str) -> None:
    x = numbers(dtype, 300, 2 * width).at[0, :2].set(jnp.array([-200.0, 200.0], dtype))

    def silu(x: np.ndarray) -> np.ndarray:
        return x[:, :width] / (1 + np.exp(-x[:, :width])) * x[:, width:]

    def gelu(x: np.ndarray) -> np.ndarray:
        gates = x[:, :width]
        inner = np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3)
        return 0.5 * gates * (1 + np.tanh(inner)) * x[:, width:]

    check(jax.jit(lambda x: rows.gate(x, "silu")), x, silu)
    check(jax.jit(lambda x: rows.gate(x, "gelu_tanh")), x, gelu)
    broken = np.asarray(rows.gate(x.at[1, 0].set(jnp.nan), "silu"), np.float32)
    assert np.isnan(broken[1, 0]) and np.isnan(broken).sum() == 1


@pytest.mark.parametrize(
    ("width", "scale_dtype", "dtype"),
    few(
        itertools.product(WIDTHS, (*DTYPES, "float16"), DTYPES),
        [(64, "float16", "float32"), (100, "bfloat16", "bfloat16"), (7, "float32", "float32")],
    ),
)
def test_one_call_normalises(width: int, scale_dtype: str, dtype: str) -> None:
    scale = numbers(scale_dtype, width)

    def norm(x: np.ndarray) -> np.ndarray:
        root = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-3)
        return x / root * (np.asarray(scale, np.float64) + 1)

    x = numbers(dtype, 300, width)
    check(jax.jit(lambda x: rows.rms_norm(x, scale, 1e-3, 1.0)), x, norm)

    def after_sum(x: jax.Array) -> Any:
        return rows.add_and_norm(x, x[:, ::-1] * 0.3, scale, 1e-3, 1.0)

    added, normed = after_sum(x)
    both = x + x[:, ::-1] * 0.3
    np.testing.assert_array_equal(added, both)
    np.testing.assert_array_equal(normed, rows.rms_norm(both, scale, 1e-3, 1.0))
    for ours, theirs in zip(after_sum(x[-3:]), (added, normed), strict=True):
        np.testing.assert_array_equal(ours, theirs[-3:])


@pytest.mark.parametrize(
    ("width", "with_bias", "dtype"),
    few(
        itertools.product(WIDTHS, (True, False), DTYPES),
        [(64, False, "bfloat16"), (100, True, "bfloat16"), (7, True, "float32")],
    ),
)
def test_one_call_normalises_around_the_mean(width: int, with_bias: bool, dtype: str) -> None:
    scale = numbers(dtype, width)
    bias = scale[::-1] if with_bias else None

    def norm(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        root = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + 1e-3)
        scaled = centred / root * (np.asarray(scale, np.float64) + 1)
        return scaled if bias is None else scaled + np.asarray(bias, np.float64)

    def call(x: jax.Array, *added: jax.Array, keeps_sum: bool = False) -> Any:
        return rows.layer_norm(x, scale, bias, 1e-3, 1.0, *added, keeps_sum=keeps_sum)

    x = numbers(dtype, 300, width) + 3
    check(jax.jit(lambda x: call(x)[1]), x, norm)
    other = x[:, ::-1] * 0.3
    both, normed = call(x, other, keeps_sum=True)
    np.testing.assert_array_equal(both, x + other)
    np.testing.assert_array_equal(normed, call(x + other)[1])
    nothing, same = call(x, other)
    assert nothing is None
    np.testing.assert_array_equal(same, normed)
    plain = np.asarray(rows.layer_norm(x, None, None, 1e-3, 0.0)[1], np.float64)
    np.testing.assert_allclose(plain.mean(axis=-1), 0, atol=0.01)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@pytest.mark.parametrize(
    ("activation", "num_out", "dtype"),
    few(
        itertools.product([None, "gelu"], WIDTHS, DTYPES),
        [(None, 7, "float32"), ("gelu", 64, "float32"), ("gelu", 100, "bfloat16")],
    ),
)
def test_one_call_multiplies_and_adds_a_bias(
    activation: str | None, num_out: int, dtype: str
) -> None:
    x, weight = numbers(dtype, 300, 24), np.asarray(numbers(dtype, num_out, 24))
    bias = numbers("float32", num_out)
    panels = packed.pack(weight, packed.NUMBERS[dtype])

    def call(x: jax.Array) -> jax.Array:
        options = {"bias_O": bias, "activation": activation, "result": "float32"}
        return packed.multiply_packed(x, panels, num_out, **options)  # type: ignore[arg-type]

    result = np.asarray(call(x))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias)
    exact = exact if activation is None else gelu(exact)
    np.testing.assert_allclose(result, exact, atol=2e-4)
    np.testing.assert_array_equal(call(x[-3:]), result[-3:])


def test_one_call_computes_gelu() -> None:
    x = np.linspace(-8, 8, 20_001, dtype=np.float32)
    x = np.concatenate([x, [np.nan, -np.inf, np.inf]]).astype(np.float32)
    both = np.stack([x, np.ones_like(x)]).T.reshape(1, -1)
    result = np.asarray(rows.gate(jnp.asarray(both.reshape(-1, 2)), "gelu"))[:, 0]
    np.testing.assert_allclose(result[:-3], gelu(x[:-3].astype(np.float64)), rtol=2e-7, atol=1e-6)
    assert np.isnan(result[-3]) and result[-1] == np.inf


SHAPES = (((4, 2), 32), ((2, 2), 80), ((3, 1), 16))


def attention(q: Any, k: Any, v: Any, scale: float, reach: int | None) -> np.ndarray:
    """Returns what one text attends to, in float64."""
    q, k, v = (np.asarray(each, np.float64).swapaxes(0, 1) for each in (q, k, v))
    k, v = (np.repeat(each, len(q) // len(k), axis=0) for each in (k, v))
    scores = q @ k.swapaxes(1, 2) * scale
    place = np.arange(scores.shape[1])
    if reach is not None:
        scores[:, np.abs(place[:, None] - place) > reach] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1)


@pytest.mark.parametrize(
    ("heads", "width", "reach"),
    few(
        [(*shape, reach) for shape in SHAPES for reach in (None, 3, 40)],
        [((4, 2), 32, None), ((2, 2), 80, 3), ((3, 1), 16, 40)],
    ),
)
def test_one_call_attends_both_ways(heads: tuple[int, int], width: int, reach: int | None) -> None:
    """Texts have any length; rows that are no text are in the middle and at the end; and each text
    is alone.
    """
    lengths = (1, 20, 33, 500, 64, 2)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    segment = np.insert(segment, 21, [-1] * 5)
    segment = np.append(segment, [-1] * 7)
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.standard_normal((len(segment), count, width)).astype(np.float32) * 2
        for count in (heads[0], heads[1], heads[1])
    )
    for each in (q, k, v):
        each[segment < 0] = np.nan

    def call(places: Any) -> np.ndarray:
        arrays = (jnp.asarray(each[places]) for each in (q, k, v, segment))
        return np.asarray(attend_bidirectional(*arrays, scale=0.05, reach=reach))

    result = call(slice(None))
    assert not result[segment < 0].any()
    for text in range(len(lengths)):
        places = segment == text
        exact = attention(q[places], k[places], v[places], 0.05, reach)
        np.testing.assert_allclose(result[places], exact, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(call(places), result[places])


def test_one_call_attends_with_a_score_that_no_other_comes_near() -> None:
    """Weights below the least number are zero, and a value that is no number reaches its text
    alone.
    """
    q = np.zeros((40, 1, 16), np.float32)
    q[:, :, 0] = 1
    k = q * np.where(np.arange(40) % 20 == 3, 1e4, -1e4).astype(np.float32)[:, None, None]
    v = numbers("float32", 40, 1, 16)
    segment = jnp.repeat(jnp.arange(2), 20)
    result = np.asarray(attend_bidirectional(jnp.asarray(q), jnp.asarray(k), v, segment, scale=1.0))
    np.testing.assert_array_equal(result, np.asarray(v)[np.repeat([3, 23], 20)])
    q[25] = np.nan
    result = np.asarray(attend_bidirectional(jnp.asarray(q), jnp.asarray(k), v, segment, scale=1.0))
    assert np.isnan(result).any(axis=(1, 2)).nonzero()[0].tolist() == [25]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "pairs"), [(64, 32), (80, 20), (6, 3)])
def test_one_call_turns_pairs(width: int, pairs: int, dtype: str) -> None:
    x = numbers(dtype, 300, 3, width)
    angles = np.arange(300 * pairs).reshape(300, pairs) * 0.1
    cos, sin = (jnp.asarray(function(angles), jnp.float32) for function in (np.cos, np.sin))

    def rotate(x: np.ndarray) -> np.ndarray:
        cosines, sines = (np.asarray(each, np.float64)[-len(x) :, None] for each in (cos, sin))
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        parts = (first * cosines - second * sines, second * cosines + first * sines)
        return np.concatenate([*parts, x[..., 2 * pairs :]], axis=-1)

    run = jax.jit(rows.rotate)
    check(lambda x: run(x, cos[300 - len(x) :], sin[300 - len(x) :]), x, rotate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_keys", [1, 2])
def test_one_call_splits_and_turns(num_keys: int, dtype: str) -> None:
    """Heads that numpy splits are turned as without being split."""
    num_tokens, num_queries, width, pairs = 130, 3, 20, 8
    x = numbers(dtype, num_tokens, (num_queries + 2 * num_keys) * width)
    angles = np.arange(num_tokens * pairs).reshape(num_tokens, pairs) * 0.1
    cos, sin = (jnp.asarray(function(angles), jnp.float32) for function in (np.cos, np.sin))
    parts = jax.jit(lambda x: rows.split_and_rotate(x, cos, sin, num_keys, width))(x)
    heads = np.asarray(x).reshape(num_tokens, -1, width)
    q, k, v = np.split(heads, [num_queries, num_queries + num_keys], axis=1)
    expected = (*(rows.rotate(jnp.asarray(each), cos, sin) for each in (q, k)), v)
    for ours, theirs in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def weight_of(kind: str, dtype: str, num_out: int, num_in: int) -> tuple[Any, np.ndarray]:
    """Returns a weight of a kind for rows of a type, and its numbers."""
    exact = np.random.default_rng(num_out).standard_normal((num_out, num_in)) / num_in**0.5
    if kind == "numbers":
        exact = np.asarray(exact, dtype)
        panels = jnp.asarray(packed.pack(exact, packed.NUMBERS[dtype]))
        return Packed(panels, num_out, num_in), exact.astype(np.float64)
    if kind == "int8":
        values = np.round(exact * 50).astype(np.int8)
        panels = jnp.asarray(packed.pack(values, packed.NUMBERS["int8"]))
        return Packed(panels, num_out, num_in, jnp.full(num_out, 0.02, jnp.float32)), values * 0.02
    codes = np.clip(np.round(exact * 4), -8, 7).astype(np.int64) + 8
    zero = jnp.full((num_out, num_in // 16), 7.0) if kind == "int4 with zeros" else None
    weight = QuantizedWeight(
        jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4, jnp.uint8),
        jnp.full((num_out, num_in // 16), 0.25, "bfloat16" if zero is None else "float32"),
        zero,
        "int4",
        16,
    )
    grouped = Grouped(*packed.pack_quantized(weight))
    return PackedCodes(grouped, num_out, num_in), (codes - (8 if zero is None else 7)) * 0.25


KINDS = ("numbers", "int8", "int4", "int4 with zeros")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_computes_fused_operations(kind: str, dtype: str) -> None:
    """It has the bits of its parts alone for any number of rows, and the numbers of float64."""
    width = 48
    output, gate_up, down = (
        weight_of(kind, dtype, *shape) for shape in ((112, 64), (2 * width, 112), (112, width))
    )
    scale = numbers(dtype, 112)
    first, residual = numbers(dtype, 300, 64) / 4, numbers(dtype, 300, 112)[:, ::-1]

    def whole(x: jax.Array, residual: jax.Array, padding: Padding | None = None) -> jax.Array:
        stages = [
            Multiply(output[0]),
            AddAndNorm(residual, scale),
            Multiply(gate_up[0]),
            Gate("silu"),
            Multiply(down[0]),
            AddSum(),
        ]
        return run_fusion(x, stages, 1e-3, 1.0, padding=padding)[-1]

    def parts(x: jax.Array, residual: jax.Array) -> jax.Array:
        attended = multiply_packed(x, output[0], dtype, None)
        added, normed = rows.add_and_norm(attended, residual, scale, 1e-3, 1.0)
        gated = rows.gate(multiply_packed(normed, gate_up[0], dtype, None), "silu")
        return added + multiply_packed(gated, down[0], dtype, None)

    fused = np.asarray(jax.jit(whole)(first, residual))
    np.testing.assert_array_equal(fused, jax.jit(parts)(first, residual))
    for count in (0, 1, 2, 5):
        alone = jax.jit(whole)(first[300 - count :], residual[300 - count :])
        np.testing.assert_array_equal(alone, fused[300 - count :])
        padding, is_padding = Padding(300, jnp.int32(count)), jnp.arange(300)[:, None] >= count
        padded = jnp.where(is_padding, jnp.nan, first)
        for made, expected in (
            (whole(padded, residual, padding), fused),
            (
                multiply_packed(padded, output[0], dtype, None, padding=padding),
                multiply_packed(first, output[0], dtype, None),
            ),
        ):
            np.testing.assert_array_equal(made, np.where(is_padding, 0, expected))
    added = np.asarray(first, np.float64) @ output[1].T + np.asarray(residual, np.float64)
    normed = added / np.sqrt(np.square(added).mean(axis=-1, keepdims=True) + 1e-3)
    both = normed * (np.asarray(scale, np.float64) + 1) @ gate_up[1].T
    gates, ups = both[:, :width], both[:, width:]
    exact = added + (gates / (1 + np.exp(-gates)) * ups) @ down[1].T
    rounded = 0.05 if kind == "int8" or dtype == "bfloat16" else 1e-4
    assert np.abs(fused - exact).max() <= rounded * np.abs(exact).max()

    def matmul(x: jax.Array, padding: Padding | None = None) -> jax.Array:
        stages = [Norm(scale), Multiply(gate_up[0])]
        return run_fusion(x, stages, 1e-3, 1.0, padding=padding)[-1]

    normed = rows.rms_norm(residual, scale, 1e-3, 1.0)
    together = multiply_packed(normed, gate_up[0], dtype, None)
    np.testing.assert_array_equal(jax.jit(matmul)(residual), together)
    np.testing.assert_array_equal(jax.jit(matmul)(residual[-1:]), together[-1:])
    made = matmul(residual, Padding(300, jnp.int32(2)))
    np.testing.assert_array_equal(made, jnp.asarray(together).at[2:].set(0))


def test_a_fusion_that_does_not_fit_is_refused() -> None:
    x, scale = jnp.ones((2, 8)), jnp.ones(8)
    weight, _ = weight_of("numbers", "float32", 20, 8)
    for stages, reason in (
        ([Multiply(weight), Norm(scale)], "shapes of a norm"),
        ([Norm(scale), AddSum()], "lacks a sum"),
        ([AddAndNorm(x, scale), Multiply(weight), AddSum()], "lacks a sum"),
        ([AddAndNorm(x[:1], scale)], "shapes of a sum"),
        ([Multiply(weight), Multiply(weight)], "weight in panels do not fit"),
        ([Gate("silu"), AddAndNorm(x, scale)], "shapes of a norm|shapes of a sum"),
    ):
        with pytest.raises(Exception, match=reason):
            jax.block_until_ready(run_fusion(x, stages, 1e-5, 0.0))  # type: ignore[arg-type]


def packed_linear(num_out: int, num_in: int, *, bias: bool = False) -> PackedLinear:
    whole = linear(num_in, Part(num_out, None, "part"), input_axis=None, bias=bias, dtype="float32")
    whole.kernel.set_value(numbers("float32", num_out, num_in) / 8)
    if whole.bias is not None:
        whole.bias.set_value(numbers("float32", num_out))
    layer = PackedLinear(whole)
    layer.kernel.set_value(packed.panels_of(whole.kernel[...], 1))
    return layer


@pytest.mark.parametrize(
    ("num_fusions", "change"),
    [(2, {}), (2, {"residual_scale": 0.22}), (1, {"bias": True}), (1, {"activation": "relu"})],
    ids=["all in one call", "a residual scale", "a bias", "an activation that no kernel has"],
)
def test_a_block_joins_what_a_kernel_computes_in_one_call(
    num_fusions: int, change: dict[str, Any]
) -> None:
    """The bits are those of separate calls, and what a call has joined is not computed again."""
    norm = RMSNorm(32, name="norm", epsilon=1e-5, dtype="float32")
    norm.scale.set_value(numbers("float32", 32))
    into, output = packed_linear(48, 32), packed_linear(32, 48)
    gate_up = packed_linear(80, 32, bias="bias" in change)
    half = GatedMLP(gate_up, packed_linear(32, 40), activation=change.get("activation", "silu"))

    def attend(x: jax.Array, pages: Any, context: Any) -> Any:
        return output(into(x)), pages

    scale = change.get("residual_scale", 1.0)
    block = Block(
        attention_norm=norm, attention=attend, mlp_norm=norm, mlp=half, residual_scale=scale
    )

    def run(x: jax.Array) -> jax.Array:
        return block(x, None, None)[0]  # type: ignore[arg-type]

    kernels = LayerKernels(
        *2 * [None],  # type: ignore[arg-type]
        multiply_packed=multiply_packed,
        packed_rows=None,  # type: ignore[arg-type]
        by_group=None,
        rows=ROW_KERNELS,
    )
    x = numbers("float32", 5, 32)
    with TraceScope(kernels).open():
        separate = jax.jit(lambda x: run(x))(x)
    with TraceScope(kernels._replace(run_fusion=run_fusion)).open():
        compiled = jax.jit(lambda x: run(x)).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), separate)
    counts = Counter(re.findall("jaxpage_[a-z_]+", compiled.as_text()))
    assert counts["jaxpage_run_fusion"] == num_fusions
    if not change:
        assert set(counts) == {"jaxpage_run_fusion"}


def test_shapes_that_do_not_fit_are_refused() -> None:
    ones = jnp.ones((2, 8))
    for call in (
        lambda: rows.rms_norm(ones, jnp.ones(7), 1e-5, 0.0),
        lambda: rows.rotate(ones[:, None], jnp.ones((2, 5)), jnp.ones((2, 5))),
        lambda: rows.gate(ones.astype("float16"), "silu"),
        lambda: rows.add_and_norm(ones, jnp.ones((1, 8)), jnp.ones(8), 1e-5, 0.0),
        lambda: rows.split_and_rotate(ones, jnp.ones((3, 2)), jnp.ones((3, 2)), 1, 2),
        lambda: rows.layer_norm(ones, jnp.ones(7), None, 1e-5, 0.0),
        lambda: rows.layer_norm(ones, jnp.ones(8), jnp.ones(9), 1e-5, 0.0),
        lambda: rows.layer_norm(ones, None, None, 1e-5, 0.0, jnp.ones((1, 8))),
        lambda: attend_bidirectional(*3 * [ones[:, None]], jnp.zeros(2, int), scale=1.0),
        lambda: attend_bidirectional(*3 * [jnp.ones((2, 3, 16))], jnp.zeros(3, int), scale=1.0),
    ):
        with pytest.raises(Exception, match="do not fit|no kernel for rows of these types"):
            jax.block_until_ready(call())


def test_layers_say_the_same_with_kernels_and_without() -> None:
    norm = RMSNorm(100, name="norm", epsilon=1e-5, offset=1.0, dtype="float32")
    norm.scale.set_value(numbers("float32", 100))
    around = LayerNorm(100, name="norm", epsilon=1e-5, dtype="float32")
    around.scale.set_value(numbers("float32", 100))
    around.bias.set_value(numbers("float32", 100)[::-1])
    angles = Rope((1.0, 0.1, 0.01)).angles(jnp.arange(12))

    def layers(x: jax.Array) -> Any:
        rotate = angles.rotate(x.reshape(12, 5, 20)), *angles.split_and_rotate(x, 1, 20)
        return (
            norm(x),
            *add_and_norm(norm, x, 2 * x),
            around(x.reshape(3, 4, 100)),
            *add_and_norm(around, x, 3 * x),
            norm_of_sum(around, x, 4 * x),
            norm_of_sum(norm, x, 5 * x),
            gate(x, "gelu_new"),
            gate(x, "relu"),
            rotate,
        )

    kernels = LayerKernels(*5 * [None], rows=ROW_KERNELS)  # type: ignore[arg-type]
    x = numbers("float32", 12, 100)
    plain = jax.jit(layers)(x)
    with TraceScope(kernels).open():
        text = str(jax.make_jaxpr(lambda x: layers(x))(x))
        result = jax.jit(lambda x: layers(x))(x)
    counts = {"rms_norm": 2, "add_and_norm": 1, "layer_norm": 3, "gate": 1, "rotate": 1}
    for name, count in {**counts, "split_and_rotate": 1}.items():
        assert text.count(f"target_name=jaxpage_{name}") == count
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_with_what_follows_says_the_same(bias: bool, activation: str | None) -> None:
    """In float32 one call does all that kernels know; XLA does the rest."""
    whole = linear(24, Part(20, None, "part"), input_axis=None, bias=bias, dtype="float32")
    whole.kernel.set_value(numbers("float32", 20, 24))
    if whole.bias is not None:
        whole.bias.set_value(numbers("float32", 20))
    x = numbers("float32", 12, 24)
    plain = whole(x, activation)
    in_panels = PackedLinear(whole)
    in_panels.kernel.set_value(jnp.asarray(packed.pack(np.asarray(whole.kernel[...]), 1)))
    kernels = LayerKernels(*5 * [None])._replace(multiply_packed=multiply_packed)  # type: ignore[arg-type]
    with TraceScope(kernels).open():
        result = jax.jit(lambda x: in_panels(x, activation))(x)
    np.testing.assert_allclose(result, plain, rtol=1e-5, atol=1e-4)
