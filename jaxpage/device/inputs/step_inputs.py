"""Packs a step's metadata into one int32 vector: one transfer, which the device slices again.

Floats and seeds travel as their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxpage.device.inputs.buckets import Bucket
from jaxpage.shapes import MAX_BIASES
from jaxpage.step.token_masks import num_mask_words

NUM_FLAGS = 9


class TableShape(NamedTuple):
    """Holds the shape of the block tables of a step, and what else all steps have in common."""

    num_groups: int  # Z: cache groups
    width: int  # M: blocks of the longest sequence
    num_axes: int = 0  # A: axes of rotary positions; 0 if these are the tokens' places
    sees_ahead: bool = False  # tokens of pictures see each other both ways


class DrawInputs(NamedTuple):
    """Holds what each draw of a step depends on, one entry a draw."""

    drawn_token_R: jax.Array  # index into the stream of the token whose logits are drawn from
    temperature_R: jax.Array  # 0 is greedy
    top_k_R: jax.Array  # 0 is off
    top_p_R: jax.Array
    min_p_R: jax.Array
    seed_R2: jax.Array  # the noise key's two words
    sample_index_R: jax.Array
    drawn_position_R: jax.Array  # the position of the drawn token
    repetition_penalty_R: jax.Array  # 1 is off
    frequency_penalty_R: jax.Array
    presence_penalty_R: jax.Array
    num_prompt_tokens_R: jax.Array  # tokens of the history before the output
    # 1: its log probabilities are those of the distribution that it is drawn from
    is_processed_R: jax.Array


class StepInputs(NamedTuple):
    """Holds the fields of a step's metadata, in the order in which they are packed.

    The batch builder writes them as numpy views, all by their names, and the step reads them as
    arrays.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    # The slot of each token's key and value in each cache group: block * S + offset. Padding goes
    # to block 0.
    slots_ZT: jax.Array
    block_table_ZBM: jax.Array
    context_len_B: jax.Array
    query_start: jax.Array  # [B + 1]
    next_token_B: jax.Array  # the known token after each row; -1: it is drawn
    draws: DrawInputs
    # The place in the stream of the token before this one, in steps that verify; -1: it was
    # computed before the step.
    parents_T: jax.Array
    # A bit for each token of the row that a token sees, itself included, in steps with trees.
    tree_mask_TU: jax.Array
    q_ids_TW: jax.Array  # the tokens that each draft was drawn from, padded with -1
    q_TW: jax.Array  # their probabilities; 1 for a draft that was not drawn
    # The token whose log probability after this token is wanted; 0 where none is.
    scored_T: jax.Array
    lora_slot_T: jax.Array  # the slot of its adapter; 0: none
    axes_AT: jax.Array  # the rotary positions, if these have several axes
    # The last position that each token sees, in steps that take vectors if these see each other
    # both ways.
    last_seen_T: jax.Array
    is_vector_T: jax.Array  # 1 where a vector takes the place of the token, in steps that take some
    flags: jax.Array  # see `Flags`

    @property
    def rotary_AT(self) -> jax.Array | None:
        """Returns the rotary positions, if these have several axes."""
        return self.axes_AT if len(self.axes_AT) else None


class Flags:
    """Names the places in `StepInputs.flags`, which say what any row of the step asks for.

    Work that no row asks for is not done. Three flags are numbers: SCORED counts the tokens of the
    stream up to the last whose `scored_T` is wanted, DRAFT_DEPTH is `StepPlan.draft_depth`, or -1
    for None, and DRAWN counts the draws, which those of padding follow.
    """

    RANDOM, LOGPROBS, MASKED, BIASED, PENALISED, SCORED, DRAFT_DEPTH, PROCESSED, DRAWN = range(
        NUM_FLAGS
    )


class ProcessorInputs(NamedTuple):
    """Holds the wide arrays that change a draw's logits.

    They are rarely wanted, and do not travel when no draw of a step asks for them.
    """

    mask_RU: Any  # uint32: a bit per token id: see jaxpage/step/token_masks.py
    bias_ids_RE: Any  # padded with V
    bias_RE: Any  # float32
    history_RC: Any  # the known tokens, prompt first, padded with V


# The names of all fields, each of which is a part of the packed vector.
FIELDS = tuple(
    name
    for field in StepInputs._fields
    for name in (DrawInputs._fields if field == "draws" else (field,))
)
_FLOATS = frozenset(
    {
        "temperature_R",
        "top_p_R",
        "min_p_R",
        "repetition_penalty_R",
        "frequency_penalty_R",
        "presence_penalty_R",
        "q_TW",
    }
)
_WORDS = frozenset({"seed_R2", "tree_mask_TU"})


def _shapes(bucket: Bucket, tables: TableShape) -> dict[str, tuple[int, ...]]:
    tokens = bucket.num_tokens
    rows = bucket.num_rows
    draws = bucket.num_draws
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(FIELDS, (draws,))
    shapes |= dict.fromkeys(("token_ids_T", "positions_T", "scored_T", "lora_slot_T"), (tokens,))
    shapes |= {
        "slots_ZT": (tables.num_groups, tokens),
        "block_table_ZBM": (tables.num_groups, rows, tables.width),
    }
    shapes |= dict.fromkeys(("context_len_B", "next_token_B"), (rows,))
    shapes |= {
        "query_start": (rows + 1,),
        "seed_R2": (draws, 2),
        "parents_T": (tokens if bucket.verifies else 0,),
    }
    shapes["tree_mask_TU"] = (tokens, bucket.num_mask_words)
    shapes |= dict.fromkeys(("q_ids_TW", "q_TW"), (tokens, bucket.q_width))
    shapes["axes_AT"] = (tables.num_axes, tokens)
    shapes["last_seen_T"] = (tokens if bucket.takes_vectors and tables.sees_ahead else 0,)
    shapes["is_vector_T"] = (tokens if bucket.takes_vectors else 0,)
    shapes["flags"] = (NUM_FLAGS,)
    return shapes


def processor_shapes(num_draws: int, *, vocab_size: int, context: int) -> ProcessorInputs:
    """Returns the shapes and types of the logits processors' inputs for `num_draws` draws.

    `context` is C, the positions of the longest sequence.
    """
    return ProcessorInputs(
        mask_RU=jax.ShapeDtypeStruct((num_draws, num_mask_words(vocab_size)), jnp.uint32),
        bias_ids_RE=jax.ShapeDtypeStruct((num_draws, min(MAX_BIASES, vocab_size)), jnp.int32),
        bias_RE=jax.ShapeDtypeStruct((num_draws, min(MAX_BIASES, vocab_size)), jnp.float32),
        history_RC=jax.ShapeDtypeStruct((num_draws, context), jnp.int32),
    )


def vector_shape(num_deep: int, width: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns the shape [1 + n, D] of what takes the place of a token.

    Args:
        num_deep: The number of vectors for later layers (n).
        width: The width of a vector (D).
        dtype: The type of the model's activations.
    """
    return jax.ShapeDtypeStruct((1 + num_deep, width), jnp.dtype(dtype))


def size_when_packed(bucket: Bucket, tables: TableShape) -> int:
    """Returns the length of a step's packed vector."""
    return max(place.stop for place, _ in _slices(bucket, tables).values())


@functools.cache  # asked for at every step, for a handful of buckets
def _slices(bucket: Bucket, tables: TableShape) -> dict[str, tuple[slice, tuple[int, ...]]]:
    start = 0
    slices = {}
    for name, shape in _shapes(bucket, tables).items():
        stop = start + math.prod(shape)
        slices[name] = (slice(start, stop), shape)
        start = stop
    return slices


def empty_inputs(
    bucket: Bucket, tables: TableShape
) -> tuple[npt.NDArray[np.int32], dict[str, Any]]:
    """Returns a packed vector of zeros, and its fields, to be written in place."""
    packed = np.zeros(size_when_packed(bucket, tables), np.int32)
    return packed, views(packed, bucket, tables)


def views(
    packed: npt.NDArray[np.int32], bucket: Bucket, tables: TableShape
) -> dict[str, npt.NDArray[np.generic]]:
    """Returns the fields of a host vector, to be written in place."""
    fields: dict[str, npt.NDArray[np.generic]] = {}
    for name, (place, shape) in _slices(bucket, tables).items():
        dtype = np.float32 if name in _FLOATS else np.uint32 if name in _WORDS else np.int32
        fields[name] = packed[place].view(dtype).reshape(shape)
    return fields


def unpack(packed: jax.Array, bucket: Bucket, tables: TableShape) -> StepInputs:
    """Returns the fields of a packed vector on the device."""
    fields = {}
    for name, (place, shape) in _slices(bucket, tables).items():
        dtype = jnp.float32 if name in _FLOATS else jnp.uint32 if name in _WORDS else jnp.int32
        fields[name] = jax.lax.bitcast_convert_type(packed[place], dtype).reshape(shape)
    return unflatten(fields)


def unflatten(fields: Mapping[str, Any]) -> StepInputs:
    """Returns the inputs of a step from all their fields, by `FIELDS`."""
    # The packed vector is flat: a nested record costs nothing on the way to the device.
    draws = DrawInputs(**{name: fields[name] for name in DrawInputs._fields})
    shared = {name: fields[name] for name in StepInputs._fields if name != "draws"}
    return StepInputs(draws=draws, **shared)


def at_step(inputs: StepInputs, index: jax.Array, token_ids_B: jax.Array) -> StepInputs:
    """Returns the inputs of step `index` of several decode steps.

    They are those of a decode bucket whose rows are these tokens, at their places.
    """
    first_B = inputs.query_start[:-1]
    length_B = jnp.diff(inputs.query_start)
    index_B = jnp.minimum(
        # A row that has had all its steps stays at its last token; a row of padding may begin past
        # the end.
        first_B + jnp.minimum(index, jnp.maximum(length_B - 1, 0)),
        inputs.token_ids_T.shape[0] - 1,
    )
    draws = jax.tree.map(lambda array: array[index_B], inputs.draws)
    positions_B = inputs.positions_T[index_B]
    is_row_B = length_B > 0
    return inputs._replace(
        draws=draws._replace(drawn_token_R=jnp.arange(len(token_ids_B))),
        flags=inputs.flags.at[Flags.DRAWN].set(is_row_B.sum()),
        token_ids_T=token_ids_B,
        positions_T=positions_B,
        axes_AT=inputs.axes_AT[:, index_B],
        slots_ZT=jnp.where(index < length_B, inputs.slots_ZT[:, index_B], 0),
        context_len_B=jnp.where(is_row_B, positions_B + 1, 0),
        # Rows of padding come last, so the others are rows of one token, one after the other.
        query_start=jnp.append(0, jnp.cumsum(is_row_B)),
        scored_T=jnp.zeros_like(token_ids_B),
        lora_slot_T=jnp.where(is_row_B, inputs.lora_slot_T[index_B], 0),
    )
