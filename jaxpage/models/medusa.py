"""Medusa-1 heads: small networks on the model's last hidden state that guess the tokens behind the next one.

Cai et al. 2024, arXiv:2401.10774: head j takes h through residual blocks h + SiLU(W h + b), then through a token table of its own. Both
published formats of the weights are known here: of the authors, and of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.layers.linear import precision
from jaxpage.models.weights import Weight

PREFIX = "medusa_heads."  # vLLM's names may begin with it


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

    def weights(self) -> list[Weight]:
        """One entry per parameter: {"blocks": {head: {layer: kernel, bias}}, "tables": {head: [rows, D]}}."""
        weights = []
        width = self.model_width
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                name, path = self._block(head, layer), ("blocks", head, layer)
                weights.append(self._weight((*path, "kernel"), f"{name}.weight", width, width))
                if self.bias:
                    weights.append(self._weight((*path, "bias"), f"{name}.bias", width))
            if not (self.one_table and head):
                aliases = ("lm_head.weight",) if self.one_table else ()
                weights.append(
                    self._weight(("tables", head), self.table(head), self.table_rows, width, aliases=aliases)
                )
        return weights

    def table(self, head: int) -> str:
        return f"{head}.{self.num_layers}.weight" if self.layout == "medusa" else f"lm_heads.{head}.weight"

    def _block(self, head: int, layer: int) -> str:
        return f"{head}.{layer}.linear" if self.layout == "medusa" else f"blocks.{head}.layers.{layer}"

    def _weight(self, path: tuple[str | int, ...], name: str, *shape: int, aliases: tuple[str, ...] = ()) -> Weight:
        if self.layout == "vllm":
            aliases = (*aliases, *(PREFIX + known for known in (name, *aliases)))
        return Weight(path, name, shape, aliases=aliases)


def head_logits(heads: Any, head: int, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Of one head, in float32."""
    x_BD = hidden_BD
    for layer in range(len(heads.get("blocks", {}).get(head, {}))):
        block = heads["blocks"][head][layer]
        kernel_DD = block["kernel"]
        y_BD = jnp.einsum("BI,OI->BO", x_BD, kernel_DD, precision=precision(kernel_DD.dtype))
        x_BD = x_BD + jax.nn.silu(y_BD + block["bias"] if "bias" in block else y_BD)
    table_VD = heads["tables"][head if head in heads["tables"] else 0]
    return jnp.einsum(
        "BD,VD->BV", x_BD, table_VD, precision=precision(table_VD.dtype), preferred_element_type=jnp.float32
    )


def num_heads(heads: Any) -> int:
    return max(len(heads.get("blocks", {})), len(heads["tables"]))


def guess(heads: Any, hidden_BD: Float[Array, "B D"], num_guesses: int) -> Int[Array, "B J W"]:
    """The token ids that each head takes for the likeliest, best first.

    Args:
        heads: as `MedusaSpec.weights` has it, and "token_map" [rows] where a row of a table is not the token of that id.
        hidden_BD: behind the model's final norm. Head j guesses the token j + 2 behind the one that stands there.
        num_guesses: W, at most the rows of a table.
    """
    ids = [jax.lax.top_k(head_logits(heads, head, hidden_BD), num_guesses)[1] for head in range(num_heads(heads))]
    ids_BJW = jnp.stack(ids, axis=1).astype(jnp.int32)
    return heads["token_map"][ids_BJW] if "token_map" in heads else ids_BJW
