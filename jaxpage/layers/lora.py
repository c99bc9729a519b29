"""Low-rank adapters of a linear layer add `B (A x)` to its output, one adapter per token or none.

See Hu et al., 2021. The work grows with the adapters that a step has, not with those that are
loaded: each is multiplied with all tokens of the step, and the result is taken for its own tokens.
A copy of A and B for every token would be more bytes than the step's own weights, and a product of
one row, whose bits may differ from those of many. A token's result is selected and not added up,
so its bits depend neither on its neighbours' adapters nor on the slot of its own; a token without
an adapter keeps the bits of the base model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.matmul import matmul
from jaxpage.layers.parameter import Axis, parameter
from jaxpage.layers.trace_scope import trace_scope


class LoRA(nnx.Module):
    """Holds the matrices A and B of all slots.

    Where the linear layer joins several products (q, k and v), each has its own A.

    Attributes:
        rows: The outputs of each product.
        a: The matrices A. Those with a smaller rank than the slots are padded with zeros.
        b: The matrices B, which have the factor alpha / r in them.
    """

    def __init__(
        self,
        num_slots: int,
        rank: int,
        num_in: int,
        rows: tuple[int, ...],
        axes: tuple[Axis, Axis],
        dtype: DTypeLike,
    ):
        """Declares the parameters.

        Args:
            num_slots: The number of slots.
            rank: The largest rank of an adapter.
            num_in: The number of inputs of the linear layer.
            rows: The outputs of each product.
            axes: The names of the axes of the linear layer's inputs and outputs.
            dtype: The type of the parameters.
        """
        self.rows = rows
        self.a = parameter(
            (num_slots, len(rows) * rank, num_in), axes=(None, None, axes[0]), dtype=dtype
        )
        self.b = parameter((num_slots, sum(rows), rank), axes=(None, axes[1], None), dtype=dtype)

    def __call__(self, x_TI: Float[Array, "T I"], y_TO: Float[Array, "T O"]) -> Float[Array, "T O"]:
        """Returns y with what each token's adapter adds to it."""
        adapters = trace_scope().adapters
        assert adapters is not None, "a step of a model with adapters gives those of its tokens"
        ends = [sum(self.rows[: index + 1]) for index in range(len(self.rows) - 1)]

        def add(index: jax.Array, y_TO: jax.Array) -> jax.Array:
            slot = adapters.present[index]
            a, b = (
                # Slots count from 1, because 0 stands for a token without an adapter.
                jax.lax.dynamic_index_in_dim(matrix[...], slot - 1, keepdims=False)
                for matrix in (self.a, self.b)
            )
            inner = jnp.split(matmul(x_TI, a), len(self.rows), axis=1)
            added = [
                matmul(inner_TR, b_OR)
                for inner_TR, b_OR in zip(inner, jnp.split(b, ends), strict=True)
            ]
            return jnp.where(
                adapters.slot_T[:, None] == slot, y_TO + jnp.concatenate(added, axis=1), y_TO
            )

        return jax.lax.fori_loop(0, adapters.num_present, add, y_TO)
