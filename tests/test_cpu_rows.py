"""The kernels for CPUs between products: one call against the same in float64, whatever other rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.attention import ROW_KERNELS
from jaxpage.layers.activations import gate
from jaxpage.layers.norms import RMSNorm, add_and_norm
from jaxpage.layers.rope import Rope
from jaxpage.layers.trace_scope import LayerKernels, TraceScope
from pallas_kernels.cpu import library, rows

# 300 rows are shared among threads; the other widths do not fill their last vector.
WIDTHS = (64, 100, 7)
# An error of float32, and half of the last bit of bfloat16.
CLOSE = {"float32": 4e-6, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if library.load().reason:
        pytest.skip(f"no kernels: {library.load().reason}")


def check(call: Callable[[Any], Any], x: jax.Array, wanted: Callable[[Any], Any]) -> None:
    """The numbers are those of float64, and a row's bits are the same alone and among others."""
    found = np.asarray(call(x))
    assert found.dtype == x.dtype
    exact = wanted(np.asarray(x, np.float64))
    error = np.abs(found.astype(np.float64) - exact) / (1 + np.abs(exact))
    assert error.max() <= CLOSE[x.dtype.name]
    np.testing.assert_array_equal(call(x[-3:]), found[-3:])
    assert call(x[:0]).shape[0] == 0


def numbers(dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 4, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", WIDTHS)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", WIDTHS)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "pairs"), [(64, 32), (80, 20), (6, 3)])
def test_one_call_turns_pairs(width: int, pairs: int, dtype: str) -> None:
    x = numbers(dtype, 300, 3, width)
    angles = np.arange(300 * pairs).reshape(300, pairs) * 0.1
    cos, sin = (jnp.asarray(function(angles), jnp.float32) for function in (np.cos, np.sin))

    def rotated(x: np.ndarray) -> np.ndarray:
        cosines, sines = (np.asarray(each, np.float64)[-len(x) :, None] for each in (cos, sin))
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        parts = (first * cosines - second * sines, second * cosines + first * sines)
        return np.concatenate([*parts, x[..., 2 * pairs :]], axis=-1)

    run = jax.jit(rows.rotate)
    check(lambda x: run(x, cos[300 - len(x) :], sin[300 - len(x) :]), x, rotated)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_keys", [1, 2])
def test_one_call_splits_and_turns(num_keys: int, dtype: str) -> None:
    """What is split by numpy is turned as it is without being split."""
    num_tokens, num_queries, width, pairs = 130, 3, 20, 8
    x = numbers(dtype, num_tokens, (num_queries + 2 * num_keys) * width)
    angles = np.arange(num_tokens * pairs).reshape(num_tokens, pairs) * 0.1
    cos, sin = (jnp.asarray(function(angles), jnp.float32) for function in (np.cos, np.sin))
    found = jax.jit(lambda x: rows.split_and_rotate(x, cos, sin, num_keys, width))(x)
    heads = np.asarray(x).reshape(num_tokens, -1, width)
    q, k, v = np.split(heads, [num_queries, num_queries + num_keys], axis=1)
    wanted = (*(rows.rotate(jnp.asarray(each), cos, sin) for each in (q, k)), v)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shapes_that_do_not_fit_are_refused() -> None:
    one = jnp.ones((2, 8))
    for call in (
        lambda: rows.rms_norm(one, jnp.ones(7), 1e-5, 0.0),
        lambda: rows.rotate(one[:, None], jnp.ones((2, 5)), jnp.ones((2, 5))),
        lambda: rows.gate(one.astype("float16"), "silu"),
        lambda: rows.add_and_norm(one, jnp.ones((1, 8)), jnp.ones(8), 1e-5, 0.0),
        lambda: rows.split_and_rotate(one, jnp.ones((3, 2)), jnp.ones((3, 2)), 1, 2),
    ):
        with pytest.raises(Exception, match="do not fit|no kernel for rows of these types"):
            jax.block_until_ready(call())


def test_layers_say_the_same_with_kernels_and_without() -> None:
    norm = RMSNorm(100, name="norm", epsilon=1e-5, offset=1.0, dtype="float32")
    norm.scale.set_value(numbers("float32", 100))
    angles = Rope((1.0, 0.1, 0.01)).angles(jnp.arange(12))

    def layers(x: jax.Array) -> Any:
        rotated = angles.rotate(x.reshape(12, 5, 20)), *angles.split_and_rotate(x, 1, 20)
        return (
            norm(x),
            *add_and_norm(norm, x, 2 * x),
            gate(x, "gelu_new"),
            gate(x, "relu"),
            rotated,
        )

    kernels = LayerKernels(*5 * [None], rows=ROW_KERNELS)  # type: ignore[arg-type]
    x = numbers("float32", 12, 100)
    plain = jax.jit(layers)(x)
    with TraceScope(kernels).open():
        text = str(jax.make_jaxpr(lambda x: layers(x))(x))
        found = jax.jit(lambda x: layers(x))(x)
    for name in ("rms_norm", "add_and_norm", "gate", "rotate", "split_and_rotate"):
        assert text.count(f"target_name=jaxpage_{name}") == 1
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
