"""Turns a plan into the arrays of a step, padded to the sizes of its bucket.

It also checks token ids, slots and blocks, because JAX silently clamps or drops an index that is
out of range.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.device.inputs import (
    Bucket,
    BucketMenu,
    Flags,
    ProcessorInputs,
    TableShape,
    empty_inputs,
)
from jaxpage.engine.processor_inputs import processor_inputs_of
from jaxpage.engine.vector_fields import NO_SOURCES, Sources, fill_axes, place_vectors
from jaxpage.step.draft import PLACEHOLDER
from jaxpage.step.plan import Row, Sample, StepPlan, depths_of
from jaxpage.step.token_masks import Mask

Pairs = npt.NDArray[np.int32]
Move = tuple[int, Pairs]  # the index of a cache group, and pairs of its blocks
NO_SLOTS: Mapping[str, int] = MappingProxyType({})
NO_MASKS: Mapping[int, Mask] = MappingProxyType({})


@dataclass(frozen=True)
class Batch:
    """Holds a step that is ready for the device: its executable's shape, its inputs, and its moves.

    The moves of blocks come before the step, in the order of the fields.

    Attributes:
        bucket: The shape of the step.
        packed: All other inputs in one array, so that one transfer is enough.
        processor_inputs: The inputs of logits processors; None for each that no draw asks for.
        vectors: The array [T, 1 + n, D] of what takes the place of tokens, if anything does.
        swap_out: Arrays [num_swapped, 2] of (block, host block), padded with null blocks.
        swap_in: Arrays [num_swapped, 2] of (host block, block), padded with null blocks.
        copies: Arrays [num_copies, 2] of (source, destination), padded with the null block.
        num_draws: The number of draws without padding.
        num_rows: The number of rows without padding.
        num_scored: The number of tokens of the stream up to the last one that is scored.
        draft_depth: The depth to which the step drafts; see `StepPlan`.
        returns_masks: True if a draw asks for the tokens that could be drawn.
        returns_routes: True if a row asks for its routes.
        returns_hidden: True if a draw asks for the hidden state that it is made from.
    """

    bucket: Bucket
    packed: npt.NDArray[np.int32]
    processor_inputs: ProcessorInputs
    vectors: tuple[npt.NDArray[Any], ...]
    swap_out: tuple[Move, ...]
    swap_in: tuple[Move, ...]
    copies: tuple[Move, ...]
    num_draws: int
    num_rows: int
    num_scored: int
    draft_depth: int | None
    returns_masks: bool = False
    returns_routes: bool = False
    returns_hidden: bool = False


class BatchBuilder:
    """Builds batches, and knows the menu of shapes and the limits of every id."""

    def __init__(
        self,
        menu: BucketMenu,
        *,
        table_width: int,
        block_size: int,
        blocks: Sequence[range],
        vocab_size: int,
        tables: TableShape | None = None,
        host_blocks: Sequence[range] = (),
        max_loras: int = 0,
        vectors: jax.ShapeDtypeStruct | None = None,
    ):
        """Sets the shapes and the limits.

        Args:
            menu: The compiled shapes.
            table_width: The number of blocks in a row of a block table (M).
            block_size: The slots of a block (S).
            blocks: The block ids of each cache group's pool. The arrays of a group count from 1.
            vocab_size: The number of token ids (V).
            tables: What the inputs of all steps have in common; None for block tables alone.
            host_blocks: The ids of each cache group's host blocks.
            max_loras: The number of adapter slots.
            vectors: The shape and type of what may take the place of a token; see `StepOptions`.
        """
        self.menu = menu
        self.tables = tables or TableShape(len(blocks), table_width)
        self.block_size = block_size
        self.max_length = self.tables.width * block_size  # tokens of the longest sequence
        self.blocks = tuple(blocks)
        self.vocab_size = vocab_size
        self.max_loras = max_loras
        self.vectors = vectors
        # Without host blocks all pools are empty, so that any swap is refused.
        self.host_blocks = tuple(host_blocks) or (range(1, 1),) * len(blocks)

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """Returns the smallest shape that has room for a step."""
        return self.menu.choose(
            [len(row.token_ids) for row in plan.rows],
            len(plan.samples),
            scores=any(row.scored for row in plan.rows),
            verifies=plan.verifies,
            branches=plan.branches,
            multi_step=plan.is_multi_step,
            takes_vectors=plan.takes_vectors,
        )

    def build(
        self,
        plan: StepPlan,
        masks: Mapping[int, Mask] = NO_MASKS,
        lora_slots: Mapping[str, int] = NO_SLOTS,
        sources: Sources = NO_SOURCES,
    ) -> Batch:
        """Returns the batch of a plan.

        Args:
            plan: The plan of the step.
            masks: The tokens that a grammar admits, by the index of the draw in the plan's samples.
            lora_slots: The slot on the device, from 1, of each adapter, by its digest.
            sources: The rows [R, 1 or 1 + n, D] of each source of vectors, by its key.

        Raises:
            ValueError: An id is out of range, or a step of several tokens needs the host in
                between.
        """
        num_scored = _num_scored(plan.rows)
        bucket = self.bucket_of(plan)
        packed, fields = empty_inputs(bucket, self.tables)
        self._fill_rows(fields, plan.rows)
        if lora_slots:
            lengths = [len(row.token_ids) for row in plan.rows]
            slots = [0 if row.lora is None else lora_slots[row.lora] for row in plan.rows]
            fields["lora_slot_T"][: sum(lengths)] = np.repeat(slots, lengths)
        if plan.is_multi_step:
            _check_hostless(plan.samples, masks)
            # The step itself draws these tokens.
            fields["token_ids_T"][fields["token_ids_T"] == PLACEHOLDER] = 0
        if bucket.verifies:
            self._fill_drafts(fields, plan.rows)
        if self.tables.num_axes:
            fill_axes(fields, plan.rows)
        if num_scored:
            self._fill_scored(fields, plan.rows)
        self._fill_draws(fields, plan.samples)
        context = self.tables.width * self.block_size
        processor_inputs = processor_inputs_of(
            plan.samples, masks, bucket.num_processed, vocab_size=self.vocab_size, context=context
        )
        if processor_inputs.history_RC is not None:
            self._fill_penalties(fields, plan.samples)
        fields["flags"][Flags.MASKED] = processor_inputs.mask_RU is not None
        fields["flags"][Flags.BIASED] = processor_inputs.bias_RE is not None
        fields["flags"][Flags.PENALISED] = processor_inputs.history_RC is not None
        fields["flags"][Flags.SCORED] = num_scored
        fields["flags"][Flags.DRAWN] = len(plan.samples)
        fields["flags"][Flags.DRAFT_DEPTH] = -1 if plan.draft_depth is None else plan.draft_depth
        self._check(fields)
        return Batch(
            bucket,
            packed,
            processor_inputs,
            place_vectors(fields, plan.rows, sources, self.vectors) if bucket.takes_vectors else (),
            swap_out=_moves(
                "swap_out", plan.swap_out, self.blocks, self.host_blocks, self.menu.num_swapped
            ),
            swap_in=_moves(
                "swap_in", plan.swap_in, self.host_blocks, self.blocks, self.menu.num_swapped
            ),
            copies=_moves("copies", plan.copies, self.blocks, self.blocks, self.menu.num_copies),
            num_draws=len(plan.samples),
            num_rows=len(plan.rows),
            num_scored=num_scored,
            draft_depth=plan.draft_depth,
            returns_masks=any(sample.params.return_sampling_mask for sample in plan.samples),
            returns_routes=any(row.is_routed for row in plan.rows),
            returns_hidden=any(sample.params.return_hidden_states for sample in plan.samples),
        )

    def _fill_rows(self, fields: dict[str, Any], rows: tuple[Row, ...]) -> None:
        """Writes the rows into the stream, one after the other.

        Rows of padding are empty. Tokens of padding are written to the null block.
        """
        lengths = [len(row.token_ids) for row in rows]
        ends = list(itertools.accumulate(lengths))
        total = ends[-1]
        num_rows = len(rows)
        fields["token_ids_T"][:total] = list(
            itertools.chain.from_iterable(row.token_ids for row in rows)
        )
        fields["query_start"][1:] = total
        fields["query_start"][1 : num_rows + 1] = ends
        fields["context_len_B"][:num_rows] = [row.context_length for row in rows]
        fields["next_token_B"][:num_rows] = [row.next_token_id for row in rows]
        tables = fields["block_table_ZBM"]
        for index, row in enumerate(rows):
            for group, table in enumerate(row.block_tables):
                tables[group, index, : len(table)] = table
        # The first pool's ids begin at 1, as its arrays count.
        for group, blocks in enumerate(self.blocks[1:], start=1):
            tables[group] = _offset_ids(tables[group], blocks)
        row_T = np.repeat(np.arange(num_rows), lengths)
        position_T = np.arange(total) - np.repeat(np.array(ends) - lengths, lengths)
        position_T += np.repeat([row.start for row in rows], lengths)
        fields["positions_T"][:total] = position_T
        block_ZT = tables[:, row_T, position_T // self.block_size]
        fields["slots_ZT"][:, :total] = block_ZT * self.block_size + position_T % self.block_size

    def _fill_drafts(self, fields: dict[str, Any], rows: tuple[Row, ...]) -> None:
        """Writes the parent of each token of the stream, and its position.

        The slot of a draft follows from its place in the row, its position from its depth in the
        tree.
        """
        fields["parents_T"][:] = -1
        has_mask = fields["tree_mask_TU"].size > 0
        # `query_start` is longer: it has rows of padding and the end of the stream.
        for first, row in zip(fields["query_start"].tolist(), rows, strict=False):
            depths = depths_of(row.parents)
            stop = first + len(depths)
            fields["parents_T"][first + 1 : stop] = [first + parent for parent in row.parents]
            fields["positions_T"][first:stop] = [row.start + depth for depth in depths]
            if has_mask:
                _fill_tree_mask(fields["tree_mask_TU"][first:stop], row.parents)
        if fields["q_TW"].size:
            _fill_candidates(fields, rows)

    def _fill_scored(self, fields: dict[str, Any], rows: tuple[Row, ...]) -> None:
        starts = fields["query_start"].tolist()
        for start, row in zip(starts, rows, strict=False):
            first = start + row.first_scored
            fields["scored_T"][first : first + len(row.scored)] = row.scored

    def _fill_draws(self, fields: dict[str, Any], samples: tuple[Sample, ...]) -> None:
        count = len(samples)
        params = [sample.params for sample in samples]
        starts = fields["query_start"]
        fields["drawn_token_R"][:count] = [starts[sample.row] + sample.offset for sample in samples]
        fields["temperature_R"][:count] = [p.temperature for p in params]
        # A larger number means the same, and might not fit into int32.
        fields["top_k_R"][:count] = [min(p.top_k, self.vocab_size) for p in params]
        # 1 is off, and padding must ask for no cut-off.
        fields["top_p_R"][:] = 1.0
        fields["top_p_R"][:count] = [p.top_p for p in params]
        fields["min_p_R"][:count] = [p.min_p for p in params]
        seeds = np.array([sample.seed for sample in samples], np.uint64)
        fields["seed_R2"][:count, 0] = seeds >> np.uint64(32)
        fields["seed_R2"][:count, 1] = seeds & np.uint64(0xFFFFFFFF)
        fields["sample_index_R"][:count] = [sample.sample_index for sample in samples]
        fields["drawn_position_R"][:count] = [sample.position for sample in samples]
        are_processed = [p.logprobs_mode == "processed" for p in params]
        fields["is_processed_R"][:count] = are_processed
        fields["flags"][Flags.PROCESSED] = any(
            sample.num_logprobs is not None and (is_processed or sample.params.return_sampling_mask)
            for sample, is_processed in zip(samples, are_processed, strict=True)
        )
        fields["flags"][Flags.RANDOM] = any(p.temperature > 0 for p in params)
        fields["flags"][Flags.LOGPROBS] = any(sample.num_logprobs is not None for sample in samples)

    def _fill_penalties(self, fields: dict[str, Any], samples: tuple[Sample, ...]) -> None:
        """Writes the penalties; only a step that has penalties reads them."""
        count = len(samples)
        # A zero in padding would divide logits by zero.
        fields["repetition_penalty_R"][:] = 1.0
        fields["repetition_penalty_R"][:count] = [
            sample.params.repetition_penalty for sample in samples
        ]
        fields["frequency_penalty_R"][:count] = [
            sample.params.frequency_penalty for sample in samples
        ]
        fields["presence_penalty_R"][:count] = [
            sample.params.presence_penalty for sample in samples
        ]
        fields["num_prompt_tokens_R"][:count] = [sample.num_prompt_tokens for sample in samples]

    def _check(self, fields: dict[str, Any]) -> None:
        limits: list[tuple[str, Any, int]] = [
            ("token_ids_T", ..., self.vocab_size),
            ("scored_T", ..., self.vocab_size),
        ]
        limits.append(("lora_slot_T", ..., 1 + self.max_loras))
        for group, blocks in enumerate(self.blocks):
            limits.append(("slots_ZT", group, (1 + len(blocks)) * self.block_size))
            limits.append(("block_table_ZBM", group, 1 + len(blocks)))
        for name, part, limit in limits:
            values = fields[name][part]
            if values.min() < 0 or values.max() >= limit:
                raise ValueError(
                    f"{name} has entries from {values.min()} to {values.max()}, allowed are "
                    f"0 to {limit - 1}"
                )


def _check_hostless(samples: tuple[Sample, ...], masks: Mapping[int, Mask]) -> None:
    """Checks a step that draws several tokens of each sequence without the host in between.

    Raises:
        ValueError: A draw needs the host between two tokens, such as for a mask.
    """
    asking = {
        sample.sequence_id
        for index, sample in enumerate(samples)
        if index in masks or sample.params.processes_logits or sample.suppressed_token_ids
    }
    if asking:
        raise ValueError(
            f"sequences {sorted(asking)} need the host between two tokens, in a step that "
            "draws several"
        )


def _fill_candidates(fields: dict[str, Any], rows: tuple[Row, ...]) -> None:
    """Writes the distribution that each draft was drawn from; a chosen draft gets probability 1."""
    ids_TW = fields["q_ids_TW"]
    q_TW = fields["q_TW"]
    ids_TW[:] = -1
    ids_TW[:, 0] = fields["token_ids_T"]
    q_TW[:, 0] = 1.0
    for first, row in zip(fields["query_start"].tolist(), rows, strict=False):
        if row.q is not None:
            drafts = slice(first + 1, first + len(row.token_ids))
            width = row.q.token_ids_NW.shape[1]
            q_TW[drafts] = 0.0
            ids_TW[drafts, :width], q_TW[drafts, :width] = row.q


def _fill_tree_mask(mask_TU: npt.NDArray[np.uint32], parents: tuple[int, ...]) -> None:
    """Sets the bits of the tokens that each token of a row sees: its parent's, and its own."""
    # tree of drafts    mask (the token of a line sees those with an x; x in column j is bit j)
    #      t0               t0 t1 t2 t3
    #     /  \          t0   x             parents = (0, 0, 1): of t1, t2 and t3
    #   t1    t2        t1   x  x
    #   |               t2   x     x       t2 and t1 are alternatives, so neither sees the other
    #   t3              t3   x  x     x
    for index in range(len(mask_TU)):
        if index:
            mask_TU[index] = mask_TU[parents[index - 1]]
        mask_TU[index, index // 32] |= np.uint32(1 << index % 32)


def _num_scored(rows: tuple[Row, ...]) -> int:
    """Returns the number of tokens of the stream up to the last one that is scored."""
    num_scored = first = 0
    for row in rows:
        if row.scored:
            num_scored = first + row.first_scored + len(row.scored)
        first += len(row.token_ids)
    return num_scored


def _offset_ids(ids: npt.NDArray[np.int32], blocks: range) -> npt.NDArray[np.int32]:
    """Returns ids of a pool as its layers' arrays count them.

    The null block is 0, and an id of another pool is -1.
    """
    return np.where(ids == 0, 0, np.where(ids < blocks.start, -1, ids - blocks.start + 1))


def _moves(
    name: str,
    pairs: tuple[tuple[int, int], ...],
    sources: Sequence[range],
    destinations: Sequence[range],
    size: int,
) -> tuple[Move, ...]:
    """Returns the moves of each cache group as arrays [size, 2], the last one padded.

    Raises:
        ValueError: A pair has an id that is in none of the pools; the null block is for padding
            only.
    """
    if not pairs:
        return ()
    ids = np.array(pairs, np.int32)
    moves = []
    num_moved = 0
    for group, pools in enumerate(zip(sources, destinations, strict=True)):
        first, stop = np.array([(pool.start, pool.stop) for pool in pools], np.int32).T
        group_ids = ids[((ids >= first) & (ids < stop)).all(axis=1)] - first + 1
        # The size is 0 where nothing is swapped, which is no step for a range.
        for start in range(0, len(group_ids), max(1, size)):
            part = group_ids[start : start + size]
            moves.append((group, np.pad(part, ((0, size - len(part)), (0, 0)))))
        num_moved += len(group_ids)
    if num_moved < len(ids):
        allowed = [
            f"{ranges[0].start} to {ranges[0].stop - 1}" for ranges in (sources, destinations)
        ]
        raise ValueError(f"{name} {pairs} leave the pools: ids are {allowed[0]} and {allowed[1]}")
    return tuple(moves)
