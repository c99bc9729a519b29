"""The kernel set: one implementation of every operation on pages and quantised weights, and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.arguments import Arguments
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.tiles import Shape, Tiles

Leaves = list[jax.Array]  # of the pages, each [P, S, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that a set is asked to take.

    interpret: run kernels on CPU, operation by operation.
    page_dtype: the type of pages that are read or written as numbers; None where blocks are moved as they are.
    attention, tiles: the arguments of attention; None in other operations, and where they are not known yet.
    weight: the weight of a product.
    """

    interpret: bool = False
    page_dtype: str | None = None
    attention: Arguments | None = None
    tiles: Tiles | None = None
    weight: QuantizedWeight | None = None


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The operations of one set, and what it says of itself.

    Operations get arguments that were checked (`paged_attention`, `kv_write` and `block_copy` say what they mean), and only calls
    that the set does not refuse (`refusal`); `interpret=True` and `tiles` are passed where a call has them. They may still raise
    `NotImplementedError` with a reason.

    attend: (Arguments) -> out_TNH.
    write: (k_TKH, v_TKH, k_pages, v_pages, slots_T, k_scale, v_scale) -> the pages, and the scales where there are any.
    copy_blocks, copy_slots: (leaves, source, destination) -> leaves.
    gather_blocks: (leaves, blocks) -> bytes. scatter_blocks: (leaves, blocks, bytes) -> leaves.
    multiply: (x_TI, QuantizedWeight, type of the result) -> y_TO, see `quantized_product`.
    multiply_grouped: (x_PI, weight, count_E, type of the result) -> y_PO, see `grouped_product`;
    None: the set has no such kernel.
    write_and_attend: (k_TKH, v_TKH, slots_T, Arguments) -> out_TNH and what `write` returns, where one kernel does both.
    cutoffs, likeliest: select in rows of logits (see `selection`), where a set has kernels for both.
    honours: names of the fields of `AttentionOptions` that its attention computes; it refuses calls with others.
    supports: (jax.Device, Call) -> why else it refuses a call, or None. Kernels are also lowered for GPUs that are not there: then the
        device is a CPU.
    tiles: how a call of this shape is cut where nothing was measured; None for a set that takes no tiles.
    platforms: JAX's platforms on which it runs natively; empty for plain XLA, which runs everywhere.
    interpretable: whether its kernels run on CPU with interpret=True.
    unaddressable: (type of pages) -> numbers of elements that one array of pages must not have.
    prefers_mixed_steps: whether rows that decode and prompt chunks are best computed in one step.
    comes_first: kinds of step (`Shape.kind`) whose attention "auto" gives to this set before the others, where nothing was measured.
    """

    name: str
    attend: Callable[..., jax.Array]
    write: Callable[..., tuple[jax.Array | None, ...]]
    copy_blocks: Callable[..., Leaves]
    copy_slots: Callable[..., Leaves]
    gather_blocks: Callable[..., jax.Array]
    scatter_blocks: Callable[..., Leaves]
    multiply: Callable[..., jax.Array]
    multiply_grouped: Callable[..., jax.Array] | None = None
    write_and_attend: Callable[..., tuple[jax.Array, tuple[jax.Array | None, ...]]] | None = None
    cutoffs: Callable[..., jax.Array] | None = None
    likeliest: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    honours: frozenset[str]
    supports: Callable[[Any, Call], str | None]
    tiles: Callable[[Shape], Tiles] | None = None
    unaddressable: Callable[[DTypeLike], range] = lambda _: range(0)
    platforms: tuple[str, ...] = ()
    interpretable: bool = False
    prefers_mixed_steps: bool = False
    comes_first: tuple[str, ...] = ()

    def runs_on(self, platform: str) -> bool:
        return not self.platforms or platform in self.platforms

    def refusal(self, device: Any, call: Call) -> str | None:
        """Returns why the set does not take a call on a `jax.Device`, or None if it does."""
        reason = self.supports(device, call)
        if reason is None and call.attention is not None:
            given = call.attention.options.given
            if missing := given - self.honours:
                return f"{', '.join(sorted(missing))}: its attention has no such option"
            if {"tree_mask_TQ", "sliding_window"} <= given:
                # which no set computes, nor the definition
                return "a tree mask with a sliding window"
        return reason


def first_reason(*reasons: tuple[Any, str]) -> str | None:
    """Returns the text of the first pair that begins with something true."""
    return next((text for refused, text in reasons if refused), None)


def capability(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU, (0, 0) for a GPU of another maker, None for what is no GPU."""
    if device.platform != "gpu":
        return None
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def described(device: Any) -> str:
    """Returns a GPU as a refusal names it."""
    return f"{device.device_kind} has {getattr(device, 'compute_capability', 'none')}"
