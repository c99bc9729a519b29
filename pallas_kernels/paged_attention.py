"""The one signature of paged attention. Backends are tried in order; when none takes the call, every refusal is reported."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.arguments import Arguments
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.kernel_set import Call, KernelSet
from pallas_kernels.kv_write import checked
from pallas_kernels.sets import first_that_takes
from pallas_kernels.tiles import Tiles


def paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"] | None,
    block_table_BM: Int[Array, "B M"],
    context_len_B: Int[Array, "B"],
    query_start: Int[Array, "B+1"],
    *,
    k_scale: Float[Array, "P S K"] | None = None,
    v_scale: Float[Array, "P S K"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    max_query_len: int | None = None,
    tiles: Tiles | None = None,
    **options: Any,
) -> Float[Array, "T N _"]:
    """Returns the attention of a ragged stream of query tokens over keys and values in blocks (PagedAttention, SOSP 2023).

    Row b owns the query tokens `query_start[b] <= t < query_start[b + 1]`. They are the last tokens of its context, so token t stands at
    position `context_len_B[b] - (query_start[b + 1] - t)` and sees the positions up to its own. Position c lies in block
    `block_table_BM[b, c // S]`, slot `c % S`. Rows may be empty; tokens after `query_start[B]` are padding and give zeros.

    Args:
        k_scale, v_scale: of pages of int8 or float8, as `write_kv` makes them; None for float pages.
        backend: one of `BACKENDS`, or "auto": kernels alone where JAX's default backend is a GPU.
        interpret: run a kernel on CPU, operation by operation; one of `INTERPRETABLE_BACKENDS`.
        max_query_len: a promise that no row has more query tokens, which lets a backend choose its tiles; the default is T.
        tiles: how a kernel cuts its work; the default is what was measured on this kind of GPU, else a rule.
        **options: the fields of `AttentionOptions`, which describes them: `scale`, and what else the call asks for.

    Returns:
        out_TNH in the queries' type, as wide as the values.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it and its value.
        NotImplementedError: no backend takes the call; the text has every backend's reason.
    """
    arguments = Arguments(
        q_TNH=q_TNH,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table_BM=block_table_BM,
        context_len_B=context_len_B,
        query_start=query_start,
        options=AttentionOptions(**options),
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=sys.maxsize if max_query_len is None else max_query_len,
    )
    call = Call(
        interpret=interpret,
        page_dtype=arguments.k_pages.dtype.name,
        attention=arguments,
        tiles=tiles,
    )
    return first_that_takes(
        "paged_attention",
        lambda each: functools.partial(_attend, each),
        arguments,
        call=call,
        backend=backend,
    )


def _show_options(call: Any) -> None:
    """Gives a function that takes `**options` the signature that `help` and editors should show."""
    own, of_options = (
        inspect.signature(call),
        inspect.signature(AttentionOptions).parameters.values(),
    )
    named = [
        each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    call.__signature__ = own.replace(parameters=[*named, *of_options])


_show_options(paged_attention)


def write_and_attend(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"] | None,
    slots_T: Int[Array, "T"],
    arguments: Arguments,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Does `write_kv` and then `paged_attention` over its pages, by one kernel set, which may have one kernel for both.

    Args:
        k_TKH, v_TKH, slots_T: what `write_kv` takes.
        arguments: the call of attention, with the pages as they are before the write.

    Returns:
        The output of `paged_attention` and what `write_kv` returns.

    Raises:
        As `paged_attention` and `write_kv` do.
    """
    pages = arguments.k_pages, arguments.v_pages, slots_T, arguments.k_scale, arguments.v_scale
    k_TKH, v_TKH, *_, slots_T, _, _ = checked(k_TKH, v_TKH, *pages)
    call = Call(interpret=interpret, page_dtype=arguments.k_pages.dtype.name, attention=arguments)
    return first_that_takes(
        "write_and_attend",
        lambda each: functools.partial(_write_and_attend, each),
        *(k_TKH, v_TKH, slots_T, arguments),
        call=call,
        backend=backend,
    )


def _attend(each: KernelSet, arguments: Arguments, **options: Any) -> jax.Array:
    if not arguments.q_TNH.shape[0] or not arguments.context_len_B.shape[0]:
        shape = *arguments.q_TNH.shape[:2], arguments.out_width
        return jnp.zeros(shape, arguments.q_TNH.dtype)  # no tokens, or nothing but padding
    return each.attend(arguments, **options)


def _write_and_attend(
    each: KernelSet,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    slots_T: jax.Array,
    arguments: Arguments,
    **options: Any,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    if each.write_and_attend is not None:
        return each.write_and_attend(k_TKH, v_TKH, slots_T, arguments, **options)
    old = arguments.k_pages, arguments.v_pages, slots_T, arguments.k_scale, arguments.v_scale
    pages = each.write(k_TKH, v_TKH, *old, **options)
    written: dict[str, Any] = dict(
        zip(("k_pages", "v_pages", "k_scale", "v_scale"), pages, strict=False)
    )
    return _attend(each, dataclasses.replace(arguments, **written), **options), pages


def pages_from_PSKH(pages_PSKH: Num[Array, "P S K H"]) -> Num[Array, "P S K H"]:
    """Turns pages in the order [block, slot, key/value head, head width] into the layout that the kernels use: today the same."""
    return pages_PSKH
