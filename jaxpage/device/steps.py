"""Defines the pure functions that are compiled: steps of the model, and copies of blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.device.acceptance import decide
from jaxpage.device.attention import make_attend, make_layer_kernels, make_rotate_and_write
from jaxpage.device.divided_logits import Logits, draw_from_parts, need_whole_rows
from jaxpage.device.drafters.drafter import DeviceDrafter, TargetStep, split_layers
from jaxpage.device.drawn import pack_drawn, pack_draws, width_of_draw
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import (
    Flags,
    ProcessorInputs,
    StepInputs,
    TableShape,
    at_step,
    unpack,
)
from jaxpage.device.moving import copy_blocks, copy_slots
from jaxpage.device.packing import Padding
from jaxpage.device.pages.kv_pages import KVPages, by_layer, in_a_row
from jaxpage.device.recurrence import make_recur
from jaxpage.device.routes import RoutedLayers, stack_routes
from jaxpage.device.sampler import draw, scale_logits
from jaxpage.device.selection_kernels import selection_kernels
from jaxpage.device.verify import accept, last_of, moves
from jaxpage.layers.context import ForwardContext
from jaxpage.layers.sharding import UNDIVIDED, Sharding
from jaxpage.layers.trace_scope import Routes, TraceScope, adapters_of
from jaxpage.settings.cuda_graphs import USUAL_GRAPHS, GraphSettings
from jaxpage.settings.draft_settings import AcceptanceRule
from jaxpage.step.token_masks import num_mask_words

# Tokens whose logits are made together: enough that reading the head's weights costs little
# (docs/lab-log.md).
SCORED_AT_ONCE = 64


class StepOptions(NamedTuple):
    """Holds the constants of a step function that are fixed for the life of an engine.

    The bucket is the only other constant.
    """

    graph: Any  # the model's nnx graph definition
    vocab_size: int  # V
    context: int  # C: positions of the longest sequence
    tables: TableShape
    # The cache group of each layer, and in a divided model that of the layer's pages in each shard.
    # A drafter's layers come after the model's.
    layer_groups: tuple[int, ...]
    attention_backend: Backend
    sample_by_row: bool
    drafter: DeviceDrafter | None = None  # its target is the model
    acceptance: AcceptanceRule = AcceptanceRule()
    max_loras: int = 0  # slots of adapters
    sharding: Sharding = UNDIVIDED
    graphs: GraphSettings = USUAL_GRAPHS
    # [1 + n, D], the vectors that may take the place of a token; n are for later layers.
    vectors: jax.ShapeDtypeStruct | None = None
    returns_masks: bool = False  # of the tokens that could be drawn
    routed: RoutedLayers | None = None  # the layers whose routes are returned
    returns_hidden: bool = False  # states that tokens are drawn from


class StepOutput(NamedTuple):
    """Holds the int32 arrays that leave the device after a step, some for `unpack_drawn`."""

    drawn: jax.Array  # [R, X], the draws, from `pack_draws`
    scored: jax.Array  # [T, X], the scored tokens; empty where no token can be scored
    paths: jax.Array  # [B, Q] from `decide` in a step that verifies; empty otherwise
    draft_candidates: jax.Array | None = None  # see `DeviceDrafter.step`
    masks: jax.Array | None = None  # uint32 [R, U], from `pack_draws`, with `returns_masks`
    routes: jax.Array | None = None  # int16 [T, L, X], with `routed`
    hidden: jax.Array | None = None  # float32 [R, D], with `returns_hidden`


def model_step(
    parameters: Any,
    pages: KVPages,
    packed: jax.Array,
    processor_inputs: ProcessorInputs,
    vectors: jax.Array | None = None,
    *,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[StepOutput, KVPages]:
    """Computes the tokens of a step, draws up to R tokens, and drafts after them.

    The keys and values of the step's tokens are written to `pages`, which are to be donated.

    Args:
        parameters: {"target": the model's, "drafter": its drafter's, or None}.
        pages: The pages of all layers, a drafter's after the model's.
        packed: The step's metadata; see `step_inputs`.
        processor_inputs: The wide arrays of logits processors.
        vectors: [T, 1 + n, D], what takes the place of tokens, in a bucket that takes such.
        bucket: The shape of the step.
        options: The other constants.
    """
    with selection_kernels(options.attention_backend):
        return _step(
            parameters,
            pages,
            unpack(packed, bucket, options.tables),
            processor_inputs,
            vectors,
            bucket,
            options,
        )


def _step(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    vectors: jax.Array | None,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[StepOutput, KVPages]:
    if bucket.num_steps > 1:
        return _multi_step(parameters["target"], pages, inputs, processor_inputs, bucket, options)
    pages, own_pages = split_layers(pages, options.drafter)
    output, target, pages = _target_step(
        parameters["target"], pages, inputs, processor_inputs, bucket, options, vectors
    )
    if options.drafter is not None:
        with TraceScope(make_layer_kernels(options.attention_backend)).open():
            draft_candidates, own_pages = options.drafter.step(parameters, target, own_pages)
        output = output._replace(draft_candidates=draft_candidates)
    return output, pages + own_pages


def _target_step(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    bucket: Bucket,
    options: StepOptions,
    vectors: jax.Array | None = None,
) -> tuple[StepOutput, TargetStep, KVPages]:
    backend = options.attention_backend
    routes = Routes()
    model, hidden_TD, pages, states = _run_model(
        parameters, pages, inputs, bucket, options, vectors, routes
    )
    local_RU = _logits_to_draw_from(model, hidden_TD, inputs, options, divided=True)
    logits = Logits(local_RU, options.vocab_size, options.sharding)
    with jax.named_scope("sampling"):
        token_ids_R, paths, drawn, masks = _draw(logits, inputs, processor_inputs, bucket, options)
    last_B = last_of(paths) if bucket.verifies else jnp.arange(bucket.num_rows)
    scored = jnp.zeros((0, drawn.shape[1]), jnp.int32)
    # Prompts are scored in chunk steps alone; see `BucketMenu.choose`.
    if bucket.max_query_len > 1 and not bucket.verifies:
        scored = _score(model, hidden_TD, inputs, drawn.shape[1], bucket, options)
    # The accepted drafts of a chain are in place. With trees there are no windows, so there is one
    # cache group.
    if bucket.trees:
        source, destination = moves(paths, inputs.slots_ZT[0], inputs.query_start)
        pages = copy_slots(pages, source, destination, backend)
    target = TargetStep(
        inputs._replace(last_seen_T=inputs.last_seen_T[:0]),  # a drafter looks back alone
        bucket,
        backend,
        options.sample_by_row,
        hidden_TD,
        states,
        logits,
        token_ids_R,
        paths,
        last_B,
        pages,
        None if vectors is None else vectors[:, 0],
    )
    output = StepOutput(
        drawn,
        scored,
        paths,
        masks=masks if options.returns_masks else None,
        routes=stack_routes(routes.chosen, options.routed),
        hidden=hidden_TD[inputs.draws.drawn_token_R].astype(jnp.float32)
        if options.returns_hidden
        else None,
    )
    return output, target, pages


def _draw(
    logits: Logits,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the drawn tokens, the paths of accepted drafts, and what `pack_draws` returns."""
    by_row = options.sample_by_row
    no_paths = jnp.zeros((0, 0), jnp.int32)
    num_words = num_mask_words(logits.vocab_size) if options.returns_masks else 0

    def of_whole_rows() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        logits_RV = logits.whole()
        scaled_RV = None
        if by_row:  # at once it would be a second array as large as the logits
            scaled_RV = scale_logits(logits_RV, inputs, processor_inputs, by_row=True)
        paths = no_paths
        if bucket.verifies:
            token_ids_R, paths = decide(
                logits_RV,
                inputs,
                processor_inputs,
                bucket,
                options.acceptance,
                by_row=by_row,
                scaled_RV=scaled_RV,
            )
        else:
            token_ids_R = draw(
                logits_RV, inputs, processor_inputs, by_row=by_row, scaled_BV=scaled_RV
            )
        packed = pack_draws(
            logits_RV,
            token_ids_R,
            inputs,
            processor_inputs,
            scaled_RV=scaled_RV,
            num_words=num_words,
        )
        return token_ids_R, paths, *packed

    def of_parts() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        token_ids_R = draw_from_parts(logits, inputs, by_row=by_row)
        paths = no_paths
        if bucket.verifies:
            paths = accept(
                token_ids_R,
                inputs.token_ids_T,
                inputs.parents_T,
                inputs.query_start,
                bucket.max_query_len,
            )
        width = width_of_draw(logits.vocab_size)
        drawn = jnp.pad(token_ids_R[:, None], ((0, 0), (0, width - 1)))
        return token_ids_R, paths, drawn, jnp.zeros((len(drawn), num_words), jnp.uint32)

    if not logits.are_divided or (bucket.verifies and options.acceptance.name != "coupled"):
        return of_whole_rows()
    return jax.lax.cond(need_whole_rows(inputs, logits.vocab_size), of_whole_rows, of_parts)


def _multi_step(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[StepOutput, KVPages]:
    """Computes decode steps one after the other, as many as the longest row has places.

    A row that has no place left computes its last token again. What comes of it is dropped, and its
    key and value go to the null block.
    """
    single_step = Bucket(bucket.num_rows, bucket.num_rows, 1)
    num_tokens = bucket.num_tokens
    first_B = inputs.query_start[:-1]
    length_B = jnp.diff(inputs.query_start)

    def step(index: jax.Array, token_ids_B: jax.Array, pages: KVPages) -> tuple[Any, KVPages]:
        now = at_step(inputs, index, token_ids_B)
        output, _, pages = _target_step(
            parameters, pages, now, processor_inputs, single_step, options
        )
        return (output.drawn, output.masks, output.routes, output.hidden), pages

    def next_step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, token_ids_B, pages, arrays = state
        rows, pages = step(index, token_ids_B, pages)
        index_B = jnp.where(index < length_B, first_B + index, num_tokens)
        arrays = jax.tree.map(
            lambda array, some: array.at[index_B].set(some, mode="drop"), arrays, rows
        )
        # The text of a row that drew nothing (a negative id) ends there; what it computes until
        # then is dropped.
        return index + 1, jnp.maximum(rows[0][:, 0], 0), pages, arrays

    # Rows of padding may begin past the last token.
    start = jnp.int32(0), inputs.token_ids_T[jnp.minimum(first_B, num_tokens - 1)], pages
    arrays = jax.tree.map(
        lambda row: jnp.zeros((num_tokens, *row.shape[1:]), row.dtype),
        jax.eval_shape(step, *start)[0],
    )
    *_, pages, (drawn, *returned) = jax.lax.while_loop(
        lambda state: state[0] < length_B.max(), next_step, (*start, arrays)
    )
    index_Q = jnp.arange(bucket.max_query_len)
    paths = jnp.where(index_Q < length_B[:, None], first_B[:, None] + index_Q, -1).astype(jnp.int32)
    return StepOutput(drawn, drawn[:0], paths, None, *returned), pages


def _scope(
    options: StepOptions, lora_slot_T: jax.Array, padding: Padding | None = None, **settings: Any
) -> TraceScope:
    """Returns what the model's layers take in a pass over tokens with adapters in these slots.

    The settings are attributes of `TraceScope`.
    """
    kernels = make_layer_kernels(options.attention_backend, padding)
    return TraceScope(kernels, adapters_of(lora_slot_T, options.max_loras), **settings)


def _logits_to_draw_from(
    model: Any, hidden_TD: jax.Array, inputs: StepInputs, options: StepOptions, *, divided: bool
) -> jax.Array:
    """Returns the logits [R, V] of the tokens to draw from; those of padding are of no use.

    With `divided`, each device has its part of them, where the model is divided.
    """
    rows_R = inputs.draws.drawn_token_R
    padding = Padding(len(rows_R), inputs.flags[Flags.DRAWN])
    scope = _scope(options, inputs.lora_slot_T[rows_R], padding, divided_logits=divided)
    return _logits(model, hidden_TD[rows_R], scope)


def _logits(model: Any, hidden_BD: jax.Array, scope: TraceScope) -> jax.Array:
    """Returns the logits [B, V] of hidden states.

    A family may multiply by linear layers here, too, which take the rows' adapters (OPT-350m).
    """
    with scope.open():
        logits_BV: jax.Array = model.logits(hidden_BD)
        return logits_BV


def _score(
    model: Any,
    hidden_TD: jax.Array,
    inputs: StepInputs,
    width: int,
    bucket: Bucket,
    options: StepOptions,
) -> jax.Array:
    """Returns the scores [T, width] of given tokens, for `unpack_drawn`; zeros if none is scored.

    It works in tiles, because the logits of a whole prompt would take more memory than the pool.
    Tiles after the last token that is wanted are left out.
    """
    tile = min(bucket.num_tokens, max(bucket.num_rows, SCORED_AT_ONCE))
    padding = -bucket.num_tokens % tile
    hidden_TD = jnp.pad(hidden_TD, ((0, padding), (0, 0)))
    token_ids_T, lora_slot_T = (
        jnp.pad(array, (0, padding)) for array in (inputs.scored_T, inputs.lora_slot_T)
    )

    def score_tile(index: jax.Array, scored: jax.Array) -> jax.Array:
        hidden_BD, token_ids_B, lora_slot_B = (
            jax.lax.dynamic_slice_in_dim(array, index * tile, tile)
            for array in (hidden_TD, token_ids_T, lora_slot_T)
        )
        logits_BV = _logits(model, hidden_BD, _scope(options, lora_slot_B))
        rows = pack_drawn(logits_BV, token_ids_B, True, by_row=options.sample_by_row)
        return jax.lax.dynamic_update_slice_in_dim(scored, rows, index * tile, axis=0)

    num_tiles = (inputs.flags[Flags.SCORED] + tile - 1) // tile
    zeros = jnp.zeros((bucket.num_tokens + padding, width), jnp.int32)
    return jax.lax.fori_loop(0, num_tiles, score_tile, zeros)[: bucket.num_tokens]


def logits_step(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    vectors: jax.Array | None = None,
    *,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[jax.Array, KVPages]:
    """Computes a step up to the draw.

    Returns:
        The logits [B, V] in float32 of the tokens to draw from, and the pages.
    """
    pages, own_pages = split_layers(pages, options.drafter)
    model, hidden_TD, pages, _ = _run_model(
        parameters["target"], pages, inputs, bucket, options, vectors
    )
    return _logits_to_draw_from(model, hidden_TD, inputs, options, divided=False), pages + own_pages


def pool_step(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    num_skipped: jax.Array,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[jax.Array, KVPages]:
    """Returns what hidden states are pooled from, as float32 [5, D], and the pages.

    These are the last state, the sum of all, the sum in which each counts as often as its place
    in the prompt (from 1), the greatest numbers, and the state of the first token that counts. The
    step has one row. `parameters` are the model's alone, without a drafter's. The first
    `num_skipped` tokens of the prompt do not count.
    """
    _, hidden_TD, pages, _ = _run_model(parameters, pages, inputs, bucket, options)
    count = inputs.query_start[1]
    hidden_TD = hidden_TD.astype(jnp.float32)
    counts_T1 = jnp.arange(bucket.num_tokens) < count
    counts_T1 = (counts_T1 & (inputs.positions_T >= num_skipped))[:, None]
    index_T1 = (inputs.positions_T + 1).astype(jnp.float32)[:, None]
    counted_TD = jnp.where(counts_T1, hidden_TD, 0.0)
    rows = (
        hidden_TD[count - 1],
        counted_TD.sum(axis=0),
        (counted_TD * index_T1).sum(axis=0),
        jnp.where(counts_T1, hidden_TD, -jnp.inf).max(axis=0),
        # The first True.
        hidden_TD[jnp.argmax(counts_T1[:, 0])],
    )
    return jnp.stack(rows), pages


def _run_model(
    parameters: Any,
    pages: KVPages,
    inputs: StepInputs,
    bucket: Bucket,
    options: StepOptions,
    vectors: jax.Array | None = None,
    routes: Routes | None = None,
) -> tuple[Any, jax.Array, KVPages, tuple[jax.Array, ...]]:
    """Returns the model, its hidden states, its pages, and the states that a drafter takes.

    `routes` gets the experts of the tokens; see `TraceScope`.
    """
    model = nnx.merge(options.graph, parameters)
    # The shards of a layer are next to each other and in one group; `attend` counts layers.
    groups = options.layer_groups[: len(pages) : options.sharding.num_local]
    attend = make_attend(
        inputs, backend=options.attention_backend, bucket=bucket, layer_groups=groups
    )
    aux_layers = options.drafter.aux_layers if options.drafter else ()
    recur = make_recur(inputs, layer_groups=groups, by_row=options.sample_by_row)
    context = ForwardContext(
        inputs.positions_T,
        attend,
        aux_layers=aux_layers,
        recur=recur,
        rotate_and_write=make_rotate_and_write(
            inputs, backend=options.attention_backend, layer_groups=groups
        ),
        vectors=None if vectors is None else (inputs.is_vector_T > 0, vectors[:, 0]),
        axes_AT=inputs.rotary_AT,
        deep_nTD=None if vectors is None else jnp.moveaxis(vectors[:, 1:], 1, 0),
    )
    padding = Padding(bucket.num_tokens, inputs.query_start[-1])
    with _scope(options, inputs.lora_slot_T, padding, routes=routes).open():
        hidden_TD, of_layers, states = model(
            inputs.token_ids_T, by_layer(pages, options.sharding), context
        )
    return model, hidden_TD, in_a_row(of_layers, options.sharding), states or (hidden_TD,)


def copy_step(pages: KVPages, pairs: jax.Array, *, backend: Backend) -> KVPages:
    """Copies block `pairs[i, 0]` to block `pairs[i, 1]` in every layer of a cache group.

    The pages are to be donated.
    """
    return copy_blocks(pages, pairs[:, 0], pairs[:, 1], backend)
