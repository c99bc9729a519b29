"""A mixture of experts in place of the feed-forward half of a layer (Shazeer et al., 2017; Fedus et al., 2022).

The work goes with the tokens that are routed, not with the experts there are: tokens are sorted by expert and multiplied in tiles of a
few rows, each by the weights of one expert. All tiles have one shape, so that a token's bits do not depend on what else goes there.
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
from jaxpage.layers.parameter import Source, parameter, tensor
from jaxpage.layers.product import product

TILE_ROWS = 16
ROUTED_AT_ONCE = 16  # tokens


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
        out_TXD = self.made(x_TD, expert_TX, activation)
        total_TD = out_TXD[:, 0] * weight_TX[:, :1]
        for place in range(1, expert_TX.shape[1]):  # in one order, whatever XLA makes of a sum
            total_TD = total_TD + out_TXD[:, place] * weight_TX[:, place : place + 1]
        return total_TD.astype(x_TD.dtype)

    def made(self, x_TD: Float[Array, "T D"], expert_TX: Int[Array, "T X"], activation: str) -> Float[Array, "T X D"]:
        """What each of the chosen experts makes of each token; zeros of a number that is no expert's."""
        num_tokens, per_token = expert_TX.shape
        num_pairs, num_experts = num_tokens * per_token, self.gate_up.shape[0]
        rows = TILE_ROWS
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
        return jax.lax.fori_loop(0, end_E[-1], tile, empty).reshape(num_tokens, per_token, -1)


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
        expert_TX, weight_TX = jax.lax.platform_dependent(logits_TE, cpu=self._chosen_by_tiles, default=self._chosen)
        return expert_TX, weight_TX.astype(x_TD.dtype)

    def _chosen(self, logits_TE: Float[Array, "T E"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        odds_TE = jnp.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))
        weight_TX, expert_TX = jax.lax.top_k(odds_TE, self.spec.per_token)
        return expert_TX, weight_TX / _total(weight_TX if self.spec.normalized else odds_TE)

    def _chosen_by_tiles(self, logits_TE: Float[Array, "T E"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """In one shape for any number of tokens: what XLA makes of an exponential on CPU depends on the shape (docs/lab-log.md)."""
        num_tokens, num_experts = logits_TE.shape
        padded = jnp.pad(logits_TE, ((0, -num_tokens % ROUTED_AT_ONCE), (0, 0)))
        tiles = jax.lax.map(self._chosen, padded.reshape(-1, ROUTED_AT_ONCE, num_experts))
        expert_TX, weight_TX = (each.reshape(-1, self.spec.per_token)[:num_tokens] for each in tiles)
        return expert_TX, weight_TX


def _total(x_TE: Float[Array, "T E"]) -> Float[Array, "T 1"]:
    """The sum over the last axis, by halves: XLA on CPU adds up a reduction in an order that depends on the other axis."""
    width = x_TE.shape[1]
    if width == 1:
        return x_TE
    half = 1 << (width - 1).bit_length() - 1
    rest = jnp.pad(x_TE[:, half:], ((0, 0), (0, 2 * half - width)))
    return _total(x_TE[:, :half] + rest)
