"""Computes what layers do between two products, row by row, with Triton kernels.

A program takes a row. Its warps and the numbers that a thread adds up depend on the width alone, so
that a row has the same bits in any company; XLA chooses both by the number of rows. The functions
are those of `pallas_kernels.cpu.rows`: numbers are computed in float32 and rounded once at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.triton import backend as tb

TILE = 4096  # the numbers of a row of logits that a program reads at once
NUMBERS_OF_A_WARP = 1024


def takes(dtype: DTypeLike) -> bool:
    """Returns whether there are kernels for rows of this type."""
    return jnp.dtype(dtype).name in ("bfloat16", "float16", "float32")


def gate(
    both_TF: Float[Array, "T F2"], activation: str, *, interpret: bool = False
) -> Float[Array, "T F"]:
    """Returns `activation(gate) * up`, where each row has the gates and then the ups.

    Raises:
        NotImplementedError: The backend has no such function.
    """
    if activation not in _FUNCTIONS:
        raise NotImplementedError(
            f"the activation {activation} (only {', '.join(_FUNCTIONS)} in the triton set)"
        )
    num_rows, width = both_TF.shape[0], both_TF.shape[1] // 2
    shape = jax.ShapeDtypeStruct((num_rows, width), both_TF.dtype)
    body = functools.partial(_gate, function=_FUNCTIONS[activation], width=width)
    cols = min(1024, pl.next_power_of_2(width))
    y_TF: jax.Array = row_call(
        functools.partial(body, cols=cols),
        "gate",
        (num_rows, pl.cdiv(width, cols)),
        shape,
        cols,
        interpret,
    )(both_TF)
    return y_TF


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    # The first constant is sqrt(2 / pi).
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def _gate(both_ref: Any, out_ref: Any, *, function: Any, width: int, cols: int) -> None:
    row = pl.program_id(0)
    at_F = pl.program_id(1) * cols + jnp.arange(cols)
    has_F = at_F < width
    gate_F, up_F = (
        tb.load(both_ref.at[row, at_F + first], mask=has_F, other=0).astype(jnp.float32)
        for first in (0, width)
    )
    out_F = function(gate_F) * up_F
    tb.store(out_ref.at[row, at_F], out_F.astype(out_ref.dtype), mask=has_F)


def rms_norm(
    x_TD: Float[Array, "T D"],
    scale_D: Float[Array, "D"],
    epsilon: float,
    offset: float,
    *,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Returns `(scale + offset) * x / sqrt(mean(x^2) + epsilon)`."""
    return _norm(x_TD, scale_D, None, None, epsilon, offset, False, False, interpret)[1]


def add_and_norm(
    x_TD: Float[Array, "T D"],
    added_TD: Float[Array, "T D"] | Float[Array, "Z T D"],
    scale_D: Float[Array, "D"],
    epsilon: float,
    offset: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns the rounded sum of both, and `rms_norm` of it.

    What is added may be sums of segments; see `fold_segments`.
    """
    sum_TD, y_TD = _norm(x_TD, scale_D, None, added_TD, epsilon, offset, False, True, interpret)
    assert sum_TD is not None, "it was asked for"
    return sum_TD, y_TD


def layer_norm(
    x_TD: Float[Array, "T D"],
    scale_D: Float[Array, "D"] | None,
    bias_D: Float[Array, "D"] | None,
    epsilon: float,
    offset: float,
    added_TD: Float[Array, "T D"] | None = None,
    *,
    keeps_sum: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "T D"] | None, Float[Array, "T D"]]:
    """Returns the sum of x and what is added, and its norm; see `pallas_kernels.cpu.rows`."""
    return _norm(x_TD, scale_D, bias_D, added_TD, epsilon, offset, True, keeps_sum, interpret)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _norm(
    x_TD: jax.Array,
    scale_D: jax.Array | None,
    bias_D: jax.Array | None,
    added_TD: jax.Array | None,
    epsilon: float,
    offset: float,
    is_centred: bool,
    keeps_sum: bool,
    interpret: bool,
) -> tuple[jax.Array | None, jax.Array]:
    num_rows, width = x_TD.shape
    shape = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    body = functools.partial(
        _norm_row, width=width, epsilon=epsilon, offset=offset, is_centred=is_centred
    )
    out = row_call(body, "norm", (num_rows,), [shape] * (1 + keeps_sum), width, interpret)(
        x_TD, scale_D, bias_D, added_TD
    )
    return (out[0] if keeps_sum else None), out[-1]


def _norm_row(
    x_ref: Any,
    scale_ref: Any,
    bias_ref: Any,
    added_ref: Any,
    *out_refs: Any,
    width: int,
    epsilon: float,
    offset: float,
    is_centred: bool,
) -> None:
    row = pl.program_id(0)
    at_D = jnp.arange(pl.next_power_of_2(width))
    has_D = at_D < width

    def wide(ref: Any, *at: Any) -> jax.Array:
        numbers: jax.Array = tb.load(ref.at[(*at, at_D)], mask=has_D, other=0).astype(jnp.float32)
        return numbers

    x_D = wide(x_ref, row)
    if added_ref is not None:
        added_D = fold_segments(added_ref, x_ref.dtype, (row, at_D), has_D)
        # The norm is that of the rounded sum, with the same bits whether or not the sum is kept.
        x_D = (x_D + added_D.astype(jnp.float32)).astype(x_ref.dtype).astype(jnp.float32)
    if len(out_refs) == 2:
        tb.store(out_refs[0].at[row, at_D], x_D.astype(x_ref.dtype), mask=has_D)
    if is_centred:
        # Padding must stay 0, or it would be counted in the variance.
        x_D = jnp.where(has_D, x_D - jnp.sum(x_D) / width, 0.0)
    x_D = x_D * lax.rsqrt(jnp.sum(x_D * x_D) / width + epsilon)
    if scale_ref is not None:
        scale_D = wide(scale_ref)
        x_D = x_D * (scale_D + offset if offset else scale_D)
    if bias_ref is not None:
        x_D = x_D + wide(bias_ref)
    tb.store(out_refs[-1].at[row, at_D], x_D.astype(x_ref.dtype), mask=has_D)


def fold_segments(ref: Any, dtype: DTypeLike, at: tuple[Any, ...], mask: Any) -> jax.Array:
    """Returns a tile of an array, or of sums of segments, which have one more axis in front.

    These are added up in order and rounded to the type, as `product.fold_kernel` does it.
    """
    # Triton's lowering refuses `other` without a mask.
    other = None if mask is None else 0
    if len(ref.shape) == len(at):
        numbers: jax.Array = tb.load(ref.at[at], mask=mask, other=other)
        return numbers

    def add(segment: Any, total: jax.Array) -> jax.Array:
        return total + tb.load(ref.at[(segment, *at)], mask=mask, other=other)

    shape = jnp.broadcast_shapes(*(jnp.shape(each) for each in at))
    total = lax.fori_loop(0, ref.shape[0], add, jnp.zeros(shape, jnp.float32))
    return total.astype(dtype)


def rotate(
    x_TNH: Float[Array, "T N H"],
    cos_TE: Float[Array, "T E"],
    sin_TE: Float[Array, "T E"],
    *,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Turns the pairs (i, E + i) of every head; what is after the pairs stays."""
    return _rotate(x_TNH, cos_TE, sin_TE, 0, x_TNH.shape[1], False, interpret)


def rotate_pairs(
    x_TNH: Float[Array, "T N H"],
    cos_TE: Float[Array, "T E"],
    sin_TE: Float[Array, "T E"],
    *,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Turns the pairs (2 i, 2 i + 1) of every head; what is after the pairs stays."""
    return _rotate(x_TNH, cos_TE, sin_TE, 0, x_TNH.shape[1], True, interpret)


def split_and_rotate(
    x_TF: Float[Array, "T F"],
    cos_TE: Float[Array, "T E"],
    sin_TE: Float[Array, "T E"],
    num_keys: int,
    head_dim: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Returns the queries, keys and values that each row has in this order.

    Queries and keys are turned as by `rotate`.
    """
    x_TMH = x_TF.reshape(len(x_TF), -1, head_dim)
    num_queries = x_TMH.shape[1] - 2 * num_keys
    q_TNH, k_TKH = (
        _rotate(x_TMH, cos_TE, sin_TE, first, count, False, interpret)
        for first, count in ((0, num_queries), (num_queries, num_keys))
    )
    return q_TNH, k_TKH, x_TMH[:, num_queries + num_keys :]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _rotate(
    x_TMH: jax.Array,
    cos_TE: jax.Array,
    sin_TE: jax.Array,
    first: int,
    num_heads: int,
    interleaved: bool,
    interpret: bool,
) -> jax.Array:
    num_tokens, _, head_dim = x_TMH.shape
    shape = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), x_TMH.dtype)
    body = functools.partial(
        _rotate_head,
        first=first,
        num_pairs=cos_TE.shape[1],
        head_dim=head_dim,
        interleaved=interleaved,
    )
    y_TNH: jax.Array = row_call(
        body, "rotate", (num_tokens, num_heads), shape, head_dim, interpret
    )(x_TMH, cos_TE, sin_TE)
    return y_TNH


def _rotate_head(
    x_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    out_ref: Any,
    *,
    first: int,
    num_pairs: int,
    head_dim: int,
    interleaved: bool,
) -> None:
    token = pl.program_id(0)
    head = pl.program_id(1)
    at_H = jnp.arange(pl.next_power_of_2(head_dim))
    is_rotated_H = at_H < 2 * num_pairs
    if interleaved:
        is_second_H = at_H & 1 == 1
        pair_H = at_H >> 1
        other_H = at_H ^ 1
    else:
        is_second_H = at_H >= num_pairs
        pair_H = jnp.where(is_second_H, at_H - num_pairs, at_H)
        other_H = jnp.where(is_second_H, at_H - num_pairs, at_H + num_pairs)

    def wide(at_H: jax.Array, mask_H: jax.Array) -> jax.Array:
        numbers: jax.Array = tb.load(x_ref.at[token, first + head, at_H], mask=mask_H, other=0)
        return numbers.astype(jnp.float32)

    x_H = wide(at_H, at_H < head_dim)
    cos_H, sin_H = (
        tb.load(ref.at[token, pair_H], mask=is_rotated_H, other=0) for ref in (cos_ref, sin_ref)
    )
    across_H = wide(other_H, is_rotated_H) * sin_H
    rotated_H = x_H * cos_H + jnp.where(is_second_H, across_H, -across_H)
    out_H = jnp.where(is_rotated_H, rotated_H, x_H).astype(out_ref.dtype)
    tb.store(out_ref.at[token, head, at_H], out_H, mask=at_H < head_dim)


def log_sums(
    logits_RV: Float[Array, "R V"], largest_R: Float[Array, "R"], *, interpret: bool = False
) -> Float[Array, "R"]:
    """Returns `log(sum(exp(logits - largest)))` of each row."""
    num_rows, width = logits_RV.shape
    shape = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    call = row_call(
        functools.partial(_log_sum, width=width), "log_sum", (num_rows,), shape, TILE, interpret
    )
    sums_R: jax.Array = call(logits_RV, largest_R)
    return sums_R


def _log_sum(logits_ref: Any, largest_ref: Any, out_ref: Any, *, width: int) -> None:
    row = pl.program_id(0)
    largest = tb.load(largest_ref.at[row])

    def add(tile: Any, total_V: Any) -> Any:
        at_V = tile * TILE + jnp.arange(TILE)
        has_V = at_V < width
        logits_V = tb.load(logits_ref.at[row, at_V], mask=has_V, other=0.0)
        return total_V + jnp.where(has_V, jnp.exp(logits_V - largest), 0.0)

    total_V = lax.fori_loop(0, pl.cdiv(width, TILE), add, jnp.zeros(TILE, jnp.float32))
    tb.store(out_ref.at[row], jnp.log(jnp.sum(total_V)))


def scores(
    logits_TE: Float[Array, "T E"], *, sigmoid: bool, interpret: bool = False
) -> Float[Array, "T E"]:
    """Returns the sigmoid of each logit, or `exp(logits - their maximum)` of each row."""
    num_rows, width = logits_TE.shape
    body = functools.partial(_scores_row, width=width, sigmoid=sigmoid)
    shape = jax.ShapeDtypeStruct(logits_TE.shape, logits_TE.dtype)
    scores_TE: jax.Array = row_call(body, "expert_scores", (num_rows,), shape, width, interpret)(
        logits_TE
    )
    return scores_TE


def _scores_row(logits_ref: Any, out_ref: Any, *, width: int, sigmoid: bool) -> None:
    row = pl.program_id(0)
    at_E = jnp.arange(pl.next_power_of_2(width))
    has_E = at_E < width
    logits_E = tb.load(logits_ref.at[row, at_E], mask=has_E, other=-jnp.inf)
    tb.store(out_ref.at[row, at_E], scores_of(logits_E, sigmoid=sigmoid), mask=has_E)


def scores_of(logits_E: jax.Array, *, sigmoid: bool) -> jax.Array:
    """Returns the odds of the experts of a token; see `scores`."""
    if sigmoid:
        return 1.0 / (1.0 + jnp.exp(-logits_E))
    return jnp.exp(logits_E - jnp.max(logits_E))


def weighted_sum(
    x_TXD: Float[Array, "T X D"], weight_TX: Float[Array, "T X"], *, interpret: bool = False
) -> Float[Array, "T D"]:
    """Returns the sum of the X rows of each token with these weights, added up one by one."""
    num_tokens, count, width = x_TXD.shape
    cols = min(1024, pl.next_power_of_2(width))
    shape = jax.ShapeDtypeStruct((num_tokens, width), x_TXD.dtype)
    body = functools.partial(_weighted_sum, count=count, width=width, cols=cols)
    grid = (num_tokens, pl.cdiv(width, cols))
    sum_TD: jax.Array = row_call(body, "weighted_sum", grid, shape, cols, interpret)(
        x_TXD, weight_TX
    )
    return sum_TD


def _weighted_sum(
    x_ref: Any, weight_ref: Any, out_ref: Any, *, count: int, width: int, cols: int
) -> None:
    token = pl.program_id(0)
    at_D = pl.program_id(1) * cols + jnp.arange(cols)
    has_D = at_D < width

    def add(place: Any, total_D: Any) -> Any:
        weight = tb.load(weight_ref.at[token, place]).astype(jnp.float32)
        x_D = tb.load(x_ref.at[token, place, at_D], mask=has_D, other=0).astype(jnp.float32)
        return total_D + x_D * weight

    total_D = lax.fori_loop(0, count, add, jnp.zeros(cols, jnp.float32))
    tb.store(out_ref.at[token, at_D], total_D.astype(out_ref.dtype), mask=has_D)


def warps_of(width: int) -> int:
    """Returns the warps of a program that takes a row of this width."""
    return max(1, min(8, pl.next_power_of_2(width) // NUMBERS_OF_A_WARP))


def row_call(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    width: int,
    interpret: bool,
) -> Callable[..., Any]:
    """Returns a call with as many warps as a row of this width takes, whatever the rows are."""
    return tb.kernel_call(
        body,
        name=name,
        grid=grid,
        out_shape=out_shape,
        num_warps=warps_of(width),
        num_stages=1,
        interpret=interpret,
    )
