"""Checks the grouped product over named shapes against float64, and times it.

Times are reported next to those of a bfloat16 product and to the measured bandwidth. Rows are
spread over the groups unevenly: some groups have none, and one has many. An error is a share of the
sum of the absolute values that are added up; weights of few bits are rounded to the type of x.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import grouped_matmul
from pallas_kernels.quantized_weight import FP4, QuantizedWeight
from tools.lab.kernel_lab.bounds import Ceilings
from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    Table,
    first_line,
    judge,
)
from tools.lab.kernel_lab.specs import MATMULS, MatmulSpec
from tools.lab.kernel_lab.timing import median_of_rounds

TOLERANCE = 2.0**-7
CHECKED = 48  # outputs that are computed in float64: half of them the first, half the last
NUM_CALLS = 20  # calls of a timed program
LAST_S = 10.0  # the time before the end in which no further product is begun
NUM_WEIGHTS = 2  # weights that take turns, so that no call finds its own in the cache
DTYPES = {"int8": "int8", "fp8": "uint8", "int4": "uint8", "fp4": "uint8"}


def specs(small: bool) -> list[MatmulSpec]:
    """Returns the named shapes, or in small those that differ in more than sizes."""
    if not small:
        return list(MATMULS)
    kinds = {(spec.code, spec.zeros, spec.num_groups > 1): spec.cut() for spec in MATMULS}
    return list(kinds.values())


def counts(spec: MatmulSpec, seed: int = 0) -> np.ndarray:
    """Returns the number of rows of each group."""
    if spec.num_groups == 1:
        return np.array([spec.num_rows])
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(spec.num_groups, 0.7))
    return rng.multinomial(spec.num_rows, share)


def make_weight(spec: MatmulSpec, seed: int = 0) -> Any:
    """Returns random numbers of x's type, or random codes without NaN, with scales."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (spec.num_groups, spec.num_out, spec.num_in)
    if spec.code is None:
        return jax.random.normal(keys[0], shape, jnp.dtype(spec.dtype))
    packed = spec.code in ("int4", "fp4")
    bits = jax.random.bits(keys[0], (*shape[:2], shape[2] // (2 if packed else 1)), jnp.uint8)
    bits = bits & 0xF7 if spec.code == "fp8" else bits
    codes = jax.lax.bitcast_convert_type(bits, jnp.dtype(DTYPES[spec.code]))
    of_groups = (*shape[:2], -(-spec.num_in // spec.group_size))
    scale = jax.random.uniform(keys[1], of_groups, minval=0.5, maxval=2.0)
    zero = jax.random.randint(keys[2], of_groups, 0, 16).astype(jnp.float32) if spec.zeros else None
    return QuantizedWeight(codes, scale, zero, spec.code, spec.group_size)


def exact_weight(weight: Any, outputs: np.ndarray) -> np.ndarray:
    """Returns the weights of these outputs in all groups, in float64."""
    if not isinstance(weight, QuantizedWeight):
        return np.asarray(weight[:, outputs]).astype(np.float64)
    bits = np.asarray(weight.values[:, outputs])
    if weight.code in ("int4", "fp4"):
        codes = (
            np.stack([bits & 15, bits >> 4], axis=-1).reshape(*bits.shape[:2], -1).astype(np.int64)
        )
        number = (
            np.array(FP4)[codes]
            if weight.code == "fp4"
            else codes - (0.0 if weight.zero_OJ is not None else 8.0)
        )
    else:
        number = (bits.view(jnp.float8_e4m3fn) if weight.code == "fp8" else bits).astype(np.float64)

    def by_input(values: jax.Array) -> np.ndarray:
        wide = np.repeat(np.asarray(values[:, outputs]), weight.group_size, axis=2)
        return wide[:, :, : number.shape[2]].astype(np.float64)

    if weight.zero_OJ is not None:
        number = number - by_input(weight.zero_OJ)
    return number * by_input(weight.scale_OJ)


def parity(spec: MatmulSpec, multiply: Callable[..., jax.Array]) -> Finding:
    """Compares a product with float64.

    Args:
        spec: The product.
        multiply: Computes the product of (x_PI, weight, count_E) in float32.
    """
    weight, count_E = make_weight(spec), counts(spec)
    x_PI = jax.random.normal(jax.random.key(1), (spec.num_rows, spec.num_in), jnp.dtype(spec.dtype))
    half = min(CHECKED, spec.num_out) // 2
    outputs = np.r_[:half, spec.num_out - half : spec.num_out]
    got = np.asarray(multiply(x_PI, weight, jnp.asarray(count_E, jnp.int32)))[:, outputs].astype(
        np.float64
    )
    exact, x = exact_weight(weight, outputs), np.asarray(x_PI).astype(np.float64)
    end_E, worst = np.cumsum(count_E), 0.0
    for group, end in enumerate(end_E):
        rows = slice(end - count_E[group], end)
        size = np.abs(x[rows]) @ np.abs(exact[group]).T
        error = np.abs(got[rows] - x[rows] @ exact[group].T) / size
        worst = max(worst, np.max(np.where(np.isfinite(error), error, np.inf), initial=0.0))
    status = PASSED if worst < TOLERANCE else FAILED
    summary = f"largest error {worst:.1e} of the sum of sizes (up to {TOLERANCE:.1e})"
    return Finding(f"products: {spec.name}", status, summary, data={"error": float(worst)})


def findings(
    backend: str, measure: Callable[[], Ceilings], *, interpret: bool, small: bool, seconds: float
) -> Iterator[Finding]:
    """Yields the findings of one backend.

    Args:
        backend: The kernel set.
        measure: Measures the ceilings.
        interpret: Runs the kernels on CPU.
        small: Everything is cut small.
        seconds: The time for all of it. What no longer fits is left out.
    """
    end = time.monotonic() + seconds - LAST_S
    multiply = functools.partial(grouped_matmul, backend=backend, interpret=interpret)
    in_float32 = functools.partial(multiply, result="float32")
    for spec in specs(small):
        name = f"products: {spec.name}"
        if time.monotonic() < end:
            yield judge(name, functools.partial(parity, spec, in_float32))
        else:
            yield Finding(name, LEFT_OUT, f"{seconds:.0f} s are used up")
    if time.monotonic() < end:
        yield judge("products: timings", lambda: timings(multiply, measure(), small=small, end=end))
    else:
        yield Finding("products: timings", LEFT_OUT, f"{seconds:.0f} s are used up")


def timings(
    multiply: Callable[..., jax.Array], ceilings: Ceilings, *, small: bool, end: float
) -> Finding:
    """Times each product, and XLA's in bfloat16 of the same shape where there is one weight.

    The bound is the time that the weights' bytes take at the measured bandwidth, without those of
    groups that have no rows. No product is begun after `end`, a time of `time.monotonic`.
    """
    columns = [
        "product",
        "us",
        "us of bfloat16",
        "us at the bandwidth",
        "share of the bandwidth",
        "note",
    ]
    table, data, failed = Table("Products", columns), list[dict[str, Any]](), False
    for spec in specs(small):
        if time.monotonic() >= end:
            table.rows.append([spec.name, "-", "-", "-", "-", "no time was left"])
            continue
        touched = np.count_nonzero(counts(spec)) / spec.num_groups
        bound = spec.weight_bytes * touched / ceilings.bandwidth
        try:
            taken = seconds(multiply, spec, small)
            plain = dense_seconds(spec, small) if spec.num_groups == 1 else None
        except Exception as error:  # the row reports it
            failed = True
            table.rows.append([spec.name, "-", "-", "-", "-", first_line(error)])
            continue
        cells = [f"{taken * 1e6:.1f}", "-" if plain is None else f"{plain * 1e6:.1f}"]
        cells += [f"{bound * 1e6:.1f}", f"{bound / taken:.2f}"]
        table.rows.append([spec.name, *cells, ""])
        data.append(
            {
                "product": spec.name,
                "seconds": taken,
                "bfloat16_seconds": plain,
                "bound_seconds": bound,
            }
        )
    status = FAILED if failed else PASSED
    return Finding(
        "products: timings", status, f"{len(data)} timed", tables=[table], data={"rows": data}
    )


def seconds(multiply: Callable[..., jax.Array], spec: MatmulSpec, small: bool) -> float:
    """Times one call, in a program of many that wait for each other."""
    weights = [make_weight(spec, seed) for seed in range(NUM_WEIGHTS)]
    count_E = jnp.asarray(counts(spec), jnp.int32)

    def run_matmul(x_PI: jax.Array, arrays: list[Any], index: int) -> jax.Array:
        array = arrays[index]
        if spec.code is None:
            return multiply(x_PI, array, count_E)
        values, scale, zero = array
        return multiply(
            x_PI, QuantizedWeight(values, scale, zero, spec.code, spec.group_size), count_E
        )

    return _seconds(
        run_matmul, spec, [weight[:3] if spec.code else weight for weight in weights], small
    )


def dense_seconds(spec: MatmulSpec, small: bool) -> float:
    """Times XLA's product in bfloat16 of the same shape."""
    keys = jax.random.split(jax.random.key(3), NUM_WEIGHTS)
    weights = [jax.random.normal(key, (spec.num_out, spec.num_in), jnp.bfloat16) for key in keys]
    return _seconds(lambda x, w, index: jnp.einsum("TI,OI->TO", x, w[index]), spec, weights, small)


def _seconds(
    matmul: Callable[..., jax.Array], spec: MatmulSpec, weights: Any, small: bool
) -> float:
    x_PI = jax.random.normal(jax.random.key(2), (spec.num_rows, spec.num_in), jnp.dtype(spec.dtype))
    turns = 1 if small else NUM_CALLS // NUM_WEIGHTS

    def program(x_PI: jax.Array, weights: Any) -> jax.Array:
        def turn(_: jax.Array, out_PO: jax.Array) -> jax.Array:
            for index in range(NUM_WEIGHTS):
                # Each product waits for the one before.
                x, out_PO = jax.lax.optimization_barrier((x_PI, out_PO))
                out_PO = matmul(x, weights, index).astype(out_PO.dtype)
            return out_PO

        return jax.lax.fori_loop(
            0, turns, turn, jnp.zeros((spec.num_rows, spec.num_out), x_PI.dtype)
        )

    compiled = jax.jit(program).lower(x_PI, weights).compile()
    return median_of_rounds(
        lambda: compiled(x_PI, weights), turns * NUM_WEIGHTS, rounds=1 if small else 7
    ).seconds
