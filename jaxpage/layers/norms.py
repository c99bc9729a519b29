"""Normalises over the last axis, in float32 whatever the parameters' type."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.parameter import Source, parameter, tensor
from jaxpage.layers.producers import MadeByNorm, MadeBySum
from jaxpage.layers.trace_scope import RowKernels, row_kernels, trace_scope


def mean(x: jax.Array) -> jax.Array:
    """Returns the mean over the last axis.

    On a GPU it is a plain one, which XLA fuses with the operations around it.
    """
    return jax.lax.platform_dependent(
        x, cpu=_mean_as_matmul, default=lambda y: jnp.mean(y, axis=-1, keepdims=True)
    )


def _mean_as_matmul(x: jax.Array) -> jax.Array:
    """Returns the mean as a product with ones.

    XLA on CPU adds up a plain reduction in an order that depends on the other axes.
    """
    width = x.shape[-1]
    # Two rows, because XLA computes a matrix-vector product in yet another way.
    ones_2D = jnp.ones((2, width), x.dtype)
    return (
        jnp.einsum("...D,ZD->...Z", x, ones_2D, precision=jax.lax.Precision.HIGHEST)[..., :1]
        / width
    )


def _declare(name: str, width: int, axis: str | None, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    return parameter((width,), axes=(axis,), dtype=dtype, sources=[tensor(name, width)])


def _scale(parameter: nnx.Param[jax.Array], offset: float) -> jax.Array:
    scale = _row(parameter)
    if not offset:
        return scale
    # XLA moves this sum out of a loop over steps, and rounds the product in another way where both
    # are together. The barrier keeps them apart, so that one step and several have the same bits.
    return jax.lax.optimization_barrier(scale + offset)


def _row(parameter: nnx.Param[jax.Array]) -> jax.Array:
    return parameter[...].astype(jnp.float32)[None, :]


class RMSNorm(nnx.Module):
    """Computes `scale * x / sqrt(mean(x^2) + epsilon)` (Zhang and Sennrich, 2019).

    Attributes:
        scale: The scale, a parameter of the checkpoint's module; None for a factor of one.
        epsilon: The number that is added to the mean of squares.
        offset: The number that is added to the stored scale (Gemma stores it less 1).
        groups: The number of equal parts of the width, each of which has a mean of its own.
    """

    def __init__(
        self,
        width: int,
        *,
        name: str | None,
        epsilon: float,
        axis: str | None = "embed",
        offset: float = 0.0,
        groups: int = 1,
        dtype: DTypeLike,
    ):
        self.scale = None if name is None else _declare(f"{name}.weight", width, axis, dtype)
        self.groups = groups
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        """Returns the normalised numbers in the type of the input."""
        kernels = row_kernels(x.dtype)
        if kernels is not None and self.groups == 1:
            rows = x.reshape(-1, x.shape[-1])
            scale = jnp.ones(rows.shape[1:], x.dtype) if self.scale is None else self.scale[...]
            normed = kernels.rms_norm(rows, scale, self.epsilon, self.offset)
            return normed.reshape(x.shape)
        # Two axes: with three, XLA of jax 0.12 on CPU rounds differently for each shape.
        wide = x.astype(jnp.float32).reshape(-1, x.shape[-1] // self.groups)
        if kernels is not None and kernels.update_state is not None:  # XLA's sums have no one order
            ones = jnp.ones(wide.shape[1:], jnp.float32)
            normed = kernels.rms_norm(wide, ones, self.epsilon, 0.0)
        else:
            normed = wide * jax.lax.rsqrt(mean(jnp.square(wide)) + self.epsilon)
        normed = normed.reshape(-1, x.shape[-1])
        if self.scale is None:
            return normed.astype(x.dtype).reshape(x.shape)
        return (normed * _scale(self.scale, self.offset)).astype(x.dtype).reshape(x.shape)


def add_and_norm(
    norm: Callable[[jax.Array], jax.Array] | None,
    x_TD: Float[Array, "T D"],
    added_TD: Float[Array, "T D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns the sum of both, and the norm of the sum; without a norm the sum twice."""
    kernels = row_kernels(x_TD.dtype)
    if kernels is not None and isinstance(norm, LayerNorm):
        sum_TD, normed_TD = norm.in_one_call(kernels, x_TD, added_TD, keeps_sum=True)
        assert sum_TD is not None, "it was asked for"
        return sum_TD, normed_TD
    if kernels is None or not isinstance(norm, RMSNorm) or norm.groups > 1 or norm.scale is None:
        sum_TD = x_TD + added_TD
        return sum_TD, sum_TD if norm is None else norm(sum_TD)
    return kernels.add_and_norm(x_TD, added_TD, norm.scale[...], norm.epsilon, norm.offset)


def add_before_norm(
    x_TD: Float[Array, "T D"], added_TD: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """Returns the sum of both, which `keep_and_norm` may compute again with a norm, in one call."""
    sum_TD = x_TD + added_TD
    if row_kernels(x_TD.dtype) is not None:
        # The compiler leaves this sum out where nothing else reads it.
        trace_scope().producers.note(sum_TD, MadeBySum(x_TD, added_TD))
    return sum_TD


def keep_and_norm(
    norm: Callable[[jax.Array], jax.Array] | None, x_TD: Float[Array, "T D"]
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns x and its norm; one call computes both where x comes from `add_before_norm`."""
    producers = trace_scope().producers
    if norm is not None and (made := producers.find(x_TD, MadeBySum)) is not None:
        return add_and_norm(norm, made.x_TD, made.added_TD)
    normed_TD = x_TD if norm is None else norm(x_TD)
    if isinstance(norm, RMSNorm) and norm.scale is not None and norm.groups == 1:
        numbers = (norm.scale[...], norm.epsilon, norm.offset)
        producers.note(normed_TD, MadeByNorm(x_TD, *numbers))
    return x_TD, normed_TD


def norm_of_sum(
    norm: RMSNorm | LayerNorm, x_TD: Float[Array, "T D"], added_TD: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """Returns the norm of the sum of both, of a layer that has no other use for the sum."""
    kernels = row_kernels(x_TD.dtype)
    if kernels is not None and isinstance(norm, LayerNorm):
        return norm.in_one_call(kernels, x_TD, added_TD)[1]
    return norm(x_TD + added_TD)


def _standardise(wide: jax.Array, epsilon: float) -> jax.Array:
    """Returns `(x - mean) / sqrt(variance + epsilon)`."""
    # Two passes: the mean of squares less the square of the mean cancels where the mean is large.
    centred = wide - mean(wide)
    return centred * jax.lax.rsqrt(mean(jnp.square(centred)) + epsilon)


class LayerNorm(nnx.Module):
    """Computes `scale * (x - mean) / sqrt(variance + epsilon) + bias` (Ba et al., 2016).

    The scale is there only if `affine` is True, the bias only if `bias` is True too. For `offset`
    see `RMSNorm`.
    """

    def __init__(
        self,
        width: int,
        *,
        name: str,
        epsilon: float = 1e-5,
        axis: str | None = "embed",
        affine: bool = True,
        bias: bool = True,
        offset: float = 0.0,
        dtype: DTypeLike,
    ):
        self.scale = _declare(f"{name}.weight", width, axis, dtype) if affine else None
        self.bias = _declare(f"{name}.bias", width, axis, dtype) if affine and bias else None
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        """Returns the normalised numbers in the type of the input."""
        kernels = row_kernels(x.dtype)
        if kernels is not None:
            return self.in_one_call(kernels, x.reshape(-1, x.shape[-1]))[1].reshape(x.shape)
        # Two axes, as in `RMSNorm`.
        normed = _standardise(x.astype(jnp.float32).reshape(-1, x.shape[-1]), self.epsilon)
        if self.scale is not None:
            normed = normed * _scale(self.scale, self.offset)
        if self.bias is not None:
            normed = normed + _row(self.bias)
        return normed.astype(x.dtype).reshape(x.shape)

    def in_one_call(
        self,
        kernels: RowKernels,
        x_TD: Float[Array, "T D"],
        added_TD: Float[Array, "T D"] | None = None,
        *,
        keeps_sum: bool = False,
    ) -> tuple[Float[Array, "T D"] | None, Float[Array, "T D"]]:
        """Returns the sum and its norm by a kernel; see `pallas_kernels.cpu.rows.layer_norm`."""
        scale, bias = (None if each is None else each[...] for each in (self.scale, self.bias))
        return kernels.layer_norm(
            x_TD, scale, bias, self.epsilon, self.offset, added_TD, keeps_sum=keeps_sum
        )


class HeadNorm(nnx.Module):
    """Computes a LayerNorm over each head, with a scale of its own and no bias (Command R+).

    Attributes:
        scale: The scales [N, H] of queries, or [K, H] of keys.
        epsilon: The number that is added to the variance.
    """

    def __init__(self, source: Source, *, axis: str, epsilon: float, dtype: DTypeLike):
        self.scale = parameter(source.shape, axes=(axis, None), dtype=dtype, sources=[source])
        self.epsilon = epsilon

    def __call__(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Returns the normalised numbers in the type of the input."""
        # Two axes, as in `RMSNorm`.
        wide = x_TNH.astype(jnp.float32).reshape(-1, x_TNH.shape[-1])
        normed_TNH = _standardise(wide, self.epsilon).reshape(x_TNH.shape)
        return (normed_TNH * self.scale[...].astype(jnp.float32)[None]).astype(x_TNH.dtype)
