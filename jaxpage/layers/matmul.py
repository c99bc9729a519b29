"""Multiplies by weights, in this one place, and decides the precision of the product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Int32

from jaxpage.layers.fusion import multiply_after_norm, note_matmul
from jaxpage.layers.trace_scope import LayerKernels, trace_scope
from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes, Scaled, StoredWeight

TOKENS_BY_HEAD = 16  # the tokens of a tile: see `matmul_by_head`
MIN_SCALE = 2.0**-100  # The scale of a token whose inputs are all zero.


@jax.named_scope("matmul")  # These names are for profiles: see `bench.step_profile`.
def matmul(
    x_TI: Float[Array, "T I"], weight: StoredWeight, *, result: DTypeLike | None = None
) -> Float[Array, "T O"]:
    """Returns `x @ weight.T` for a weight that is stored [out, in], as a torch `Linear` stores it.

    An engine on a CPU has weights in panels, whose kernel computes a row in the same way among any
    others. Where it has none, XLA multiplies: this order spares a transposition, and in it XLA on
    CPU computes a row in the same way among 2 rows as among 512 (docs/lab-log.md). So a token's
    result depends neither on the batch nor on the chunks of its prompt.

    Float32 means float32: by default XLA would use TF32 for it on GPU and one bfloat16 pass on TPU.

    Args:
        x_TI: The inputs.
        weight: The weight.
        result: The type of the result and of its sums; None for the type of the inputs.
    """
    if isinstance(weight, Scaled):
        return _multiply_scaled(x_TI, weight).astype(result or x_TI.dtype)
    if isinstance(weight, Grouped):
        return _kernels().multiply(x_TI, weight, result or x_TI.dtype)
    if isinstance(weight, Packed | PackedCodes):
        # A call that begins with the norm gives rows of the input's type only.
        y_TO = None if result else multiply_after_norm(x_TI, weight)
        if y_TO is None:
            y_TO = _kernels().multiply_packed(x_TI, weight, result or x_TI.dtype, None)
        return note_matmul(y_TO, x_TI, weight)
    kernels = trace_scope().kernels
    if kernels is not None and kernels.multiply_numbers is not None:
        return kernels.multiply_numbers(x_TI, weight, result or x_TI.dtype)
    precision = (
        jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    return jnp.einsum("TI,OI->TO", x_TI, weight, precision=precision, preferred_element_type=result)


@jax.named_scope("matmul")
def matmul_and_finish(
    x_TI: Float[Array, "T I"],
    weight: StoredWeight,
    bias_O: Float[Array, "O"] | None,
    activation: str | None,
    *,
    result: DTypeLike | None = None,
) -> Float[Array, "T O"] | None:
    """Returns `activation(x @ weight.T + bias)` in one call; None where no kernel does that.

    The result is float32: in fewer bits, the call would round once and the layers do each time.

    Args:
        x_TI: The inputs.
        weight: The weight.
        bias_O: The bias; None for none.
        activation: The name of the function in kernels; None for none.
        result: See `matmul`.
    """
    dtype = result or x_TI.dtype
    if not isinstance(weight, Packed) or dtype != jnp.float32:
        return None
    return _kernels().multiply_packed(x_TI, weight, dtype, None, bias_O, activation)


def _kernels() -> LayerKernels:
    kernels = trace_scope().kernels
    assert kernels is not None, "bound where a model with such weights is traced"
    return kernels


def rows_of(
    weight: Scaled | Grouped | Packed | PackedCodes, ids_T: Int[Array, "T"]
) -> Float[Array, "T I"]:
    """Returns rows of a table; those of a quantised one in float32."""
    if isinstance(weight, Scaled):
        return weight.values_OI[ids_T].astype(jnp.float32) * weight.scale_O[ids_T][:, None]
    if isinstance(weight, Packed | PackedCodes):
        return _kernels().packed_rows(weight, ids_T)
    zero, minimum = (
        None if each is None else each[ids_T] for each in (weight.zero_OJ, weight.minimum_OJ)
    )
    rows = weight._replace(
        values=weight.values[ids_T],
        scale_OJ=weight.scale_OJ[ids_T],
        zero_OJ=zero,
        minimum_OJ=minimum,
    )
    return _kernels().numbers(rows)


def weight_numbers(weight: StoredWeight) -> Float[Array, "O I"]:
    """Returns the weight itself, dequantised, for uses other than its product with an input."""
    assert not isinstance(weight, Packed | PackedCodes), (
        "only weights that inputs are multiplied by are packed"
    )
    if isinstance(weight, Scaled):
        return weight.values_OI.astype(jnp.float32) * weight.scale_O[:, None]
    return _kernels().numbers(weight) if isinstance(weight, Grouped) else weight


@jax.named_scope("matmul")
def matmul_by_head(
    x_TNI: Float[Array, "T N I"], weight: Float[Array, "N _ _"], *, transposed: bool = False
) -> Float[Array, "T N _"]:
    """Multiplies each head by its own matrix, which is [out, in] or, transposed, [in, out]."""
    kernels = trace_scope().kernels
    if kernels is not None and kernels.multiply_heads is not None:
        weight_NOI = weight.swapaxes(1, 2) if transposed else weight
        return kernels.multiply_heads(x_TNI, weight_NOI)

    def whole(x_TNI: jax.Array) -> jax.Array:
        precision = (
            jax.lax.Precision.HIGHEST if x_TNI.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        )
        return jnp.einsum(
            "TNI,NIO->TNO" if transposed else "TNI,NOI->TNO", x_TNI, weight, precision=precision
        )

    def by_tiles(x_TNI: jax.Array) -> jax.Array:
        """Multiplies in one shape for any number of tokens.

        On CPU the shape decides in which way XLA computes, and with it the bits.
        """
        num_tokens = x_TNI.shape[0]
        padded = jnp.pad(x_TNI, ((0, -num_tokens % TOKENS_BY_HEAD), (0, 0), (0, 0)))
        out = jax.lax.map(whole, padded.reshape(-1, TOKENS_BY_HEAD, *x_TNI.shape[1:]))
        return out.reshape(-1, *out.shape[2:])[:num_tokens]

    matmul_TNO: jax.Array = jax.lax.platform_dependent(x_TNI, cpu=by_tiles, default=whole)
    return matmul_TNO


def matmul_by_state(
    x_BNK: Float[Array, "B N K"], state_BNKV: Float[Array, "B N K V"]
) -> Float[Array, "B N V"]:
    """Multiplies the vector of each row and head by its matrix.

    It is a product because XLA on CPU takes up to twenty times as long for a plain sum of products.
    """
    return jnp.einsum("BNK,BNKV->BNV", x_BNK, state_BNKV, precision=jax.lax.Precision.HIGHEST)


def _multiply_scaled(x_TI: Float[Array, "T I"], weight: Scaled) -> Float[Array, "T O"]:
    """Multiplies tokens that are rounded to eight bits, each with its own scale.

    The sums are of integers, which are exact in any order.
    """
    sums_TO, scale_T1 = multiply_rounded(x_TI.astype(jnp.float32), weight.values_OI)
    return sums_TO.astype(jnp.float32) * scale_T1 * weight.scale_O


def has_matmul_by_group(weight: StoredWeight) -> bool:
    """Returns whether there is a kernel that multiplies rows by such weights of their groups."""
    kernels = trace_scope().kernels
    return isinstance(weight, Packed | PackedCodes) or (
        kernels is not None and kernels.by_group is not None
    )


@jax.named_scope("matmul")
def matmul_by_group(
    x_PI: Float[Array, "P I"],
    weight: StoredWeight,
    group_P: Int[Array, "P"],
    count_E: Int[Array, "E"],
) -> Float[Array, "P O"] | None:
    """Multiplies each row by the weight of its group, in one launch.

    Rows are sorted by group. Those whose group has no weight come last, and their results are
    undefined.

    Args:
        x_PI: The rows.
        weight: The weights, whose arrays have one more axis in front, of groups.
        group_P: The group of each row.
        count_E: The number of rows of each group.

    Returns:
        The products; None where no kernel takes them.
    """
    if isinstance(weight, Packed | PackedCodes):
        return _kernels().multiply_packed(x_PI, weight, x_PI.dtype, count_E)
    kernels = trace_scope().kernels
    if kernels is None or kernels.by_group is None:
        return None
    if not isinstance(weight, Scaled):
        return kernels.by_group(x_PI, weight, count_E, x_PI.dtype)
    rounded_PI, scale_P1 = round_inputs(x_PI.astype(jnp.float32))
    sums_PO = kernels.by_group(rounded_PI, weight.values_OI, count_E, jnp.int32)
    if sums_PO is None:
        return None
    return (sums_PO.astype(jnp.float32) * scale_P1 * weight.scale_O[group_P]).astype(x_PI.dtype)


def multiply_rounded(
    x_TI: Float[Array, "T I"], values_OI: Int8[Array, "O I"]
) -> tuple[Int32[Array, "T O"], Float[Array, "T 1"]]:
    """Returns the sums of products with x rounded to eight bits, and the scale of each token."""
    rounded_TI, scale_T1 = round_inputs(x_TI)
    return jnp.einsum(
        "TI,OI->TO", rounded_TI, values_OI, preferred_element_type=jnp.int32
    ), scale_T1


def round_inputs(x_TI: Float[Array, "T I"]) -> tuple[Int8[Array, "T I"], Float[Array, "T 1"]]:
    """Returns the inputs rounded to eight bits, and the scale of each token.

    The scale is NaN where an input is NaN, which XLA on CPU leaves out of a maximum. The inputs are
    multiplied by the inverse of the scale, because XLA rewrites a division so; a kernel has to do
    the same.
    """
    scale_T1 = jnp.maximum(
        jnp.abs(x_TI).max(axis=1, keepdims=True) * jnp.float32(1 / 127), MIN_SCALE
    )
    scale_T1 = jnp.where(jnp.isnan(x_TI).any(axis=1, keepdims=True), jnp.nan, scale_T1)
    return jnp.round(x_TI * (1 / scale_T1)).astype(jnp.int8), scale_T1
