"""Defines a kernel set: one implementation of every operation on pages and quantised weights.

A set also says which calls it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.arguments import Arguments
from pallas_kernels.page_layouts import SEPARATE
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.tiles import Shape, Tiles

Leaves = list[jax.Array]  # the arrays of the pages, each [P, S, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that a set is asked to take.

    Attributes:
        interpret: Says that kernels run on CPU, operation by operation.
        page_dtype: The type of pages that are read or written as numbers; None if blocks are moved
            as they are.
        layout: The layout of the pages; see `page_layouts`. None if blocks are moved.
        attention: The arguments of attention; None in other operations, and if they are not known
            yet.
        tiles: The tiles of attention; None like `attention`, or for the set's own choice.
        weight: The weight of a product.
        batch_invariant: True to refuse sets in which the order of a token's sums depends on the
            batch or on the kind of step.
    """

    interpret: bool = False
    page_dtype: str | None = None
    layout: str | None = None
    attention: Arguments | None = None
    tiles: Tiles | None = None
    weight: QuantizedWeight | None = None
    batch_invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Holds the operations that move the contents of pages as they are.

    Attributes:
        copy_blocks: (leaves, source, destination) -> leaves.
        copy_slots: (leaves, source, destination) -> leaves.
        gather_blocks: (leaves, blocks) -> bytes.
        scatter_blocks: (leaves, blocks, bytes) -> leaves.
    """

    copy_blocks: Callable[..., Leaves]
    copy_slots: Callable[..., Leaves]
    gather_blocks: Callable[..., jax.Array]
    scatter_blocks: Callable[..., Leaves]


@dataclass(frozen=True, kw_only=True)
class Matmuls:
    """Holds the operations that multiply by weights, and those that bring rows to their experts.

    Attributes:
        multiply: (x_TI, QuantizedWeight, type of the result) -> y_TO; see `quantized_matmul`.
        grouped: (x_PI, weight, count_E, type of the result) -> y_PO; see `grouped_matmul`. None if
            the set has no such kernel.
        by_segments: (x_TI, weight, count_E or None, type of the result) -> y_TO, and the sums of
            segments or None; see `matmul_and_sums`. None if the set has no such kernel.
        choose_experts: (logits_TE, correction_E or None, count) -> odds_TX and expert_TX; see
            `expert_routing.choose_experts`. None if the set has no such kernel.
        gather_by_group: (x_TI, group_P, number of groups) -> x_PI, place_P, group_P and count_E;
            see `expert_routing.gather_by_group`. None like `choose_experts`.
    """

    multiply: Callable[..., jax.Array]
    grouped: Callable[..., jax.Array] | None = None
    by_segments: Callable[..., tuple[jax.Array, jax.Array | None]] | None = None
    choose_experts: Callable[..., tuple[jax.Array, ...]] | None = None
    gather_by_group: Callable[..., tuple[jax.Array, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Holds the operations that select in rows of logits; see `selection`.

    Attributes:
        cutoffs: Finds the least logit of each row that may be drawn.
        top_candidates: Selects the largest logits of each row.
    """

    cutoffs: Callable[..., jax.Array]
    top_candidates: Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Holds the operations of one set, and what the set says of itself.

    Operations get arguments that were checked (`paged_attention`, `kv_write` and `block_copy` say
    what they mean), and only calls that the set does not refuse (`refusal`). `interpret=True` and
    `tiles` are passed if a call has them. An operation may still raise `NotImplementedError` with a
    reason.

    Attributes:
        name: The name of the set and of its file.
        attend: (Arguments) -> out_TNH.
        write: (k_TKH, v_TKH, k_pages, v_pages, slots_T, k_scale, v_scale) -> the pages, and the
            scales if there are any.
        moves: The copies of blocks and slots, and their way to the host and back.
        matmuls: The products with weights of few bits, and those of experts.
        rotate_and_write: (x_TMH, cos_TE, sin_TE, k_pages, v_pages, slots_T, k_scale, v_scale,
            query_scale_H, key_scale_H) -> q_TNH, and the pages and scales; see
            `kv_write.rotate_and_write`. None if the set has no such kernel.
        write_and_attend: (k_TKH, v_TKH, slots_T, Arguments) -> out_TNH and what `write` returns.
            None unless one kernel does both.
        selection: Selects in rows of logits; None if the set has no kernels for it.
        honours: The fields of `AttentionOptions` that its attention computes; calls with others are
            refused.
        supports: (jax.Device, Call) -> the reason why it refuses a call for anything else, or None.
            Kernels are also lowered for GPUs that are not there; the device is a CPU then.
        tiles: Returns the tiles for a shape that was not measured; None for a set that takes no
            tiles.
        unaddressable: (type of pages) -> the numbers of elements that an array of pages must not
            have.
        layouts: The layouts of pages that it reads and writes; an engine that runs the set keeps
            the first. Blocks and slots are moved whatever their layout.
        platforms: The JAX platforms on which it runs natively; empty for plain XLA, which runs
            everywhere.
        interpretable: Says whether its kernels run on CPU with interpret=True.
        prefers_mixed_steps: Says whether decodes and prompt chunks are best computed in one step.
        comes_first: The kinds of step (`Shape.kind`) whose attention "auto" gives to this set
            before the others, if nothing was measured.
        rows: What layers compute between products, row by row; see `triton.rows`. Empty if the set
            has no such kernels.
        is_batch_invariant: Says whether its attention takes `batch_invariant=True`, with which the
            order of a token's sums depends on positions alone.
        ordered_bytes: (tokens of a step that is no chunk, outputs of a token's attention, positions
            of a block table) -> the most bytes of sums that its kernels keep apart then.
    """

    name: str
    attend: Callable[..., jax.Array]
    write: Callable[..., tuple[jax.Array | None, ...]]
    moves: Moves
    matmuls: Matmuls
    rotate_and_write: Callable[..., tuple[jax.Array, ...]] | None = None
    write_and_attend: Callable[..., tuple[jax.Array, tuple[jax.Array | None, ...]]] | None = None
    selection: Selection | None = None
    honours: frozenset[str]
    supports: Callable[[Any, Call], str | None]
    tiles: Callable[[Shape], Tiles] | None = None
    unaddressable: Callable[[DTypeLike], range] = lambda _: range(0)
    layouts: tuple[str, ...] = (SEPARATE,)
    platforms: tuple[str, ...] = ()
    interpretable: bool = False
    prefers_mixed_steps: bool = False
    comes_first: tuple[str, ...] = ()
    rows: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    is_batch_invariant: bool = False
    ordered_bytes: Callable[[int, int, int], int] = lambda *_: 0

    def runs_on(self, platform: str) -> bool:
        """Returns whether the set runs natively on a platform of JAX."""
        return not self.platforms or platform in self.platforms

    def refusal(self, device: Any, call: Call) -> str | None:
        """Returns why the set does not take a call on a `jax.Device`, or None if it does."""
        reason = self.supports(device, call)
        if reason is None and call.batch_invariant and not self.is_batch_invariant:
            return "its sums depend on the batch (batch_invariant)"
        if reason is None and call.layout is not None and call.layout not in self.layouts:
            return f"{call.layout} pages of keys and values (only {', '.join(self.layouts)} ones)"
        if reason is None and call.attention is not None:
            options = call.attention.options.set_names
            if missing := options - self.honours:
                return f"{', '.join(sorted(missing))}: its attention has no such option"
            # No set computes both together, and the definition does not either.
            if {"tree_mask_TQ", "sliding_window"} <= options:
                return "a tree mask with a sliding window"
            if {"tree_mask_TQ", "attention_chunk"} <= options:
                return "a tree mask with chunks of attention"
            others = {"tree_mask_TQ", "alibi_slopes", "attention_chunk"}
            if "last_seen_T" in options and options & others:
                return "tokens that see later ones, with a tree mask, ALiBi or chunks of attention"
        return reason


def first_reason(*reasons: tuple[Any, str]) -> str | None:
    """Returns the text of the first pair whose first item is true."""
    return next((text for refused, text in reasons if refused), None)


def no_kernel(*_: object, **__: object) -> Any:
    """Refuses a call in the place of an operation that a set lacks.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("it has no such kernel")


def capability(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU.

    It is (0, 0) for a GPU of another maker, and None for a device that is no GPU.
    """
    if device.platform != "gpu":
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def describe(device: Any) -> str:
    """Returns the words for a GPU in a refusal."""
    return f"{device.device_kind} has {getattr(device, 'compute_capability', 'none')}"
