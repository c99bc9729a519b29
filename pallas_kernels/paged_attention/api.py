"""The one signature of paged attention. Backends are tried in order; when none takes the call, every refusal is reported."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.paged_attention import mosaic, reference, scan, triton
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.tiles import Tiles

_XLA: dict[str, Callable[[Arguments], jax.Array]] = {"reference": reference.attend, "scan": scan.attend}
_KERNELS: dict[str, Callable[..., jax.Array]] = {"triton": triton.attend, "mosaic": mosaic.attend}
_AUTO = {"gpu": ("triton", "mosaic", "scan", "reference"), "interpret": ("triton", "mosaic"), "": ("scan", "reference")}

XLA_BACKENDS = tuple(_XLA)
BACKENDS = (*XLA_BACKENDS, *_KERNELS)
INTERPRETABLE_BACKENDS = ("triton", "mosaic") if mosaic.INTERPRETABLE else ("triton",)  # on CPU, with interpret=True


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
    tiles: Tiles | None = None,
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
        backend: one of `BACKENDS`, or "auto": kernels first where JAX's default backend is a GPU.
        interpret: run a kernel on CPU, operation by operation; one of `INTERPRETABLE_BACKENDS`.
        max_query_len: a promise that no row has more query tokens, which lets a backend choose its tiles; the default is T.
        tiles: how a kernel cuts its work; the default is what was measured on this kind of GPU, else a rule.

    Returns:
        out_TNH in the queries' type.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it and its value.
        NotImplementedError: no backend takes the call; the text has every backend's reason.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, not {backend!r}")
    longest = max((1, *jnp.shape(q_TNH)[:1]))
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
        max_query_len=longest if max_query_len is None else min(max_query_len, longest),
    )
    if not arguments.q_TNH.shape[0] or not arguments.context_len_B.shape[0]:
        return jnp.zeros_like(arguments.q_TNH)  # no tokens, or nothing but padding
    platform = "interpret" if interpret else "gpu" if jax.default_backend() == "gpu" else ""
    refusals = []
    for name in _AUTO[platform] if backend == "auto" else (backend,):
        try:
            return _attend(name, arguments, tiles, interpret)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError("no backend of paged_attention takes this call: " + "; ".join(refusals))


def _attend(name: str, arguments: Arguments, tiles: Tiles | None, interpret: bool) -> jax.Array:
    if kernel := _KERNELS.get(name):
        return kernel(arguments, tiles, interpret=interpret)
    if interpret or tiles is not None:
        raise NotImplementedError("no kernel, so it takes neither interpret nor tiles")
    return _XLA[name](arguments)


def pages_from_PSKH(pages_PSKH: Num[Array, "P S K H"]) -> Num[Array, "P S K H"]:
    """Turns pages in the order [block, slot, key/value head, head width] into the layout that the kernels use: today the same."""
    return pages_PSKH
