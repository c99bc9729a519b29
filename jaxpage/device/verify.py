"""Which drafts were right. Noise is a function of the position, so the draw behind a right token is the draw there would have been."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def accept(
    drawn_T: Int[Array, "T"],
    token_ids_T: Int[Array, "T"],
    parents_T: Int[Array, "T"],
    query_start: Int[Array, "_"],  # [B + 1]
    max_query_len: int,
) -> Int[Array, "B Q"]:
    """From the first token of each row down to children that are what was drawn: the tokens of that path, -1 behind the last.

    What was drawn at each of them is the row's text; at the last of them it is no draft, or a wrong one. Coupled acceptance
    (Daliri, Musco, Suresh 2024, arXiv:2408.07978): the noise of a draw is the same with and without drafts.

    Args:
        drawn_T: what was drawn behind each token of the stream.
        parents_T: where in the stream the token before each draft stands; -1 for tokens that are no drafts. Of equal children the
            first counts.
    """
    num_tokens = token_ids_T.shape[0]
    place_T = jnp.arange(num_tokens)
    is_right_T = (parents_T >= 0) & (drawn_T[parents_T] == token_ids_T)
    child_T = (
        jnp.full(num_tokens, num_tokens)
        .at[parents_T]
        .min(jnp.where(is_right_T, place_T, num_tokens), mode="drop", wrap_negative_indices=False)
    )
    child_T = jnp.append(child_T, num_tokens)  # behind the last comes nothing
    node_B = jnp.where(query_start[1:] > query_start[:-1], query_start[:-1], num_tokens)
    path = [node_B]
    for _ in range(max_query_len - 1):
        node_B = child_T[node_B]
        path.append(node_B)
    path_BQ = jnp.stack(path, axis=1)
    return jnp.where(path_BQ < num_tokens, path_BQ, -1).astype(jnp.int32)
