"""A model that drafts for another inside the other's step: first over the same tokens, then ahead of them.

Its keys and values are further layers of the same pool, in the same blocks and slots. So whatever happens to a sequence (a found prefix,
forks, swapping, preemption, wrong drafts) happens to them, and no step has to catch up. What it computes ahead goes to scratch
blocks behind those of the pool, which only its own layers have: it takes no block of a sequence, and a fork or a copy never sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.device.attention import make_attend
from jaxpage.device.backends import Backend
from jaxpage.device.buckets import Bucket
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.moving import copy_blocks, copy_slots
from jaxpage.device.sampler import Draws, draw_draft, draws_of, perturbed
from jaxpage.device.step_inputs import Flags, StepInputs
from jaxpage.layers.context import ForwardContext
from jaxpage.models.drafter import Drafter
from jaxpage.settings.speculative_config import MOST_CANDIDATES

# How a drafter chooses: as the target will draw, with its noise; the likeliest, whatever the noise; or by a draw of its own.
Choice = Literal["coupled", "likeliest", "drawn"]


class TreeShape(NamedTuple):
    """How far and how wide a drafter drafts, at most."""

    num_levels: int  # J: tokens ahead
    num_branches: int  # X: of the tokens of a level, how many are followed, and how many follow each; 1: a chain
    most_rows: int  # of a step whose sequences are drafted for

    def scratch_blocks(self, block_size: int) -> int:
        """Of one branch: it begins anywhere in a block."""
        return -(-(block_size - 1 + self.num_levels) // block_size)

    def num_scratch_blocks(self, block_size: int) -> int:
        """Of all branches of a step."""
        return self.most_rows * self.num_branches * self.scratch_blocks(block_size)


class DrafterOptions(NamedTuple):
    """What is fixed of a drafter for the life of an engine."""

    graph: Any  # its nnx graph definition
    aux_layers: tuple[int, ...] | None  # see `Drafter`
    shape: TreeShape
    first_layer: int  # of its own in the pages: behind the target's
    num_blocks: int  # of the pool: where the scratch blocks begin
    choice: Choice = "coupled"  # "drawn" is for chains

    @property
    def num_fields(self) -> int:
        """G: numbers of each candidate."""
        return 3 + 2 * MOST_CANDIDATES * (self.choice == "drawn")


class Ends(NamedTuple):
    """Where drafting begins: behind the token that was drawn for each row."""

    block_table_BM: Int[Array, "B M"]
    position_B: Int[Array, "B"]  # of that token
    token_id_B: Int[Array, "B"]
    draws: Draws  # what it was drawn with
    output_BD: Float[Array, "B D"] | None  # of a drafter that takes features: what it made of the token before


class _Tree(NamedTuple):
    """Drafts as they grow: the branches that are followed, and every candidate of every level."""

    pages: KVPages
    token_id_BX: jax.Array  # the last of each branch
    branch_BX: jax.Array  # whose continuation it is
    output_BXD: jax.Array  # what the drafter made of the branch before it
    score_BX: jax.Array  # log probability of the branch
    node_BX: jax.Array  # its last token's place among the candidates
    candidates_BJGY: jax.Array


class StepDrafter(NamedTuple):
    """A drafter in a step of its target."""

    drafter: Drafter
    options: DrafterOptions
    inputs: StepInputs
    bucket: Bucket
    backend: Backend
    by_row: bool


def extend(
    drafting: StepDrafter, pages: KVPages, states: Sequence[jax.Array], token_ids_R: Int[Array, "R"]
) -> tuple[Float[Array, "T D"], KVPages]:
    """The drafter's layers over the step's own stream, behind the target's; zeros, and nothing is done, where the step does not ask.

    Args:
        states: the target's hidden states that `Drafter.fuse` takes.
        token_ids_R: what the step drew.
    """
    drafter, options, inputs, bucket, backend, _ = drafting
    others, pages = pages[: options.first_layer], pages[options.first_layer :]
    attend = make_attend(inputs, backend=backend, bucket=bucket)

    def compute(pages: KVPages) -> tuple[jax.Array, KVPages]:
        context = ForwardContext(inputs.positions_T, attend)
        if drafter.aux_layers is None:
            return drafter(inputs.token_ids_T, None, pages, context)
        next_T = token_ids_R if bucket.verifies else _next_tokens(inputs, token_ids_R)
        return drafter(jnp.maximum(next_T, 0), drafter.fuse(states), pages, context)

    shape = jax.eval_shape(compute, pages)[0]
    nothing = jnp.zeros(shape.shape, shape.dtype)
    # A loop of one round or none, because XLA copies the pages where a branch takes them.
    rounds = inputs.flags[Flags.EXTENDS]
    output_TD, pages = jax.lax.fori_loop(0, rounds, lambda _, state: compute(state[1]), (nothing, pages))
    return output_TD, others + pages


def _next_tokens(inputs: StepInputs, token_ids_R: Int[Array, "R"]) -> Int[Array, "T"]:
    """What follows each token of a step that verifies nothing. Of several draws behind one token any counts."""
    num_tokens = inputs.token_ids_T.shape[0]
    end_B = jnp.where(inputs.query_start[1:] > inputs.query_start[:-1], inputs.query_start[1:] - 1, num_tokens)
    drawn_R = jnp.where(inputs.drawn_position_R > 0, inputs.drawn_token_R, num_tokens)  # padding draws for position 0
    next_T = jnp.roll(inputs.token_ids_T, -1).at[end_B].set(inputs.next_token_B, mode="drop")
    return next_T.at[drawn_R].set(token_ids_R, mode="drop")


def _ends(
    inputs: StepInputs, output_TD: jax.Array | None, token_ids_R: Int[Array, "R"], last_B: Int[Array, "B"]
) -> Ends:
    draws = jax.tree.map(lambda array: array[last_B], draws_of(inputs))
    token_B = inputs.drawn_token_R[last_B]
    row_B = jnp.searchsorted(inputs.query_start[1:], token_B, side="right")
    return Ends(
        inputs.block_table_BM[row_B],
        draws.position_R,
        jnp.maximum(token_ids_R[last_B], 0),
        draws,
        None if output_TD is None else output_TD[token_B],
    )


def draft_ahead(
    drafting: StepDrafter,
    pages: KVPages,
    output_TD: Float[Array, "T D"],
    token_ids_R: Int[Array, "R"],
    last_B: Int[Array, "B"],
) -> tuple[Int[Array, "B J G Y"], KVPages]:
    """Grows a tree of drafts behind each row, level by level: the best X candidates of a level are followed, each by its own best X.

    Dynamic trees as in EAGLE-2 (Li et al. 2024, arXiv:2406.16858), for any drafter; with one branch it is a chain. A candidate's
    score is its branch's log probability under the drafter, and if the choice is coupled also under the row's own noise: drafts are then
    right wherever the target draws what the drafter would draw (Daliri, Musco, Suresh 2024, arXiv:2408.07978).

    Args:
        output_TD: from `extend`.
        token_ids_R: what the step drew.
        last_B: the draw with which each row ends.

    Returns:
        Of each of the Y = X * X candidates of a level: the token, the place in [J * Y] of the one before it (-1: none), and
        the bits of its score; -inf of what is no candidate. Of drafts that were drawn also the ids [W] and the bits of the probabilities
        [W] of what each was drawn from. Only the levels that `Flags.LEVELS` asks for are made.
    """
    options, levels = drafting.options, drafting.inputs.flags[Flags.LEVELS]
    others, pages = pages[: options.first_layer], pages[options.first_layer :]
    takes_features = drafting.drafter.aux_layers is not None
    ends = _ends(drafting.inputs, output_TD if takes_features else None, token_ids_R, last_B)

    def follow_and_grow(level: jax.Array, tree: _Tree) -> _Tree:
        return _grow(drafting, ends, _follow(drafting, ends, tree, level - takes_features), level)

    def draft(_: jax.Array, tree: _Tree) -> _Tree:
        tree = tree._replace(pages=_fork_last_blocks(tree.pages, ends, options, drafting.backend))
        if takes_features:  # they have made something of the token that was drawn
            tree = _grow(drafting, ends, tree, 0)
        stop = jnp.minimum(levels, options.shape.num_levels)
        return jax.lax.fori_loop(int(takes_features), stop, follow_and_grow, tree)

    # As in `extend`: where nothing is wanted, nothing is done.
    tree = jax.lax.fori_loop(0, (levels > 0).astype(jnp.int32), draft, _root(ends, output_TD, pages, options))
    return tree.candidates_BJGY, others + tree.pages


def _root(ends: Ends, output_TD: jax.Array, pages: KVPages, options: DrafterOptions) -> _Tree:
    """The token that was drawn, as the first of all branches, and the only one."""
    num_rows, width = ends.token_id_B.shape[0], options.shape.num_branches
    zeros_BX = jnp.zeros((num_rows, width), jnp.int32)
    output_BD = jnp.zeros((num_rows, output_TD.shape[1]), output_TD.dtype) if ends.output_BD is None else ends.output_BD
    return _Tree(
        pages,
        token_id_BX=zeros_BX + ends.token_id_B[:, None],
        branch_BX=zeros_BX,
        output_BXD=jnp.repeat(output_BD[:, None], width, axis=1),
        score_BX=jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf) + zeros_BX,
        node_BX=zeros_BX - 1,
        candidates_BJGY=jnp.full(
            (num_rows, options.shape.num_levels, options.num_fields, width * width), _bits(jnp.float32(-jnp.inf))
        ),
    )


def _grow(drafting: StepDrafter, ends: Ends, tree: _Tree, level: Any) -> _Tree:
    """The candidates behind the branches, and the best of them as the new branches."""
    num_rows, width = tree.token_id_BX.shape
    draws = ends.draws._replace(position_R=ends.draws.position_R + 1 + level)
    draws = jax.tree.map(lambda array: jnp.repeat(array, width, axis=0), draws)
    logits = drafting.drafter.logits(tree.output_BXD.reshape(num_rows * width, -1))
    token_ids, scores, drawn_from = _best(drafting, logits, draws)
    score_BY = (tree.score_BX[:, :, None] + scores.reshape(num_rows, width, width)).reshape(num_rows, -1)
    token_id_BY = token_ids.reshape(num_rows, -1).astype(jnp.int32)
    parent_BY = jnp.repeat(tree.node_BX, width, axis=1)
    candidates = [jnp.stack([token_id_BY, parent_BY, _bits(score_BY)], axis=1), *drawn_from]
    score_BX, place_BX = jax.lax.top_k(score_BY, width)
    return tree._replace(
        token_id_BX=jnp.take_along_axis(token_id_BY, place_BX, axis=1),
        branch_BX=place_BX // width,
        score_BX=score_BX,
        node_BX=level * width * width + place_BX,
        candidates_BJGY=tree.candidates_BJGY.at[:, level].set(jnp.concatenate(candidates, axis=1)),
    )


def _best(drafting: StepDrafter, logits: jax.Array, draws: Draws) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Of each branch the X tokens that it may go on with, their log probabilities, and what they were drawn from, if they were."""
    width, choice, by_row = drafting.options.shape.num_branches, drafting.options.choice, drafting.by_row
    if choice == "drawn":
        token_ids, (ids_BW, q_BW) = draw_draft(logits, draws, by_row=by_row)
        return token_ids, jnp.zeros(token_ids.shape), [ids_BW[:, :, None], _bits(q_BW)[:, :, None]]
    if choice == "coupled":
        logits = perturbed(logits, draws, drafting.inputs.flags[Flags.RANDOM] > 0, by_row=by_row)
    scores, token_ids = jax.lax.top_k(jax.nn.log_softmax(logits), width)
    return token_ids, scores, []


def _follow(drafting: StepDrafter, ends: Ends, tree: _Tree, index: Any) -> _Tree:
    """One pass over the last token of each branch, the `index`-th of those that stand in scratch."""
    drafter, options, inputs, _, backend, _ = drafting
    num_rows, width = tree.token_id_BX.shape
    count, block_size = num_rows * width, tree.pages[0].k_pages.shape[1]
    first_block_BX = _first_blocks(num_rows, options, block_size)
    pages = tree.pages if width == 1 else _inherit(tree, ends, first_block_BX, index, options, backend)
    position_BX = jnp.broadcast_to(ends.position_B[:, None] + index, (num_rows, width))
    inputs = inputs._replace(
        slots_T=(first_block_BX * block_size + ends.position_B[:, None] % block_size + index).reshape(-1),
        block_table_BM=_scratch_tables(ends, first_block_BX, options, block_size),
        context_len_B=position_BX.reshape(-1) + 1,
        query_start=jnp.arange(count + 1, dtype=jnp.int32),
    )
    feature = None
    if drafter.aux_layers is not None:
        feature = jnp.take_along_axis(tree.output_BXD, tree.branch_BX[:, :, None], axis=1).reshape(count, -1)
    attend = make_attend(inputs, backend=backend, bucket=Bucket(count, count, 1))
    context = ForwardContext(position_BX.reshape(-1), attend)
    output, pages = drafter(tree.token_id_BX.reshape(-1), feature, pages, context)
    return tree._replace(pages=pages, output_BXD=output.reshape(num_rows, width, -1))


def _inherit(
    tree: _Tree, ends: Ends, first_block_BX: jax.Array, index: Any, options: DrafterOptions, backend: Backend
) -> KVPages:
    """A branch goes on from what stands in the scratch of the one that it continues."""
    block_size, place_J = tree.pages[0].k_pages.shape[1], jnp.arange(options.shape.num_levels)
    offset_B1J = (ends.position_B % block_size)[:, None, None] + place_J
    source, destination = (
        jnp.where(place_J < index, block_BX[:, :, None] * block_size + offset_B1J, 0).reshape(-1)
        for block_BX in (jnp.take_along_axis(first_block_BX, tree.branch_BX, axis=1), first_block_BX)
    )
    return copy_slots(tree.pages, source, destination, backend)


def _first_blocks(num_rows: int, options: DrafterOptions, block_size: int) -> Int[Array, "B X"]:
    """Of the scratch blocks of each branch, which lie one behind the other."""
    branches = jnp.arange(num_rows * options.shape.num_branches, dtype=jnp.int32).reshape(num_rows, -1)
    return options.num_blocks + branches * options.shape.scratch_blocks(block_size)


def _fork_last_blocks(pages: KVPages, ends: Ends, options: DrafterOptions, backend: Backend) -> KVPages:
    """Copies of the block in which each row ends, for each of its branches: what is written behind it stays out of the row's own."""
    block_size, last = pages[0].k_pages.shape[1], ends.block_table_BM.shape[1] - 1
    place_B1 = jnp.minimum(ends.position_B // block_size, last)[:, None]
    source_B1 = jnp.take_along_axis(ends.block_table_BM, place_B1, axis=1)
    first_block = _first_blocks(ends.position_B.shape[0], options, block_size)
    begins_in_it = (ends.position_B % block_size > 0)[:, None]
    source, destination = (
        jnp.where(begins_in_it, block, 0) for block in (jnp.broadcast_to(source_B1, first_block.shape), first_block)
    )
    return copy_blocks(pages, source.reshape(-1), destination.reshape(-1), backend)


def _scratch_tables(
    ends: Ends, first_block_BX: jax.Array, options: DrafterOptions, block_size: int
) -> Int[Array, "BX M"]:
    """Block tables of the branches: the row's own up to the block in which it ends, and scratch from there on."""
    num_scratch = options.shape.scratch_blocks(block_size)
    table = jnp.pad(ends.block_table_BM, ((0, 0), (0, num_scratch)))  # a draft may go beyond the longest sequence
    place_B1M = jnp.arange(table.shape[1]) - (ends.position_B // block_size)[:, None, None]
    scratch_BXM = first_block_BX[:, :, None] + place_B1M
    tables = jnp.where((place_B1M >= 0) & (place_B1M < num_scratch), scratch_BXM, table[:, None])
    return tables.reshape(-1, table.shape[1])


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)
