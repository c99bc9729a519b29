"""A mixture of experts takes the place of the feed-forward half of a layer.

See Shazeer et al., 2017, and Fedus et al., 2022. The work grows with the tokens, not with the
experts: pairs of a token and an expert are sorted by expert. Where a kernel takes rows in this
order, all are multiplied in one call. Elsewhere they are multiplied in tiles of a few rows, each by
the weights of one expert. All tiles of a step have one shape, so that `matmul` gives a row the
same bits in any tile:

    tokens           t0   t1   t2   t3         each token takes two experts
    experts          0 2  1 2  0 1  0 2
    pairs by expert  [ t0 t2 | t3 - ] [ t1 t2 ] [ t0 t1 | t3 - ]     tiles of two rows
                          expert 0    expert 1       expert 2        - is padding
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpage.layers.activations import ACTIVATIONS, gate
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.linear import Linear
from jaxpage.layers.matmul import has_matmul_by_group, matmul
from jaxpage.layers.mlp import MLP, GatedMLP
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.layers.routing import Router, Routing
from jaxpage.layers.trace_scope import row_kernels, trace_scope

# The rows of a tile; the key is the largest mean number of pairs per expert (docs/lab-log.md, "Time
# of a mixture of experts").
TILE_ROWS = {8: 8, 64: 16, math.inf: 32}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Computes `(up + 1) * gate * sigmoid(alpha * gate)` of clamped gates and ups (GPT-OSS).

    Columns of gates and ups take turns.

    Attributes:
        limit: The largest gate; ups are between `-limit` and `limit`.
        alpha: The factor in the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, both_PF: Float[Array, "P F2"]) -> Float[Array, "P F"]:
        """Returns the function's value for columns in which gates and ups take turns."""
        gate = jnp.minimum(both_PF[:, 0::2], self.limit)
        up = jnp.clip(both_PF[:, 1::2], -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


@dataclass(frozen=True)
class ExpertsSpec:
    """Describes the experts of a layer.

    Attributes:
        routing: The choice of each token's experts.
        width: The width of an expert's inner layer.
        shared_width: The inner width of an expert that all tokens take as well; None if there is
            none.
        swiglu: The function between an expert's products, which then have biases; None for the
            model's activation of the gates, times the ups.
        scales_input: True if the weight of an expert multiplies its input, not its output (Llama
            4).
        has_gates: False if an expert computes `down(activation(up(x)))` (Nemotron 3).
        latent_width: The width of the experts' inputs and outputs, between two products that all
            experts share; None if it is the width of the model.
    """

    routing: Routing
    width: int
    shared_width: int | None = None
    swiglu: ClampedSwiGLU | None = None
    scales_input: bool = False
    has_gates: bool = True
    latent_width: int | None = None


class Experts(nnx.Module):
    """Holds the experts of a layer.

    Attributes:
        gate_up: The product for gates and ups, the gates first unless `swiglu` is given; for ups
            alone if there are no gates.
        down: The product for the output.
        activation: The name of the activation function.
        swiglu: The function between the products, if it is not the activation times the ups.
        scales_input: See `ExpertsSpec`.
    """

    def __init__(
        self,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        *,
        activation: str,
        swiglu: ClampedSwiGLU | None,
        scales_input: bool = False,
    ):
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.swiglu = swiglu
        self.scales_input = scales_input

    @property
    def has_gates(self) -> bool:
        """Returns whether the first product gives gates, in as many columns as ups."""
        return self.gate_up.spec.num_out > self.down.spec.num_in

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        expert_TX: Int[Array, "T X"],
        weight_TX: Float[Array, "T X"],
    ) -> Float[Array, "T D"]:
        """Returns the sum of the chosen experts' outputs for each token, with these weights."""
        if self.scales_input:
            # Each expert of a token gets an input of its own, as a token with one expert does.
            scaled_PD = (x_TD[:, None] * weight_TX[..., None]).reshape(-1, x_TD.shape[1])
            made_PD = self.run(scaled_PD, expert_TX.reshape(-1, 1))
            out_TXD = made_PD.reshape(*expert_TX.shape, -1)
            weight_TX = jnp.ones_like(weight_TX)
        else:
            out_TXD = self.run(x_TD, expert_TX)
        kernels = row_kernels(x_TD.dtype)
        if kernels is not None and kernels.weighted_sum is not None:
            return kernels.weighted_sum(out_TXD, weight_TX)
        total_TD = out_TXD[:, 0] * weight_TX[:, :1]
        # One order for all: XLA could choose another for a sum.
        for index in range(1, expert_TX.shape[1]):
            total_TD = total_TD + out_TXD[:, index] * weight_TX[:, index : index + 1]
        return total_TD.astype(x_TD.dtype)

    def run(self, x_TD: Float[Array, "T D"], expert_TX: Int[Array, "T X"]) -> Float[Array, "T X D"]:
        """Returns the output of each chosen expert for each token.

        A number that is no expert's gives zeros.
        """
        output_TXD = None
        if has_matmul_by_group(self.gate_up.weight(...)):
            output_TXD = self._run_at_once(x_TD, expert_TX)
        return self._run_by_tiles(x_TD, expert_TX) if output_TXD is None else output_TXD

    def _run_at_once(
        self, x_TD: Float[Array, "T D"], expert_TX: Int[Array, "T X"]
    ) -> Float[Array, "T X D"] | None:
        """Multiplies by all experts' gates and ups at once, and by all their downs.

        Returns None where no kernel takes these products.
        """
        num_experts = self.gate_up.spec.num_experts
        is_expert_TX = (expert_TX >= 0) & (expert_TX < num_experts)
        rows_PD, place_P, sorted_P, count_E = _sort(x_TD, expert_TX, is_expert_TX, num_experts)
        both_PF = self.gate_up.of_sorted(rows_PD, sorted_P, count_E)
        if both_PF is None:
            return None
        made_PD = self.down.of_sorted(self._between(both_PF), sorted_P, count_E)
        if made_PD is None:
            return None
        # The kernel leaves rows of no expert undefined: they may be NaN, which no product with 0
        # removes.
        return jnp.where(is_expert_TX[..., None], made_PD[place_P].reshape(*expert_TX.shape, -1), 0)

    def _run_by_tiles(
        self, x_TD: Float[Array, "T D"], expert_TX: Int[Array, "T X"]
    ) -> Float[Array, "T X D"]:
        """Multiplies tiles of rows one after another, each by the weights of one expert."""
        num_tokens, per_token = expert_TX.shape
        num_pairs = num_tokens * per_token
        num_experts = self.gate_up.spec.num_experts
        rows = next(
            rows for maximum, rows in TILE_ROWS.items() if num_pairs <= maximum * num_experts
        )
        expert_P = expert_TX.reshape(-1)  # P pairs of a token and an expert
        order_P = jnp.argsort(expert_P, stable=True)
        # Pairs that are no expert's have a number past the last one: they are not counted, so no
        # tile has them, and their results stay zero.
        count_E = jnp.bincount(expert_P, length=num_experts)
        first_E = jnp.cumsum(count_E) - count_E  # The first pair of each expert in that order.
        end_E = jnp.cumsum(-(-count_E // rows))  # The end of each expert's tiles.
        x_TD = jnp.concatenate([x_TD, jnp.zeros_like(x_TD[:1])])  # Padding takes the last row.

        def tile(index: jax.Array, out_PD: jax.Array) -> jax.Array:
            # Comparing with all ends at once spares a loop of binary search inside this loop.
            expert = jnp.searchsorted(end_E, index, side="right", method="compare_all")
            place = (index - jnp.where(expert > 0, end_E[expert - 1], 0)) * rows + jnp.arange(rows)
            pair = jnp.where(
                place < count_E[expert],
                # The minimum only keeps places of padding within the array.
                order_P[jnp.minimum(first_E[expert] + place, num_pairs - 1)],
                num_pairs,
            )
            made = self.down(expert, self._between(self.gate_up(expert, x_TD[pair // per_token])))
            return out_PD.at[pair].set(made, mode="drop")

        empty = jnp.zeros((num_pairs, x_TD.shape[1]), x_TD.dtype)
        # The number of tiles depends on the choice of experts, so the loop has as many turns as
        # needed.
        return jax.lax.fori_loop(0, end_E[-1], tile, empty).reshape(num_tokens, per_token, -1)

    def _between(self, both_PF: Float[Array, "P F2"]) -> Float[Array, "P F"]:
        if self.swiglu is not None:
            return self.swiglu(both_PF)
        if not self.has_gates:
            return ACTIVATIONS[self.activation](both_PF)
        return gate(both_PF, self.activation)


def _sort(
    x_TD: Float[Array, "T D"],
    expert_TX: Int[Array, "T X"],
    is_expert_TX: Bool[Array, "T X"],
    num_experts: int,
) -> tuple[jax.Array, ...]:
    """Returns rows by expert, the place of each pair, the experts in order, and their numbers."""
    kernels = trace_scope().kernels
    if kernels is not None and kernels.gather_by_group is not None:
        sorted_pairs = kernels.gather_by_group(x_TD, expert_TX.reshape(-1), num_experts)
        if sorted_pairs is not None:
            return sorted_pairs
    expert_P = jnp.where(is_expert_TX, expert_TX, num_experts).reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    # The inverse of a permutation, which spares a second sort.
    place_P = jnp.zeros_like(order_P).at[order_P].set(jnp.arange(len(order_P)), unique_indices=True)
    count_E = (expert_P == jnp.arange(num_experts)[:, None]).sum(axis=1)
    return x_TD[order_P // expert_TX.shape[1]], place_P, expert_P[order_P], count_E


class MixtureOfExperts(nnx.Module):
    """Adds up the outputs of each token's experts, and that of an expert of all tokens.

    Attributes:
        router: Chooses the experts of each token.
        experts: The experts that tokens are routed to.
        shared: The expert of all tokens; None if there is none.
        shared_gate: The weight of that expert's gate; None if it has no gate.
        latent: The products before and after the routed experts, which are narrower than the
            model; None if they are not.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        hidden_size: int,
        *,
        shared: tuple[MLP | GatedMLP, str | None] | None = None,
        latent: tuple[Linear, Linear] | None = None,
        dtype: DTypeLike,
    ):
        self.router = router
        self.experts = experts
        gate = None if shared is None else shared[1]
        self.shared = None if shared is None else shared[0]
        self.latent = None if latent is None else nnx.List(latent)
        shape = (1, hidden_size)
        self.shared_gate = (
            None
            if gate is None
            else parameter(shape, axes=(None, "embed"), dtype=dtype, sources=[tensor(gate, *shape)])
        )

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        routed = self.router(x_TD)
        if self.latent is None:
            out_TD = self.experts(x_TD, *routed)
        else:
            narrow, widen = self.latent
            out_TD = widen(self.experts(narrow(x_TD), *routed))
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            # Two rows, because XLA on CPU computes a matrix-vector product in another way.
            two_2D = jnp.repeat(self.shared_gate[...], 2, axis=0)
            shared_TD = jax.nn.sigmoid(matmul(x_TD, two_2D)[:, :1]) * shared_TD
        return out_TD + shared_TD
