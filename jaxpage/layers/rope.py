"""Rotary position embedding: queries and keys are turned by an angle that grows with the position (Su et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
    """What a rotation needs; a constant of the trace. `layers.rope_scaling` computes it from a config.

    frequencies: radians per position of each pair of the head, H / 2 of them, each exactly a float32.
    attention_factor: multiplies sines and cosines, hence queries and keys (YaRN and LongRoPE).
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0

    def angles(self, positions_T: Int[Array, "T"]) -> Angles:
        """Cosines and sines for the positions, in float32; computed once per step and shared by the layers."""
        frequencies_E = jnp.asarray(np.asarray(self.frequencies, np.float32))
        angles_TE = positions_T.astype(jnp.float32)[:, None] * frequencies_E[None, :]
        factor = float(self.attention_factor)
        return Angles(jnp.cos(angles_TE) * factor, jnp.sin(angles_TE) * factor)


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of a stream of tokens, each [T, H / 2]."""

    cos_TE: Float[Array, "T E"]
    sin_TE: Float[Array, "T E"]

    def rotate(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Turn the pairs (i, i + H/2) of every head, in float32: the layout of Hugging Face checkpoints."""
        cos_T1E, sin_T1E = self.cos_TE[:, None, :], self.sin_TE[:, None, :]
        first_TNE, second_TNE = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
        turned = (first_TNE * cos_T1E - second_TNE * sin_T1E, second_TNE * cos_T1E + first_TNE * sin_T1E)
        return jnp.concatenate(turned, axis=-1).astype(x_TNH.dtype)
