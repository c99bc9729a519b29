"""Checks the arguments of one call of paged attention, once for every backend."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions, at_least_one, register_record
from pallas_kernels.page_layouts import (
    INTERLEAVED,
    SEPARATE,
    check_interleaved,
    interleaved_width,
)
from pallas_kernels.quantized_pages import check_scales

_TABLES = ("block_table_BM", "context_len_B", "query_start")
_ARRAYS = ("q_TNH", "k_pages", "v_pages", *_TABLES, "k_scale", "v_scale")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Holds the arguments of one call, as `paged_attention` documents them.

    Block tables and lengths become int32.

    Raises:
        ValueError: A shape or a number does not fit.
        TypeError: A type does not fit.
    """

    q_TNH: jax.Array
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array | None  # [P, S, K, H], or None with `options.value_width`
    block_table_BM: jax.Array
    context_len_B: jax.Array
    query_start: jax.Array  # [B + 1]
    options: AttentionOptions
    k_scale: jax.Array | None = None  # [P, S, K], for quantised pages
    v_scale: jax.Array | None = None
    max_query_len: int = sys.maxsize  # static; becomes T if it is more
    interleaved: bool = False  # static: k_pages is [P, S, 2K, W]; see `page_layouts`

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, jnp.asarray(array))
        self._check_arrays()
        arrays = self.q_TNH, self.k_pages, self.v_pages, self.block_table_BM
        options = self.options.check(*arrays, interleaved=self.interleaved)
        object.__setattr__(self, "options", options)
        for name in _TABLES:
            object.__setattr__(self, name, getattr(self, name).astype(jnp.int32))
        # At least 1, also for a call without tokens: tiles are made for rows of this length.
        max_length = min(
            at_least_one("max_query_len", self.max_query_len), max(1, self.q_TNH.shape[0])
        )
        object.__setattr__(self, "max_query_len", max_length)

    @property
    def num_kv_heads(self) -> int:
        """Returns the number of key/value heads (K)."""
        return int(self.k_pages.shape[2]) // (2 if self.interleaved else 1)

    @property
    def group(self) -> int:
        """Returns the number of query heads that share a key/value head (G)."""
        return int(self.q_TNH.shape[1]) // self.num_kv_heads

    @property
    def layout(self) -> str:
        """Returns the layout of the pages; see `page_layouts`."""
        return INTERLEAVED if self.interleaved else SEPARATE

    @property
    def out_width(self) -> int:
        """Returns the width of a head of the output."""
        return self.q_TNH.shape[2] if self.options.value_width is None else self.options.value_width

    def _check_arrays(self) -> None:
        for name, rank in (
            ("q_TNH", 3),
            ("k_pages", 4),
            ("v_pages", 4),
            ("block_table_BM", 2),
            ("context_len_B", 1),
        ):
            array = getattr(self, name)
            if array is not None and array.ndim != rank:
                raise ValueError(f"{name} must have {rank} axes, but its shape is {array.shape}")
        for name, shape in (
            ("k_pages", self.k_pages.shape),
            ("block_table_BM", self.block_table_BM.shape[1:]),
        ):
            if 0 in shape:
                raise ValueError(
                    f"{name} must not be empty, but its shape is {getattr(self, name).shape}"
                )
        for name in _TABLES:
            if not jnp.issubdtype(getattr(self, name).dtype, jnp.integer):
                raise TypeError(f"{name} must hold integers, but holds {getattr(self, name).dtype}")
        if self.v_pages is not None and self.k_pages.shape != self.v_pages.shape:
            raise ValueError(
                f"k_pages and v_pages must be alike, but are {self.k_pages.shape} and "
                f"{self.v_pages.shape}"
            )
        if not jnp.issubdtype(self.q_TNH.dtype, jnp.floating):
            raise TypeError(f"q_TNH must hold floats, but holds {self.q_TNH.dtype}")
        if self.interleaved:
            check_interleaved(self.k_pages, self.v_pages, self.k_scale)
        else:
            check_scales(self.k_pages, self.v_pages, self.k_scale, self.v_scale)
        num_rows = self.block_table_BM.shape[0]
        num_kv_heads = self.num_kv_heads
        if self.context_len_B.shape != (num_rows,):
            raise ValueError(
                f"context_len_B must have the {num_rows} rows of block_table_BM, not "
                f"{self.context_len_B.shape}"
            )
        if self.query_start.shape != (num_rows + 1,):
            raise ValueError(
                f"query_start must have {num_rows + 1} entries (rows + 1), not "
                f"{self.query_start.shape}"
            )
        width = self.q_TNH.shape[2]
        if self.interleaved:
            width = interleaved_width(width)
        if width != self.k_pages.shape[3]:
            raise ValueError(
                f"head width differs: queries {self.q_TNH.shape[2]}, pages {self.k_pages.shape[3]}"
            )
        if self.q_TNH.shape[1] % num_kv_heads or not self.q_TNH.shape[1]:
            raise ValueError(
                f"{self.q_TNH.shape[1]} query heads do not divide among {num_kv_heads} key/value "
                "heads"
            )


register_record(Arguments, (*_ARRAYS, "options"))
