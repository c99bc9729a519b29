"""Lists the calls whose kernels are inspected: every kernel on shapes of real models.

Nothing is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import copy_blocks, is_quantized, paged_attention, rotate_and_write, write_kv
from pallas_kernels.expert_routing import choose_experts, gather_by_group
from pallas_kernels.quantized_matmul import grouped_matmul
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.sets import KERNEL_BACKENDS, SETS
from tools.lab.kernel_lab.specs import MATMULS, SPECS, MatmulSpec, Spec

# The kernel sets that JAX compiles; fa3's kernels are in a library.
_COMPILED = tuple(name for name in KERNEL_BACKENDS if name != "fa3")
LAYERS = 32  # the layers whose blocks one call of copy_blocks copies
_MODELS = {  # the models of `SPECS` to inspect, and the beginnings of their calls' names
    "llama-3-8b": (
        "decode 64x2048",
        "verify chain 16x8",
        "verify tree 16x16",
        "chunk 128",
        "chunk 2048",
        "mixed",
    ),
    "qwen2-0.5b": ("decode",),  # seven query heads for each key/value head
    "opt-13b": ("decode", "chunk"),  # one query head for each key/value head
    "gpt2": ("decode",),
    "mistral-7b": ("decode", "chunk"),  # with a window
    "gpt-oss-20b": ("decode", "chunk"),  # with sinks
}


@dataclass(frozen=True)
class Case:
    """A jitted function on arguments of certain shapes; `backend` is the one that it asks for."""

    operation: str
    backend: str
    shape: str
    function: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Returns the operation, the backend and the shape."""
        return f"{self.operation} {self.backend}, {self.shape}"


def cases() -> list[Case]:
    """Returns all cases."""
    chosen = [spec for spec in SPECS if _is_chosen(spec)]
    return [
        *(attention_case(spec, backend) for backend in _COMPILED for spec in chosen),
        *map(matmul_case, MATMULS),
        *_page_cases(),
        routing_case(64),
        selection_case(64),
    ]


def attention_case(spec: Spec, backend: str, **settings: Any) -> Case:
    """Returns a call of `paged_attention`.

    Args:
        spec: The shapes.
        backend: The kernel set.
        **settings: More arguments of `paged_attention`, such as tiles. With `value_width` there are
            no pages of values.
    """
    function = functools.partial(
        paged_attention,
        scale=spec.head_dim**-0.5,
        sliding_window=spec.sliding_window,
        backend=backend,
        max_query_len=spec.max_query_len,
        **settings,
    )
    num_tokens, num_rows = sum(spec.queries), len(spec.contexts)
    num_blocks = 1 + sum(-(-context // spec.block_size) for context in spec.contexts)
    table_width = -(-max(spec.contexts) // spec.block_size)
    shapes: dict[str, Any] = dict(
        q_TNH=_shape((num_tokens, spec.num_heads, spec.head_dim), spec.dtype),
        block_table_BM=_shape((num_rows, table_width), "int32"),
        context_len_B=_shape((num_rows,), "int32"),
        query_start=_shape((num_rows + 1,), "int32"),
        **_pages(spec.num_kv_heads, spec.head_dim, num_blocks, spec.block_size, spec.page_dtype),
    )
    if spec.tree:
        shapes["tree_mask_TQ"] = _shape((num_tokens, spec.max_query_len), "bool")
    if "value_width" in settings:
        shapes |= dict.fromkeys(("v_pages", "v_scale") if "v_scale" in shapes else ("v_pages",))
    if spec.sinks:
        shapes["sinks"] = _shape((spec.num_heads,), "float32")
    return Case("paged_attention", backend, _label(spec), *_by_name(function, shapes))


def matmul_case(spec: MatmulSpec, backend: str = KERNEL_BACKENDS[0]) -> Case:
    """Returns the grouped product of this shape."""
    groups_and_outputs = (spec.num_groups, spec.num_out)
    shapes: dict[str, Any] = {"x_PI": _shape((spec.num_rows, spec.num_in), spec.dtype)}
    if spec.num_groups > 1:
        shapes["count_E"] = _shape((spec.num_groups,), "int32")
    if spec.code is None:
        shapes["values"] = _shape((*groups_and_outputs, spec.num_in), spec.dtype)
    else:
        columns = spec.num_in // (2 if spec.code in ("int4", "fp4") else 1)
        shapes["values"] = _shape(
            (*groups_and_outputs, columns), "int8" if spec.code == "int8" else "uint8"
        )
        shapes["scale"] = _shape(
            (*groups_and_outputs, -(-spec.num_in // spec.group_size)), "float32"
        )
        shapes["zero"] = shapes["scale"] if spec.zeros else None

    def function(
        x_PI: Any, values: Any, scale: Any = None, zero: Any = None, count_E: Any = None
    ) -> jax.Array:
        weight = (
            values
            if spec.code is None
            else QuantizedWeight(values, scale, zero, spec.code, spec.group_size)
        )
        counts = jnp.array([spec.num_rows]) if count_E is None else count_E
        return grouped_matmul(x_PI, weight, counts, backend=backend)

    return Case("grouped_matmul", backend, spec.name, *_by_name(function, shapes))


def write_case(
    num_tokens: int,
    *,
    page_dtype: str = "bfloat16",
    num_blocks: int = 4096,
    backend: str = KERNEL_BACKENDS[0],
) -> Case:
    """Returns the write of the keys and values of a step of Llama-3-8B."""
    new = _shape((num_tokens, 8, 128), "bfloat16")
    shapes = dict(
        k_TKH=new,
        v_TKH=new,
        slots_T=_shape((num_tokens,), "int32"),
        **_pages(8, 128, num_blocks, 16, page_dtype),
    )
    donated = tuple(name for name in shapes if name.endswith(("_pages", "_scale")))
    function = functools.partial(write_kv, backend=backend)
    label = f"llama-3-8b {num_tokens} tokens, {page_dtype} pages"
    return Case("write_kv", backend, label, *_by_name(function, shapes, donated))


def rotation_case(
    num_tokens: int,
    *,
    page_dtype: str = "bfloat16",
    num_segments: int = 0,
    has_norms: bool = False,
    num_blocks: int = 4096,
    backend: str = KERNEL_BACKENDS[0],
) -> Case:
    """Returns the rotation and the write of a step of Llama-3-8B, of whole numbers or of sums."""
    heads = (num_tokens, 48, 128)
    angles = _shape((num_tokens, 64), "float32")
    shapes = dict(
        x_TMH=_shape((num_segments, *heads), "float32")
        if num_segments
        else _shape(heads, "bfloat16"),
        cos_TE=angles,
        sin_TE=angles,
        slots_T=_shape((num_tokens,), "int32"),
        **_pages(8, 128, num_blocks, 16, page_dtype),
    )
    donated = tuple(name for name in shapes if name.endswith(("_pages", "_scale")))
    if has_norms:
        scale = _shape((128,), "bfloat16")
        shapes |= {"query_scale_H": scale, "key_scale_H": scale}
    function = functools.partial(rotate_and_write, dtype="bfloat16", backend=backend)
    label = f"llama-3-8b {num_tokens} tokens, {page_dtype} pages"
    if num_segments:
        label += f", {num_segments} segments"
    if has_norms:
        label += ", norms of heads"
    return Case("rotate_and_write", backend, label, *_by_name(function, shapes, donated))


def routing_case(num_tokens: int, backend: str = KERNEL_BACKENDS[0]) -> Case:
    """Returns the choice of the experts of a step of Qwen3-30B-A3B, and its rows by expert."""

    def function(logits_TE: Any, x_TI: Any) -> Any:
        _, expert_TX = choose_experts(logits_TE, None, 8, sigmoid=False, backend=backend)
        return gather_by_group(x_TI, expert_TX.reshape(-1), 128, backend=backend)

    shapes = dict(
        logits_TE=_shape((num_tokens, 128), "float32"), x_TI=_shape((num_tokens, 2048), "bfloat16")
    )
    label = f"qwen3-30b-a3b {num_tokens} tokens"
    return Case("routing", backend, label, *_by_name(function, shapes))


def copy_case(
    num_copies: int, *, num_blocks: int = 4096, backend: str = KERNEL_BACKENDS[0]
) -> Case:
    """Returns the copy of the blocks that a step of Llama-3-8B copies in all its layers."""
    pages = _pages(8, 128, num_blocks, 16, "bfloat16")
    blocks = _shape((num_copies,), "int32")
    function = functools.partial(copy_blocks, backend=backend)
    arguments = ((tuple(pages.values()),) * LAYERS, blocks, blocks)
    label = f"llama-3-8b {num_copies} blocks of {LAYERS} layers"
    return Case("copy_blocks", backend, label, jax.jit(function, donate_argnums=0), arguments)


def selection_case(
    num_rows: int, *, vocab_size: int = 128256, backend: str = KERNEL_BACKENDS[0]
) -> Case:
    """Returns the selection of a step of Llama-3-8B, with cut-offs and log probabilities."""
    selection = SETS[backend].selection
    assert selection is not None
    cutoffs, top_candidates = selection.cutoffs, selection.top_candidates

    def function(logits_RV: jax.Array, number_R: jax.Array, top_k_R: jax.Array) -> Any:
        min_R = cutoffs(logits_RV, number_R, number_R, top_k_R, number_R, number_R)
        return min_R, top_candidates(logits_RV, number_R, number_R, 64)

    arguments = (
        _shape((num_rows, vocab_size), "float32"),
        _shape((num_rows,), "float32"),
        _shape((num_rows,), "int32"),
    )
    return Case("selection", backend, f"llama-3-8b {num_rows} rows", jax.jit(function), arguments)


def _page_cases() -> Iterator[Case]:
    for page_dtype in ("bfloat16", "int8", "uint8"):
        yield write_case(64, page_dtype=page_dtype)
    yield write_case(2048)
    for page_dtype in ("bfloat16", "int8", "uint8"):
        yield rotation_case(64, page_dtype=page_dtype)
    yield rotation_case(64, num_segments=4)
    yield rotation_case(64, has_norms=True)
    yield rotation_case(2048)
    yield copy_case(16)


def _is_chosen(spec: Spec) -> bool:
    model, _, call = spec.name.partition(" ")
    return call.startswith(_MODELS.get(model, ()))


def _label(spec: Spec) -> str:
    """Returns a label that differs where specs that share a name differ in the type of pages."""
    return (
        spec.name
        if spec.page_dtype == spec.dtype or spec.page_dtype in spec.name
        else f"{spec.name}, {spec.page_dtype} pages"
    )


def _pages(
    num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: str
) -> dict[str, Any]:
    slots = (num_blocks, block_size, num_kv_heads)
    pages = dict.fromkeys(("k_pages", "v_pages"), _shape((*slots, head_dim), dtype))
    return pages | (
        dict.fromkeys(("k_scale", "v_scale"), _shape(slots, "float32"))
        if is_quantized(dtype)
        else {}
    )


def _shape(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _by_name(
    function: Callable[..., Any], shapes: dict[str, Any], donated: tuple[str, ...] = ()
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted function of two dicts that calls the function by names.

    The first dict is donated.
    """
    jitted = jax.jit(
        lambda donated_arrays, other_arrays: function(**donated_arrays, **other_arrays),
        donate_argnums=0,
    )
    others = {name: shape for name, shape in shapes.items() if name not in donated}
    return jitted, ({name: shapes[name] for name in donated}, others)
