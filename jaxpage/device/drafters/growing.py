"""Grows the drafts of a drafter level by level.

The best X candidates of a level are continued, each by its own best X. These are dynamic trees as
in EAGLE-2 (Li et al. 2024, arXiv:2406.16858), for any drafter; with one branch a tree is a chain. A
candidate's score is its branch's log probability under the drafter, and if the choice is "coupled"
also under the row's own noise. Drafts are then right wherever the target draws what the drafter
would draw (Daliri, Musco, Suresh 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpage.device.drafters.drafter import TargetStep
from jaxpage.device.drafters.ends import Ends
from jaxpage.device.drafters.tree_shape import TreeShape
from jaxpage.device.drawn import bits_of
from jaxpage.device.inputs.step_inputs import Flags
from jaxpage.device.pages.kv_pages import KVPages
from jaxpage.device.sampler import Draws, draw_draft, perturb_logits
from jaxpage.device.token_logprobs import log_softmax
from jaxpage.shapes import MAX_CANDIDATES

# A drafter chooses as the target will draw, with the target's noise; or the most likely token; or
# by a draw of its own.
Choice = Literal["coupled", "top", "drawn"]


class Tree(NamedTuple):
    """Holds drafts as they grow: the branches that go on, and the candidates of every level.

    For each of the Y = X * X candidates of a level `candidates_BJGY` has the token, the place in
    [J * Y] of the one before it (-1 for none), and the bits of its score, which is -inf for what is
    no candidate. A draft that was drawn also has the ids [W] and the bits of the probabilities [W]
    that it was drawn from. Only as many levels as the draft depth are filled.
    """

    pages: KVPages  # what the drafter writes
    token_id_BX: jax.Array  # the last token of each branch
    branch_BX: jax.Array  # the branch of the level before that it continues
    output_BXD: jax.Array  # the drafter's output for the branches of the level before
    score_BX: jax.Array  # log probability of the branch
    node_BX: jax.Array  # its last token's place among the candidates
    candidates_BJGY: jax.Array


@dataclass(frozen=True)
class Growing:
    """Says how drafts grow in a step.

    Attributes:
        logits: Returns the logits [B, V] of the drafter's outputs [B, D].
        shape: The largest depth and width of a tree.
        choice: How tokens are chosen; "drawn" is for chains.
        target: The step of the target.
    """

    logits: Callable[[jax.Array], jax.Array]
    shape: TreeShape
    choice: Choice
    target: TargetStep

    @property
    def stop(self) -> jax.Array:
        """Returns the number of levels that the step asks for."""
        return jnp.minimum(self.target.depth, self.shape.num_levels)

    def root(self, ends: Ends, output_BD: Float[Array, "B D"], pages: KVPages) -> Tree:
        """Returns a tree in which all branches are the drawn token, and only the first one counts.

        Args:
            ends: The ends of the rows.
            output_BD: The drafter's outputs for them, or zeros of this shape.
            pages: The pages that the drafter writes.
        """
        num_rows = ends.token_id_B.shape[0]
        width = self.shape.num_branches
        num_fields = 3 + 2 * MAX_CANDIDATES * (self.choice == "drawn")
        zeros_BX = jnp.zeros((num_rows, width), jnp.int32)
        return Tree(
            pages,
            token_id_BX=zeros_BX + ends.token_id_B[:, None],
            branch_BX=zeros_BX,
            output_BXD=jnp.repeat(output_BD[:, None], width, axis=1),
            score_BX=jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf) + zeros_BX,
            node_BX=zeros_BX - 1,
            candidates_BJGY=jnp.full(
                (num_rows, self.shape.num_levels, num_fields, width * width),
                bits_of(jnp.float32(-jnp.inf)),
            ),
        )

    def grow(self, ends: Ends, tree: Tree, level: Any) -> Tree:
        """Adds the candidates that follow the branches; the best are the new branches."""
        num_rows, width = tree.token_id_BX.shape
        draws = ends.draws._replace(position_R=ends.draws.position_R + 1 + level)
        draws = jax.tree.map(lambda array: jnp.repeat(array, width, axis=0), draws)
        logits = self.logits(tree.output_BXD.reshape(num_rows * width, -1))
        token_ids, scores, drawn_from = self._best(logits, draws)
        score_BY = (tree.score_BX[:, :, None] + scores.reshape(num_rows, width, width)).reshape(
            num_rows, -1
        )
        token_id_BY = token_ids.reshape(num_rows, -1).astype(jnp.int32)
        parent_BY = jnp.repeat(tree.node_BX, width, axis=1)
        candidates = [jnp.stack([token_id_BY, parent_BY, bits_of(score_BY)], axis=1), *drawn_from]
        score_BX, index_BX = jax.lax.top_k(score_BY, width)
        return tree._replace(
            token_id_BX=jnp.take_along_axis(token_id_BY, index_BX, axis=1),
            branch_BX=index_BX // width,
            score_BX=score_BX,
            node_BX=level * width * width + index_BX,
            candidates_BJGY=tree.candidates_BJGY.at[:, level].set(
                jnp.concatenate(candidates, axis=1)
            ),
        )

    def _best(
        self, logits: jax.Array, draws: Draws
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Returns the X tokens that may follow each branch, with their log probabilities.

        The last result has the ids and the probabilities that each was drawn from, for the choice
        "drawn"; otherwise it is empty. Scores of drawn tokens are 0.
        """
        target = self.target
        if self.choice == "drawn":
            token_ids, (ids_BW, q_BW) = draw_draft(logits, draws, by_row=target.by_row)
            return (
                token_ids,
                jnp.zeros(token_ids.shape),
                [ids_BW[:, :, None], bits_of(q_BW)[:, :, None]],
            )
        if self.choice == "coupled":
            is_random = target.inputs.flags[Flags.RANDOM] > 0
            logits = perturb_logits(logits, draws, is_random, by_row=target.by_row)
        scores, token_ids = jax.lax.top_k(log_softmax(logits), self.shape.num_branches)
        return token_ids, scores, []
