"""Decides which drafts become tokens, and what is drawn after the last accepted one.

The rule "coupled" compares drafts with the tokens that are drawn anyway. The rules "rejection" and
"typical" look at the distribution p of each draw, after all that its request asks for. A greedy
request has all of p on one token, so that each rule gives its greedy text.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import ProcessorInputs, StepInputs
from jaxpage.device.sampler import (
    Stream,
    are_finite,
    distributions,
    draw,
    each_row,
    noise_key,
    with_noise,
)
from jaxpage.device.verify import accept, follow, last_of
from jaxpage.settings.draft_settings import AcceptanceRule
from jaxpage.shapes import NOT_FINITE


def decide(
    logits_RV: Float[Array, "R V"],
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    bucket: Bucket,
    rule: AcceptanceRule,
    *,
    by_row: bool,
    scaled_RV: Float[Array, "R V"] | None = None,
) -> tuple[Int[Array, "R"], Int[Array, "B Q"]]:
    """Returns the token after each draw, and each row's path of accepted drafts.

    The step is one that verifies, and the paths are like those of `verify.accept`. The rules other
    than "coupled" draw only after the last token of each path: after an earlier token of a path the
    token is the next draft, and after a token on no path it is 0.

    `scaled_RV` is what `scale_logits` returns; None computes it.
    """
    if rule.name == "coupled":
        drawn_R = draw(logits_RV, inputs, processor_inputs, by_row=by_row, scaled_BV=scaled_RV)
        return drawn_R, accept(
            drawn_R, inputs.token_ids_T, inputs.parents_T, inputs.query_start, bucket.max_query_len
        )
    log_p_RV = distributions(
        logits_RV, inputs, processor_inputs, by_row=by_row, scaled_BV=scaled_RV
    )
    if rule.name == "rejection":
        paths_BQ, drawn_B = rejection(log_p_RV, inputs, bucket.max_query_len, by_row=by_row)
    else:
        is_right_T = typical(log_p_RV, inputs, bucket.max_query_len, rule, by_row=by_row)
        paths_BQ = follow(is_right_T, inputs.parents_T, inputs.query_start, bucket.max_query_len)
        drawn_B = each_row(
            lambda place: with_noise(log_p_RV[place], _key(inputs, place)),
            (last_of(paths_BQ),),
            by_row=by_row,
        )
    token_ids_R = _tokens_after(drawn_B, paths_BQ, inputs.token_ids_T)
    return jnp.where(are_finite(logits_RV), token_ids_R, NOT_FINITE), paths_BQ


def _key(inputs: StepInputs, place: jax.Array, stream: int | None = None) -> jax.Array:
    """Returns the key of the noise for the token after a token of the stream.

    A step that verifies draws after every token, so a place in the stream is also that of a draw.
    """
    return noise_key(
        inputs.draws.seed_R2[place],
        inputs.draws.sample_index_R[place],
        inputs.draws.drawn_position_R[place],
        stream,
    )


def _tokens_after(
    drawn_B: Int[Array, "B"], paths_BQ: Int[Array, "B Q"], token_ids_T: Int[Array, "T"]
) -> Int[Array, "T"]:
    num_tokens = token_ids_T.shape[0]
    next_BQ = jnp.pad(paths_BQ[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    tokens_BQ = jnp.where(next_BQ >= 0, token_ids_T[next_BQ], drawn_B[:, None])
    # JAX counts negative indices from the end; one past the last is dropped.
    indices_BQ = jnp.where(paths_BQ >= 0, paths_BQ, num_tokens)
    return jnp.zeros(num_tokens, jnp.int32).at[indices_BQ].set(tokens_BQ, mode="drop")


class _Walk(NamedTuple):
    """Holds the state of a walk down the tree of one row's drafts."""

    path_Q: jax.Array
    depth: jax.Array  # the depth of the path's last token
    p_V: jax.Array  # distribution of the next token, less what rejected drafts took
    tried_V: jax.Array  # the rejected drafts
    num_tried: jax.Array


def rejection(
    log_p_RV: Float[Array, "R V"], inputs: StepInputs, max_query_len: int, *, by_row: bool
) -> tuple[Int[Array, "B Q"], Int[Array, "B"]]:
    """Returns the paths of drafts that are not rejected, and the token drawn after each path.

    A draft that was drawn from q stays with probability min(1, p / q). Where it is rejected, what
    remains of p is max(p - q, 0) (Leviathan, Kalman, Matias 2023, arXiv:2211.17192; Chen et al.
    2023, arXiv:2302.01318). Several drafts after one token are tried in their order, each against
    what the ones before it left of p (SpecInfer, Miao et al. 2023, arXiv:2305.09781). They were
    drawn without replacement, so q loses the rejected ones, too.

    The text has the distribution that it has without drafts. It is a function of the request's seed
    and of the drafts; where nothing is drafted it is the text without drafts.
    """
    walk = functools.partial(_walk, log_p_RV=log_p_RV, inputs=inputs, max_query_len=max_query_len)
    paths: tuple[jax.Array, jax.Array] = each_row(
        walk, (inputs.query_start[:-1], inputs.query_start[1:]), by_row=by_row
    )
    return paths


def _walk(
    start: jax.Array,
    stop: jax.Array,
    *,
    log_p_RV: jax.Array,
    inputs: StepInputs,
    max_query_len: int,
) -> tuple[jax.Array, jax.Array]:
    """Walks once over the tokens of a row, from the first to the last.

    Drafts come after their parents, so the children of an accepted token are still ahead.
    """

    def visit(place: jax.Array, walk: _Walk) -> _Walk:
        is_next = inputs.parents_T[place] == walk.path_Q[walk.depth]
        return jax.lax.cond(is_next, lambda: _try(place, walk, log_p_RV, inputs), lambda: walk)

    first = jnp.minimum(start, log_p_RV.shape[0] - 1)  # padding may begin beyond the last
    path_Q = jnp.full(max_query_len, -1, jnp.int32).at[0].set(jnp.where(stop > start, start, -1))
    walk = _Walk(path_Q, jnp.int32(0), *_begin(log_p_RV[first]))
    walk = jax.lax.fori_loop(start + 1, stop, visit, walk)
    last = walk.path_Q[walk.depth]
    # Without rejected drafts the noise is that of a step that drafts nothing.
    key = jax.lax.cond(
        walk.num_tried > 0, lambda: _key(inputs, last, Stream.RESIDUAL), lambda: _key(inputs, last)
    )
    return walk.path_Q, with_noise(jnp.log(walk.p_V), key)


def _begin(log_p_V: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns p, the rejected drafts and their number after a token that was just accepted."""
    return jnp.exp(log_p_V), jnp.zeros(log_p_V.shape, bool), jnp.int32(0)


def _try(place: jax.Array, walk: _Walk, log_p_RV: jax.Array, inputs: StepInputs) -> _Walk:
    """Accepts or rejects a draft that follows the last token of the path."""
    token_id = inputs.token_ids_T[place]
    before = walk.path_Q[walk.depth]
    # Padding (-1) reads some token's entry below, and has a probability of 0.
    ids_W = inputs.q_ids_TW[place]
    q_W = jnp.where(walk.tried_V[ids_W], 0.0, inputs.q_TW[place])
    # Nothing is left of q where all that it had was rejected; 0 / 0 would be NaN.
    q_W /= jnp.maximum(jnp.sum(q_W), jnp.finfo(jnp.float32).tiny)
    # It is 0 where the same draft was rejected before.
    q = jnp.sum(jnp.where(ids_W == token_id, q_W, 0.0))
    uniform = jax.random.uniform(
        jax.random.fold_in(_key(inputs, before, Stream.ACCEPT), walk.num_tried)
    )

    def accept_drafts() -> _Walk:
        depth = walk.depth + 1
        return _Walk(walk.path_Q.at[depth].set(place), depth, *_begin(log_p_RV[place]))

    def reject_drafts() -> _Walk:
        p_V = jnp.where(q > 0, residual(walk.p_V, ids_W, q_W), walk.p_V)
        return walk._replace(
            p_V=p_V, tried_V=walk.tried_V.at[token_id].set(True), num_tried=walk.num_tried + 1
        )

    # `uniform < p / q`, without a division by q, which may be 0.
    return jax.lax.cond((q > 0) & (uniform * q < walk.p_V[token_id]), accept_drafts, reject_drafts)


def residual(
    p_V: Float[Array, "V"], ids_W: Int[Array, "W"], q_W: Float[Array, "W"]
) -> Float[Array, "V"]:
    """Returns max(p - q, 0), normalised; p where nothing remains, which only rounding can cause."""
    # Padding (-1) must not take from the last token.
    left_V = jnp.maximum(p_V.at[ids_W].add(-q_W, mode="drop", wrap_negative_indices=False), 0.0)
    total = jnp.sum(left_V)
    return jnp.where(total > 0, left_V / total, p_V)


def typical(
    log_p_RV: Float[Array, "R V"],
    inputs: StepInputs,
    max_query_len: int,
    rule: AcceptanceRule,
    *,
    by_row: bool,
) -> Bool[Array, "T"]:
    """Returns which drafts are on the best path of their row, by typical acceptance.

    The rule is lossy: texts do not follow p (Cai et al. 2024, arXiv:2401.10774). A draft is
    acceptable where p(draft) > min(threshold, alpha * exp(-entropy of p)). The best path is the
    longest one of acceptable drafts; of equally long paths it is the most likely one, and of
    equally likely ones the first.
    """
    parents_T = inputs.parents_T
    num_tokens = parents_T.shape[0]
    num_rows = inputs.query_start.shape[0] - 1
    index_T = jnp.arange(num_tokens)
    is_draft_T = parents_T >= 0
    # Of the distribution that the draft was to follow. Tokens that are no drafts read some entry,
    # which `is_fine_T` leaves out.
    entropy_T = each_row(_entropy, (log_p_RV,), by_row=by_row)[parents_T]
    log_p_T = log_p_RV[parents_T, inputs.token_ids_T]
    threshold_T = jnp.minimum(rule.posterior_threshold, rule.posterior_alpha * jnp.exp(-entropy_T))
    is_fine_T = is_draft_T & (jnp.exp(log_p_T) > threshold_T)

    def deepen(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        depth_T, likelihood_T = state  # depth -1: not acceptable, or after one that is not
        goes_on_T = is_fine_T & (depth_T[parents_T] >= 0)
        depth_T = jnp.where(is_draft_T, jnp.where(goes_on_T, depth_T[parents_T] + 1, -1), 0)
        return depth_T, jnp.where(goes_on_T, likelihood_T[parents_T] + log_p_T, 0.0)

    begin = jnp.where(is_draft_T, -1, 0), jnp.zeros(num_tokens)
    depth_T, likelihood_T = jax.lax.fori_loop(1, max_query_len, deepen, begin)
    # Padding belongs to no row.
    row_T = jnp.searchsorted(inputs.query_start, index_T, side="right", method="compare_all") - 1
    best = functools.partial(jax.ops.segment_max, segment_ids=row_T, num_segments=num_rows)
    is_best_T = depth_T == best(depth_T)[row_T]
    is_best_T &= likelihood_T == best(jnp.where(is_best_T, likelihood_T, -jnp.inf))[row_T]
    # The smallest index of the best, as the negative of a maximum.
    last_B = -best(jnp.where(is_best_T, -index_T, -num_tokens))

    def climb(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        is_right_T, node_B = state
        # The walk up a tree ends at -1, which stays where it is.
        is_right_T = is_right_T.at[node_B].set(True, mode="drop", wrap_negative_indices=False)
        return is_right_T, jnp.where(node_B >= 0, parents_T[node_B], -1)

    is_right_T, _ = jax.lax.fori_loop(
        1, max_query_len, climb, (jnp.zeros(num_tokens, bool), last_B)
    )
    return is_right_T & is_draft_T


def _entropy(log_p_V: jax.Array) -> jax.Array:
    p_V = jnp.exp(log_p_V)
    return -jnp.sum(jnp.where(p_V > 0, p_V * log_p_V, 0.0))
