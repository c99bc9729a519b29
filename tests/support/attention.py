"""Random calls of paged attention, what numpy says that they give, in float64, and one compiled
function that runs them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import is_quantized, paged_attention
from pallas_kernels.cpu import library
from pallas_kernels.sets import SETS

E4M3 = ml_dtypes.float8_e4m3fn
# The sets that the shared tests run: all but those that have no kernel for these cases on a CPU.
SHARED_BACKENDS = tuple(name for name in SETS if name not in ("fa3", "mosaic", "tpu"))


@dataclasses.dataclass
class Case:
    """A random call: contexts, query lengths and all that the oracle and the backends need."""

    q_TNH: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_table_BM: np.ndarray
    context_len_B: np.ndarray
    query_start: np.ndarray
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns what `paged_attention` takes by position."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)[:6])

    @property
    def scales(self) -> dict[str, np.ndarray]:
        """Returns what it takes by keyword, where pages are quantised."""
        return {} if self.k_scale is None else {"k_scale": self.k_scale, "v_scale": self.v_scale}


def make_case(
    seed,
    contexts,
    queries,
    *,
    heads=(4, 2),
    width=16,
    block_size=8,
    padding=3,
    table_width=None,
    num_blocks=None,
    dtype="float32",
    page_dtype="float32",
) -> Case:
    """Makes a case of rows; num_blocks and table_width may be larger, to give cases one shape."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    needed = [-(-length // block_size) for length in contexts]
    table_width = table_width or max(1, *needed) + 1
    num_blocks = num_blocks or sum(needed) + 3
    shape = (num_blocks, block_size, num_kv_heads, width)
    blocks = iter(1 + rng.permutation(num_blocks - 1))
    table = np.zeros((len(contexts), table_width), np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = [next(blocks) for _ in range(count)]
    pages = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    num_tokens = sum(queries) + padding
    q_TNH = rng.standard_normal((num_tokens, num_heads, width)).astype(np.float32)
    if is_quantized(page_dtype):
        # scales that differ
        spread = np.exp(rng.standard_normal((*shape[:3], 1)) / 2).astype(np.float32)
        (k_pages, k_scale), (v_pages, v_scale) = (
            quantize(each * spread, page_dtype) for each in pages
        )
    else:
        k_pages, v_pages = (each.astype(page_dtype) for each in pages)
        k_scale = v_scale = None
    return Case(
        q_TNH=q_TNH.astype(dtype),
        k_pages=k_pages,
        v_pages=v_pages,
        block_table_BM=table,
        context_len_B=np.array(contexts, np.int32),
        query_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def quantize(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes to the formats as the documentation has them, in numpy."""
    largest = np.float32(1 / 127) if dtype == "int8" else np.float32(1 / 448)
    scale = np.maximum(np.abs(x).max(-1) * largest, np.float32(2.0**-100))
    scaled = x / scale[..., None]
    if dtype == "int8":
        return np.rint(scaled).astype(np.int8), scale
    stored = scaled.astype(E4M3)
    return (stored.view(np.uint8) if dtype == "uint8" else stored), scale


def dequantize(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Returns the numbers that codes stand for, in float64."""
    stored = stored.view(E4M3) if stored.dtype == np.uint8 else stored
    wide = stored.astype(np.float64)
    return wide if scale is None else wide * scale[..., None].astype(np.float64)


def oracle(
    case: Case,
    *,
    scale,
    sliding_window=None,
    attention_chunk=None,
    logit_softcap=None,
    tree_mask_TQ=None,
    sinks=None,
    alibi_slopes=None,
    last_seen_T=None,
) -> np.ndarray:
    """Computes one token and one head at a time, in float64, from what the arrays hold.

    A token that sees nothing has zeros.
    """
    out = np.zeros(case.q_TNH.shape)
    num_kv_heads, width = case.k_pages.shape[2:]
    group = case.q_TNH.shape[1] // num_kv_heads
    k_pages, v_pages = (
        dequantize(case.k_pages, case.k_scale),
        dequantize(case.v_pages, case.v_scale),
    )
    for row, length in enumerate(case.context_len_B):
        start, stop = case.query_start[row : row + 2]
        keys, values = (
            pages[case.block_table_BM[row]].reshape(-1, num_kv_heads, width)[:length]
            for pages in (k_pages, v_pages)
        )
        for token in range(start, stop):
            position = length - (stop - token)
            last = position if last_seen_T is None else max(position, last_seen_T[token])
            seen = [c for c in range(length) if c <= last]
            if tree_mask_TQ is not None:
                first = length - (stop - start)
                seen = [c for c in range(length) if c < first or tree_mask_TQ[token, c - first]]
            if sliding_window is not None:
                seen = [c for c in seen if c > position - sliding_window]
            if attention_chunk is not None:
                seen = [c for c in seen if c // attention_chunk == position // attention_chunk]
            for head in range(case.q_TNH.shape[1] if seen else 0):
                scores = (
                    keys[seen, head // group] @ case.q_TNH[token, head].astype(np.float64) * scale
                )
                if logit_softcap is not None:
                    scores = logit_softcap * np.tanh(scores / logit_softcap)
                if alibi_slopes is not None:
                    scores -= alibi_slopes[head] * np.arange(len(seen))[::-1]
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                out[token, head] = (
                    weights @ values[seen, head // group] / (weights.sum() + np.exp(sink - top))
                )
    return out


def hidden(case, queries, window=None):
    """Returns the case with NaN in every slot that no query token sees.

    The null block is wherever a table needs no block.
    """
    poisoned = [np.full_like(pages, np.nan) for pages in (case.k_pages, case.v_pages)]
    table, block_size = np.zeros_like(case.block_table_BM), case.k_pages.shape[1]
    for row, (length, num_new) in enumerate(zip(case.context_len_B, queries, strict=True)):
        for position in range(
            0 if window is None else max(0, length - num_new - window + 1), length
        ):
            block = table[row, position // block_size] = case.block_table_BM[
                row, position // block_size
            ]
            for pages, seen in zip(poisoned, (case.k_pages, case.v_pages), strict=True):
                pages[block, position % block_size] = seen[block, position % block_size]
    return dataclasses.replace(case, k_pages=poisoned[0], v_pages=poisoned[1], block_table_BM=table)


STATIC = (
    "value_width",
    "scale",
    "sliding_window",
    "attention_chunk",
    "logit_softcap",
    "backend",
    "max_query_len",
    "interpret",
    "tiles",
)


@functools.partial(jax.jit, static_argnames=STATIC)
def _run(*arrays, **options):
    return paged_attention(*arrays, **options)


def run(*arrays, backend="auto", **options):
    """Runs `paged_attention`, compiled; kernels for GPUs are interpreted."""
    if backend == "cpu" and (reason := library.load().reason) is not None:
        pytest.skip(reason)
    return _run(*arrays, backend=backend, interpret=backend == "triton", **options)
