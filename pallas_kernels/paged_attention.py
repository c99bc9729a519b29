"""Defines paged attention: one signature for all kernel sets.

The sets are tried in order; if none takes the call, the error has the reason of each.
"""

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
from pallas_kernels.kv_write import check
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
    interleaved: bool = False,
    backend: str = "auto",
    interpret: bool = False,
    max_query_len: int | None = None,
    tiles: Tiles | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> Float[Array, "T N _"]:
    """Returns the attention of a ragged stream of query tokens over keys and values in blocks.

    Row b owns the query tokens `query_start[b] <= t < query_start[b + 1]` (PagedAttention, SOSP
    2023). They are the last tokens of its context: token t has the position
    `context_len_B[b] - (query_start[b + 1] - t)` and sees the positions up to its own. Position c
    is in block `block_table_BM[b, c // S]`, slot `c % S`. Rows may be empty. Tokens from
    `query_start[B]` on are padding and give zeros. An example with blocks of S = 4 slots:

        query_start     0    1           4
        q_TNH         [ a0 | b0  b1  b2 | . ]     the last token is padding
        row a         context 6, blocks [7 2]     a0 at position 5: block 2, slot 1
        row b         context 3, blocks [9 0]     b0 to b2 at positions 0 to 2: block 9, slots 0..2

    Args:
        q_TNH: The queries.
        k_pages: The pages of keys.
        v_pages: The pages of values; None if the option `value_width` finds values in the keys, or
            pages are interleaved.
        block_table_BM: The block table of each row.
        context_len_B: The tokens in the context of each row, its query tokens included.
        query_start: The first query token of each row, and the end of the last row.
        k_scale: The scales of int8 or float8 pages, as `write_kv` makes them; None for float pages.
        v_scale: The scales of the pages of values.
        interleaved: Says that `k_pages` is an array [P, S, 2K, W] with both: the value of each head
            follows its key, each with zeros up to a multiple of 128. Such pages are not quantised.
        backend: One of `BACKENDS`, or "auto": only kernels where JAX's default backend is a GPU.
        interpret: Runs a kernel on CPU, operation by operation; for `INTERPRETABLE_BACKENDS`.
        max_query_len: A promise that no row has more query tokens, with which a backend chooses its
            tiles; T by default.
        tiles: The way a kernel cuts its work; by default the tiles that were measured on this kind
            of GPU, or else a rule.
        batch_invariant: Asks for sums whose order depends on positions alone: a token has the same
            bits in decode, in verification of drafts without a tree and in a chunk, in any tiles of
            the same turns and segments. Only a backend that has such a kernel takes the call.
        **options: The fields of `AttentionOptions`, which describes them: `scale`, and any others.

    Returns:
        out_TNH in the queries' type, as wide as the values.

    Raises:
        ValueError: An argument does not fit; the message names it and its value.
        TypeError: An argument has the wrong type.
        NotImplementedError: No backend takes the call; the message has every backend's reason.
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
        interleaved=interleaved,
        # It is only a bound, so one that no row can exceed stands for none.
        max_query_len=sys.maxsize if max_query_len is None else max_query_len,
    )
    return attend_to_pages(
        arguments,
        backend=backend,
        interpret=interpret,
        tiles=tiles,
        batch_invariant=batch_invariant,
    )


def attend_to_pages(
    arguments: Arguments,
    *,
    backend: str = "auto",
    interpret: bool = False,
    tiles: Tiles | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "T N _"]:
    """Returns what `paged_attention` does, for arguments that are one record."""
    call = Call(
        interpret=interpret,
        page_dtype=arguments.k_pages.dtype.name,
        layout=arguments.layout,
        attention=arguments,
        tiles=tiles,
        batch_invariant=batch_invariant,
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
    signature = inspect.signature(call)
    of_options = inspect.signature(AttentionOptions).parameters.values()
    named = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    call.__signature__ = signature.replace(parameters=[*named, *of_options])


_show_options(paged_attention)


def write_and_attend(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"] | None,
    slots_T: Int[Array, "T"],
    arguments: Arguments,
    *,
    backend: str = "auto",
    interpret: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Does `write_kv` and then `paged_attention` over its pages, with one kernel set.

    The set may have one kernel for both.

    Args:
        k_TKH: The new keys.
        v_TKH: The new values, or None as for `write_kv`.
        slots_T: The slot of each token.
        arguments: The call of attention, with the pages as they are before the write.
        backend: One of `BACKENDS`, or "auto".
        interpret: Runs kernels on CPU, operation by operation.
        batch_invariant: See `paged_attention`.

    Returns:
        The output of `paged_attention` and what `write_kv` returns.

    Raises:
        ValueError: An argument does not fit.
        TypeError: An argument has the wrong type.
        NotImplementedError: No backend takes the call.
    """
    pages = arguments.k_pages, arguments.v_pages, slots_T, arguments.k_scale, arguments.v_scale
    k_TKH, v_TKH, *_, slots_T, _, _ = check(k_TKH, v_TKH, *pages)
    call = Call(
        interpret=interpret,
        page_dtype=arguments.k_pages.dtype.name,
        layout=arguments.layout,
        attention=arguments,
        batch_invariant=batch_invariant,
    )
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
        return jnp.zeros(shape, arguments.q_TNH.dtype)  # there are no tokens, or only padding
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
    of_write = {name: value for name, value in options.items() if name == "interpret"}
    pages = each.write(k_TKH, v_TKH, *old, **of_write)
    written: dict[str, Any] = dict(
        # Pages that are not quantised come back without scales.
        zip(("k_pages", "v_pages", "k_scale", "v_scale"), pages, strict=False)
    )
    return _attend(each, dataclasses.replace(arguments, **written), **options), pages


def pages_from_PSKH(pages_PSKH: Num[Array, "P S K H"]) -> Num[Array, "P S K H"]:
    """Turns pages [block, slot, key/value head, head width] into the layout of the kernels.

    This is the same layout; `page_layouts.interleave` makes the other one, of the set for TPUs.
    """
    return pages_PSKH
