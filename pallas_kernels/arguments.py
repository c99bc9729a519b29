"""The arguments of one call of paged attention, checked once for every backend."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_pages import check_scales

_TABLES = ("block_table_BM", "context_len_B", "query_start")
_ARRAYS = ("q_TNH", "k_pages", "v_pages", *_TABLES, "tree_mask_TQ", "k_scale", "v_scale", "sinks")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """One call. Arrays as `paged_attention` documents them; everything else is static. Tables and lengths become int32."""

    q_TNH: jax.Array
    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array | None  # [P, S, K, H], or None with `value_width`
    block_table_BM: jax.Array
    context_len_B: jax.Array
    query_start: jax.Array  # [B + 1]
    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    tree_mask_TQ: jax.Array | None = None
    k_scale: jax.Array | None = None  # [P, S, K], of quantised pages
    v_scale: jax.Array | None = None
    sinks: jax.Array | None = None  # becomes float32
    value_width: int | None = None
    max_query_len: int = sys.maxsize  # becomes T where it is more

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, jnp.asarray(array))
        self._check_arrays()
        for name in _TABLES:
            object.__setattr__(self, name, getattr(self, name).astype(jnp.int32))
        if self.sinks is not None:
            object.__setattr__(self, "sinks", self.sinks.astype(jnp.float32))
        # Numbers become Python's own, which have no type in JAX that results could take on.
        for name in ("scale", "logit_softcap"):
            if (number := getattr(self, name)) is not None or name == "scale":
                object.__setattr__(self, name, _number(name, number))
        for name in ("sliding_window", "value_width", "max_query_len"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, _at_least_one(name, number))
        object.__setattr__(self, "max_query_len", min(self.max_query_len, max(1, self.q_TNH.shape[0])))
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap must be above 0, not {self.logit_softcap}")
        if (self.value_width is None) == (self.v_pages is None):
            raise ValueError("either v_pages or value_width must be given, and not both")
        if self.value_width is not None and self.value_width > self.k_pages.shape[3]:
            raise ValueError(
                f"value_width must be at most the width of k_pages, {self.k_pages.shape[3]}, not {self.value_width}"
            )

    @property
    def out_width(self) -> int:
        """Of the output, per head."""
        return self.k_pages.shape[3] if self.value_width is None else self.value_width

    def _check_arrays(self) -> None:
        for name, rank in (("q_TNH", 3), ("k_pages", 4), ("v_pages", 4), ("block_table_BM", 2), ("context_len_B", 1)):
            array = getattr(self, name)
            if array is not None and array.ndim != rank:
                raise ValueError(f"{name} must have {rank} axes, but its shape is {array.shape}")
        for name, shape in (("k_pages", self.k_pages.shape), ("block_table_BM", self.block_table_BM.shape[1:])):
            if 0 in shape:
                raise ValueError(f"{name} must not be empty, but its shape is {getattr(self, name).shape}")
        for name in _TABLES:
            if not jnp.issubdtype(getattr(self, name).dtype, jnp.integer):
                raise TypeError(f"{name} must hold integers, but holds {getattr(self, name).dtype}")
        if self.v_pages is not None and self.k_pages.shape != self.v_pages.shape:
            raise ValueError(
                f"k_pages and v_pages must be alike, but are {self.k_pages.shape} and {self.v_pages.shape}"
            )
        if not jnp.issubdtype(self.q_TNH.dtype, jnp.floating):
            raise TypeError(f"q_TNH must hold floats, but holds {self.q_TNH.dtype}")
        check_scales(self.k_pages, self.v_pages, self.k_scale, self.v_scale)
        num_rows, num_kv_heads = self.block_table_BM.shape[0], self.k_pages.shape[2]
        if self.context_len_B.shape != (num_rows,):
            raise ValueError(
                f"context_len_B must have the {num_rows} rows of block_table_BM, not {self.context_len_B.shape}"
            )
        if self.query_start.shape != (num_rows + 1,):
            raise ValueError(f"query_start must have {num_rows + 1} entries (rows + 1), not {self.query_start.shape}")
        if self.q_TNH.shape[2] != self.k_pages.shape[3]:
            raise ValueError(f"head width differs: queries {self.q_TNH.shape[2]}, pages {self.k_pages.shape[3]}")
        if self.q_TNH.shape[1] % num_kv_heads or not self.q_TNH.shape[1]:
            raise ValueError(f"{self.q_TNH.shape[1]} query heads do not divide among {num_kv_heads} key/value heads")
        sinks = self.sinks
        if sinks is not None and (
            sinks.shape != self.q_TNH.shape[1:2] or not jnp.issubdtype(sinks.dtype, jnp.floating)
        ):
            raise ValueError(
                f"sinks must hold a float for each of {self.q_TNH.shape[1]} query heads, not {sinks.dtype} of shape {sinks.shape}"
            )
        tree = self.tree_mask_TQ
        rows_of_bools = tree is None or (tree.ndim == 2 and tree.shape[1] > 0 and tree.dtype == jnp.bool_)
        if tree is not None and (not rows_of_bools or tree.shape[0] != self.q_TNH.shape[0]):
            raise ValueError(
                f"tree_mask_TQ must hold a bool for each of {self.q_TNH.shape[0]} query tokens and the tokens of its row, "
                f"not {tree.dtype} of shape {tree.shape}"
            )


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number that is known when the call is traced, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    return float(value)


def _at_least_one(name: str, value: object) -> int:
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer that is known when the call is traced, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return int(value)
