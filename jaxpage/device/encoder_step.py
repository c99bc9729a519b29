"""Computes texts with an encoder: a stream of tokens in which each text sees itself alone.

    tokens   [CLS] a  b  c [SEP]  .  .  .  |  [CLS] d [SEP]  .  .  .  .  .      . is padding
    tiles    starts 0, ends 5              |  starts 8, ends 11

A text begins at a tile of queries, and each tile knows where its text starts and ends. Products see
the stream alone. Attention goes over the keys of a text in tiles of one size, counted from the
first token of the text, so that the sums of a token are the same whatever else is in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.steps import StepOptions
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.trace_scope import TraceScope

QUERY_TILE = 32  # tokens; a text begins at a multiple of it
KEY_TILE = 64
HEAD_ROWS = 16  # the texts that a head scores in one call
# A score of keys that a query does not see. Minus infinity would make NaN of a row without any key.
_UNSEEN = -1e30


class EncoderInputs(NamedTuple):
    """Holds the inputs of a call: those of each token, and those of each tile of queries (G).

    Attributes:
        token_ids_T: The tokens.
        positions_T: The row of each token in the table of positions, or its place in its text.
        token_types_T: The token types.
        start_G: The place in the stream at which the text of a tile starts.
        end_G: The place after the last token of that text.
        num_key_tiles: The number of tiles that the keys of the longest text fill.
    """

    token_ids_T: Any
    positions_T: Any
    token_types_T: Any
    start_G: Any
    end_G: Any
    num_key_tiles: Any


def size_of_inputs(num_tokens: int) -> int:
    """Returns the number of integers that the inputs of a call have when they are packed."""
    return 3 * num_tokens + 2 * (num_tokens // QUERY_TILE) + 1


def split_inputs(packed: Any, num_tokens: int) -> EncoderInputs:
    """Returns the inputs in a packed array; of a numpy array they are views."""
    num_tiles = num_tokens // QUERY_TILE
    sizes = (num_tokens,) * 3 + (num_tiles,) * 2
    ends = np.cumsum((0, *sizes)).tolist()
    parts = [packed[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return EncoderInputs(*parts, packed[-1])


def pack_texts(
    texts: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]],
    num_tokens: int,
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Returns the packed inputs of texts, and the place at which each of them starts.

    Args:
        texts: The token ids, positions and token types of each text.
        num_tokens: The size of the stream, which has room for all of them.
    """
    packed = np.zeros(size_of_inputs(num_tokens), np.int32)
    inputs = split_inputs(packed, num_tokens)
    # A tile of padding has one key, since the sum of none would be zero.
    inputs.end_G[:] = 1
    starts = []
    start = 0
    for ids, positions, types in texts:
        end = start + len(ids)
        inputs.token_ids_T[start:end] = ids
        inputs.positions_T[start:end] = positions
        inputs.token_types_T[start:end] = types
        tiles = slice(start // QUERY_TILE, -(-end // QUERY_TILE))
        inputs.start_G[tiles] = start
        inputs.end_G[tiles] = end
        starts.append(start)
        start = tiles.stop * QUERY_TILE
    longest = max(len(ids) for ids, _, _ in texts)
    packed[-1] = -(-longest // KEY_TILE)
    return packed, starts


def encoder_step(
    parameters: Any, packed: jax.Array, *, num_tokens: int, options: StepOptions
) -> jax.Array:
    """Returns the states [T, D] of all tokens after the last layer, in float32."""
    inputs = split_inputs(packed, num_tokens)
    model = nnx.merge(options.graph, parameters)
    context = ForwardContext(inputs.positions_T, make_attend_both_ways(inputs))
    with TraceScope(make_layer_kernels(options.attention_backend)).open():
        hidden_TD = model(inputs.token_ids_T, inputs.token_types_T, context)
    return hidden_TD.astype(jnp.float32)


def score_step(parameters: Any, pooled_RD: jax.Array, *, options: StepOptions) -> jax.Array:
    """Returns the scores [R, Z] of texts in float32, given the state that the head takes of each."""
    model = nnx.merge(options.graph, parameters)
    with TraceScope(make_layer_kernels(options.attention_backend)).open():
        dtype = model.tokens.table[...].dtype
        scores_RZ: jax.Array = model.score(pooled_RD.astype(dtype))
    return scores_RZ


def make_attend_both_ways(inputs: EncoderInputs) -> Attend:
    """Returns the operation that attention layers of an encoder call.

    `AttentionOptions.sliding_window` is here the number of positions to both sides that a token
    sees. Other options than it and the scale are not honoured, and no encoder has them.
    """

    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
    ) -> tuple[jax.Array, LayerPages]:
        assert k_TKH is not None and v_TKH is not None, "an encoder's layers have all three"
        return attend_both_ways(q_TNH, k_TKH, v_TKH, inputs, options), layer_pages

    return attend


def attend_both_ways(
    q_TNH: Float[Array, "T N H"],
    k_TNH: Float[Array, "T N H"],
    v_TNH: Float[Array, "T N H"],
    inputs: EncoderInputs,
    options: AttentionOptions,
) -> Float[Array, "T N H"]:
    """Returns for each token `softmax(scale q . k) v` over the tokens of its text.

    Scores and softmax are in float32, and the sums go from tile to tile of keys.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_tiles = num_tokens // QUERY_TILE
    q_GNQH = q_TNH.reshape(num_tiles, QUERY_TILE, num_heads, head_dim).transpose(0, 2, 1, 3)
    query_G1Q1 = jnp.arange(num_tokens).reshape(num_tiles, 1, QUERY_TILE, 1)
    precision = (
        jax.lax.Precision.HIGHEST if q_TNH.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )

    def multiply(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)

    def add_tile(
        tile: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, mixed = sums
        key_GK = inputs.start_G[:, None] + tile * KEY_TILE + jnp.arange(KEY_TILE)
        sees = (key_GK < inputs.end_G[:, None])[:, None, None, :]
        if options.sliding_window is not None:
            distance = jnp.abs(key_GK[:, None, None, :] - query_G1Q1)
            sees &= distance <= options.sliding_window
        place_GK = jnp.minimum(key_GK, num_tokens - 1)
        score_GNQK = multiply("GNQH,GKNH->GNQK", q_GNQH, k_TNH[place_GK]) * options.scale
        score_GNQK = jnp.where(sees, score_GNQK, _UNSEEN)
        new_highest = jnp.maximum(highest, score_GNQK.max(axis=-1))
        weight_GNQK = jnp.where(sees, jnp.exp(score_GNQK - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        weighted = multiply("GNQK,GKNH->GNQH", weight_GNQK.astype(v_TNH.dtype), v_TNH[place_GK])
        return (
            new_highest,
            total * shrink + weight_GNQK.sum(axis=-1),
            mixed * shrink[..., None] + weighted,
        )

    shape = (num_tiles, num_heads, QUERY_TILE)
    start = (
        jnp.full(shape, _UNSEEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    _, total, mixed = jax.lax.fori_loop(0, inputs.num_key_tiles, add_tile, start)
    # A query of padding may see no key.
    out_GNQH = mixed / jnp.maximum(total, 1e-30)[..., None]
    return out_GNQH.transpose(0, 2, 1, 3).reshape(q_TNH.shape).astype(q_TNH.dtype)
