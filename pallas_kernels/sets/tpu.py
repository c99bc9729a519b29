"""Defines the kernel set for TPUs: JAX's own ragged paged attention, and plain XLA for the rest.

The kernel is part of JAX (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`), with the same
signature in jax 0.10 to 0.12. It takes decodes, chains of drafts and prompt chunks in one call, and
reads interleaved pages. It computes every row up to the last that is not empty, so the call is made
fit for it here:

    rows         a: 1 token | b: none | c: 3 tokens | d: none        d is not counted
    kv_lens      as they are; 1 for b: the kernel waits for a block of each row that it counts

A window's row begins at the block of the first position that its first token sees: the kernel would
read the whole context and mask it. So the slots of that block before the window must be finite, as
they are in an engine: they hold keys and values of the same sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.compat import libtpu_reason, x64_reason
from pallas_kernels.kernel_set import Call, first_reason
from pallas_kernels.page_layouts import INTERLEAVED, LANES, fill_up
from pallas_kernels.quantized_pages import spell_dtype
from pallas_kernels.query_tiles import token_rows
from pallas_kernels.sets import reference

QUERY_DTYPES = ("bfloat16", "float32")
# The positions of a turn of the loop over the context, and the query tokens of a program. They
# depend on nothing else, so a token's sums do not depend on how many rows a step has.
CONTEXT = 512
QUERY_TOKENS = 32
VMEM_BYTES = 32 * 2**20  # a core has 64 MiB (v7x) or 128 MiB (v5e, v6e)
# The block tables are in the scalar memory of a core, of 1 MiB; libtpu takes the rest of it.
TABLE_BYTES = 960 * 1024


def attend(arguments: Arguments) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return _attend(arguments, kernel=ragged_paged_attention)


# It is traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames="kernel")
def _attend(arguments: Arguments, *, kernel: Callable[..., jax.Array]) -> jax.Array:
    options = arguments.options
    num_tokens = arguments.q_TNH.shape[0]
    block_size = arguments.k_pages.shape[1]
    length_B, table_BM = _without_blocks_before_the_window(arguments)
    count_B = jnp.diff(arguments.query_start)
    is_used_B = (count_B > 0) & (arguments.context_len_B > 0)
    indices_B = jnp.arange(1, is_used_B.shape[0] + 1)
    num_rows = jnp.max(jnp.where(is_used_B, indices_B, 0))
    # A step of padding alone has one token, whose result is not used.
    start = jnp.where(
        num_rows == 0, jnp.minimum(jnp.arange(indices_B.shape[0] + 1), 1), arguments.query_start
    )
    out_TNW = kernel(
        # The pages have heads in whole lanes, which may be wider than the queries'.
        fill_up(arguments.q_TNH, arguments.k_pages.shape[3]),
        arguments.k_pages,
        jnp.maximum(length_B, 1).astype(jnp.int32),
        table_BM.astype(jnp.int32),
        start.astype(jnp.int32),
        jnp.maximum(num_rows, 1)[None].astype(jnp.int32),
        sm_scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.logit_softcap,
        num_kv_pages_per_block=min(table_BM.shape[1], max(1, CONTEXT // block_size)),
        num_queries_per_block=min(num_tokens, QUERY_TOKENS),
        vmem_limit_bytes=VMEM_BYTES,
    )
    # The kernel writes nothing for tokens of padding.
    rows = token_rows(arguments.context_len_B, arguments.query_start, num_tokens)
    seen_T = rows.valid_T & (rows.position_T >= 0)
    return jnp.where(seen_T[:, None, None], out_TNW[..., : arguments.out_width], 0)


def _without_blocks_before_the_window(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """Returns each row's context length and block table from the first block that it sees."""
    length_B = arguments.context_len_B
    table_BM = arguments.block_table_BM
    if (window := arguments.options.sliding_window) is None:
        return length_B, table_BM
    block_size = arguments.k_pages.shape[1]
    position_B = length_B - jnp.diff(arguments.query_start)  # of the first query token
    num_hidden_B = jnp.maximum(position_B - window + 1, 0) // block_size
    # The table keeps its width, so its end repeats the last block, after the end of the context.
    indices_BM = num_hidden_B[:, None] + jnp.arange(table_BM.shape[1])
    shifted_BM = jnp.take_along_axis(
        table_BM, jnp.minimum(indices_BM, table_BM.shape[1] - 1), axis=1
    )
    return length_B - num_hidden_B * block_size, shifted_BM


def supports(device: Any, call: Call) -> str | None:
    """Returns why the set refuses a call, or None if it takes it."""
    if call.interpret or call.tiles is not None:
        return "JAX's kernel takes neither interpret nor tiles"
    if device.platform != "tpu":
        missing = libtpu_reason()
        return f"needs a TPU, and the device is a {device.platform}" + (
            f". {missing}" if missing else ""
        )
    return x64_reason() or (None if call.attention is None else _attention_reason(call.attention))


def _attention_reason(arguments: Arguments) -> str | None:
    dtype = arguments.q_TNH.dtype.name
    page_dtype = arguments.k_pages.dtype.name
    num_rows, table_width = arguments.block_table_BM.shape
    table_bytes = 4 * num_rows * -(-table_width // LANES) * LANES
    return first_reason(
        (dtype not in QUERY_DTYPES, f"q_TNH of {dtype} (only {', '.join(QUERY_DTYPES)})"),
        (
            page_dtype != dtype,
            f"pages of {spell_dtype(page_dtype)} under q_TNH of {dtype} (only the queries' type)",
        ),
        (
            not _fills_tiles(2 * arguments.num_kv_heads, page_dtype),
            f"{arguments.num_kv_heads} key/value heads in {page_dtype}, which do not fill whole "
            "tiles of a TPU",
        ),
        (
            table_bytes > TABLE_BYTES,
            f"block tables of {num_rows} rows and {table_width} blocks, {table_bytes} bytes: the "
            f"scalar memory of a TPU takes {TABLE_BYTES}; use a larger block_size or fewer rows",
        ),
    )


def _fills_tiles(num_heads: int, dtype: str) -> bool:
    """Returns whether XLA keeps so many heads in whole tiles; it is the kernel's own condition."""
    num_packed, remainder = divmod(num_heads, 4 // jnp.dtype(dtype).itemsize)
    return not remainder and (num_packed in (1, 2, 4) or num_packed % 8 == 0)


SET = dataclasses.replace(
    reference.SET,
    name="tpu",
    attend=attend,
    honours=frozenset({"scale", "sliding_window", "logit_softcap"}),
    supports=supports,
    layouts=(INTERLEAVED,),
    platforms=("tpu",),
    prefers_mixed_steps=True,
)
