"""Sets how much of a GPU JAX's allocator may take. JAX reads that once, when it opens its devices: 0.75 of the card by default."""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge  # JAX has no public name for whether its devices are open

# JAX's; the second is the older name
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
HEADROOM = 0.05  # of the card, beyond what an engine plans: for gaps between arrays
MOST = 0.95  # of the card: CUDA itself, code and graphs take memory beside JAX's allocator

_fraction: float | None = None  # of a GPU's memory that `open_devices` gave JAX; None: it gave none


def open_devices(utilization: float) -> None:
    """Has JAX open its devices such that an engine can have `utilization` of a GPU. Without effect where JAX has opened them before, or
    the user has set one of `VARIABLES`."""
    global _fraction
    if any(name in os.environ for name in VARIABLES) or _are_open():
        return
    _fraction = min(MOST, utilization + HEADROOM)
    os.environ[VARIABLES[0]] = str(_fraction)
    try:
        jax.devices()
    finally:
        del os.environ[VARIABLES[0]]


def _are_open() -> bool:
    return bool(xla_bridge.backends_are_initialized())


def share(limit: int, utilization: float) -> int:
    """Bytes that an engine may have of a GPU of which JAX's allocator has `limit`: that share of the card where JAX has its limit from
    here, else of the limit."""
    return int(limit * (utilization if _fraction is None else min(1.0, utilization / _fraction)))


def notice(utilization: float) -> str:
    """Returns a sentence where `utilization` is a share of less than the card; else an empty one."""
    if _fraction is not None:
        return ""
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    why = (
        f"{given[0]} is set"
        if given
        else "JAX had opened the GPU before the engine, with 0.75 of its memory by default"
    )
    return f"gpu_memory_utilization = {utilization:g} is a share of what JAX may take of the GPU, not of all its memory: {why}"
