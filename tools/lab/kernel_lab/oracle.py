"""Defines paged attention in float64 numpy, one row at a time.

It shares no code with the kernels, nor with their types.
"""

from __future__ import annotations

import numpy as np

from tools.lab.kernel_lab.kernel_cases import Case


def attention(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Computes the attention of a case in float64.

    Returns:
        The output out_TNH, and size_TNH, which is the same weighted sum over |v|: rounding errors
        are measured by it. Tokens after the last row, and tokens that see nothing, have zeros in
        both.
    """
    spec, pages, step = case.spec, case.layers[0], case.step
    q_TNH = np.asarray(case.q_TNH).astype(np.float64)
    k_pages = _plain(pages.k_pages, pages.k_scale)
    v_pages = _plain(pages.v_pages, pages.v_scale)
    table_BM, context_len_B, query_start = map(
        np.asarray, (step.block_table_BM, step.context_len_B, step.query_start)
    )
    tree_mask_TQ = None if step.tree_mask_TQ is None else np.asarray(step.tree_mask_TQ)
    sinks_N = None if pages.sinks is None else np.asarray(pages.sinks).astype(np.float64)
    out_TNH, size_TNH = np.zeros_like(q_TNH), np.zeros_like(q_TNH)
    for row, context in enumerate(context_len_B):
        start, stop = int(query_start[row]), int(query_start[row + 1])
        if start == stop:
            continue
        seen_QC = visible(int(context), stop - start, spec.sliding_window)
        if tree_mask_TQ is not None:
            seen_QC[:, context - (stop - start) :] = tree_mask_TQ[start:stop, : stop - start]
        needed_C = np.flatnonzero(seen_QC.any(axis=0))
        block_C, slot_C = table_BM[row, needed_C // spec.block_size], needed_C % spec.block_size
        for kv_head in range(spec.num_kv_heads):
            heads = _heads(spec.num_heads, spec.num_kv_heads, kv_head)
            k_CH, v_CH = k_pages(block_C, slot_C, kv_head), v_pages(block_C, slot_C, kv_head)
            for head in heads:
                scores_QC = q_TNH[start:stop, head] @ k_CH.T * case.scale
                if case.logit_softcap is not None:
                    scores_QC = case.logit_softcap * np.tanh(scores_QC / case.logit_softcap)
                weights_QC = _softmax(
                    scores_QC, seen_QC[:, needed_C], -np.inf if sinks_N is None else sinks_N[head]
                )
                out_TNH[start:stop, head] = weights_QC @ v_CH
                size_TNH[start:stop, head] = weights_QC @ np.abs(v_CH)
    return out_TNH, size_TNH


def visible(context: int, queries: int, sliding_window: int | None) -> np.ndarray:
    """Returns [Q, C]: the positions that the last `queries` positions of a context see."""
    position_Q = np.arange(context - queries, context)[:, None]
    position_C = np.arange(context)[None, :]
    seen_QC = position_C <= position_Q
    return (
        seen_QC if sliding_window is None else seen_QC & (position_C > position_Q - sliding_window)
    )


def _heads(num_heads: int, num_kv_heads: int, kv_head: int) -> range:
    group = num_heads // num_kv_heads
    return range(kv_head * group, (kv_head + 1) * group)


def _softmax(scores_QC: np.ndarray, seen_QC: np.ndarray, sink: float) -> np.ndarray:
    top_Q1 = np.where(seen_QC, scores_QC, -np.inf).max(
        axis=1, keepdims=True, initial=max(sink, -1e300)
    )
    weights_QC = np.where(seen_QC, np.exp(np.where(seen_QC, scores_QC - top_Q1, 0.0)), 0.0)
    total_Q1 = weights_QC.sum(axis=1, keepdims=True) + np.exp(sink - top_Q1)
    return weights_QC / np.where(total_Q1 == 0.0, 1.0, total_Q1)


class _plain:
    """Reads vectors out of pages, in float64."""

    def __init__(self, pages: object, scale: object) -> None:
        self.pages = np.asarray(pages)
        self.scale = None if scale is None else np.asarray(scale)

    def __call__(self, block_C: np.ndarray, slot_C: np.ndarray, head: int) -> np.ndarray:
        stored_CH = self.pages[block_C, slot_C, head]
        if self.scale is None:
            return stored_CH.astype(np.float64)
        eight_bits = stored_CH.dtype == np.int8
        numbers_CH = (
            stored_CH.astype(np.float64) if eight_bits else float8_e4m3fn(stored_CH.view(np.uint8))
        )
        return numbers_CH * self.scale[block_C, slot_C, head].astype(np.float64)[:, None]


def float8_e4m3fn(bits: np.ndarray) -> np.ndarray:
    """Returns the numbers that float8_e4m3fn bytes encode.

    A byte holds a sign, four bits of exponent (bias 7) and three of fraction; 0x7f and 0xff are
    NaN.
    """
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, fraction = (bits >> 3 & 0xF).astype(np.int64), (bits & 7).astype(np.float64)
    size = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * np.exp2(exponent - 7.0)
    )
    return np.where(bits & 0x7F == 0x7F, np.nan, sign * size)
