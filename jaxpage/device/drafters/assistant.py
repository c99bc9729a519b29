"""Runs Gemma 4's assistants inside the steps of their target, whose pages they read.

An assistant keeps nothing of the text, so there is nothing to compute for the tokens of a step, no
block that it takes, and nothing that it can miss.

What it sees is what it sees in transformers (5.24, `SinglePositionMultiTokenCandidateGenerator`):
all keys before the token that the drafts follow, and, where a draft in its place was rejected in
this step, the key of that draft too. Layers with a window see those of all rejected drafts, once
the text is longer than the window:

    window 4, text a b c d e f, drafts x y z after f: x is right, and g is drawn after it
    keys in the pages             a b c d e f x y z
    full layers draft after g by  a b c d e f x y
    layers with a window by               e f x y z        5 keys: see `follow_target`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.device.attention import make_attend
from jaxpage.device.drafters.drafter import TargetStep
from jaxpage.device.drafters.ends import Ends, ends_of
from jaxpage.device.drafters.growing import Choice, Growing, Tree
from jaxpage.device.drafters.tree_shape import TreeShape
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.pages.kv_pages import KVPages, LayerPages
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext
from jaxpage.models.drafters import Assistant, join


@dataclass(frozen=True)
class AssistantDrafter:
    """A `DeviceDrafter` that reads the pages of the target's layers."""

    graph: Any  # its nnx graph definition
    layer_groups: tuple[int, ...]  # the cache group of each of the target's layers
    shape: TreeShape
    choice: Choice = "coupled"  # "drawn" is for chains
    num_layers: ClassVar[int] = 0
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def drafts_in(self, bucket: Bucket) -> bool:
        """Returns whether steps with so many rows have drafts."""
        return bucket.num_rows <= self.shape.max_rows

    def step(
        self, parameters: Any, target: TargetStep, pages: KVPages
    ) -> tuple[jax.Array | None, KVPages]:
        """Returns candidates [B, J, G, Y], see `Tree`, and the pages, of which it has none."""
        if not self.drafts_in(target.bucket):
            return None, pages
        assistant = cast(Assistant, join(self.graph, parameters))
        growing = Growing(assistant.logits, self.shape, self.choice, target)
        ends = ends_of(target, None)
        token_B = target.inputs.draws.drawn_token_R[target.last_B]
        # The first draft follows the target's own state; later ones the assistant's.
        state_BS = target.hidden_TD[token_B]
        width = self.shape.num_branches
        attend = _make_attend(target, ends, self.layer_groups, width)

        def compute(token_id_BX: jax.Array, state_BXS: jax.Array) -> Float[Array, "B X D"]:
            position_T = jnp.repeat(ends.position_B, width)
            output_TD = assistant(
                token_id_BX.reshape(-1),
                state_BXS.reshape(position_T.size, -1),
                target.pages,
                ForwardContext(position_T, attend),
            )
            return output_TD.reshape(*token_id_BX.shape, -1)

        def follow_and_grow(level: jax.Array, tree: Tree) -> Tree:
            output = jnp.take_along_axis(tree.output_BXD, tree.branch_BX[:, :, None], axis=1)
            state = assistant.next_state(output.reshape(-1, output.shape[-1]))
            tree = tree._replace(output_BXD=compute(tree.token_id_BX, state))
            return growing.grow(ends, tree, level)

        def draft(_: jax.Array, tree: Tree) -> Tree:
            state_BXS = jnp.repeat(state_BS[:, None], width, axis=1)
            tree = tree._replace(output_BXD=compute(tree.token_id_BX, state_BXS))
            tree = growing.grow(ends, tree, 0)
            return jax.lax.fori_loop(1, growing.stop, follow_and_grow, tree)

        nothing_BD = jnp.zeros(
            (len(ends.token_id_B), assistant.spec.decoder.hidden_size), target.hidden_TD.dtype
        )
        # A loop of one round or none, as in `drafting._extend`.
        rounds = (target.depth > 0).astype(jnp.int32)
        tree = jax.lax.fori_loop(0, rounds, draft, growing.root(ends, nothing_BD, ()))
        return tree.candidates_BJGY, pages


def _make_attend(
    target: TargetStep, ends: Ends, layer_groups: tuple[int, ...], width: int
) -> Attend:
    """Returns the function `attend` for one query of each branch, over the rows' own pages."""
    count = len(ends.position_B) * width
    inputs = target.inputs._replace(
        block_table_ZBM=jnp.repeat(ends.block_table_ZBM, width, axis=1),
        query_start=jnp.arange(count + 1, dtype=jnp.int32),
    )

    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, LayerPages]:
        context_len_B = _count_keys(target, ends, options.sliding_window)
        of_layer = make_attend(
            inputs._replace(context_len_B=jnp.repeat(context_len_B, width)),
            backend=target.backend,
            bucket=Bucket(count, count, 1),
            layer_groups=layer_groups,
        )
        return of_layer(layer_index, q_TNH, k_TKH, v_TKH, layer_pages, options)

    return attend


def _count_keys(target: TargetStep, ends: Ends, window: int | None) -> Int[Array, "B"]:
    """Returns how many keys of each row a layer with this window may see.

    Rows of padding have one.
    """
    inputs = target.inputs
    if target.bucket.trees:  # what is after the accepted drafts is of other branches
        return jnp.maximum(ends.position_B, 1)
    num_known_B = ends.position_B + 1
    num_keys_B = inputs.context_len_B[ends.row_B]
    num_seen_B = num_known_B
    if window is not None:
        # In transformers such a layer has the keys of the step, and W - 1 before them. Its list is
        # cut off after as many keys as there are known tokens, wherever it begins.
        num_new_B = jnp.diff(inputs.query_start)[ends.row_B]
        num_left_out_B = jnp.maximum(0, num_keys_B - (window - 2 + num_new_B))
        num_seen_B = num_known_B + num_left_out_B
    return jnp.clip(num_keys_B, 1, jnp.maximum(num_seen_B, 1))
