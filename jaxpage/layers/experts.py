"""A mixture of experts in place of the feed-forward half of a layer (Shazeer et al., 2017; Fedus et al., 2022).

The work goes with the tokens that are routed, not with the experts there are: tokens are sorted by expert and multiplied in tiles of a
few rows, each by the weights of one expert. A tile has at least two rows, so that a token's bits do not depend on what else goes there.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.norms import mean
from jaxpage.layers.parameter import Source, parameter, tensor
from jaxpage.layers.product import product

MOST_ROWS = 64  # of a tile


@dataclass(frozen=True)
class ExpertsSpec:
    """width: of an expert's inner layer. per_token: how many experts a token takes.

    normalized: the weights of those add up to one. shared_width: of an expert that all tokens take as well; None: there is none.
    """

    num_experts: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int | None = None


class Experts(nnx.Module):
    """The experts' weights, one above the other. gate_up, down: where they stand in a checkpoint."""

    def __init__(
        self, spec: ExpertsSpec, model_width: int, *, gate_up: list[Source], down: list[Source], dtype: DTypeLike
    ):
        count, inner = spec.num_experts, spec.width
        self.gate_up = parameter(
            (count, 2 * inner, model_width),
            axes=("expert", (("ffn", inner), ("ffn", inner)), "embed"),
            dtype=dtype,
            sources=gate_up,
        )
        self.down = parameter((count, model_width, inner), axes=("expert", "embed", "ffn"), dtype=dtype, sources=down)

    def __call__(
        self, x_TD: Float[Array, "T D"], expert_TX: Int[Array, "T X"], weight_TX: Float[Array, "T X"], activation: str
    ) -> Float[Array, "T D"]:
        """What the chosen experts make of each token, added up with these weights."""
        num_tokens, per_token = expert_TX.shape
        num_pairs, num_experts = num_tokens * per_token, self.gate_up.shape[0]
        rows = min(MOST_ROWS, max(2, 1 << (num_pairs // num_experts).bit_length()))
        expert_P = expert_TX.reshape(-1)  # P pairs of a token and an expert
        order_P = jnp.argsort(expert_P, stable=True)
        count_E = jnp.bincount(expert_P, length=num_experts)
        first_E = jnp.cumsum(count_E) - count_E  # of each expert's pairs in that order
        end_E = jnp.cumsum(-(-count_E // rows))  # of each expert's tiles
        x_TD = jnp.concatenate([x_TD, jnp.zeros_like(x_TD[:1])])  # padding takes the last row

        def tile(index: jax.Array, out_PD: jax.Array) -> jax.Array:
            expert = jnp.searchsorted(end_E, index, side="right")
            place = (index - jnp.where(expert > 0, end_E[expert - 1], 0)) * rows + jnp.arange(rows)
            pair = jnp.where(
                place < count_E[expert], order_P[jnp.minimum(first_E[expert] + place, num_pairs - 1)], num_pairs
            )
            gate, up = jnp.split(product(x_TD[pair // per_token], self.gate_up[...][expert]), 2, axis=-1)
            made = product(ACTIVATIONS[activation](gate) * up, self.down[...][expert])
            return out_PD.at[pair].set(made, mode="drop")

        empty = jnp.zeros((num_pairs, x_TD.shape[1]), x_TD.dtype)
        out_TXD = jax.lax.fori_loop(0, end_E[-1], tile, empty).reshape(num_tokens, per_token, -1)
        total_TD = out_TXD[:, 0] * weight_TX[:, :1]
        for place in range(1, per_token):  # in one order, whatever XLA makes of a sum
            total_TD = total_TD + out_TXD[:, place] * weight_TX[:, place : place + 1]
        return total_TD.astype(x_TD.dtype)


class MixtureOfExperts(nnx.Module):
    """Each token goes to the experts that the router rates highest, by a softmax in float32 over all of them.

    router: where its weight stands in a checkpoint. shared: an expert of all tokens, and where the weight of its gate stands.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        model_width: int,
        experts: Experts,
        *,
        router: str,
        router_aliases: tuple[str, ...] = (),
        activation: str,
        shared: tuple[GatedMLP, str] | None = None,
        dtype: DTypeLike,
    ):
        shape = (spec.num_experts, model_width)
        self.router = parameter(
            shape, axes=(None, "embed"), dtype=dtype, sources=[tensor(router, *shape, aliases=router_aliases)]
        )
        self.spec, self.experts, self.activation = spec, experts, activation
        expert, gate = shared or (None, "")
        shape = (1, model_width)
        self.shared = expert
        self.shared_gate = (
            None
            if expert is None
            else parameter(shape, axes=(None, "embed"), dtype=dtype, sources=[tensor(gate, *shape)])
        )

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        expert_TX, weight_TX = self._routed(x_TD)
        out_TD = self.experts(x_TD, expert_TX, weight_TX, self.activation)
        if self.shared is None or self.shared_gate is None:
            return out_TD
        two_2D = jnp.repeat(self.shared_gate[...], 2, axis=0)  # a matrix-vector product would take another path
        return out_TD + jax.nn.sigmoid(product(x_TD, two_2D)[:, :1]) * self.shared(x_TD)

    def _routed(self, x_TD: Float[Array, "T D"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        logits_TE = product(x_TD, self.router[...]).astype(jnp.float32)
        odds_TE = jnp.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))
        weight_TX, expert_TX = jax.lax.top_k(odds_TE / (mean(odds_TE) * self.spec.num_experts), self.spec.per_token)
        if self.spec.normalized:
            total_T1 = weight_TX[:, :1]
            for place in range(1, self.spec.per_token):
                total_T1 = total_T1 + weight_TX[:, place : place + 1]
            weight_TX = weight_TX / total_T1
        return expert_TX, weight_TX.astype(x_TD.dtype)
