"""Keeps everything that kernels here use of Pallas' Triton backend.

JAX has deprecated it since 0.11 and may remove it. The names below are the same from jax 0.10 to
0.12. If JAX has no such backend, the set `triton` refuses every call; this folder and
`sets/triton.py` can then go, and nothing else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

# The interpreter of other backends is imported lazily by `pallas_call(interpret=True)`, which makes
# JAX trace the caller once more.
from jax.experimental.pallas import tpu as _tpu  # noqa: F401

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # JAX has removed it: everything else must still be importable
    _triton = None  # type: ignore[assignment]
plt: Any = _triton

# Each lowering warns, and no frame of this project is on the stack then. So the warning is ignored
# by its text, once for the process.
DEPRECATION = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)

# jax 0.11.0 and 0.11.1 lower only for the GPUs in this list. Later versions ask any other GPU of
# NVIDIA for its capability, and 0.10 asks all of them.
_LISTED = [version.value for version in getattr(plt, "GpuVersion", ())]
ASKS = jax.__version_info__ < (0, 11, 0) or jax.__version_info__ >= (0, 11, 2)

load: Any = getattr(plt, "load", None)
store: Any = getattr(plt, "store", None)
dot: Any = getattr(plt, "dot", None)


def missing_reason() -> str | None:
    """Returns why no Triton kernel can be made, or None."""
    return (
        None
        if plt
        else f"needs jax.experimental.pallas.triton, which jax {jax.__version__} does not have"
    )


def exp2_of(x: jax.Array, factor: float, minus: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns exp2(x * factor - minus), elementwise in float32, for NVIDIA in two instructions.

    XLA forbids Triton to fuse the product with the difference. It also wraps exp2 in three more
    instructions for results below 2^-126, which are as good as zero here.
    """
    if interpret:
        return jnp.exp2(x * factor - minus)
    bits = np.float32(factor).view(np.uint32)
    asm = f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}"
    # The sign is changed here, since the instruction adds.
    args = [x, jnp.broadcast_to(-minus, x.shape)]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    (result,) = plt.elementwise_inline_asm(
        asm, args=args, constraints="=f,f,f", pack=1, result_shape_dtypes=shapes
    )
    return result


def knows(kind: str) -> bool:
    """Returns whether the backend lowers for a GPU of this `device_kind`."""
    if not _LISTED or (ASKS and kind.startswith("NVIDIA")):
        return True
    return any(re.search(rf"\b{re.escape(name)}\b", kind) for name in _LISTED)


def kernel_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Returns a `pl.pallas_call` with every operand whole in global memory.

    The kernel gets one ref for each operand (None for None), then those of the outputs.

    Args:
        kernel: The kernel.
        name: The name of the kernel in profiles.
        grid: The numbers of programs.
        out_shape: The shapes of the outputs.
        num_warps: The warps of a program.
        num_stages: The stages of its loops.
        interpret: Runs on CPU, as plain JAX operations; warps and stages have no meaning then.
        input_output_aliases: The outputs that are operands.

    Raises:
        NotImplementedError: The backend's offsets overflow in an operand or a result of this size.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out_specs = [whole] * len(out_shape) if isinstance(out_shape, Sequence) else whole

    def call(*operands: jax.Array | None) -> Any:
        for array in (*operands, *jax.tree.leaves(out_shape)):
            _check_offsets(array)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[None if operand is None else whole for operand in operands],
            out_specs=out_specs,
            out_shape=out_shape,
            input_output_aliases=dict(input_output_aliases or {}),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*operands)

    return call


def _check_offsets(operand: Any) -> None:
    """Raises NotImplementedError for an array in which offsets overflow.

    Offsets count elements. They have 32 bits with a sign for arrays up to 2**32 bytes, and 64 bits
    for larger ones: too few for arrays of bytes in between.
    """
    if (
        operand is not None
        and operand.size > 2**31
        and operand.size * operand.dtype.itemsize <= 2**32
    ):
        raise NotImplementedError(
            f"an array {operand.dtype} {operand.shape} has more than 2**31 elements in no more "
            "than 2**32 bytes, "
            "and offsets into it overflow in Pallas' Triton backend"
        )
