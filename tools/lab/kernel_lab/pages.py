"""Compares kernels that write and move pages with the XLA versions, bit by bit, and times both."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import copy_blocks, copy_slots, gather_blocks, scatter_blocks, write_kv
from pallas_kernels.sets import DEFINITION, KERNEL_BACKENDS, SETS
from tools.lab.kernel_lab import specs
from tools.lab.kernel_lab.bounds import Ceilings
from tools.lab.kernel_lab.findings import (
    FAILED,
    PASSED,
    Finding,
    LeftOut,
    Table,
    first_line,
    judge,
)
from tools.lab.kernel_lab.kernel_cases import Pages, make_case
from tools.lab.kernel_lab.specs import Spec
from tools.lab.kernel_lab.timing import median_of_rounds

# The kernel sets that write and move pages with kernels of their own. The other sets use the
# definition's, or those of one of these.
_DEFINED = SETS[DEFINITION].write
_KERNEL_NAMES = {
    each.write: name
    for name, each in reversed(SETS.items())
    if inspect.unwrap(each.write) is not _DEFINED
}
KERNELS = tuple(name for name in _KERNEL_NAMES.values() if name in KERNEL_BACKENDS)
PAGE_DTYPES = ("bfloat16", "float32", "int8", "uint8")
NUM_CALLS = 50  # calls of a timed program


def _pool(page_dtype: str, small: bool) -> Spec:
    spec = dataclasses.replace(specs.find("llama-3-8b decode 64 ragged"), page_dtype=page_dtype)
    return spec.cut() if small else spec


def _new(spec: Spec, num_tokens: int, num_slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys, values and their slots: no slot twice, and none in the null block."""
    key = jax.random.key(5)
    shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
    k_TKH, v_TKH = (
        jax.random.normal(part, shape, jnp.dtype(spec.dtype)) for part in jax.random.split(key)
    )
    free = np.arange(spec.block_size, num_slots)
    slots_T = np.random.default_rng(5).choice(free, num_tokens, replace=False)
    return k_TKH, v_TKH, jnp.asarray(slots_T, jnp.int32)


def write(pages: Pages, new: tuple[jax.Array, ...], **options: Any) -> Pages:
    """Writes new keys and values into the pages."""
    k_TKH, v_TKH, slots_T = new
    options |= {} if pages.k_scale is None else {"k_scale": pages.k_scale, "v_scale": pages.v_scale}
    return Pages(*write_kv(k_TKH, v_TKH, pages.k_pages, pages.v_pages, slots_T, **options))  # type: ignore[arg-type]


def bits(tree: Any) -> list[bytes]:
    """Returns the bytes of each array of a tree."""
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(tree)]


def check(name: str, run: Callable[..., Any], pages: Any, *others: Any, interpret: bool) -> Finding:
    """Compares the kernels' results with the definition's.

    The pages are donated, as in the engine.

    Args:
        name: The check's name.
        run: Takes the pages, `others`, `backend` and `interpret`, and returns the new pages.
        pages: The pages before the call.
        *others: The other arguments of `run`.
        interpret: Kernels are interpreted.
    """
    results = {}
    for backend in (DEFINITION, *KERNELS):

        def call(pages: Pages, *others: Any, backend: str = backend) -> Any:
            return run(pages, *others, backend=backend, interpret=interpret and backend in KERNELS)

        donated = jax.tree.map(jnp.copy, pages)
        try:
            results[backend] = bits(jax.jit(call, donate_argnums=0)(donated, *others))
        except NotImplementedError as refusal:
            raise LeftOut(str(refusal)) from refusal
    same = all(result == results[DEFINITION] for result in results.values())
    summary = "the same bits as XLA" if same else "differs from XLA"
    changed = bits(pages) != results[DEFINITION]
    if not changed:
        return Finding(name, FAILED, "nothing was written, by XLA either")
    return Finding(name, PASSED if same else FAILED, summary)


def findings(
    *, interpret: bool, small: bool, page_dtypes: tuple[str, ...] = PAGE_DTYPES
) -> Iterator[Finding]:
    """Yields the findings for each type of page."""
    for page_dtype in page_dtypes:
        spec = _pool(page_dtype, small)
        for num_tokens in (7,) if small else (1, 64, 2000):
            name = f"write_kv {page_dtype} {num_tokens} tokens"
            yield judge(name, functools.partial(_write, name, spec, num_tokens, interpret))
        for name, run in MOVES.items():
            name = f"{name} {page_dtype}"
            yield judge(name, functools.partial(_move, name, run, spec, interpret))


def _write(name: str, spec: Spec, num_tokens: int, interpret: bool) -> Finding:
    pages = make_case(spec).layers[0]
    num_slots = pages.k_pages.shape[0] * pages.k_pages.shape[1]
    return check(name, write, pages, _new(spec, num_tokens, num_slots), interpret=interpret)


def _pairs(count: int, minimum: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Returns sources and destinations among the ids from `minimum` up to `count`.

    No destination comes twice, except for the padding with zeros. Two of the ids trade places, so a
    copy must read before another copy writes.
    """
    picked = (
        np.random.default_rng(seed).permutation(count - minimum)[
            : min(64, count - minimum) // 2 * 2
        ]
        + minimum
    )
    source, destination = np.split(picked, 2)
    source, destination = (
        np.concatenate([source, destination[:1], [0, 0]]),
        np.concatenate([destination, source[:1], [0, 0]]),
    )
    return jnp.asarray(source, jnp.int32), jnp.asarray(destination, jnp.int32)


def _there_and_back(pages: Any, pair: tuple[jax.Array, jax.Array], **options: Any) -> Any:
    """Reads blocks as bytes and writes the bytes into other blocks, as a swap does."""
    contents = gather_blocks(pages, pair[0], **options)
    return scatter_blocks(pages, pair[1], contents, **options), contents


def _copy(pages: Any, pair: tuple[jax.Array, jax.Array], **options: Any) -> Any:
    return copy_blocks(pages, *pair, **options)


def _copy_slots(pages: Any, pair: tuple[jax.Array, jax.Array], **options: Any) -> Any:
    return copy_slots(pages, *pair, **options)


def _move(name: str, run: Callable[..., Any], spec: Spec, interpret: bool) -> Finding:
    layers = make_case(spec, layers=2).layers
    num_blocks = layers[0].k_pages.shape[0]
    slots = run is _copy_slots
    pair = (
        _pairs(num_blocks * spec.block_size, spec.block_size, 6)
        if slots
        else _pairs(num_blocks, 1, 6)
    )
    return check(name, run, layers, pair, interpret=interpret)


MOVES = {"copy_blocks": _copy, "copy_slots": _copy_slots, "gather and scatter": _there_and_back}


def _seconds(run: Callable[..., Any], pages: Any, others: Any, num_calls: int) -> float:
    """Times one call among many in a program that carries the pages in place."""

    def program(pages: Any, others: Any) -> Any:
        def turn(index: jax.Array, pages: Any) -> Any:
            # The barrier keeps XLA from preparing anything once for all turns.
            _, now = jax.lax.optimization_barrier((index, others))
            return run(pages, now)

        return jax.lax.fori_loop(0, num_calls, turn, pages)

    compiled = jax.jit(program, donate_argnums=0).lower(pages, others).compile()
    held = [jax.tree.map(jnp.copy, pages)]

    def once() -> Any:
        held[0] = compiled(held[0], others)
        return held[0]

    return median_of_rounds(once, num_calls).seconds


def timings(ceilings: Ceilings | None, *, interpret: bool, small: bool) -> Finding:
    """Times writing one layer's tokens, and copying 16 blocks in 8 layers.

    GB/s counts what is read and what is written.
    """
    num_calls = 2 if small else NUM_CALLS
    table = Table("Writing and copying pages", ["operation", "backend", "us", "GB/s", "note"])
    data: list[dict[str, Any]] = []
    failed = False
    for page_dtype in ("bfloat16", "int8"):
        spec = _pool(page_dtype, small)
        layers = make_case(spec, layers=2 if small else 8).layers
        num_slots = layers[0].k_pages.shape[0] * spec.block_size
        slot_bytes = sum(array.nbytes for array in jax.tree.leaves(layers[0])) // num_slots
        new_bytes = 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        count = 4 if small else 16
        blocks = (
            jnp.arange(1, count + 1, dtype=jnp.int32),
            jnp.arange(count + 1, 2 * count + 1, dtype=jnp.int32),
        )
        work: list[tuple[str, Callable[..., Any], Any, Any, int]] = [
            (
                f"write_kv {n} x {page_dtype}",
                write,
                layers[0],
                _new(spec, n, num_slots),
                n * (slot_bytes + new_bytes),
            )
            for n in ((7,) if small else (64, 2048))
        ]
        moved_bytes = 2 * count * len(layers) * slot_bytes * spec.block_size
        work.append(
            (
                f"copy_blocks {count} x {len(layers)} layers {page_dtype}",
                _copy,
                layers,
                blocks,
                moved_bytes,
            )
        )
        for name, run, pages, others, num_bytes in work:
            for backend in (DEFINITION, *KERNELS):
                options = {"backend": backend, "interpret": interpret and backend in KERNELS}
                try:
                    seconds = _seconds(functools.partial(run, **options), pages, others, num_calls)
                except Exception as error:  # the row reports it
                    failed |= not isinstance(error, NotImplementedError)
                    table.rows.append([name, backend, "-", "-", first_line(error)])
                    continue
                table.rows.append(
                    [name, backend, f"{seconds * 1e6:.1f}", f"{num_bytes / seconds / 1e9:.0f}", ""]
                )
                data.append(
                    {"operation": name, "backend": backend, "seconds": seconds, "bytes": num_bytes}
                )
    copied = "" if ceilings is None else f"; a large copy reaches {ceilings.copied / 1e9:.0f} GB/s"
    status = FAILED if failed else PASSED
    return Finding(
        "pages: timings", status, f"{len(data)} timed{copied}", tables=[table], data={"rows": data}
    )
