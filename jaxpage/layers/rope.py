"""Rotary position embedding turns queries and keys by an angle that grows with the position.

See Su et al., 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpage.layers.trace_scope import row_kernels


@dataclass(frozen=True)
class Rope:
    """Holds the constants of a rotation, which are constants of the trace.

    `layers.rope_scaling` computes them from a config.

    Attributes:
        frequencies: The radians per position of each pair of a head, each exactly a float32. Where
            there are fewer than H / 2, the rest of the head is not turned. Those of nanochat are
            negative, because it turns in the opposite direction.
        attention_factor: The factor of sines and cosines, hence of queries and keys (YaRN and
            LongRoPE).
        interleaved: True if the pairs are neighbours, (2 i, 2 i + 1), and not (i, i + E).
        axes: For each pair the axis by whose positions it turns, where tokens have positions on
            several axes (pictures); empty if there is one axis.
    """

    # A tuple, because a rope is a key (`ForwardContext.angles`), which an array cannot be.
    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()

    def angles(self, positions: Int[Array, "T"] | Int[Array, "A T"]) -> Angles:
        """Returns cosines and sines for the positions, in float32.

        A step computes them once, and its layers share them.

        Args:
            positions: The position of each token, on one axis or on each of several.
        """
        frequencies_E = jnp.asarray(np.asarray(self.frequencies, np.float32))
        wide = positions.astype(jnp.float32)
        position_TE = wide[:, None] if wide.ndim == 1 else wide[np.asarray(self.axes, int)].T
        angles_TE = position_TE * frequencies_E[None, :]
        factor = float(self.attention_factor)
        return Angles(jnp.cos(angles_TE) * factor, jnp.sin(angles_TE) * factor, self.interleaved)


NO_ROTATION = Rope(())


@dataclass(frozen=True)
class Angles:
    """Holds the cosines and sines of a stream of tokens, for E pairs of each head."""

    cos_TE: Float[Array, "T E"]
    sin_TE: Float[Array, "T E"]
    interleaved: bool = False

    def split_and_rotate(
        self, x_TF: Float[Array, "T F"], num_keys: int, head_dim: int
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Returns the queries and keys of rows, rotated, and the values after them."""
        kernels = row_kernels(x_TF.dtype)
        if kernels is not None and not self.interleaved:
            return kernels.split_and_rotate(x_TF, self.cos_TE, self.sin_TE, num_keys, head_dim)
        x_TMH = x_TF.reshape(len(x_TF), -1, head_dim)
        num_queries = x_TMH.shape[1] - 2 * num_keys
        q_TNH, k_TKH, v_TKH = jnp.split(x_TMH, [num_queries, num_queries + num_keys], axis=1)
        return self.rotate(q_TNH), self.rotate(k_TKH), v_TKH

    def rotate(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Turns the pairs of every head, in float32."""
        if (kernels := row_kernels(x_TNH.dtype)) is not None:
            turn = kernels.rotate_pairs if self.interleaved else kernels.rotate
            if turn is not None:
                return turn(x_TNH, self.cos_TE, self.sin_TE)
        cos_T1E = self.cos_TE[:, None, :]
        sin_T1E = self.sin_TE[:, None, :]
        width = 2 * self.cos_TE.shape[1]
        # A head may be wider than its pairs; the rest of it is not turned.
        wide = x_TNH[..., :width].astype(jnp.float32)
        if self.interleaved:
            first_TNE = wide[..., 0::2]
            second_TNE = wide[..., 1::2]
        else:
            first_TNE, second_TNE = jnp.split(wide, 2, axis=-1)
        rotated = (
            first_TNE * cos_T1E - second_TNE * sin_T1E,
            second_TNE * cos_T1E + first_TNE * sin_T1E,
        )
        joined = (
            jnp.stack(rotated, -1).reshape(wide.shape)
            if self.interleaved
            else jnp.concatenate(rotated, axis=-1)
        )
        return jnp.concatenate([joined.astype(x_TNH.dtype), x_TNH[..., width:]], axis=-1)
