"""Backends of the operations that write and move pages: XLA's scatters, which define them, and Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

XLA = "xla"
TRITON = "triton"

Result = TypeVar("Result")


def first_that_takes(
    operation: str, xla: Callable[[], Result], triton: Callable[[], Result], *, backend: str, interpret: bool
) -> Result:
    """The result of the backend of that name, or for "auto" of the first that takes the call: the kernel where JAX's default backend is
    a GPU or where it is to be interpreted.

    Raises:
        ValueError: there is no such backend.
        NotImplementedError: no backend takes the call; the text has every backend's reason.
    """
    if backend not in ("auto", XLA, TRITON):
        raise ValueError(f"backend must be 'auto', {XLA!r} or {TRITON!r}, not {backend!r}")
    automatic = (TRITON,) if interpret else (TRITON, XLA) if jax.default_backend() == "gpu" else (XLA,)
    refusals = []
    for name in automatic if backend == "auto" else (backend,):
        try:
            if name == TRITON:
                return triton()
            if interpret:
                raise NotImplementedError("no kernel, so it takes no interpret=True")
            return xla()
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError(f"no backend of {operation} takes this call: " + "; ".join(refusals))
