"""The one signature of paged attention. Backends are tried in order; when none takes the call, every refusal is reported."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.paged_attention import reference, scan
from pallas_kernels.paged_attention.arguments import Arguments

_BACKENDS: dict[str, Callable[[Arguments], jax.Array]] = {"reference": reference.attend, "scan": scan.attend}
_AUTO = ("scan", "reference")

BACKENDS = tuple(_BACKENDS)
INTERPRETABLE_BACKENDS: tuple[str, ...] = ()  # kernels that run on CPU with interpret=True; none is written yet


def paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"],
    block_table_BM: Int[Array, "B M"],
    context_len_B: Int[Array, "B"],
    query_start: Int[Array, "B+1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    tree_mask_TQ: Bool[Array, "T Q"] | None = None,
    k_scale: Float[Array, "P S K"] | None = None,
    v_scale: Float[Array, "P S K"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    max_query_len: int | None = None,
) -> Float[Array, "T N H"]:
    """Attention of a ragged stream of query tokens over keys and values in blocks (PagedAttention, SOSP 2023).

    Row b owns the query tokens `query_start[b] <= t < query_start[b + 1]`. They are the last tokens of its context, so token t stands at
    position `context_len_B[b] - (query_start[b + 1] - t)` and sees the positions up to its own. Position c lies in block
    `block_table_BM[b, c // S]`, slot `c % S`. Rows may be empty; tokens behind `query_start[B]` are padding and give zeros.

    Args:
        scale: factor of the scores, usually H ** -0.5.
        sliding_window: number of positions a token sees, its own included; None for all.
        logit_softcap: scores become softcap * tanh(scores / softcap).
        tree_mask_TQ: `tree_mask_TQ[t, j]` says whether query token t sees query token j of its row, in place of the causal order.
        k_scale, v_scale: of pages of int8 or float8, as `write_kv` makes them; None for float pages.
        backend: one of `BACKENDS`, or "auto".
        interpret: reserved for kernels that can be interpreted; refused by backends that are not kernels.
        max_query_len: a promise that no row has more query tokens, which lets a backend choose its tiles; the default is T.

    Returns:
        out_TNH in the queries' type.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it and its value.
        NotImplementedError: no backend takes the call; the text has every backend's reason.
    """
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, not {backend!r}")
    if interpret:
        raise NotImplementedError(f"interpret=True: {backend} is not a kernel; interpretable: {INTERPRETABLE_BACKENDS}")
    arguments = Arguments(
        q_TNH=q_TNH,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table_BM=block_table_BM,
        context_len_B=context_len_B,
        query_start=query_start,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        tree_mask_TQ=tree_mask_TQ,
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=max_query_len or q_TNH.shape[0],
    )
    refusals = []
    for name in _AUTO if backend == "auto" else (backend,):
        try:
            return _BACKENDS[name](arguments)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError("no backend of paged_attention takes this call: " + "; ".join(refusals))


def pages_from_PSKH(pages_PSKH: Num[Array, "P S K H"]) -> Num[Array, "P S K H"]:
    """Turns pages in the order [block, slot, key/value head, head width] into the layout that the kernels use: today the same."""
    return pages_PSKH
