"""Medusa-1 heads: small networks on the model's last hidden state that predict the tokens behind the next one.

Cai et al. 2024, arXiv:2401.10774: head j takes h through residual blocks h + SiLU(W h + b), then through a token table of its own. Both
published formats of the weights are known here: of the authors, and of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.embedding import Embedding
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.parameter import parameter


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """The sizes of heads, and how their tensors are named."""

    layout: Literal["medusa", "vllm"]
    num_heads: int  # J
    num_layers: int  # residual blocks of each head; 0: its table alone
    bias: bool  # of the blocks
    one_table: bool  # all heads share the first one's
    table_rows: int  # V, or as many tokens as heads with a vocabulary of their own know
    model_width: int  # D
    # tokens of a token map: a row of a table is not the token of that id
    num_known: int | None = None

    def table(self, head: int) -> str:
        """The name of the module in the checkpoint, as of `block`."""
        return f"{head}.{self.num_layers}" if self.layout == "medusa" else f"lm_heads.{head}"

    def block(self, head: int, layer: int) -> str:
        return (
            f"{head}.{layer}.linear" if self.layout == "medusa" else f"blocks.{head}.layers.{layer}"
        )


class MedusaHeads(nnx.Module):
    """All heads of a model. In a file whose heads know a part of the vocabulary tables may have the rows of all of it."""

    def __init__(self, spec: MedusaSpec, *, dtype: DTypeLike):
        width, rows, aliases = (
            spec.model_width,
            spec.table_rows,
            ("lm_head",) if spec.one_table else (),
        )

        def block(head: int, layer: int) -> Linear:
            part = Part(width, "embed", spec.block(head, layer))
            return linear(width, part, input_axis=None, bias=spec.bias, dtype=dtype)

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
        """Of one head, in float32."""
        x_BD = hidden_BD
        for block in self.blocks[head]:
            x_BD = x_BD + jax.nn.silu(block(x_BD))
        return self.tables[min(head, len(self.tables) - 1)].logits(x_BD)

    def top_ids(self, hidden_BD: Float[Array, "B D"], num_candidates: int) -> Int[Array, "B J W"]:
        """The token ids that each head takes for the likeliest, best first.

        Args:
            hidden_BD: behind the model's final norm. Head j predicts the token j + 2 behind the one that stands there.
            num_candidates: W, at most the rows of a table.
        """
        logits = [self.head_logits(head, hidden_BD) for head in range(len(self.blocks))]
        ids_BJW = jnp.stack(
            [jax.lax.top_k(each, num_candidates)[1] for each in logits], axis=1
        ).astype(jnp.int32)
        return ids_BJW if self.token_map is None else self.token_map[...][ids_BJW]
