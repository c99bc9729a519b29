"""Tables have a row per token or per position; a token table also gives the logits, tied or not."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.parameter import parameter, tensor
from jaxpage.layers.product import product


class Embedding(nnx.Module):
    """Looks up rows of a table [rows, width].

    Ids are not checked: JAX clamps them, so the host validates them first.

    Attributes:
        name: The module of the checkpoint; None for a table that no checkpoint has.
        axis: The name of the axis of the rows.
        table: The parameter.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        *,
        name: str | None,
        axis: str | None = "vocab",
        aliases: tuple[str, ...] = (),
        dtype: DTypeLike,
    ):
        others = tuple(f"{alias}.weight" for alias in aliases)
        sources = (
            [] if name is None else [tensor(f"{name}.weight", num_rows, width, aliases=others)]
        )
        self.name = name
        self.axis = axis
        self.table = parameter(
            (num_rows, width), axes=(axis, "embed"), dtype=dtype, sources=sources
        )

    @property
    def num_rows(self) -> int:
        """Returns the number of rows."""
        return self.table.get_value().shape[0]

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Returns the rows of these ids."""
        return self.table[...][ids_T]

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns `hidden @ table.T` in float32.

        An untied head is such a table too: checkpoints store it in this order.
        """
        return product(hidden_BD, self.table[...], result=jnp.float32)


def token_tables(
    vocab_size: int, width: int, *, name: str, tied: bool, dtype: DTypeLike
) -> tuple[Embedding, Embedding | None]:
    """Returns the token table and the head; None for the head where it is tied to the table.

    A checkpoint of a tied model may have the name of the table, or of the head, or both.
    """
    head = "lm_head"
    tokens = Embedding(vocab_size, width, name=name, aliases=(head,) if tied else (), dtype=dtype)
    return tokens, None if tied else Embedding(vocab_size, width, name=head, dtype=dtype)
