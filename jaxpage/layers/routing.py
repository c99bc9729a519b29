"""Chooses the experts of each token and their weights, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.matmul import matmul
from jaxpage.layers.parameter import Source, parameter
from jaxpage.layers.trace_scope import row_kernels, trace_scope

ROUTED_AT_ONCE = 16  # The tokens of a tile on CPU: see `Router._choose_by_tiles`.


@dataclass(frozen=True)
class Groups:
    """Divides experts, in order, into groups of equal size, of which a token takes the best.

    DeepSeek's models have them.

    Attributes:
        count: The number of groups.
        num_kept: The number of groups that a token takes.
        best: The number of a group's best experts whose ratings are added up to rate it.
    """

    count: int
    num_kept: int
    best: int


@dataclass(frozen=True)
class Routing:
    """Describes the choice of the `per_token` experts that are rated highest.

    Attributes:
        num_experts: The number of experts.
        per_token: The number of experts of a token.
        normalized: True if the weights add up to one, before `factor` multiplies them.
        epsilon: The number that is added to the sum of the weights before it divides them.
        sigmoid: True if a score is the sigmoid of its expert's logit, not a softmax over all.
        bias: True if the logits have biases.
        corrected: True if a rating is the score plus a number of the expert, which has no part in
            the weight; otherwise ratings are scores.
        groups: The groups of experts, or None.
        factor: The factor of the weights.
        jitter: A threshold of Phi-3.5-MoE; None for other models. The softmax that weighs the best
            expert leaves out experts whose scores differ from the best one by more than twice this
            share of it.
    """

    num_experts: int
    per_token: int
    normalized: bool
    epsilon: float = 1e-20
    sigmoid: bool = False
    bias: bool = False
    corrected: bool = False
    groups: Groups | None = None
    factor: float = 1.0
    jitter: float | None = None


class Router(nnx.Module):
    """Rates the experts for each token.

    Only the parameters that `Routing` names are declared.
    """

    def __init__(
        self,
        routing: Routing,
        hidden_size: int,
        *,
        weight: Source,
        bias: Source,
        correction: Source,
        dtype: DTypeLike,
    ):
        self.routing = routing
        count = routing.num_experts
        self.weight = parameter(
            (count, hidden_size), axes=(None, "embed"), dtype=dtype, sources=[weight]
        )
        self.bias = (
            parameter((count,), axes=(None,), dtype=dtype, sources=[bias]) if routing.bias else None
        )
        self.correction = (
            parameter(
                (count,), axes=(None,), dtype="float32", sources=[correction], keeps_dtype=True
            )
            if routing.corrected
            else None
        )

    def __call__(self, x_TD: Float[Array, "T D"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """Returns the chosen experts of each token, and their weights."""
        logits_TE = matmul(x_TD, self.weight[...], result=jnp.float32)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias[...].astype(jnp.float32)[None, :]
        routes = trace_scope().routes
        kernels = trace_scope().kernels
        if routes is not None and (requested_TX := routes.request()) is not None:
            expert_TX, weight_TX = self._choose(logits_TE, requested_TX)
        elif kernels is not None and kernels.choose_experts is not None and self._is_plain:
            correction_E = None if self.correction is None else self.correction[...]
            scores_TX, expert_TX = kernels.choose_experts(
                logits_TE, correction_E, self.routing.per_token, sigmoid=self.routing.sigmoid
            )
            # Where `_is_plain` is true, `_scale` reads no scores of other experts; logits fill
            # their place.
            weight_TX = self._scale(scores_TX, logits_TE)
        else:
            expert_TX, weight_TX = jax.lax.platform_dependent(
                logits_TE, cpu=self._choose_by_tiles, default=self._choose
            )
        if routes is not None:
            routes.chosen.append(expert_TX)
        return expert_TX, weight_TX.astype(x_TD.dtype)

    @property
    def _is_plain(self) -> bool:
        """Returns whether scores alone, and corrections of sigmoids, decide which experts are best.

        The weights then depend on the scores of the chosen experts alone.
        """
        routing = self.routing
        is_alone = routing.jitter is None and routing.groups is None
        return is_alone and (routing.sigmoid or (routing.normalized and not routing.corrected))

    def _choose(
        self, logits_TE: Float[Array, "T E"], requested_TX: Int[Array, "T X"] | None = None
    ) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """Chooses experts, or takes those that are requested, and weighs them."""
        routing = self.routing
        if routing.jitter is not None:
            return _each_among_close(logits_TE, routing.per_token, routing.jitter, requested_TX)
        scores_TE = _scores(logits_TE, sigmoid=routing.sigmoid)
        # A correction is added to probabilities, and these are exponentials that are not divided
        # yet.
        if self.correction is not None and not routing.sigmoid:
            scores_TE = scores_TE / _total(scores_TE)
        if requested_TX is not None:
            weight_TX = jnp.take_along_axis(scores_TE, requested_TX, axis=1)
            return requested_TX, self._scale(weight_TX, scores_TE)
        rated_TE = (
            scores_TE if self.correction is None else scores_TE + self.correction[...][None, :]
        )
        if routing.groups is not None:
            rated_TE = _only_best(rated_TE, routing.groups)
        weight_TX, expert_TX = _best(
            rated_TE, scores_TE, routing.per_token, corrected=routing.corrected
        )
        return expert_TX, self._scale(weight_TX, scores_TE)

    def _scale(
        self, weight_TX: Float[Array, "T X"], scores_TE: Float[Array, "T E"]
    ) -> Float[Array, "T X"]:
        """Returns the weights of the chosen experts, from their scores."""
        routing = self.routing
        if routing.normalized:
            weight_TX = weight_TX / (_total(weight_TX) + routing.epsilon)
        elif not routing.sigmoid:
            weight_TX = weight_TX / _total(scores_TE)
        return weight_TX if routing.factor == 1.0 else weight_TX * routing.factor

    def _choose_by_tiles(
        self, logits_TE: Float[Array, "T E"]
    ) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
        """Chooses in one shape for any number of tokens.

        The bits of an exponential that XLA computes on CPU depend on the shape (docs/lab-log.md).
        The barriers are there because XLA dissolves a loop over one tile and joins its body with
        the operations around it.
        """

        def alone(tile_TE: Float[Array, "T E"]) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
            return jax.lax.optimization_barrier(self._choose(jax.lax.optimization_barrier(tile_TE)))

        num_tokens, num_experts = logits_TE.shape
        padded = jnp.pad(logits_TE, ((0, -num_tokens % ROUTED_AT_ONCE), (0, 0)))
        tiles = jax.lax.map(alone, padded.reshape(-1, ROUTED_AT_ONCE, num_experts))
        expert_TX, weight_TX = (
            each.reshape(-1, self.routing.per_token)[:num_tokens] for each in tiles
        )
        return expert_TX, weight_TX


def _scores(logits_TE: Float[Array, "T E"], *, sigmoid: bool) -> Float[Array, "T E"]:
    """Returns sigmoids, or exponentials of which the largest of a token is 1."""
    kernels = row_kernels(logits_TE.dtype)
    if kernels is not None and kernels.scores is not None:
        return kernels.scores(logits_TE, sigmoid=sigmoid)
    if sigmoid:
        return jax.nn.sigmoid(logits_TE)
    return jnp.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))


def _best(
    rated_TE: Float[Array, "T E"], scores_TE: Float[Array, "T E"], count: int, *, corrected: bool
) -> tuple[Float[Array, "T X"], Int[Array, "T X"]]:
    """Returns the scores of the experts that are rated highest, and these experts.

    The scores are sorted with the ratings, because XLA on CPU computes them again for a
    gather, with other bits.
    """
    if not corrected:
        best_TX, best_expert_TX = jax.lax.top_k(rated_TE, count)
        return best_TX, best_expert_TX
    expert_TE = jnp.broadcast_to(jnp.arange(rated_TE.shape[1]), rated_TE.shape)
    _, sorted_TE, expert_TE = jax.lax.sort((-rated_TE, scores_TE, expert_TE), num_keys=1)
    return sorted_TE[:, :count], expert_TE[:, :count]


def _each_among_close(
    logits_TE: Float[Array, "T E"],
    count: int,
    jitter: float,
    requested_TX: Int[Array, "T X"] | None,
) -> tuple[Int[Array, "T X"], Float[Array, "T X"]]:
    """Returns the experts with the highest logits, and their weights, one after the other.

    The weight is a softmax over the experts that were not chosen before and are close to this one
    (`Routing.jitter`); see "sparse mixer" in Liu et al., 2024.
    """
    experts = []
    weights = []
    left_TE = logits_TE
    for index in range(count):
        if requested_TX is None:
            best_T1, expert_T1 = jax.lax.top_k(left_TE, 1)
        else:
            expert_T1 = requested_TX[:, index : index + 1]
            best_T1 = jnp.take_along_axis(left_TE, expert_T1, axis=1)
        scale_TE = jnp.maximum(jnp.abs(logits_TE), best_T1)
        # As in the paper's code; whatever it says of experts that were chosen before, they count 0.
        is_far_TE = (best_T1 - logits_TE) / scale_TE > 2 * jitter
        scores_TE = jnp.where(is_far_TE, 0.0, jnp.exp(left_TE - best_T1))
        experts.append(expert_T1)
        # The score of the best one itself is exp(0).
        weights.append(1 / _total(scores_TE))
        is_chosen_TE = jnp.arange(logits_TE.shape[1])[None, :] == expert_T1
        left_TE = jnp.where(is_chosen_TE, -jnp.inf, left_TE)
    return jnp.concatenate(experts, axis=1), jnp.concatenate(weights, axis=1)


def _only_best(rated_TE: Float[Array, "T E"], groups: Groups) -> Float[Array, "T E"]:
    """Returns the ratings, with minus infinity outside of the groups that a token takes."""
    num_tokens = rated_TE.shape[0]
    grouped = rated_TE.reshape(num_tokens, groups.count, -1)
    best = jax.lax.top_k(grouped, groups.best)[0]
    total = best[..., 0]
    for index in range(1, groups.best):
        total = total + best[..., index]
    is_kept = jax.nn.one_hot(
        jax.lax.top_k(total, groups.num_kept)[1], groups.count, dtype=bool
    ).any(axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(rated_TE.shape)


def _total(x_TE: Float[Array, "T E"]) -> Float[Array, "T 1"]:
    """Returns the sum over the last axis, added up by halves.

    XLA on CPU adds up a reduction in an order that depends on the other axis.
    """
    width = x_TE.shape[1]
    if width == 1:
        return x_TE
    # The largest power of two below the width: only the first halving meets padding.
    half = 1 << (width - 1).bit_length() - 1
    second_half = jnp.pad(x_TE[:, half:], ((0, 0), (0, 2 * half - width)))
    return _total(x_TE[:, :half] + second_half)
