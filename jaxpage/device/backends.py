"""Which kernel set an engine runs on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.device.kv_pages import QUANTIZED, KVPages, LayerPages
from jaxpage.errors import UnsupportedError
from pallas_kernels import SETS, XLA_BACKENDS, Arguments, Call, candidates, set_for
from pallas_kernels.cpu.library import load as load_cpu_library
from pallas_kernels.kernel_set import capability

BFLOAT16_CAPABILITY = (8, 0)  # of NVIDIA's GPUs; earlier ones have float16 alone


class Backend(NamedTuple):
    """What computes attention, and what writes and moves keys and values."""

    name: str  # of a kernel set, or "auto"
    interpret: bool = False  # a kernel on CPU, operation by operation
    few_rows: bool = False  # products of few rows by a kernel, where it has XLA's bits

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every operation of `pallas_kernels`."""
        return {"backend": self.name, "interpret": self.interpret}


def choose_backend(name: str, device: Any, kv_cache_dtype: str = "auto") -> Backend:
    """What an engine on this device (a `jax.Device`) uses for a value of the setting `attention_backend`. Kernels are interpreted on CPU.
    "auto" chooses call by call. On a CPU the kernels are compiled here, unless they are there already.

    Raises:
        UnsupportedError: the device does not run that kernel set; the text says what it needs.
    """
    if name == "auto":
        return Backend(name, few_rows=device.platform == "cpu" and not load_cpu_library().reason)
    chosen = SETS[name]
    interpret = not chosen.runs_on(device.platform)
    if interpret and not (chosen.interpretable and device.platform == "cpu"):
        needed = " or ".join(chosen.platforms).upper()
        raise UnsupportedError(
            f"attention_backend {name!r} needs a {needed}: jax {jax.__version__} does not interpret it on this device"
        )
    if reason := chosen.supports(device, Call(interpret=interpret, page_dtype=QUANTIZED.get(kv_cache_dtype))):
        raise UnsupportedError(
            f"attention_backend {name!r} with kv_cache_dtype {kv_cache_dtype!r}: {reason}; use {' or '.join(XLA_BACKENDS)}"
        )
    return Backend(name, interpret, few_rows=name == "cpu")


def attention_set(backend: Backend, device: Any, pages: KVPages, num_heads: int, dtype: DTypeLike) -> str:
    """The kernel set that computes attention over these layers' pages, before anything is loaded or compiled.

    pages: shapes. num_heads, dtype: of the queries.

    Raises UnsupportedError with each set's reason where none takes them.
    """
    chosen = ""

    def ask(q_TNH: jax.Array, table_B1: jax.Array, length_B: jax.Array, start: jax.Array, layer: LayerPages) -> None:
        nonlocal chosen
        arguments = Arguments(
            q_TNH=q_TNH,
            block_table_BM=table_B1,
            context_len_B=length_B,
            query_start=start,
            scale=1.0,
            max_query_len=1,
            value_width=layer.k_pages.shape[3] if layer.v_pages is None else None,
            **layer._asdict(),
        )
        call = Call(interpret=backend.interpret, page_dtype=arguments.k_pages.dtype.name, attention=arguments)
        chosen = set_for(call, backend=backend.name, device=device).name

    index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,), (2,))]
    for layer in {layer for layer in pages if isinstance(layer, LayerPages)}:
        query = jax.ShapeDtypeStruct((1, num_heads, layer.k_pages.shape[3]), dtype)
        try:
            jax.eval_shape(ask, query, *index, layer)
        except NotImplementedError as refusal:
            raise UnsupportedError(f"attention_backend {backend.name!r}: {refusal}") from refusal
    return chosen


def unaddressable_blocks(name: str, platform: str, block_elements: int, dtype: DTypeLike) -> tuple[int, int]:
    """With how many blocks a layer's keys begin to be an array that the kernel set tried first cannot address, and end to be one.

    block_elements: of one block in one layer's keys. dtype: of the pages.
    """
    elements = candidates(name, platform)[0].unaddressable(dtype)
    return -(-elements.start // block_elements), -(-elements.stop // block_elements)


def has_bfloat16(device: Any) -> bool:
    """Returns whether the device, a `jax.Device`, multiplies in bfloat16."""
    found = capability(device) or (0, 0)
    return found == (0, 0) or found >= BFLOAT16_CAPABILITY


def cpu_kernels() -> str:
    """The instruction set that the kernels for CPUs are compiled for, or why there are none."""
    library = load_cpu_library()
    return library.instruction_set or f"none: {library.reason}. Plain XLA takes their place, which is slow"


def prefers_mixed_steps(name: str, platform: str) -> bool:
    """Whether this kernel set, or that which "auto" tries first, computes rows that decode and prompt chunks best in one step."""
    chosen = candidates(name, platform)[0]
    return chosen.prefers_mixed_steps and chosen.runs_on(platform)
