"""Tables with a row per token or per position; a token table also gives the logits, tied or not."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.linear import precision


class Embedding(nnx.Module):
    """A table `[rows, width]`. Ids are not checked here: JAX clamps them, so the host validates them first."""

    def __init__(self, num_rows: int, width: int, *, dtype: DTypeLike):
        self.table = nnx.Param(jnp.zeros((num_rows, width), dtype))

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        return self.table[...][ids_T]

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """`hidden @ table.T` in float32. An untied head is such a table too: checkpoints need no transpose for it."""
        table_VD = self.table[...]
        return jnp.einsum(
            "BD,VD->BV",
            hidden_BD,
            table_VD,
            precision=precision(table_VD.dtype),
            preferred_element_type=jnp.float32,
        )
