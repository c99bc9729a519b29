"""Binds the kernels to the layers: the seam `attend` writes a layer's new keys and values, then reads through the block tables."""

from __future__ import annotations

import jax

from jaxpage.device.backends import Backend
from jaxpage.device.buckets import Bucket
from jaxpage.device.kv_pages import LayerPages
from jaxpage.device.step_inputs import StepInputs
from jaxpage.device.verify import unpack_tree_mask
from jaxpage.layers.context import Attend
from pallas_kernels import paged_attention, write_kv


def make_attend(inputs: StepInputs, *, backend: Backend, bucket: Bucket) -> Attend:
    """The seam for one step. A backend that fuses write and read would take both arguments here; the layers would not know."""
    tree_mask_TQ = unpack_tree_mask(inputs.tree_mask_TU, bucket.max_query_len) if bucket.trees else None

    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        layer_pages: LayerPages,
        /,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> tuple[jax.Array, LayerPages]:
        pages = LayerPages(
            *write_kv(
                k_TKH,
                v_TKH,
                layer_pages.k_pages,
                layer_pages.v_pages,
                inputs.slots_T,
                k_scale=layer_pages.k_scale,
                v_scale=layer_pages.v_scale,
                **backend.mover,
            )
        )
        out_TNH = paged_attention(
            q_TNH,
            pages.k_pages,
            pages.v_pages,
            inputs.block_table_BM,
            inputs.context_len_B,
            inputs.query_start,
            scale=scale,
            sliding_window=sliding_window,
            tree_mask_TQ=tree_mask_TQ,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            backend=backend.name,
            interpret=backend.interpret,
            max_query_len=bucket.max_query_len,
        )
        return out_TNH, pages

    return attend
