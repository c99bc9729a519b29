"""Medusa-1 heads predict, from the model's last hidden state, the tokens after the next one.

See Cai et al. 2024, arXiv:2401.10774. Head j puts h through residual blocks h + SiLU(W h + b), then
through a token table of its own. Both published formats of the weights are known: the authors' and
vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Embedding, Linear
from jaxpage.layers.parameter import parameter
from jaxpage.models.parts import Scope


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """Holds the sizes of heads, and the layout of their tensors.

    Attributes:
        layout: The format of the names.
        num_heads: The number of heads (J).
        num_layers: The residual blocks of each head; 0 if it has a table alone.
        bias: True if the blocks have biases.
        one_table: True if all heads share the table of the first.
        table_rows: The rows of a table: V, or the number of tokens that heads with a vocabulary of
            their own know.
        hidden_size: The width of the model (D).
        num_known: The number of tokens of a token map; None without one. With a map a row of a
            table is not the token of that id.
    """

    layout: Literal["medusa", "vllm"]
    num_heads: int
    num_layers: int
    bias: bool
    one_table: bool
    table_rows: int
    hidden_size: int
    num_known: int | None = None

    def table(self, head: int) -> str:
        """Returns the name of a head's table in the checkpoint."""
        return f"{head}.{self.num_layers}" if self.layout == "medusa" else f"lm_heads.{head}"

    def block(self, head: int, layer: int) -> str:
        """Returns the name of a residual block in the checkpoint."""
        return (
            f"{head}.{layer}.linear" if self.layout == "medusa" else f"blocks.{head}.layers.{layer}"
        )


class MedusaHeads(nnx.Module):
    """Holds all heads of a model.

    In a file whose heads know a part of the vocabulary, tables may have rows for all of it.
    """

    def __init__(self, spec: MedusaSpec, *, dtype: jax.typing.DTypeLike):
        width = spec.hidden_size
        rows = spec.table_rows
        aliases = ("lm_head",) if spec.one_table else ()

        def block(head: int, layer: int) -> Linear:
            part = spec.block(head, layer), width
            return Scope("", dtype).projection(width, part, axes=(None, "embed"), bias=spec.bias)

        self.blocks = nnx.List(
            nnx.List(block(head, layer) for layer in range(spec.num_layers))
            for head in range(spec.num_heads)
        )
        self.tables = nnx.List(
            Embedding(rows, width, name=spec.table(head), aliases=aliases, dtype=dtype)
            for head in range(1 if spec.one_table else spec.num_heads)
        )
        known = spec.num_known
        self.token_map = (
            None if known is None else parameter((known,), axes=("vocab",), dtype=jnp.int32)
        )

    def head_logits(self, head: int, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of one head, in float32."""
        x_BD = hidden_BD
        for block in self.blocks[head]:
            x_BD = x_BD + jax.nn.silu(block(x_BD))
        return self.tables[min(head, len(self.tables) - 1)].logits(x_BD)

    def top_ids(self, hidden_BD: Float[Array, "B D"], num_candidates: int) -> Int[Array, "B J W"]:
        """Returns the most probable token ids of each head, best first.

        Args:
            hidden_BD: The hidden states after the model's final norm. For the hidden state of a
                token, head j predicts the token that is j + 2 places after it.
            num_candidates: The number of ids of a head (W), at most the rows of a table.
        """
        logits = [self.head_logits(head, hidden_BD) for head in range(len(self.blocks))]
        ids_BJW = jnp.stack(
            [jax.lax.top_k(each, num_candidates)[1] for each in logits], axis=1
        ).astype(jnp.int32)
        return ids_BJW if self.token_map is None else self.token_map[...][ids_BJW]
