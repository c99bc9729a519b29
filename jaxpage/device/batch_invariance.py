"""Keeps the bits of a token the same in any batch, on a device where XLA would not.

XLA chooses how to add up by the number of rows: products, norms and softmaxes have other bits for
one row than for a thousand. In this mode kernels compute what adds up floats, each in an order that
depends on shapes of weights and on positions alone. What is left to XLA must add up no floats: the
trace of each step is searched for that before it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.device.hardware.backends import Backend
from jaxpage.errors import UnsupportedError
from jaxpage.layers.producers import MadeBySegments
from jaxpage.layers.trace_scope import LayerKernels, RowKernels, trace_scope
from jaxpage.layers.weight_kinds import Grouped
from pallas_kernels.quantized_matmul import batch_invariant_matmul, matmul_and_sums
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.sets import SETS

# By default XLA keeps the bits of a bfloat16 number that were to be rounded away, where it computes
# on with it in the same kernel.
EXACT_OPTIONS = {"xla_allow_excess_precision": "False"}
# XLA adds up in an order of its own in these, or devices do.
SUMS = frozenset(
    {
        "conv_general_dilated",
        "cumlogsumexp",
        "cumprod",
        "cumsum",
        "dot_general",
        "psum",
        "psum_invariant",
        "ragged_dot_general",
        "reduce_prod",
        "reduce_scatter",
        "reduce_sum",
        "reduce_window_sum",
        "scatter-add",
        "scatter-mul",
    }
)


def with_ordered_sums(kernels: LayerKernels, backend: Backend) -> LayerKernels:
    """Returns the kernels of layers, of which those that add up do so in one order."""

    def to_kernel_weight(weight: jax.Array | Grouped) -> jax.Array | QuantizedWeight:
        return QuantizedWeight(*weight) if isinstance(weight, Grouped) else weight

    def multiply(x_TI: jax.Array, weight: jax.Array | Grouped, result: DTypeLike) -> jax.Array:
        y_TO, sums_ZTO = matmul_and_sums(
            x_TI, to_kernel_weight(weight), result=result, **backend.options
        )
        if sums_ZTO is not None:
            # The compiler leaves the product out where kernels after it read the sums alone.
            trace_scope().producers.note(y_TO, MadeBySegments(sums_ZTO))
        return y_TO

    def multiply_by_group(
        x_PI: jax.Array, weight: jax.Array | Grouped, count_E: jax.Array | None, result: DTypeLike
    ) -> jax.Array:
        return batch_invariant_matmul(
            x_PI, to_kernel_weight(weight), count_E, result=result, **backend.options
        )

    def multiply_heads(x_TNI: jax.Array, weight_NOI: jax.Array) -> jax.Array:
        num_tokens, num_heads, width = x_TNI.shape
        x_PI = x_TNI.swapaxes(0, 1).reshape(-1, width)
        count_N = jnp.full(num_heads, num_tokens)
        y_PO = multiply_by_group(x_PI, weight_NOI, count_N, x_TNI.dtype)
        return y_PO.reshape(num_heads, num_tokens, -1).swapaxes(0, 1)

    functions = SETS[backend.name].rows
    rows = RowKernels(
        **{
            name: functools.partial(functions[name], interpret=backend.interpret)
            # The first is `takes`, which is no kernel.
            for name in RowKernels._fields[1:]
        },
        takes=functions["takes"],
    )

    def add_and_norm(
        x_TD: jax.Array, added_TD: jax.Array, *norm: Any
    ) -> tuple[jax.Array, jax.Array]:
        # The kernel rounds the sum of segments to x's type; a product of another type was rounded
        # to that.
        if added_TD.dtype == x_TD.dtype:
            added_TD = trace_scope().segments_of(added_TD)
        return rows.add_and_norm(x_TD, added_TD, *norm)

    rows_of_sums = rows._replace(add_and_norm=add_and_norm)
    return kernels._replace(
        multiply=multiply,
        multiply_numbers=multiply,
        by_group=multiply_by_group,
        multiply_heads=multiply_heads,
        rows=rows_of_sums,
    )


def log_sums_of(backend: Backend) -> Callable[..., jax.Array] | None:
    """Returns the kernel for the logarithms of sums of exponentials; None where XLA computes it."""
    if not backend.batch_invariant:
        return None
    return functools.partial(SETS[backend.name].rows["log_sums"], interpret=backend.interpret)


def exact_options(backend: Backend, jaxpr: Any) -> dict[str, str]:
    """Returns more options of XLA for a function, which is refused if XLA would add up in it.

    Args:
        backend: The kernels; there are no such options if they are not batch invariant.
        jaxpr: The closed jaxpr of the function.

    Raises:
        UnsupportedError: See `refuse_sums`.
    """
    if not backend.batch_invariant:
        return {}
    if not backend.interpret:  # on a CPU the sampler adds up row by row
        refuse_sums(jaxpr)
    return EXACT_OPTIONS


def refuse_sums(jaxpr: Any) -> None:
    """Refuses a step in which XLA adds up floats.

    Args:
        jaxpr: The closed jaxpr of the step.

    Raises:
        UnsupportedError: It does; the text says where.
    """
    places = dict.fromkeys(_sums(jaxpr))
    if places:
        raise UnsupportedError(
            "batch_invariant: the order of these sums would depend on the batch, because XLA adds "
            f"up: {'; '.join(list(places)[:8])}. Dense layers, experts, attention to keys "
            "and values or to latents, and layers with states are computed in one order on a GPU, "
            "without adapters; leave batch_invariant out for others"
        )


def _sums(jaxpr: Any) -> Iterator[str]:
    """Yields the places where a jaxpr adds up floats outside of kernels."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        # Our own kernels, whose sums have one order.
        if name == "pallas_call":
            continue
        dtype = equation.outvars[0].aval.dtype if equation.outvars else None
        if name in SUMS and dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            frame = equation.source_info.name_stack
            yield f"{name} of {dtype} ({frame})" if str(frame) else f"{name} of {dtype}"
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _sums(inner)
