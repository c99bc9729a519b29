"""Runs a draft model inside the steps of its target: over the same tokens, then ahead of them.

Its keys and values are further layers of the same pool, in the same blocks and slots. So whatever
happens to a sequence (a prefix hit, forks, swapping, preemption, wrong drafts) happens to them,
too, and no step has to catch up.

What it computes ahead goes to scratch blocks after the P blocks of the pool, which only its own
layers have. So it takes no block of a sequence, and a fork or a copy never sees it:

    block table of a row that ends in block 9     [ 7  3  9   ]
    block table of its first branch               [ 7  3  P   P+1 ]     block 9 is copied to P
    block table of its second branch              [ 7  3  P+2 P+3 ]     block 9 is copied to P+2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.attention import make_attend
from jaxpage.device.drafters.drafter import TargetStep
from jaxpage.device.drafters.ends import Ends, ends_of
from jaxpage.device.drafters.growing import Choice, Growing, Tree
from jaxpage.device.drafters.tree_shape import TreeShape
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import StepInputs
from jaxpage.device.moving import copy_blocks, copy_slots
from jaxpage.device.pages.kv_pages import KVPages, in_groups
from jaxpage.device.verify import moves
from jaxpage.layers.context import ForwardContext
from jaxpage.models.drafters import Drafter, join


@dataclass(frozen=True)
class ModelDrafter:
    """A `DeviceDrafter` with layers of its own: a draft model or an EAGLE head."""

    graph: Any  # its nnx graph definition
    own_aux_layers: tuple[int, ...] | None  # see `Drafter`
    layer_groups: tuple[int, ...]  # the cache group of each of its layers
    shape: TreeShape
    num_blocks: tuple[int, ...]  # P of each cache group's pool: where the scratch blocks begin
    choice: Choice = "coupled"  # "drawn" is for chains

    @property
    def num_layers(self) -> int:
        """Returns the number of the drafter's layers."""
        return len(self.layer_groups)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Returns which hidden states of the target it takes; an empty tuple if it takes none."""
        return self.own_aux_layers or ()

    def drafts_in(self, bucket: Bucket) -> bool:
        """Returns whether there are scratch blocks for all rows of the shape."""
        return bucket.num_rows <= self.shape.max_rows

    def step(
        self, parameters: Any, target: TargetStep, pages: KVPages
    ) -> tuple[jax.Array | None, KVPages]:
        """Returns candidates [B, J, G, Y], see `Tree`, and the pages."""
        drafting = _DraftStep(join(self.graph, parameters), self, target)
        output_TD, pages = _extend(drafting, pages)
        if target.bucket.trees:  # the accepted drafts of a chain are in place
            slots = moves(target.paths_BQ, target.inputs.slots_ZT[0], target.inputs.query_start)
            pages = copy_slots(pages, *slots, target.backend)
        if not self.drafts_in(target.bucket):
            return None, pages
        return _draft_ahead(drafting, pages, output_TD)


class _DraftStep(NamedTuple):
    """Groups a drafter, its options, and the step of its target in which it drafts."""

    drafter: Drafter
    options: ModelDrafter
    target: TargetStep


def _extend(drafting: _DraftStep, pages: KVPages) -> tuple[Float[Array, "T D"], KVPages]:
    """Computes the drafter's layers over the step's own stream, after the target's.

    Where the draft depth is None nothing is done, and the result is zeros.
    """
    drafter, options, target = drafting
    inputs = target.inputs
    token_ids_R = target.token_ids_R
    attend = make_attend(
        inputs, backend=target.backend, bucket=target.bucket, layer_groups=options.layer_groups
    )

    def compute(pages: KVPages) -> tuple[jax.Array, KVPages]:
        context = ForwardContext(inputs.positions_T, attend, axes_AT=inputs.rotary_AT)
        if drafter.aux_layers is None:
            return drafter(inputs.token_ids_T, None, pages, context)
        next_T = token_ids_R if target.bucket.verifies else _next_tokens(inputs, token_ids_R)
        context = replace(context, vectors=_next_vectors(target))
        # A negative id says that nothing was drawn; that text ends, and any token will do.
        return drafter(jnp.maximum(next_T, 0), drafter.fuse(target.states), pages, context)

    shape = jax.eval_shape(compute, pages)[0]
    nothing = jnp.zeros(shape.shape, shape.dtype)
    # A loop of one round or none, because XLA copies the pages where a branch takes them.
    rounds = (target.depth >= 0).astype(jnp.int32)
    return jax.lax.fori_loop(0, rounds, lambda _, state: compute(state[1]), (nothing, pages))


def _next_tokens(inputs: StepInputs, token_ids_R: Int[Array, "R"]) -> Int[Array, "T"]:
    """Returns the token after each token of the stream, in a step that verifies nothing.

    If several tokens are drawn after one, it returns any of them.
    """
    num_tokens = inputs.token_ids_T.shape[0]
    end_B = _ends_of_rows(inputs)
    # Padding draws for position 0.
    drawn_R = jnp.where(inputs.draws.drawn_position_R > 0, inputs.draws.drawn_token_R, num_tokens)
    next_T = jnp.roll(inputs.token_ids_T, -1).at[end_B].set(inputs.next_token_B, mode="drop")
    return next_T.at[drawn_R].set(token_ids_R, mode="drop")


def _next_vectors(target: TargetStep) -> tuple[Bool[Array, "T"], Float[Array, "T D"]] | None:
    """Returns which tokens have a vector in place of the token after them, and these vectors.

    The vector after the last token of a row is not in the step. A draft may be worse for that.
    """
    if target.vectors_TD is None:
        return None
    is_next_T = jnp.roll(target.inputs.is_vector_T, -1) > 0
    is_next_T = is_next_T.at[_ends_of_rows(target.inputs)].set(False, mode="drop")
    return is_next_T, jnp.roll(target.vectors_TD, -1, axis=0)


def _ends_of_rows(inputs: StepInputs) -> Int[Array, "B"]:
    """Returns the last token of each row; of those without tokens, the end of the stream."""
    starts = inputs.query_start
    return jnp.where(starts[1:] > starts[:-1], starts[1:] - 1, inputs.token_ids_T.shape[0])


def _draft_ahead(
    drafting: _DraftStep, pages: KVPages, output_TD: Float[Array, "T D"]
) -> tuple[Int[Array, "B J G Y"], KVPages]:
    """Grows a tree of drafts after each of `target.last_B`, level by level.

    For how it grows see `Growing`.

    Args:
        drafting: The drafter and the step.
        pages: The pages of the drafter's layers.
        output_TD: The output of `_extend`.

    Returns:
        `Tree.candidates_BJGY`, and the pages.
    """
    options, target = drafting.options, drafting.target
    growing = Growing(drafting.drafter.logits, options.shape, options.choice, target)
    takes_features = drafting.drafter.aux_layers is not None
    ends = ends_of(target, output_TD if takes_features else None)

    def follow_and_grow(level: jax.Array, tree: Tree) -> Tree:
        # A drafter that takes features has its first level from `_extend`, so it is a token behind.
        tree = _follow(drafting, ends, tree, level - takes_features)
        return growing.grow(ends, tree, level)

    def draft(_: jax.Array, tree: Tree) -> Tree:
        tree = tree._replace(pages=_fork_last_blocks(tree.pages, ends, options, target.backend))
        if takes_features:  # its output is already for the drawn token
            tree = growing.grow(ends, tree, 0)
        return jax.lax.fori_loop(int(takes_features), growing.stop, follow_and_grow, tree)

    # A loop of one round or none, for the same reason as in `_extend`.
    num_rows = ends.token_id_B.shape[0]
    output_BD = ends.output_BD
    if output_BD is None:
        output_BD = jnp.zeros((num_rows, output_TD.shape[1]), output_TD.dtype)
    rounds = (target.depth > 0).astype(jnp.int32)
    tree = jax.lax.fori_loop(0, rounds, draft, growing.root(ends, output_BD, pages))
    return tree.candidates_BJGY, tree.pages


def _follow(drafting: _DraftStep, ends: Ends, tree: Tree, index: Any) -> Tree:
    """Runs the drafter over the last token of each branch, the `index`-th token in its scratch."""
    drafter, options, target = drafting
    backend = target.backend
    num_rows, width = tree.token_id_BX.shape
    count = num_rows * width
    block_size = tree.pages[0][0].shape[1]
    first_block_ZBX = _first_blocks(num_rows, options, block_size)
    pages = (
        tree.pages if width == 1 else _inherit(tree, ends, first_block_ZBX, index, options, backend)
    )
    position_BX = jnp.broadcast_to(ends.position_B[:, None] + index, (num_rows, width))
    inputs = target.inputs._replace(
        slots_ZT=(
            # The scratch blocks of a branch follow each other, so slots count on past the end of
            # one.
            first_block_ZBX * block_size + ends.position_B[:, None] % block_size + index
        ).reshape(-1, count),
        block_table_ZBM=_scratch_tables(ends, first_block_ZBX, options, block_size),
        context_len_B=position_BX.reshape(-1) + 1,
        query_start=jnp.arange(count + 1, dtype=jnp.int32),
    )
    feature = None
    if drafter.aux_layers is not None:
        feature = jnp.take_along_axis(tree.output_BXD, tree.branch_BX[:, :, None], axis=1).reshape(
            count, -1
        )
    attend = make_attend(
        inputs, backend=backend, bucket=Bucket(count, count, 1), layer_groups=options.layer_groups
    )
    context = ForwardContext(position_BX.reshape(-1), attend, axes_AT=ends.axes(position_BX))
    output, pages = drafter(tree.token_id_BX.reshape(-1), feature, pages, context)
    return tree._replace(pages=pages, output_BXD=output.reshape(num_rows, width, -1))


def _inherit(
    tree: Tree,
    ends: Ends,
    first_block_ZBX: jax.Array,
    index: Any,
    options: ModelDrafter,
    backend: Backend,
) -> KVPages:
    """Copies to each branch the scratch of the branch that it continues."""
    block_size = tree.pages[0][0].shape[1]
    index_J = jnp.arange(options.shape.num_levels)
    offset_B1J = (ends.position_B % block_size)[:, None, None] + index_J
    num_groups = len(options.num_blocks)
    source, destination = (
        # What is not written yet becomes slot 0 of the null block, copied to itself.
        jnp.where(index_J < index, block_ZBX[..., None] * block_size + offset_B1J, 0).reshape(
            num_groups, -1
        )
        for block_ZBX in (
            jnp.take_along_axis(first_block_ZBX, tree.branch_BX[None], axis=2),
            first_block_ZBX,
        )
    )
    return in_groups(
        tree.pages,
        options.layer_groups,
        lambda group, pages: copy_slots(pages, source[group], destination[group], backend),
    )


def _first_blocks(num_rows: int, options: ModelDrafter, block_size: int) -> Int[Array, "Z B X"]:
    """Returns the first scratch block of each branch; its other ones follow it."""
    branches = jnp.arange(num_rows * options.shape.num_branches, dtype=jnp.int32).reshape(
        num_rows, -1
    )
    return jnp.array(options.num_blocks)[:, None, None] + branches * options.shape.scratch_blocks(
        block_size
    )


def _fork_last_blocks(
    pages: KVPages, ends: Ends, options: ModelDrafter, backend: Backend
) -> KVPages:
    """Copies the block in which each row ends to each of its branches.

    What a branch writes then stays out of the row's own block.
    """
    block_size = pages[0][0].shape[1]
    last = ends.block_table_ZBM.shape[2] - 1
    index_B1 = jnp.minimum(ends.position_B // block_size, last)[:, None]
    source_ZB1 = jnp.take_along_axis(ends.block_table_ZBM, index_B1[None], axis=2)
    first_block = _first_blocks(ends.position_B.shape[0], options, block_size)
    # Nothing is to be copied where the next token begins a block.
    begins_in_it = (ends.position_B % block_size > 0)[:, None]
    source, destination = (
        jnp.where(begins_in_it, block, 0).reshape(len(options.num_blocks), -1)
        for block in (jnp.broadcast_to(source_ZB1, first_block.shape), first_block)
    )
    return in_groups(
        pages,
        options.layer_groups,
        lambda group, pages: copy_blocks(pages, source[group], destination[group], backend),
    )


def _scratch_tables(
    ends: Ends, first_block_ZBX: jax.Array, options: ModelDrafter, block_size: int
) -> Int[Array, "Z BX M"]:
    """Returns the block tables of the branches.

    A table is the row's own up to the block in which the row ends, and scratch from there on.
    """
    num_scratch = options.shape.scratch_blocks(block_size)
    # A draft may go beyond the longest sequence.
    table_ZBM = jnp.pad(ends.block_table_ZBM, ((0, 0), (0, 0), (0, num_scratch)))
    num_groups, _, table_width = table_ZBM.shape
    index_B1M = jnp.arange(table_width) - (ends.position_B // block_size)[:, None, None]
    scratch_ZBXM = first_block_ZBX[..., None] + index_B1M
    tables = jnp.where(
        (index_B1M >= 0) & (index_B1M < num_scratch), scratch_ZBXM, table_ZBM[:, :, None]
    )
    return tables.reshape(num_groups, -1, table_width)
