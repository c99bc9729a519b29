"""Binds the kernels to the layers: attention over pages, and products with weights.

The seam `attend` writes a layer's new keys and values, then reads through the block tables.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxpage.device.batch_invariance import with_ordered_sums
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import StepInputs
from jaxpage.device.packing import Padding, multiply_packed, read_packed_rows, run_fusion
from jaxpage.device.pages.kv_pages import LayerPages
from jaxpage.device.verify import unpack_tree_mask
from jaxpage.layers.context import Attend, HeadScales, RotateAndWrite
from jaxpage.layers.rope import Angles
from jaxpage.layers.trace_scope import LayerKernels, RowKernels, trace_scope
from jaxpage.layers.weight_kinds import Grouped
from pallas_kernels import (
    Arguments,
    AttentionOptions,
    attend_to_pages,
    has_rotate_and_write,
    rotate_and_write,
    write_and_attend,
)
from pallas_kernels.cpu import bidirectional, rows
from pallas_kernels.expert_routing import choose_experts, gather_by_group
from pallas_kernels.quantized_matmul import (
    grouped_matmul,
    has_grouped_matmul,
    quantized_matmul,
)
from pallas_kernels.quantized_weight import QuantizedWeight, numbers

ROW_KERNELS = RowKernels(
    rows.takes,
    rows.gate,
    rows.rms_norm,
    rows.add_and_norm,
    rows.layer_norm,
    rows.rotate,
    rows.split_and_rotate,
)
logger = logging.getLogger(__name__)


def make_attend(
    inputs: StepInputs, *, backend: Backend, bucket: Bucket, layer_groups: tuple[int, ...]
) -> Attend:
    """Returns the function `attend` for the layers of one step.

    A kernel set may write and read in one kernel; the layers do not know.

    Args:
        inputs: The step's inputs.
        backend: The kernels.
        bucket: The step's shape.
        layer_groups: The cache group of each layer.
    """
    tree_mask_TQ = (
        unpack_tree_mask(inputs.tree_mask_TU, bucket.max_query_len) if bucket.trees else None
    )

    last_seen_T = inputs.last_seen_T if inputs.last_seen_T.size else None

    @jax.named_scope("attention")
    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, LayerPages]:
        group = layer_groups[layer_index]
        slots_T = inputs.slots_ZT[group]
        options = dataclasses.replace(
            options,
            tree_mask_TQ=tree_mask_TQ,
            last_seen_T=last_seen_T if options.last_seen_T is None else options.last_seen_T,
        )
        arguments = Arguments(
            q_TNH=q_TNH,
            block_table_BM=inputs.block_table_ZBM[group],
            context_len_B=inputs.context_len_B,
            query_start=inputs.query_start,
            options=options,
            max_query_len=bucket.max_query_len,
            interleaved=layer_pages.is_interleaved,
            **layer_pages._asdict(),
        )
        settings = {**backend.options, "batch_invariant": backend.batch_invariant}
        if k_TKH is None:
            return attend_to_pages(arguments, **settings), layer_pages
        out_TNH, pages = write_and_attend(k_TKH, v_TKH, slots_T, arguments, **settings)
        return out_TNH, LayerPages(*pages)  # type: ignore[arg-type]

    return attend


def make_rotate_and_write(
    inputs: StepInputs, *, backend: Backend, layer_groups: tuple[int, ...]
) -> RotateAndWrite | None:
    """Returns the function of this name for the layers of one step; None where no kernel does it.

    The arguments are those of `make_attend`.
    """
    if not has_rotate_and_write(**backend.options):
        return None

    @jax.named_scope("attention")
    def write_rotated(
        layer_index: int,
        x_TF: jax.Array,
        head_dim: int,
        angles: Angles,
        layer_pages: LayerPages,
        norms: HeadScales | None,
        /,
    ) -> tuple[jax.Array, LayerPages] | None:
        # The kernel turns pairs (i, i + E) only, and writes to two arrays of pages.
        if angles.interleaved or layer_pages.v_pages is None:
            return None
        slots_T = inputs.slots_ZT[layer_groups[layer_index]]
        # Where the product's segments are not added up yet, the kernel does that in passing.
        sums = trace_scope().segments_of(x_TF)
        q_TNH, written = rotate_and_write(
            sums.reshape(*sums.shape[:-1], -1, head_dim),
            angles.cos_TE,
            angles.sin_TE,
            slots_T=slots_T,
            dtype=x_TF.dtype,
            **({} if norms is None else norms._asdict()),
            **layer_pages._asdict(),
            **backend.options,
        )
        return q_TNH, LayerPages(*written)

    return write_rotated


def attend_bidirectional(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, segment_T: jax.Array, **options: Any
) -> jax.Array | None:
    """Returns the result of the kernel; None for heads that it does not take."""
    if not bidirectional.takes(q_TNH.dtype, q_TNH.shape[2]):
        return None
    return bidirectional.attend_bidirectional(q_TNH, k_TKH, v_TKH, segment_T, **options)


def make_layer_kernels(backend: Backend, padding: Padding | None = None) -> LayerKernels:
    """Returns the kernels of layers.

    They multiply by weights of few bits or in panels, look up rows in a table of such weights, and
    multiply rows by the weights of their experts.

    Args:
        backend: The kernels.
        padding: The tokens that products by weights in panels leave out; their results are zero.
    """

    def multiply(x_TI: jax.Array, weight: Grouped, result: DTypeLike) -> jax.Array:
        return quantized_matmul(x_TI, QuantizedWeight(*weight), result=result, **backend.options)

    def by_group(
        x_PI: jax.Array, weight: jax.Array | Grouped, count_E: jax.Array, result: DTypeLike
    ) -> jax.Array | None:
        stacked = QuantizedWeight(*weight) if isinstance(weight, Grouped) else weight
        try:
            return grouped_matmul(x_PI, stacked, count_E, result=result, **backend.options)
        except NotImplementedError as refusal:
            logger.warning("experts are multiplied one after another, which is slow: %s", refusal)
            return None

    def sort_rows(
        x_TI: jax.Array, group_P: jax.Array, num_groups: int
    ) -> tuple[jax.Array, ...] | None:
        try:
            return gather_by_group(x_TI, group_P, num_groups, **backend.options)
        except NotImplementedError:  # of more pairs than a program compares, which XLA sorts
            return None

    has_groups = has_grouped_matmul(backend=backend.name, interpret=backend.interpret)
    kernels = LayerKernels(
        multiply,
        lambda weight: numbers(QuantizedWeight(*weight)),
        functools.partial(multiply_packed, padding=padding),
        read_packed_rows,
        by_group if has_groups else None,
        ROW_KERNELS if backend.in_cpp else None,
        attend_bidirectional if backend.in_cpp else None,
        run_fusion=functools.partial(run_fusion, padding=padding) if backend.in_cpp else None,
        choose_experts=functools.partial(choose_experts, **backend.options) if has_groups else None,
        gather_by_group=sort_rows if has_groups else None,
    )
    return with_ordered_sums(kernels, backend) if backend.batch_invariant else kernels
