"""Defines the kernel set of Pallas' Triton backend, for NVIDIA GPUs.

Its attention is one kernel for decode, verification and prompt chunks, in any mixture. A program
takes a tile of query tokens of one row, with all G query heads of one key/value head (they read the
same keys and values), and one split of the row's context. It walks its split in turns of
`Tiles.context` positions: block ids come by position from the block table, keys and values by block
id, and an online softmax adds them up in float32. If a context may have several splits, a second
kernel combines them (`triton.reduce`).

The ends of the splits of a tile depend only on the tile, so the sums of a token have one order in
every bucket and batch (`tiles` names the exception).

The kernels are imported at the first use: Pallas takes a quarter of a second to import, and a CPU
needs none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Arguments
from pallas_kernels.compat import target_device, x64_reason
from pallas_kernels.kernel_set import (
    Call,
    KernelSet,
    Matmuls,
    Moves,
    Selection,
    capability,
    describe,
    first_reason,
)
from pallas_kernels.query_tiles import QueryCut, mask_words, query_cut
from pallas_kernels.tiles import Shape, Tiles, find_tuned, shape_of

if TYPE_CHECKING:
    from pallas_kernels.triton.attention import Config

QUERY_DTYPES = ("bfloat16", "float16", "float32")
PAGE_DTYPES = (*QUERY_DTYPES, "int8", "float8_e4m3fn", "uint8")
MAX_WIDTH = 256
MAX_GROUP = 64
MAX_LATENT_WIDTH = 640
# The most query heads of a program if values are within the keys, which all heads share.
LATENT_GROUP = 16
CAPABILITY = (8, 0)  # Ampere
# A program has 99 KiB on these; the others have 163 or more.
LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
# Below this capability Triton converts nothing to float8_e4m3fn.
FLOAT8 = ("float8_e4m3fn", "uint8")
FLOAT8_CAPABILITY = (8, 9)
# With `batch_invariant` a context has segments of so many positions, or of the first power of two
# that gives no more than `MAX_SEGMENTS`.
SEGMENT = 256
MAX_SEGMENTS = 32
ROWS = (
    "takes",
    "gate",
    "rms_norm",
    "add_and_norm",
    "layer_norm",
    "rotate",
    "rotate_pairs",
    "split_and_rotate",
    "log_sums",
    "scores",
    "weighted_sum",
)
OF_STATES = ("update_state", "convolve")
# With more outputs a program goes through all segments, since the partial results of segments would
# take much memory: half a MiB for each token of 32 heads of 128, and 128 MiB for so many outputs.
MAX_SEPARATE_OUTPUTS = 2**20
# The most numbers of the sums of a product's segments: 256 programs of 128 outputs share up to 256
# rows (`triton.matmul_tiles`).
MAX_SUMS = 2**23


def heuristic(shape: Shape, has: tuple[int, int] | None = None) -> Tiles:
    """Returns tiles for a GPU on which nothing was measured.

    Those of half-precision queries spill no registers. From five stages on, the loop over the
    context loads the keys and values of the next turn in advance; with up to four, the reads of the
    block table take all buffers but one.

    Args:
        shape: The shape of the call.
        has: The GPU's compute capability. None is that of `target_device`, or Hopper's if that is
            no GPU.
    """
    has = has or capability(target_device())
    wide = shape.head_dim > 128
    eight_bits = jnp.dtype(shape.page_dtype).itemsize == 1  # they become floats in registers
    # Partial results of a long chunk would fill the memory.
    splits = {"decode": 16, "verify": 8, "chunk": 1}[shape.kind]
    few = has in LITTLE_SHARED_MEMORY
    # The operands of a product are in registers there. On Hopper and the large Blackwells they are
    # in shared memory.
    in_registers = has is not None and has[0] in (8, 12)
    short = wide or shape.kind != "chunk" or (in_registers and (eight_bits or shape.head_dim > 64))
    context = 16 if wide and few else 32 if short else 64
    stages = 5
    if shape.dtype == "float32":  # without tensor cores, operands of products are in registers
        rows = 16
        context = 16
        warps = 8
        stages = 3
    elif shape.head_dim > MAX_WIDTH:  # latents
        rows = 16 if shape.kind == "decode" else 32
        warps = 8
        context = 16 if eight_bits else context
    elif shape.kind == "decode":
        rows = 16
        warps = 8 if eight_bits and wide else 4
        if eight_bits and not wide:
            # A position has half the bytes, so there are twice the positions. With a third turn in
            # flight the compiler needs fewer registers.
            context = 64
            stages = stages if few else 7
    elif shape.kind == "verify":
        rows = 32 if in_registers and not wide else 64
        warps = 8 if wide else 4
        if in_registers and eight_bits and shape.head_dim <= 64:
            stages = 7  # with a third turn in flight, as above
    elif in_registers and eight_bits and not wide:
        rows = 64
        warps = 4
    else:
        rows = 64 if wide and (eight_bits or in_registers) else 128
        warps = 8
    return Tiles(
        query_rows=max(rows, 1 << (shape.group - 1).bit_length()),
        context=context,
        max_splits=splits,
        split_context=256,
        num_warps=warps,
        num_stages=stages,
    )


def choose_ordered_tiles(shape: Shape, num_positions: int, num_outputs: int) -> Tiles:
    """Returns tiles with which the sums of a token have one order in every kind of step.

    Turns are of the same positions, and so are segments, whose length depends on the longest
    possible context. Few outputs have a program for each segment; in a chunk a program goes
    through all of them.

    Args:
        shape: The shape of the call.
        num_positions: The positions of a block table.
        num_outputs: The numbers of the outputs of all heads and query tokens.
    """
    context = heuristic(dataclasses.replace(shape, kind="verify")).context
    length = _length_of_segments(num_positions)
    is_separate = shape.kind != "chunk" and num_outputs <= MAX_SEPARATE_OUTPUTS
    tiles = heuristic(shape)
    if shape.head_dim > MAX_WIDTH and jnp.dtype(shape.page_dtype).itemsize == 1:
        # The sums of a segment and of those before it are twice the registers, and codes of eight
        # bits become numbers in others.
        tiles = dataclasses.replace(tiles, query_rows=LATENT_GROUP)
    return dataclasses.replace(
        tiles,
        context=context,
        max_splits=max(1, -(-num_positions // length)) if is_separate else 1,
        split_context=length,
    )


def _length_of_segments(num_positions: int) -> int:
    """Returns the positions of a segment, where a block table has so many."""
    length = SEGMENT
    while num_positions > MAX_SEGMENTS * length:
        length *= 2
    return length


def ordered_bytes(num_tokens: int, outputs_of_token: int, num_positions: int) -> int:
    """Returns the most bytes of partial sums with `batch_invariant`; see `KernelSet`.

    Those of attention and those of a product are not there at the same time.
    """
    num_tokens = min(num_tokens, MAX_SEPARATE_OUTPUTS // outputs_of_token)
    num_segments = -(-num_positions // _length_of_segments(num_positions))
    return 4 * max(num_tokens * outputs_of_token * num_segments, MAX_SUMS)


def attend(
    arguments: Arguments,
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
    batch_invariant: bool = False,
) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    from pallas_kernels.triton.attention import Config

    if batch_invariant and arguments.options.tree_mask_TQ is not None:
        raise NotImplementedError(
            "a tree of drafts with batch_invariant: its keys are not at their positions"
        )
    shape, programs = _shape_and_programs(arguments)
    if tiles is None and batch_invariant:
        num_positions = arguments.block_table_BM.shape[1] * shape.block_size
        num_outputs = math.prod(arguments.q_TNH.shape[:2]) * arguments.out_width
        tiles = choose_ordered_tiles(shape, num_positions, num_outputs)
    tiles = tiles or find_tuned("triton", shape) or heuristic(shape)
    if tiles.query_rows < shape.group:
        raise NotImplementedError(
            f"tiles.query_rows of {tiles.query_rows}: the {shape.group} query heads of a key/value "
            "head share a tile"
        )
    config = Config(
        tiles=tiles,
        group=shape.group,
        programs=programs,
        query_tokens=min(tiles.query_tokens(shape.group), arguments.max_query_len),
        options=arguments.options.static,
        interpret=interpret,
        is_ordered=batch_invariant,
    )
    return _attend(arguments, config)


def _shape_and_programs(arguments: Arguments) -> tuple[Shape, int]:
    """Returns the shape that tiles depend on, and how many programs share a key/value head.

    There are several programs if values are within the keys.
    """
    shape = shape_of(arguments)
    if arguments.options.value_width is None:
        return shape, 1
    # The programs of a key/value head must have equally many query heads.
    group = next(
        size for size in range(min(LATENT_GROUP, shape.group), 0, -1) if shape.group % size == 0
    )
    return dataclasses.replace(shape, group=group), shape.group // group


def supports(device: Any, call: Call) -> str | None:
    """Returns why the set refuses a call, or None if it takes it."""
    from pallas_kernels.triton import backend as tb

    if reason := tb.missing_reason():
        return reason
    has = None if call.interpret else capability(device)
    needed = FLOAT8_CAPABILITY if call.page_dtype in FLOAT8 else CAPABILITY
    if has is not None and has < needed:
        pages = " for pages of fp8" if needed == FLOAT8_CAPABILITY else ""
        return (
            f"needs a GPU of compute capability {'.'.join(map(str, needed))} or more{pages}, but "
            f"{describe(device)}"
        )
    if has is not None and not tb.knows(device.device_kind):
        instead = "" if tb.ASKS else ": jax 0.11.2 or newer asks the GPU itself"
        return (
            f"jax {jax.__version__} has a list of the GPUs that it takes, without "
            f"{device.device_kind}{instead}"
        )
    return x64_reason() or (None if call.attention is None else _attention_reason(call.attention))


def _attention_reason(arguments: Arguments) -> str | None:
    dtype = arguments.q_TNH.dtype
    pages = arguments.k_pages
    block_size, num_kv_heads, width = pages.shape[1:]
    group = arguments.q_TNH.shape[1] // num_kv_heads
    of_latents = arguments.options.value_width is not None
    return first_reason(
        (dtype.name not in QUERY_DTYPES, f"q_TNH of {dtype} (only {', '.join(QUERY_DTYPES)})"),
        (
            pages.dtype.name not in PAGE_DTYPES,
            f"k_pages of {pages.dtype} (only {', '.join(PAGE_DTYPES)})",
        ),
        (
            not of_latents and width > MAX_WIDTH,
            f"k_pages with heads {width} wide (up to {MAX_WIDTH} only)",
        ),
        (
            width > MAX_LATENT_WIDTH or width - arguments.out_width > MAX_WIDTH,
            f"k_pages with latents {width} wide, of which {arguments.out_width} are values",
        ),
        (
            not of_latents and group > MAX_GROUP,
            f"q_TNH with {group} heads for one of k_pages (up to {MAX_GROUP} only)",
        ),
        (
            block_size & (block_size - 1),
            f"k_pages with blocks of {block_size} slots (powers of two only)",
        ),
        (
            pages.size in unaddressable(pages.dtype),
            f"k_pages of {pages.size} one-byte elements (fewer than 2^31, or more than 2^32 only)",
        ),
    )


def unaddressable(page_dtype: DTypeLike) -> range:
    """Returns the numbers of elements that an array of pages must not have.

    Pallas addresses arrays of up to 2^32 bytes with 32 bits and a sign, so it cannot reach the
    upper half of one-byte elements.
    """
    return range(2**31, 2**32 + 1) if jnp.dtype(page_dtype).itemsize == 1 else range(0)


# It is traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames="config")
def _attend(arguments: Arguments, config: Config) -> jax.Array:
    from pallas_kernels.triton import backend as tb
    from pallas_kernels.triton.attention import kernel
    from pallas_kernels.triton.reduce import fold_splits, reduce_splits

    tiles = config.tiles
    q_TNH = arguments.q_TNH
    cut = query_cut(arguments, config.query_tokens)
    schedule_RF, splits_T = _schedule(arguments, cut, tiles, is_ordered=config.is_ordered)
    separate = tiles.max_splits > 1
    shape = (*q_TNH.shape[:2], arguments.out_width)
    many = (tiles.max_splits, *shape)
    of_lanes = jax.ShapeDtypeStruct(many[:3], jnp.float32)
    out = [jax.ShapeDtypeStruct(many, jnp.float32), of_lanes]
    if config.is_ordered:
        out.append(of_lanes)
    if not separate:
        out = [jax.ShapeDtypeStruct(shape, q_TNH.dtype)]
    call = tb.kernel_call(
        functools.partial(kernel, config=config),
        name="paged_attention",
        grid=(schedule_RF.shape[0], arguments.k_pages.shape[2] * config.programs, tiles.max_splits),
        out_shape=out,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=config.interpret,
    )
    result = call(
        schedule_RF,
        q_TNH,
        arguments.k_pages,
        arguments.v_pages,
        arguments.block_table_BM.astype(jnp.int32),
        None
        if arguments.options.tree_mask_TQ is None
        else mask_words(arguments.options.tree_mask_TQ),
        arguments.k_scale,
        arguments.v_scale,
        arguments.options.sinks,
    )
    if separate and config.is_ordered:
        sum_ZTNH, top_ZTN, total_ZTN = result
        return fold_splits(
            sum_ZTNH,
            top_ZTN,
            total_ZTN,
            splits_T,
            arguments.options.sinks,
            q_TNH.dtype,
            interpret=config.interpret,
        )
    if separate:
        out_ZTNH, weight_ZTN = result
        return reduce_splits(
            out_ZTNH, weight_ZTN, splits_T, q_TNH.dtype, interpret=config.interpret
        )
    # The kernel wrote nothing for tokens without splits.
    return jnp.where((splits_T > 0)[:, None, None], result[0], 0)


def _schedule(
    arguments: Arguments, cut: QueryCut, tiles: Tiles, *, is_ordered: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the fields of each tile, [R, 8] (see `Tile`), and each token's number of splits.

    Padding has 0 splits.
    """
    causal_end_R = cut.position_R + cut.count_R
    end_R = (
        causal_end_R
        if arguments.options.tree_mask_TQ is None
        else arguments.context_len_B[cut.row_R]
    )
    end_R = jnp.where(cut.count_R > 0, end_R, 0)
    window = arguments.options.sliding_window
    begin_R = (
        jnp.zeros_like(end_R) if window is None else jnp.maximum(cut.position_R - window + 1, 0)
    )
    turn_R = begin_R // tiles.context
    if is_ordered:  # the first split begins where a segment does
        turn_R = begin_R // tiles.split_context * (tiles.split_context // tiles.context)
    turns_R = jnp.maximum((end_R + tiles.context - 1) // tiles.context - turn_R, 0)
    share_R = (turns_R + tiles.max_splits - 1) // tiles.max_splits
    share_R = (
        jnp.maximum(share_R, tiles.split_context // tiles.context)
        if tiles.max_splits > 1
        else share_R
    )
    fields = (
        cut.row_R,
        cut.token_R,
        cut.count_R,
        cut.position_R,
        cut.origin_R,
        begin_R,
        end_R,
        share_R,
    )
    # A tile of padding has no turns, so its share may be 0.
    splits_R = (turns_R + share_R - 1) // jnp.maximum(share_R, 1)
    splits_T = jnp.where(cut.valid_T, splits_R[cut.tile_T], 0)
    return jnp.stack(fields, axis=1).astype(jnp.int32), splits_T.astype(jnp.int32)


def _operation(module: str, name: str) -> Callable[..., Any]:
    """Returns an operation of a module of `pallas_kernels.triton`, imported at the first call."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(_operations()[module], name)(*arguments, **options)

    return call


@functools.cache
def _operations() -> dict[str, Any]:
    from pallas_kernels.triton import (
        matmul,
        move,
        rotary_write,
        routing,
        rows,
        select,
        state,
        write,
    )

    modules = (move, matmul, rotary_write, routing, rows, select, state, write)
    return {module.__name__.rpartition(".")[2]: module for module in modules}


SET = KernelSet(
    name="triton",
    attend=attend,
    write=_operation("write", "write"),
    moves=Moves(
        copy_blocks=_operation("move", "copy_blocks"),
        copy_slots=_operation("move", "copy_slots"),
        gather_blocks=_operation("move", "gather_blocks"),
        scatter_blocks=_operation("move", "scatter_blocks"),
    ),
    matmuls=Matmuls(
        multiply=_operation("matmul", "multiply"),
        grouped=_operation("matmul", "multiply_grouped"),
        by_segments=_operation("matmul", "multiply_by_segments"),
        choose_experts=_operation("routing", "choose_experts"),
        gather_by_group=_operation("routing", "gather_by_group"),
    ),
    rotate_and_write=_operation("rotary_write", "rotate_and_write"),
    selection=Selection(
        cutoffs=_operation("select", "cutoffs"),
        top_candidates=_operation("select", "top_candidates"),
    ),
    honours=frozenset(
        {"scale", "sliding_window", "logit_softcap", "value_width", "sinks", "tree_mask_TQ"}
    ),
    supports=supports,
    tiles=heuristic,
    unaddressable=unaddressable,
    platforms=("gpu",),
    interpretable=True,
    prefers_mixed_steps=True,
    rows={name: _operation("rows", name) for name in ROWS}
    | {name: _operation("state", name) for name in OF_STATES},
    is_batch_invariant=True,
    ordered_bytes=ordered_bytes,
)
