"""Defines the kernel set for CPUs in C++ (`pallas_kernels/cpu`).

XLA calls the kernels as foreign functions. One call writes the new keys and values in place and
computes attention, for rows of any kind: decode, prompt chunks, trees of drafts. One thread
computes a query token with the heads that share its key/value head, always with the same operations
in the same order. So a result depends only on the token's row, to the last bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import Arguments
from pallas_kernels.cpu import library
from pallas_kernels.kernel_set import Call, first_reason
from pallas_kernels.page_layouts import SEPARATE
from pallas_kernels.sets import reference

LANES = 16  # the numbers of a vector; a head is a number of whole vectors
MAX_HEAD_DIM = 640
MAX_QUERY_LEN = 1024  # the most query tokens of a row with a tree of drafts
TYPES = ("float32", "bfloat16", "float16")


def attend(arguments: Arguments) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    # XLA finds the functions by their names, which this registers.
    library.load()
    pages = _pages(arguments)
    call = jax.ffi.ffi_call("jaxpage_attend", _out_shape(arguments))
    out_TNH: jax.Array = call(
        arguments.q_TNH, *_bits(pages), *_rows(arguments), **_options(arguments)
    )
    return out_TNH


def write_and_attend(
    k_TKH: jax.Array, v_TKH: jax.Array | None, slots_T: jax.Array, arguments: Arguments
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Returns out_TNH and the pages, which are written in place if they are donated."""
    library.load()
    dtype = arguments.q_TNH.dtype
    pages = _bits(_pages(arguments))
    call = jax.ffi.ffi_call(
        "jaxpage_write_and_attend",
        (_out_shape(arguments), *map(_shape, pages)),
        # XLA would copy an empty one, since a constant cannot be written to.
        input_output_aliases={
            # Operands 3 to 6 are the pages and scales, and so are results 1 to 4.
            3 + index: 1 + index
            for index, each in enumerate(pages)
            if each.size
        },
    )
    out_TNH, *written = call(
        arguments.q_TNH,
        k_TKH.astype(dtype),
        jnp.zeros(0, dtype) if v_TKH is None else v_TKH.astype(dtype),
        *pages,
        slots_T.astype(jnp.int32),
        *_rows(arguments),
        **_options(arguments),
    )
    page_dtype = arguments.k_pages.dtype
    problems = [
        each if each.dtype == page_dtype else jax.lax.bitcast_convert_type(each, page_dtype)
        for each in written[:2]
    ]
    problems += [] if arguments.k_scale is None else written[2:]
    if arguments.v_pages is None:
        return out_TNH, tuple(None if index % 2 else each for index, each in enumerate(problems))
    return out_TNH, tuple(problems)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _out_shape(arguments: Arguments) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (*arguments.q_TNH.shape[:2], arguments.out_width), arguments.q_TNH.dtype
    )


def _pages(arguments: Arguments) -> tuple[jax.Array, ...]:
    """Returns keys, values and their scales, with an empty array for each that is not there."""
    pages = (arguments.k_pages, arguments.v_pages)
    scales = (arguments.k_scale, arguments.v_scale)
    return (
        *(jnp.zeros(0, arguments.k_pages.dtype) if each is None else each for each in pages),
        *(jnp.zeros(0, jnp.float32) if each is None else each for each in scales),
    )


def _bits(pages: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Returns the pages; float8 becomes its bytes."""
    return [
        jax.lax.bitcast_convert_type(each, jnp.uint8) if each.dtype == jnp.float8_e4m3fn else each
        for each in pages
    ]


def _rows(arguments: Arguments) -> tuple[jax.Array, ...]:
    sinks = arguments.options.sinks
    slopes = arguments.options.alibi_slopes
    tree = arguments.options.tree_mask_TQ
    last = arguments.options.last_seen_T
    return (
        arguments.block_table_BM.astype(jnp.int32),
        arguments.context_len_B.astype(jnp.int32),
        arguments.query_start.astype(jnp.int32),
        jnp.zeros((0, 0), bool) if tree is None else tree,
        jnp.zeros(0, jnp.int32) if last is None else last,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks,
        jnp.zeros(0, jnp.float32) if slopes is None else slopes,
    )


def _options(arguments: Arguments) -> dict[str, Any]:
    options = arguments.options
    return {
        "scale": np.float32(options.scale),
        "softcap": np.float32(options.logit_softcap or 0.0),
        "window": np.int64(options.sliding_window or 0),
        "chunk": np.int64(options.attention_chunk or 0),
        "value_width": np.int64(options.value_width or 0),
    }


def _supports(device: Any, call: Call) -> str | None:
    reason = first_reason(
        (device.platform != "cpu", "needs a CPU"), (call.interpret, "is not interpreted")
    )
    if reason is None and call.attention is not None:
        reason = _refusal(call.attention)
    return reason or library.load().reason or reference.supports(device, call)


def _refusal(arguments: Arguments) -> str | None:
    width = arguments.q_TNH.shape[2]
    max_length = arguments.max_query_len
    return first_reason(
        (
            width % LANES or arguments.out_width % LANES or width > MAX_HEAD_DIM,
            f"heads {width} wide, and values {arguments.out_width} (multiples of {LANES} up to "
            f"{MAX_HEAD_DIM} only)",
        ),
        (str(arguments.q_TNH.dtype) not in TYPES, f"queries of {arguments.q_TNH.dtype}"),
        (
            arguments.options.tree_mask_TQ is not None and max_length > MAX_QUERY_LEN,
            f"trees of {max_length} tokens (up to {MAX_QUERY_LEN})",
        ),
    )


SET = dataclasses.replace(
    reference.SET,
    name="cpu",
    attend=attend,
    write_and_attend=write_and_attend,
    honours=frozenset(
        {"scale", "sliding_window", "logit_softcap", "value_width", "sinks", "alibi_slopes"}
        | {"attention_chunk", "tree_mask_TQ", "last_seen_T"}
    ),
    supports=_supports,
    layouts=(SEPARATE,),
    platforms=("cpu",),
)
