"""Finds the drafts that were right, by the rule "coupled"; other rules are in `acceptance.py`.

Noise is a function of the position, so the draw after a right draft is the one that a step without
drafts would make.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32


def accept(
    drawn_T: Int[Array, "T"],
    token_ids_T: Int[Array, "T"],
    parents_T: Int[Array, "T"],
    query_start: Int[Array, "_"],  # [B + 1], an axis that only a result may have by name
    max_query_len: int,
) -> Int[Array, "B Q"]:
    """Returns each row's path from its first token down to children that are what was drawn.

    Coupled acceptance (Daliri, Musco, Suresh 2024, arXiv:2408.07978): the noise of a draw is the
    same with and without drafts. The tokens that were drawn after those of the path are the row's
    text:

        place       0   1   2   3         a ─┬─ b
        token       a   b   c   d            └─ c ── d
        parent     -1   0   0   2
        drawn       c   .   d   e         path 0, 2, 3; text c, d, e

    Args:
        drawn_T: The token that was drawn after each token of the stream.
        token_ids_T: The tokens of the stream.
        parents_T: The place in the stream of the token before each draft; -1 for tokens that are no
            drafts. Of equal children the first counts.
        query_start: The place of each row's first token, and the end of the last row.
        max_query_len: Q, the most tokens of a row.

    Returns:
        The places on each path, with -1 after the last.
    """
    return follow(
        (parents_T >= 0) & (drawn_T[parents_T] == token_ids_T),
        parents_T,
        query_start,
        max_query_len,
    )


def follow(
    is_right_T: Bool[Array, "T"],
    parents_T: Int[Array, "T"],
    query_start: Int[Array, "_"],
    max_query_len: int,
) -> Int[Array, "B Q"]:
    """Returns each row's path from its first token down to children that are right.

    The places have -1 after the last. The arguments are those of `accept`; of several right
    children the first counts.
    """
    num_tokens = parents_T.shape[0]
    index_T = jnp.arange(num_tokens)
    child_T = (
        # The smallest of the right children counts. Tokens that are no drafts have the parent -1.
        jnp.full(num_tokens, num_tokens)
        .at[parents_T]
        .min(jnp.where(is_right_T, index_T, num_tokens), mode="drop", wrap_negative_indices=False)
    )
    child_T = jnp.append(child_T, num_tokens)  # after the last comes nothing
    node_B = jnp.where(query_start[1:] > query_start[:-1], query_start[:-1], num_tokens)
    path = [node_B]
    for _ in range(max_query_len - 1):
        node_B = child_T[node_B]
        path.append(node_B)
    path_BQ = jnp.stack(path, axis=1)
    return jnp.where(path_BQ < num_tokens, path_BQ, -1).astype(jnp.int32)


def last_of(paths_BQ: Int[Array, "B Q"]) -> Int[Array, "B"]:
    """Returns the last token of each path; 0 for rows of padding."""
    return paths_BQ.max(axis=1, initial=0)  # a token comes after its parent


def unpack_tree_mask(tree_mask_TU: UInt32[Array, "T U"], max_query_len: int) -> Bool[Array, "T Q"]:
    """Returns the mask for `paged_attention`.

    Token t sees token j of its row if bit j % 32 of word j // 32 is set.
    """
    index_Q = jnp.arange(max_query_len)
    return (tree_mask_TU[:, index_Q // 32] >> (index_Q % 32).astype(jnp.uint32) & 1).astype(bool)


def moves(
    paths_BQ: Int[Array, "B Q"], slots_T: Int[Array, "T"], query_start: Int[Array, "_"]
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Returns slots (sources, destinations) whose copies bring accepted drafts to their places.

    A token's slot goes by its place in its row. The token at depth d of a path has at least d
    tokens before it in its row, so it moves ahead or not at all. Tokens that stay are replaced by
    slots of the null block.
    """
    last = slots_T.shape[0] - 1
    target_BQ = query_start[:-1, None] + jnp.arange(paths_BQ.shape[1])
    stays_BQ = (paths_BQ < 0) | (paths_BQ == target_BQ)
    source_BQ, destination_BQ = (
        jnp.where(stays_BQ, 0, slots_T[jnp.clip(index_BQ, 0, last)])
        for index_BQ in (paths_BQ, target_BQ)
    )
    return source_BQ.reshape(-1), destination_BQ.reshape(-1)
