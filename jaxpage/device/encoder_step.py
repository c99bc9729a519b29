"""Computes texts with an encoder: a stream of tokens in which each text sees itself alone.

    tokens   [CLS] a  b  c [SEP] [CLS] d [SEP]  .  .       . is padding
    rows     starts 0, 5, ...; lengths 5, 3, 0 ...

Products see the stream alone. Attention goes over the keys of a text in tiles of one size, counted
from the first token of the text, so that the sums of a token are the same whatever else is in the
stream. On a CPU the kernel of paged attention computes it, for which every token is a block. In
plain XLA a text begins at a tile of queries.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float

from jaxpage.device.attention import attend_bidirectional, make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.packing import Padding
from jaxpage.device.steps import StepOptions
from jaxpage.errors import UnsupportedError
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models import EncoderConfig, distance_buckets
from pallas_kernels import Arguments, attend_to_pages
from pallas_kernels.sets.cpu import LANES, MAX_HEAD_DIM

QUERY_TILE = 32  # tokens; in plain XLA a text begins at a multiple of it
KEY_TILE = 64
HEAD_ROWS = 16  # the texts that a head scores in one call
MAX_ROWS = 256  # texts of a stream
# A score of keys that a query does not see. Minus infinity would make NaN of a row without any key.
_UNSEEN = -1e30
Text = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]


class EncoderInputs(NamedTuple):
    """Holds the inputs of a call: those of each token, and those of each text (R rows).

    Attributes:
        token_ids_T: The tokens.
        positions_T: The row of each token in the table of positions, or its place in its text.
        token_types_T: The token types.
        start_R: The place in the stream at which each text starts; T for a row without a text.
        length_R: The tokens of each text.
    """

    token_ids_T: Any
    positions_T: Any
    token_types_T: Any
    start_R: Any
    length_R: Any


def num_rows_of(num_tokens: int) -> int:
    """Returns the most texts of a stream."""
    return min(num_tokens // 8, MAX_ROWS)


def size_of_inputs(num_tokens: int) -> int:
    """Returns the number of integers that the inputs of a call have when they are packed."""
    return 3 * num_tokens + 2 * num_rows_of(num_tokens)


def split_inputs(packed: Any, num_tokens: int) -> EncoderInputs:
    """Returns the inputs in a packed array; of a numpy array they are views."""
    num_rows = num_rows_of(num_tokens)
    ends = np.cumsum((0, *(num_tokens,) * 3, num_rows, num_rows)).tolist()
    return EncoderInputs(*(packed[start:end] for start, end in itertools.pairwise(ends)))


def pack_texts(
    texts: Sequence[Text], num_tokens: int, alignment: int
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Returns the packed inputs of texts, and the place at which each of them starts.

    Args:
        texts: The token ids, positions and token types of each text.
        num_tokens: The size of the stream, which has room for all of them.
        alignment: A text starts at a multiple of this number.
    """
    packed = np.zeros(size_of_inputs(num_tokens), np.int32)
    inputs = split_inputs(packed, num_tokens)
    inputs.start_R[:] = num_tokens
    starts = []
    start = 0
    for row, (ids, positions, types) in enumerate(texts):
        end = start + len(ids)
        inputs.token_ids_T[start:end] = ids
        inputs.positions_T[start:end] = positions
        inputs.token_types_T[start:end] = types
        inputs.start_R[row] = start
        inputs.length_R[row] = len(ids)
        starts.append(start)
        start = -(-end // alignment) * alignment
    return packed, starts


def alignment_of(backend: Backend, config: EncoderConfig) -> int:
    """Returns the number at whose multiples texts start: 1 where the kernel for CPUs attends."""
    head_dim = config.kv.head_dim
    is_width = head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM
    takes = is_width and not config.has_distances
    return 1 if backend.in_cpp and takes else QUERY_TILE


def encoder_step(
    parameters: Any, packed: jax.Array, *, num_tokens: int, max_length: int, options: StepOptions
) -> jax.Array:
    """Returns the states [T, D] of all tokens after the last layer, in float32.

    Args:
        parameters: The parameters of the model.
        packed: The inputs; see `EncoderInputs`.
        num_tokens: The size of the stream (T).
        max_length: The most tokens of a text.
        options: The constants of the steps.
    """
    inputs = split_inputs(packed, num_tokens)
    model = nnx.merge(options.graph, parameters)
    if alignment_of(options.attention_backend, model.config) == 1:
        attend = attend_in_cpp(inputs, num_tokens, min(max_length, num_tokens))
    else:
        attend = attend_in_xla(inputs, bias_by_distance(model, num_tokens))
    context = ForwardContext(inputs.positions_T, attend)
    padding = Padding(num_tokens, end_of_texts(inputs))
    with TraceScope(make_layer_kernels(options.attention_backend, padding)).open():
        hidden_TD = model(inputs.token_ids_T, inputs.token_types_T, context)
    return hidden_TD.astype(jnp.float32)


def end_of_texts(inputs: EncoderInputs) -> jax.Array:
    """Returns the place after the last token of the last text."""
    end: jax.Array = jnp.where(inputs.length_R > 0, inputs.start_R + inputs.length_R, 0).max()
    return end


def score_step(parameters: Any, pooled_RD: jax.Array, *, options: StepOptions) -> jax.Array:
    """Returns the scores [R, Z] of texts in float32.

    Args:
        parameters: The parameters of the model.
        pooled_RD: The state that the head takes of each text.
        options: The constants of the steps.
    """
    model = nnx.merge(options.graph, parameters)
    with TraceScope(make_layer_kernels(options.attention_backend)).open():
        scores_RZ: jax.Array = model.score(pooled_RD.astype(model.tokens.table[...].dtype))
    return scores_RZ


def attend_in_cpp(inputs: EncoderInputs, num_tokens: int, max_length: int) -> Attend:
    """Returns the operation that attention layers call, where the kernel for CPUs computes it.

    `AttentionOptions.sliding_window` is here the number of positions to both sides that a token
    sees. Other options than it and the scale are refused by name, and no encoder has them.
    """
    start_R = inputs.start_R
    # A token is a block of one slot, so a text's table counts up from its start.
    block_table_RM = jnp.minimum(start_R[:, None] + jnp.arange(max_length), num_tokens - 1)
    # Rows without a text come last: they start and end where the last text ends.
    end = end_of_texts(inputs)
    query_start = jnp.append(jnp.minimum(start_R, end), end)
    row_T = jnp.searchsorted(start_R, jnp.arange(num_tokens), side="right") - 1
    index_T = jnp.arange(num_tokens) - start_R[row_T]
    segment_T = jnp.where(index_T < inputs.length_R[row_T], row_T, -1)

    def attend(
        q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, options: AttentionOptions
    ) -> jax.Array:
        reach = options.sliding_window
        scale = options.scale
        mixed = attend_bidirectional(q_TNH, k_TKH, v_TKH, segment_T, scale=scale, reach=reach)
        if mixed is not None:
            return mixed
        last_T = inputs.length_R[row_T] - 1 if reach is None else index_T + reach
        # A window counts the token itself; how far it sees ahead is in `last_seen_T`.
        window = None if reach is None else reach + 1
        arguments = Arguments(
            q_TNH=q_TNH,
            k_pages=k_TKH[:, None],
            v_pages=v_TKH[:, None],
            block_table_BM=block_table_RM,
            context_len_B=inputs.length_R,
            query_start=query_start,
            options=AttentionOptions(scale=scale, sliding_window=window, last_seen_T=last_T),
        )
        return attend_to_pages(arguments, backend="cpu")

    return without_pages(attend)


def bias_by_distance(model: Any, num_tokens: int) -> jax.Array | None:
    """Returns the bias of scores for each distance -(T-1) to T-1 [2T-1, N]; None without any."""
    if model.distances is None:
        return None
    table_ZN = model.distances.table[...].astype(jnp.float32)
    bias_DN: jax.Array = table_ZN[distance_buckets(num_tokens - 1)]
    return bias_DN


def attend_in_xla(inputs: EncoderInputs, bias_DN: jax.Array | None = None) -> Attend:
    """Returns the operation that attention layers call, in plain XLA; see `attend_in_cpp`.

    Args:
        inputs: The inputs of the call.
        bias_DN: The bias of scores for each distance; see `bias_by_distance`.
    """
    return without_pages(functools.partial(attend_by_tiles, inputs, bias_DN))


def without_pages(attend: Callable[..., jax.Array]) -> Attend:
    """Returns the operation that attention layers call, which passes pages on as they are.

    Args:
        attend: Attends with queries, keys and values, given the options.
    """

    def attend_in_layer(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, LayerPages]:
        if others := options.set_names - {"scale", "sliding_window"}:
            raise UnsupportedError(
                f"attention of encoders does not compute {', '.join(sorted(others))}"
            )
        assert k_TKH is not None and v_TKH is not None, "an encoder's layers have all three"
        return attend(q_TNH, k_TKH, v_TKH, options), layer_pages

    return attend_in_layer


def attend_by_tiles(
    inputs: EncoderInputs,
    bias_DN: Float[Array, "D N"] | None,
    q_TNH: Float[Array, "T N H"],
    k_TNH: Float[Array, "T N H"],
    v_TNH: Float[Array, "T N H"],
    options: AttentionOptions,
) -> Float[Array, "T N H"]:
    """Returns for each token `softmax(scale q . k + bias) v` over the tokens of its text.

    Scores and softmax are in float32, and the sums go from tile to tile of keys.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_tiles = num_tokens // QUERY_TILE
    q_GNQH = q_TNH.reshape(num_tiles, QUERY_TILE, num_heads, head_dim).transpose(0, 2, 1, 3)
    query_G1Q1 = jnp.arange(num_tokens).reshape(num_tiles, 1, QUERY_TILE, 1)
    first_G = jnp.arange(num_tiles) * QUERY_TILE
    row_G = jnp.searchsorted(inputs.start_R, first_G, side="right") - 1
    start_G = inputs.start_R[row_G]
    end_G = start_G + inputs.length_R[row_G]
    precision = (
        jax.lax.Precision.HIGHEST if q_TNH.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )

    def multiply(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)

    def add_tile(
        tile: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, mixed = sums
        key_GK = start_G[:, None] + tile * KEY_TILE + jnp.arange(KEY_TILE)
        sees = (key_GK < end_G[:, None])[:, None, None, :]
        if options.sliding_window is not None:
            distance = jnp.abs(key_GK[:, None, None, :] - query_G1Q1)
            sees &= distance <= options.sliding_window
        # The last tile of keys may go beyond the stream; those are not seen.
        index_GK = jnp.minimum(key_GK, num_tokens - 1)
        score_GNQK = multiply("GNQH,GKNH->GNQK", q_GNQH, k_TNH[index_GK]) * options.scale
        if bias_DN is not None:
            distance_GQK = key_GK[:, None, :] - query_G1Q1[:, 0]
            bias_GQKN = bias_DN[jnp.minimum(distance_GQK + num_tokens - 1, 2 * num_tokens - 2)]
            score_GNQK += bias_GQKN.transpose(0, 3, 1, 2)
        score_GNQK = jnp.where(sees, score_GNQK, _UNSEEN)
        new_highest = jnp.maximum(highest, score_GNQK.max(axis=-1))
        weight_GNQK = jnp.where(sees, jnp.exp(score_GNQK - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        weighted = multiply("GNQK,GKNH->GNQH", weight_GNQK.astype(v_TNH.dtype), v_TNH[index_GK])
        return (
            new_highest,
            total * shrink + weight_GNQK.sum(axis=-1),
            mixed * shrink[..., None] + weighted,
        )

    shape = (num_tiles, num_heads, QUERY_TILE)
    zero = (
        jnp.full(shape, _UNSEEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    num_key_tiles = (inputs.length_R.max() + KEY_TILE - 1) // KEY_TILE
    _, total, mixed = jax.lax.fori_loop(0, num_key_tiles, add_tile, zero)
    # A query of padding may see no key.
    out_GNQH = mixed / jnp.maximum(total, 1e-30)[..., None]
    return out_GNQH.transpose(0, 2, 1, 3).reshape(q_TNH.shape).astype(q_TNH.dtype)
