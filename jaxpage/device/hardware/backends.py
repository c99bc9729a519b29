"""Chooses the kernel set that an engine runs on its device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.packing import Packings, pack_modules
from jaxpage.device.pages.kv_pages import QUANTIZED, LayerPages
from jaxpage.errors import UnsupportedError
from pallas_kernels import Arguments, AttentionOptions, Call
from pallas_kernels.compat import libtpu_reason
from pallas_kernels.cpu.build import compiler
from pallas_kernels.cpu.library import DOT, NONE, TILES
from pallas_kernels.cpu.library import load as load_cpu_library
from pallas_kernels.kernel_set import capability
from pallas_kernels.page_layouts import INTERLEAVED
from pallas_kernels.sets import SETS, XLA_ADVICE, candidates, set_for

logger = logging.getLogger(__name__)
_NAMED = {DOT: "dot products", TILES: "tiles (AMX)"}  # instructions of a CPU
BFLOAT16_CAPABILITY = (8, 0)  # earlier GPUs of NVIDIA have float16 alone


class Backend(NamedTuple):
    """Names the kernels that compute attention, and that write and move keys and values."""

    name: str  # a kernel set, or "auto"
    interpret: bool = False  # kernels run on CPU, operation by operation
    in_cpp: bool = False  # kernels for CPUs multiply by weights, which may be in panels
    interleaved: bool = False  # keys and values share an array of pages; see `page_shapes`
    batch_invariant: bool = False  # the order of a token's sums does not depend on the batch

    @property
    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of every operation of `pallas_kernels`."""
        return {"backend": self.name, "interpret": self.interpret}

    def pack_modules(self, module: nnx.Module) -> Packings:
        """Puts layers with weights in panels into a module, where kernels multiply by such.

        Returns:
            What `device.packing.pack_modules` returns.
        """
        if not self.in_cpp:
            return {}
        return pack_modules(module)


def choose_backend(
    name: str, device: Any, kv_cache_dtype: str = "auto", *, batch_invariant: bool = False
) -> Backend:
    """Returns the backend for a value of the setting `attention_backend` on a `jax.Device`.

    "auto" chooses call by call. Kernels for GPUs are interpreted on a CPU; kernels for CPUs are
    compiled here, unless they are there already.

    Args:
        name: The value of `attention_backend`.
        device: The device.
        kv_cache_dtype: The setting of this name.
        batch_invariant: The setting of this name.

    Raises:
        UnsupportedError: The device does not run that kernel set, or the set is not batch
            invariant there; the text says what it needs.
    """
    if batch_invariant:
        invariant = find_invariant_set(name, device.platform)
        if invariant is None:
            logger.info("batch_invariant has no effect: on a CPU every engine is batch invariant")
        else:
            chosen_backend = choose_backend(invariant, device, kv_cache_dtype)
            return chosen_backend._replace(batch_invariant=True)
    interleaved = keeps_interleaved(name, device.platform)
    if name == "auto":
        in_cpp = device.platform == "cpu" and not load_cpu_library().reason
        return Backend(name, in_cpp=in_cpp, interleaved=interleaved)
    interpret = is_interpreted(name, device.platform)
    if reason := SETS[name].refusal(
        device, Call(interpret=interpret, page_dtype=QUANTIZED.get(kv_cache_dtype))
    ):
        raise UnsupportedError(
            f"attention_backend {name!r} with kv_cache_dtype {kv_cache_dtype!r}: {reason}; use "
            f"{XLA_ADVICE}"
        )
    return Backend(name, interpret, in_cpp=name == "cpu", interleaved=interleaved)


def is_interpreted(name: str, platform: str) -> bool:
    """Returns whether a platform interprets the kernels of a set that is made for another one.

    Raises:
        UnsupportedError: The platform neither runs nor interprets them.
    """
    if name == "auto" or SETS[name].runs_on(platform):
        return False
    if not (SETS[name].interpretable and platform == "cpu"):
        needed = " or ".join(SETS[name].platforms).upper()
        missing = libtpu_reason() if "tpu" in SETS[name].platforms else ""
        raise UnsupportedError(
            f"attention_backend {name!r} needs a {needed}: jax {jax.__version__} does not "
            f"interpret it on this device{missing and f'; {missing}'}"
        )
    return True


def find_invariant_set(name: str, platform: str) -> str | None:
    """Returns the kernel set with which a platform is batch invariant; None where any set is.

    Raises:
        UnsupportedError: The platform is not, or is not with the set of this name.
    """
    names = [each for each, kernels in SETS.items() if kernels.is_batch_invariant]
    if platform == "cpu":
        return name if name in names else None
    if platform != "gpu":
        raise UnsupportedError(
            f"batch_invariant is for GPUs, and the device is a {platform}: XLA multiplies there, "
            "in an order that may depend on the batch; leave it out"
        )
    if name not in ("auto", *names):
        raise UnsupportedError(
            f"batch_invariant with attention_backend {name!r}: the sums of that kernel set depend "
            f"on the batch; use {' or '.join(('auto', *names))}"
        )
    return names[0]


def keeps_interleaved(name: str, platform: str) -> bool:
    """Returns whether an engine keeps interleaved pages for a kernel set.

    "auto" is here the kernel set that is tried first.
    """
    return candidates(name, platform)[0].layouts[0] == INTERLEAVED


def attention_sets(
    backend: Backend,
    device: Any,
    layers: Iterable[tuple[Any, int | None]],
    buckets: Iterable[Bucket],
    num_heads: int,
    dtype: DTypeLike,
) -> str:
    """Returns which kernel sets compute attention in which kinds of step.

    The answer is there before anything is loaded or compiled.

    Args:
        backend: The chosen kernels.
        device: The `jax.Device` of the engine.
        layers: The shapes of each layer's pages, and its sliding window. Recurrent layers attend to
            nothing.
        buckets: The shapes of the steps.
        num_heads: The number of query heads.
        dtype: The type of the queries.

    Raises:
        UnsupportedError: No kernel set takes a call; the text has the reason of each.
    """
    chosen: dict[str, set[str]] = {}  # kind of step -> sets
    attending = {(pages, window) for pages, window in layers if isinstance(pages, LayerPages)}
    for bucket in buckets:
        for pages, window in attending:
            name = _attention_set(backend, device, pages, window, bucket, num_heads, dtype)
            chosen.setdefault(bucket.kind, set()).add(name)
    names = [name for name in SETS if any(name in sets for sets in chosen.values())]
    if len(names) <= 1:
        return "".join(names)
    kinds = {
        name: ", ".join(
            kind if len(sets) == 1 else f"some of {kind}"
            for kind, sets in chosen.items()
            if name in sets
        )
        for name in names
    }
    return "; ".join(f"{name}: {kinds[name]}" for name in names)


def _attention_set(
    backend: Backend,
    device: Any,
    pages: LayerPages,
    window: int | None,
    bucket: Bucket,
    num_heads: int,
    dtype: DTypeLike,
) -> str:
    chosen = ""
    num_tokens, num_rows = (
        # Each of several steps is one of a token a row.
        (bucket.num_rows,) * 2 if bucket.num_steps > 1 else (bucket.num_tokens, bucket.num_rows)
    )

    def ask(
        q_TNH: jax.Array,
        table_B1: jax.Array,
        length_B: jax.Array,
        start: jax.Array,
        tree: Any,
        layer: LayerPages,
    ) -> None:
        nonlocal chosen
        has_latents = layer.v_pages is None and not layer.is_interleaved
        options = AttentionOptions(
            scale=1.0,
            sliding_window=window,
            tree_mask_TQ=tree,
            value_width=layer.k_pages.shape[3] if has_latents else None,
        )
        arguments = Arguments(
            q_TNH=q_TNH,
            block_table_BM=table_B1,
            context_len_B=length_B,
            query_start=start,
            options=options,
            max_query_len=bucket.max_query_len if bucket.num_steps == 1 else 1,
            interleaved=layer.is_interleaved,
            **layer._asdict(),
        )
        call = Call(
            interpret=backend.interpret,
            page_dtype=arguments.k_pages.dtype.name,
            layout=arguments.layout,
            attention=arguments,
        )
        chosen = set_for(call, backend=backend.name, device=device).name

    index = [
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((num_rows, 1), (num_rows,), (num_rows + 1,))
    ]
    query = jax.ShapeDtypeStruct((num_tokens, num_heads, pages.k_pages.shape[3]), dtype)
    tree = (
        jax.ShapeDtypeStruct((num_tokens, bucket.max_query_len), jnp.bool_)
        if bucket.trees
        else None
    )
    try:
        # A trace without arrays: the sets are asked about the very arguments that a step gives
        # them.
        jax.eval_shape(ask, query, *index, tree, pages)
    except NotImplementedError as refusal:
        raise UnsupportedError(f"attention_backend {backend.name!r}: {refusal}") from refusal
    return chosen


def has_bfloat16(device: Any) -> bool:
    """Returns whether the device, a `jax.Device`, multiplies in bfloat16."""
    capability_of_device = capability(device) or (0, 0)
    # No capability is that of a device which is no GPU of NVIDIA.
    return capability_of_device == (0, 0) or capability_of_device >= BFLOAT16_CAPABILITY


def cpp_compiler() -> list[str]:
    """Returns the command of the compiler that makes the kernels for CPUs.

    Raises:
        RuntimeError: There is no compiler.
    """
    return compiler()


def cpu_kernels() -> str:
    """Returns the instruction set that the kernels for CPUs use, or why there are none."""
    library = load_cpu_library()
    if library.reason:
        return f"none: {library.reason}. Plain XLA takes their place, which is slow"
    used = [f"{_NAMED[best]} of {dtype}" for dtype, best in library.instructions.items() if best]
    return library.instruction_set + "".join(f", {each}" for each in used)


def cpu_instructions(backend: Backend, dtype: str) -> str:
    """Returns the instructions that decide the bits of products of this type; empty without any.

    Sums of bfloat16 have other bits with each kind of instructions. Those of float32 have one
    order, and those of int8 are exact.
    """
    if not backend.in_cpp:
        return ""
    library = load_cpu_library()
    best = library.instructions.get(dtype, NONE) if dtype == "bfloat16" else NONE
    return library.instruction_set + (f", {_NAMED[best]} of {dtype}" if best else "")
