"""Changes the logits of a draw as its request asks, before temperature and truncation.

Masks, biases and penalties apply in this order. The order and the meaning are vLLM's. Each part is
computed only in steps in which a row asks for it, and a row that asks for nothing keeps its logits
to the last bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.inputs.step_inputs import Flags, ProcessorInputs, StepInputs
from jaxpage.step.token_masks import MASK_BITS


class Penalties(NamedTuple):
    """Holds the numbers that penalties take besides the history, with an entry for each draw."""

    num_prompt_tokens_R: jax.Array
    repetition_R: jax.Array
    frequency_R: jax.Array
    presence_R: jax.Array


def penalties_of(inputs: StepInputs) -> Penalties:
    """Returns the penalties of the step's draws."""
    return Penalties(
        inputs.draws.num_prompt_tokens_R,
        inputs.draws.repetition_penalty_R,
        inputs.draws.frequency_penalty_R,
        inputs.draws.presence_penalty_R,
    )


def are_processed(flags: Int[Array, "_"]) -> Bool[Array, ""]:
    """Returns whether any draw of the step asks for a mask, a bias or a penalty."""
    return flags[Flags.MASKED] + flags[Flags.BIASED] + flags[Flags.PENALISED] > 0


def process_logits(
    logits_BV: Float[Array, "B V"],
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    by_row: bool,
) -> Float[Array, "B V"]:
    """Returns the logits that are drawn from.

    With `by_row` it loops over rows instead of one wide computation.
    """

    def process() -> jax.Array:
        return process_rows(
            logits_BV, inputs.flags, processor_inputs, penalties_of(inputs), by_row=by_row
        )

    return jax.lax.cond(are_processed(inputs.flags), process, lambda: logits_BV)


@functools.partial(jax.jit, static_argnames="by_row")
def process_rows(
    logits_BV: Float[Array, "B V"],
    flags: Int[Array, "_"],
    processor_inputs: ProcessorInputs,
    penalties: Penalties,
    *,
    by_row: bool,
) -> Float[Array, "B V"]:
    """Returns the logits that are drawn from, for some rows of a step that processes logits."""

    def process_row(
        logits_V: jax.Array, processor_inputs: ProcessorInputs, row_penalties: Penalties
    ) -> jax.Array:
        logits_V = jax.lax.cond(
            flags[Flags.MASKED] > 0,
            lambda: _mask(logits_V, processor_inputs.mask_RU),
            lambda: logits_V,
        )
        logits_V = jax.lax.cond(
            flags[Flags.BIASED] > 0,
            lambda: _add_bias(logits_V, processor_inputs.bias_ids_RE, processor_inputs.bias_RE),
            lambda: logits_V,
        )
        return jax.lax.cond(
            flags[Flags.PENALISED] > 0,
            lambda: _penalise(logits_V, processor_inputs.history_RC, *row_penalties),
            lambda: logits_V,
        )

    rows = (logits_BV, processor_inputs, penalties)
    if by_row:
        return jax.lax.map(lambda row: process_row(*row), rows)
    return jax.vmap(process_row)(*rows)


def _mask(logits_V: jax.Array, words_U: jax.Array) -> jax.Array:
    bits = (words_U[:, None] >> jnp.arange(MASK_BITS, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(-1)[: logits_V.shape[0]] == 1, logits_V, -jnp.inf)


def _add_bias(logits_V: jax.Array, ids_E: jax.Array, bias_E: jax.Array) -> jax.Array:
    # The ids of a row differ, so that nothing is added up, which a GPU does in any order.
    biased_E = logits_V.at[ids_E].get(mode="fill", fill_value=0.0) + bias_E
    return logits_V.at[ids_E].set(biased_E, mode="drop", wrap_negative_indices=False)


def _penalise(
    logits_V: jax.Array,
    history_C: jax.Array,
    num_prompt_tokens: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Applies the penalties of a draw.

    As in vLLM, repetition is over prompt and output, frequency and presence over the output alone.
    """
    is_output_C = jnp.arange(history_C.shape[0]) >= num_prompt_tokens

    def count(weights_C: jax.Array) -> jax.Array:
        zeros_V = jnp.zeros(logits_V.shape, jnp.int32)
        return zeros_V.at[history_C].add(
            weights_C.astype(jnp.int32), mode="drop", wrap_negative_indices=False
        )

    in_output_V = count(is_output_C)
    in_prompt_V = count(~is_output_C)
    repeated_V = jnp.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    logits_V = jnp.where(in_output_V + in_prompt_V > 0, repeated_V, logits_V)
    penalty_V = frequency * in_output_V.astype(jnp.float32) + presence * (in_output_V > 0)
    return jnp.where(in_output_V > 0, logits_V - penalty_V, logits_V)
