"""Tables have a row per token or per position; a token table also gives the logits, tied or not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.matmul import matmul
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.layers.weight_kinds import StoredWeight


class Embedding(nnx.Module):
    """Looks up rows of a table [rows, width].

    Ids are not checked: JAX clamps them, so the host validates them first.

    Attributes:
        name: The module of the checkpoint; None for a table that no checkpoint has.
        aliases: Other names of the module.
        is_head: True if the model's logits come from this table.
        axis: The name of the axis of the rows.
        table: The parameter.
        bias: The biases of logits, or None.
    """

    bias: nnx.Param[jax.Array] | None = None

    def __init__(
        self,
        num_rows: int,
        width: int,
        *,
        name: str | None,
        axis: str | None = "vocab",
        aliases: tuple[str, ...] = (),
        bias: str | None = None,
        is_head: bool = False,
        dtype: DTypeLike,
    ):
        others = tuple(f"{alias}.weight" for alias in aliases)
        sources = (
            [] if name is None else [tensor(f"{name}.weight", num_rows, width, aliases=others)]
        )
        self.name = name
        self.aliases = aliases
        self.is_head = is_head
        self.axis = axis
        self.table = parameter(
            (num_rows, width), axes=(axis, "embed"), dtype=dtype, sources=sources
        )
        if bias is not None:
            source = tensor(bias, num_rows)
            self.bias = parameter((num_rows,), axes=(axis,), dtype=dtype, sources=[source])

    @property
    def weight(self) -> StoredWeight:
        """Returns the table as it is stored."""
        return self.table[...]

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
        logits_BV = matmul(hidden_BD, self.weight, result=jnp.float32)
        return (
            logits_BV
            if self.bias is None
            else logits_BV + self.bias[...].astype(jnp.float32)[None, :]
        )


def token_tables(
    vocab_size: int,
    width: int,
    *,
    name: str,
    heads: tuple[str, ...] = ("lm_head",),
    tied: bool,
    bias: bool = False,
    dtype: DTypeLike,
) -> tuple[Embedding, Embedding | None]:
    """Returns the token table and the head; None for the head where it is tied to the table.

    A checkpoint of a tied model may have the name of the table, or of the head, or both.

    Args:
        vocab_size: The number of token ids.
        width: The width of the model.
        name: The name of the token table.
        heads: The names of the head.
        tied: True if the table is the head too.
        bias: True if logits have biases.
        dtype: The type of the parameters.
    """
    biases = f"{heads[0]}.bias" if bias else None
    sizes = (vocab_size, width)
    head_of = functools.partial(Embedding, *sizes, bias=biases, is_head=True, dtype=dtype)
    if tied:
        return head_of(name=name, aliases=heads), None
    tokens = Embedding(*sizes, name=name, dtype=dtype)
    return tokens, head_of(name=heads[0], aliases=heads[1:])
