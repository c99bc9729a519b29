"""Sets how much of a GPU JAX's allocator may take.

JAX reads that once, when it opens its devices; its default is 0.75 of the card.
"""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge  # JAX has no public name for whether its devices are open

# JAX reads both; the second is the older name.
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
HEADROOM = 0.05  # a share of the card for gaps between arrays, beyond what an engine plans
MAXIMUM = 0.95  # the largest share: CUDA itself, code and graphs take memory, too

_fraction: float | None = None  # the share that `open_devices` gave JAX; None: it gave none


def open_devices(utilization: float) -> None:
    """Has JAX open its devices so that an engine can have `utilization` of a GPU.

    This has no effect where JAX has opened them before, or where the user has set one of
    `VARIABLES`.
    """
    global _fraction
    if any(name in os.environ for name in VARIABLES) or _are_open():
        return
    _fraction = min(MAXIMUM, utilization + HEADROOM)
    os.environ[VARIABLES[0]] = str(_fraction)
    try:
        jax.devices()
    finally:
        # JAX has read it; a process that is started later chooses for itself.
        del os.environ[VARIABLES[0]]


def _are_open() -> bool:
    return bool(xla_bridge.backends_are_initialized())


def share(limit: int, utilization: float) -> int:
    """Returns the bytes that an engine may have of a GPU.

    They are a share of the card where `open_devices` has set the allocator's limit, else a share of
    that limit.

    Args:
        limit: The bytes that JAX's allocator may take.
        utilization: The share, 0 to 1.
    """
    # The limit is `_fraction` of the card, so the quotient makes it a share of the whole card.
    return int(limit * (utilization if _fraction is None else min(1.0, utilization / _fraction)))


def notice(utilization: float) -> str:
    """Returns a sentence if `utilization` is a share of less than the card, else ""."""
    if _fraction is not None:
        return ""
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    why = (
        f"{variables[0]} is set"
        if variables
        else "JAX had opened the GPU before the engine, with 0.75 of its memory by default"
    )
    return (
        f"gpu_memory_utilization = {utilization:g} is a share of what JAX may take of the GPU, not "
        f"of all its memory: {why}"
    )
