"""Multiplies by a quantised weight, and multiplies rows by the weights of their groups."""

from __future__ import annotations

import operator
from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.compat import target_device
from pallas_kernels.kernel_set import Call, KernelSet, no_kernel
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.sets import candidates, first_that_takes


def quantized_matmul(
    x_TI: Float[Array, "T I"],
    weight: QuantizedWeight,
    *,
    result: DTypeLike | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """Returns `x @ w.T`.

    Kernels decode the weight while they multiply; plain XLA makes a temporary array of it.

    Args:
        x_TI: The rows.
        weight: The weight.
        result: The type of the product; that of x by default.
        backend: One of `BACKENDS`, or "auto", as in `paged_attention`.
        interpret: Runs a kernel on CPU, operation by operation.

    Raises:
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    y_TO: jax.Array = first_that_takes(
        "quantized_matmul",
        operator.attrgetter("matmuls.multiply"),
        x_TI,
        weight,
        result or x_TI.dtype,
        call=Call(weight=weight, interpret=interpret),
        backend=backend,
    )
    return y_TO


def grouped_matmul(
    x_PI: Shaped[Array, "P I"],
    weight: Shaped[Array, "E O I"] | QuantizedWeight,
    count_E: Int[Array, "E"],
    *,
    result: DTypeLike | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Shaped[Array, "P O"]:
    """Multiplies the rows of each group by the weight of that group, in one launch.

    The first count_E[0] rows of x belong to group 0, the next count_E[1] rows to group 1, and so
    on. Rows after the last group are undefined. The order in which a row is summed depends only on
    shapes, and neither on other rows nor on the counts.

    Args:
        x_PI: The rows, sorted by group.
        weight: Numbers of x's type (8-bit integers for an x of 8-bit integers, with result int32),
            or codes, whose arrays all have one more axis in front.
        count_E: The number of rows of each group.
        result: The type of the product; that of x by default.
        backend: One of `BACKENDS`, or "auto", as in `paged_attention`.
        interpret: Runs a kernel on CPU, operation by operation.

    Raises:
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    y_PO: jax.Array = first_that_takes(
        "grouped_matmul",
        _use_grouped,
        x_PI,
        weight,
        count_E,
        result or x_PI.dtype,
        call=Call(
            weight=weight if isinstance(weight, QuantizedWeight) else None, interpret=interpret
        ),
        backend=backend,
    )
    return y_PO


def batch_invariant_matmul(
    x_TI: Shaped[Array, "T I"],
    weight: Shaped[Array, "*E O I"] | QuantizedWeight,
    count_E: Int[Array, "E"] | None = None,
    *,
    result: DTypeLike | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Shaped[Array, "T O"]:
    """Returns the first result of `matmul_and_sums`.

    The arguments and the errors are those of this function, too.
    """
    return matmul_and_sums(
        x_TI, weight, count_E, result=result, backend=backend, interpret=interpret
    )[0]


def matmul_and_sums(
    x_TI: Shaped[Array, "T I"],
    weight: Shaped[Array, "*E O I"] | QuantizedWeight,
    count_E: Int[Array, "E"] | None = None,
    *,
    result: DTypeLike | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[Shaped[Array, "T O"], Float[Array, "Z T O"] | None]:
    """Returns `x @ w.T`, in which a row has the same bits among any number of rows.

    The inputs are in segments whose length depends on the weight's shape and type alone. Each is
    summed in one order, and the sums are added up in order.

    Args:
        x_TI: The rows; with `count_E` sorted by group, as in `grouped_matmul`.
        weight: The weight: numbers of x's type, or codes; with `count_E` the weights of groups.
        count_E: The number of rows of each group; None for one weight.
        result: The type of the product; that of x by default.
        backend: One of `BACKENDS`, or "auto", as in `paged_attention`.
        interpret: Runs a kernel on CPU, operation by operation.

    Returns:
        The product, and the sums of its segments for a kernel that adds them up in order, rounds
        them to the type of the product, and goes on; None where there are none.

    Raises:
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    outputs: tuple[jax.Array, jax.Array | None] = first_that_takes(
        "batch_invariant_matmul",
        _use_segments,
        x_TI,
        weight,
        count_E,
        result or x_TI.dtype,
        call=Call(
            weight=weight if isinstance(weight, QuantizedWeight) else None, interpret=interpret
        ),
        backend=backend,
    )
    return outputs


def has_grouped_matmul(*, backend: str = "auto", interpret: bool = False) -> bool:
    """Returns whether any set that would be tried has a kernel for it."""
    platform = target_device().platform
    return any(each.matmuls.grouped for each in candidates(backend, platform, interpret=interpret))


def _use_grouped(kernels: KernelSet) -> Callable[..., jax.Array]:
    return kernels.matmuls.grouped or no_kernel


def _use_segments(kernels: KernelSet) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    return kernels.matmuls.by_segments or no_kernel
