"""Draws from logits of which each device has a part of the vocabulary.

The logits are gathered only in steps that ask for more than the largest of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.inputs.step_inputs import Flags, StepInputs
from jaxpage.device.sampler import draws_of, each_row, largest_of, noise_key
from jaxpage.layers.sharding import Sharding, gather, place_of_device
from jaxpage.shapes import NOT_FINITE, NOTHING_ALLOWED


class Logits(NamedTuple):
    """Holds the logits of a step's draws.

    Attributes:
        local_RU: This device's columns, with padding after the last; all V columns where a model
            does not divide its head.
        vocab_size: V, the columns of the whole.
        sharding: The division of the model.
    """

    local_RU: Float[Array, "R U"]
    vocab_size: int  # V
    sharding: Sharding

    @property
    def are_divided(self) -> bool:
        """Returns whether each device has only a part of the vocabulary."""
        return self.local_RU.shape[1] != self.vocab_size

    def whole(self) -> Float[Array, "R V"]:
        """Returns the logits over the whole vocabulary, gathered from all devices."""
        return (
            gather(self.local_RU, 1, self.sharding)[:, : self.vocab_size]
            if self.are_divided
            else self.local_RU
        )


def need_whole_rows(inputs: StepInputs, vocab_size: int) -> Bool[Array, ""]:
    """Returns whether a draw of the step needs the logits of the whole vocabulary.

    It does if it asks for log probabilities, for processed logits, or for a cut-off.
    """
    kinds = (Flags.LOGPROBS, Flags.PROCESSED, Flags.MASKED, Flags.BIASED, Flags.PENALISED)
    cuts_R = (
        ((inputs.draws.top_k_R > 0) & (inputs.draws.top_k_R < vocab_size))
        | (inputs.draws.top_p_R < 1.0)
        | (inputs.draws.min_p_R > 0.0)
    )
    return jnp.any(inputs.flags[jnp.array(kinds)] > 0) | jnp.any(
        (inputs.draws.temperature_R > 0.0) & cuts_R
    )


def draw_from_parts(logits: Logits, inputs: StepInputs, *, by_row: bool) -> Int[Array, "R"]:
    """Draws a token for each row, as `sampler.draw` does, in a step that needs no whole rows.

    The devices exchange the largest logit that each has, and its place. The noise is that of a
    whole row, of which each device takes its part.
    """
    local_RU, vocab_size, sharding = logits
    size = local_RU.shape[1]
    draws = draws_of(inputs)
    first = place_of_device(sharding) * size
    # The last device may have padding after the vocabulary, which must not win.
    local_RU = jnp.where(first + jnp.arange(size) < vocab_size, local_RU, -jnp.inf)

    def perturb(
        logits_U: jax.Array,
        temperature: jax.Array,
        seed_2: jax.Array,
        sample_index: jax.Array,
        position: jax.Array,
    ) -> jax.Array:
        def noisy() -> jax.Array:
            noise_V = jax.random.gumbel(
                noise_key(seed_2, sample_index, position), (vocab_size,), jnp.float32
            )
            # Each device draws that of the whole row, so that a token's noise is what it is on one
            # device.
            padded = jnp.pad(noise_V, (0, sharding.num_devices * size - vocab_size))
            return logits_U / temperature + jax.lax.dynamic_slice_in_dim(padded, first, size)

        perturbed_U: jax.Array = jax.lax.cond(temperature > 0.0, noisy, lambda: logits_U)
        return perturbed_U

    rows = local_RU, draws.temperature_R, draws.seed_R2, draws.sample_index_R, draws.position_R
    is_random = inputs.flags[Flags.RANDOM] > 0
    perturbed_RU = jax.lax.cond(
        is_random, lambda: each_row(perturb, rows, by_row=by_row), lambda: local_RU
    )
    largest_R, index_R = jax.vmap(largest_of)(perturbed_RU)
    return _first_of_all(local_RU, largest_R, first + index_R, sharding)


def _first_of_all(
    local_RU: jax.Array, largest_R: jax.Array, token_ids_R: jax.Array, sharding: Sharding
) -> Int[Array, "R"]:
    """Returns the best token of those that the devices found, in one exchange of a few numbers."""
    # The two halves of `are_finite`: each device can say them of its part only.
    are_numbers_R = jnp.all(local_RU < jnp.inf, axis=1)
    are_any_R = jnp.any(local_RU > -jnp.inf, axis=1)
    local_4R = jnp.stack(
        # Floats travel as their bits, so that one exchange has all four.
        [jax.lax.bitcast_convert_type(largest_R, jnp.int32), token_ids_R, are_numbers_R, are_any_R]
    )
    bits_NR, token_ids_NR, are_numbers_NR, are_any_NR = gather(local_4R[:, None], 1, sharding)
    largest_NR = jax.lax.bitcast_convert_type(bits_NR, jnp.float32)
    largest_R = jnp.max(largest_NR, axis=0)
    # Of equal logits the first token wins, as in a draw from whole rows.
    best_R = jnp.min(
        jnp.where(largest_NR == largest_R, token_ids_NR, jnp.iinfo(jnp.int32).max), axis=0
    )
    best_R = jnp.where(jnp.isfinite(largest_R), best_R, NOTHING_ALLOWED)
    return jnp.where(
        jnp.all(are_numbers_NR > 0, axis=0) & jnp.any(are_any_NR > 0, axis=0), best_R, NOT_FINITE
    )
