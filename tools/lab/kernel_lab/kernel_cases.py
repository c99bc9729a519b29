"""Makes arrays for a named shape: random queries, and pages in shuffled blocks.

A case has several sets of pages, like the layers of a model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_pages import is_quantized, quantize
from pallas_kernels.tiles import Shape, Tiles, kind_of
from tools.lab.kernel_lab.specs import Spec

HOST_ELEMENTS = 2**23  # elements of a pool that numpy makes; larger pools are made on the device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Holds the keys and values of one layer, and the sinks of its heads."""

    k_pages: jax.Array
    v_pages: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    sinks: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Holds what all layers of a step share."""

    block_table_BM: jax.Array
    context_len_B: jax.Array
    query_start: jax.Array
    tree_mask_TQ: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call that can be run; each of `layers` holds other pages under the same block table."""

    spec: Spec
    q_TNH: jax.Array
    step: Step
    layers: tuple[Pages, ...]
    logit_softcap: float | None = None
    max_query_len: int | None = None  # the promised query length; None for the spec's

    @property
    def scale(self) -> float:
        """Returns the scale of the scores."""
        return float(self.spec.head_dim**-0.5)

    def attend(self, q_TNH: jax.Array, step: Step, pages: Pages, **options: Any) -> jax.Array:
        """Makes the spec's call on these arrays; `options` are backend, tiles and interpret."""
        return _attend(q_TNH, step, pages, **self._static, **options)

    def run(
        self, backend: str, *, tiles: Tiles | None = None, interpret: bool = False
    ) -> jax.Array:
        """Returns out_TNH of the first layer, from a compiled call."""
        options = {"backend": backend, "tiles": tiles, "interpret": interpret}
        return _compiled(self.q_TNH, self.step, self.layers[0], **self._static, **options)

    @property
    def _static(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "scale": self.scale,
            "sliding_window": spec.sliding_window,
            "logit_softcap": self.logit_softcap,
            "max_query_len": self.max_query_len or spec.max_query_len,
        }


def _attend(q_TNH: jax.Array, step: Step, pages: Pages, **static: Any) -> jax.Array:
    return paged_attention(
        q_TNH,
        pages.k_pages,
        pages.v_pages,
        step.block_table_BM,
        step.context_len_B,
        step.query_start,
        tree_mask_TQ=step.tree_mask_TQ,
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
        sinks=pages.sinks,
        **static,
    )


_STATIC = (
    "scale",
    "sliding_window",
    "logit_softcap",
    "max_query_len",
    "backend",
    "tiles",
    "interpret",
)
_compiled = jax.jit(_attend, static_argnames=_STATIC)


def label(spec: Spec) -> str:
    """Returns the spec's name, and the type of the pages where it is not that of the queries."""
    return spec.name if spec.page_dtype == spec.dtype else f"{spec.name} {spec.page_dtype}"


def shape_of_spec(spec: Spec) -> Shape:
    """Returns the Shape, on which the choice of tiles for this spec depends."""
    return Shape(
        kind=kind_of(spec.max_query_len),
        group=spec.num_heads // spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype,
        page_dtype=spec.page_dtype,
    )


def first_visible(spec: Spec, row: int) -> int:
    """Returns the first position of a row that any of its query tokens sees."""
    if spec.sliding_window is None:
        return 0
    return max(0, spec.contexts[row] - spec.queries[row] + 1 - spec.sliding_window)


def tree_mask(num_tokens: int) -> np.ndarray:
    """Returns [Q, Q], the mask of a binary tree of drafts in breadth-first order.

    A token sees itself and its ancestors.
    """
    mask = np.eye(num_tokens, dtype=bool)
    for token in range(1, num_tokens):
        mask[token] |= mask[(token - 1) // 2]
    return mask


def tree_masks(spec: Spec, padding: int = 0) -> np.ndarray | None:
    """Returns tree_mask_TQ of a spec; None where its queries are in causal order."""
    if not spec.tree:
        return None
    masks = np.zeros((sum(spec.queries) + padding, spec.max_query_len), bool)
    start = 0
    for queries in spec.queries:
        masks[start : start + queries, :queries] = tree_mask(queries)
        start += queries
    return masks


def make_step(spec: Spec, *, seed: int = 0, padding: int = 0) -> tuple[Step, int]:
    """Returns the metadata of a spec, and the number of blocks of its pool.

    Blocks that no query sees are the null block, 0.
    """
    rng = np.random.default_rng(seed)
    spans = [
        (
            first_visible(spec, row) // spec.block_size if spec.queries[row] else 0,
            -(-context // spec.block_size),
        )
        for row, context in enumerate(spec.contexts)
    ]
    num_blocks = 1 + sum(stop - start for start, stop in spans)
    blocks = 1 + rng.permutation(num_blocks - 1).astype(np.int32)
    table_BM = np.zeros((len(spans), max(1, *(stop for _, stop in spans))), np.int32)
    taken = 0
    for row, (start, stop) in enumerate(spans):
        table_BM[row, start:stop] = blocks[taken : taken + stop - start]
        taken += stop - start
    masks = tree_masks(spec, padding)
    step = Step(
        jnp.asarray(table_BM),
        jnp.asarray(spec.contexts, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(spec.queries)]), jnp.int32),
        None if masks is None else jnp.asarray(masks),
    )
    return step, num_blocks


def make_case(
    spec: Spec,
    *,
    layers: int = 1,
    seed: int = 0,
    padding: int = 0,
    poison: bool = False,
    logit_softcap: float | None = None,
) -> Case:
    """Makes the arrays of a spec.

    Args:
        spec: The spec.
        layers: The number of sets of pages.
        seed: The seed of all random numbers.
        padding: The number of query tokens after the last row.
        poison: Every masked slot holds NaN.
        logit_softcap: The softcap of the call.

    Raises:
        ValueError: The pool is too large to be poisoned.
    """
    step, num_blocks = make_step(spec, seed=seed, padding=padding)
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    rng = np.random.default_rng([seed, 1])
    seen_PS = slots_in_sight(spec, np.asarray(step.block_table_BM), num_blocks) if poison else None
    if math.prod(shape) <= HOST_ELEMENTS:
        made = tuple(_host_pages(rng, shape, spec.page_dtype, seen_PS) for _ in range(layers))
    elif poison:
        raise ValueError(
            f"poison is for small pools, of at most {HOST_ELEMENTS} elements, not {math.prod(shape)}"
        )
    else:
        made = tuple(
            _device_pages(key, shape, spec.page_dtype)
            for key in jax.random.split(jax.random.key(seed), layers)
        )
    shape_q = (sum(spec.queries) + padding, spec.num_heads, spec.head_dim)
    q_TNH = jnp.asarray(rng.standard_normal(shape_q, np.float32), jnp.dtype(spec.dtype))
    if spec.sinks:
        drawn = [jnp.asarray(rng.standard_normal(spec.num_heads, np.float32) * 2) for _ in made]
        made = tuple(
            dataclasses.replace(pages, sinks=sinks)
            for pages, sinks in zip(made, drawn, strict=True)
        )
    return Case(spec=spec, q_TNH=q_TNH, step=step, layers=made, logit_softcap=logit_softcap)


def slots_in_sight(spec: Spec, table_BM: np.ndarray, num_blocks: int) -> np.ndarray:
    """Returns [P, S]: whether some query token sees the slot."""
    seen_PS = np.zeros((num_blocks, spec.block_size), bool)
    for row, context in enumerate(spec.contexts):
        if spec.queries[row]:
            positions = np.arange(first_visible(spec, row), context)
            seen_PS[table_BM[row, positions // spec.block_size], positions % spec.block_size] = True
    return seen_PS


def _host_pages(
    rng: np.random.Generator, shape: tuple[int, ...], page_dtype: str, seen_PS: np.ndarray | None
) -> Pages:
    """Makes pages with numpy, which has nothing to compile.

    Slots that are not in seen_PS hold NaN, which is in the scales where the pages have scales.
    """
    arrays: list[Any] = []
    for _ in range(2):
        pages = jnp.asarray(rng.standard_normal(shape, np.float32))
        stored, scale = _quantized(pages, page_dtype) if is_quantized(page_dtype) else (pages, None)
        if seen_PS is not None:
            spoiled = np.array(stored if scale is None else scale)
            spoiled[~seen_PS] = np.nan
            stored, scale = (
                (jnp.asarray(spoiled), None) if scale is None else (stored, jnp.asarray(spoiled))
            )
        arrays.append(
            (stored if is_quantized(page_dtype) else stored.astype(jnp.dtype(page_dtype)), scale)
        )
    (k_pages, k_scale), (v_pages, v_scale) = arrays
    return Pages(k_pages, v_pages, k_scale, v_scale)


_quantized = jax.jit(quantize, static_argnums=1)


@functools.partial(jax.jit, static_argnames=("shape", "page_dtype"))
def _device_pages(key: jax.Array, shape: tuple[int, ...], page_dtype: str) -> Pages:
    arrays: list[Any] = []
    for part in jax.random.split(key):
        pages = jax.random.normal(part, shape, jnp.bfloat16)
        arrays.append(
            quantize(pages, page_dtype)
            if is_quantized(page_dtype)
            else (pages.astype(page_dtype), None)
        )
    (k_pages, k_scale), (v_pages, v_scale) = arrays
    return Pages(k_pages, v_pages, k_scale, v_scale)
