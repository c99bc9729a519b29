"""Which kernels an engine runs on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxpage.errors import UnsupportedError
from pallas_kernels import INTERPRETABLE_BACKENDS, XLA_BACKENDS

OLDEST_GPU = {"triton": (8, 0), "mosaic": (9, 0)}  # compute capability: Ampere, Hopper
OLDEST_FOR_FP8 = (8, 9)  # below it Triton converts nothing to float8_e4m3fn


class Backend(NamedTuple):
    """What computes attention, and with it what writes and moves keys and values."""

    name: str  # one of BACKENDS, or "auto"
    interpret: bool = False  # a kernel on CPU, operation by operation

    @property
    def mover(self) -> dict[str, Any]:
        """Keyword arguments of `write_kv`, `copy_blocks`, `gather_blocks` and `scatter_blocks`."""
        name = "auto" if self.name == "auto" else "xla" if self.name in XLA_BACKENDS else "triton"
        return {"backend": name, "interpret": self.interpret}


def choose_backend(name: str, device: Any, kv_cache_dtype: str = "auto") -> Backend:
    """What an engine on this device (a `jax.Device`) uses for a value of the setting `attention_backend`. Kernels are interpreted on CPU.

    Raises:
        UnsupportedError: the device does not run that backend; the text says what it needs.
    """
    if device.platform == "cpu":
        interpret = name != "auto" and name not in XLA_BACKENDS
        if interpret and name not in INTERPRETABLE_BACKENDS:
            raise UnsupportedError(
                f"attention_backend {name!r} needs a GPU: jax {jax.__version__} does not interpret it"
            )
        return Backend(name, interpret)
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))
    oldest = OLDEST_GPU.get("triton" if name == "auto" else name, (0, 0))
    if kv_cache_dtype == "fp8" and name not in XLA_BACKENDS:
        oldest = max(oldest, OLDEST_FOR_FP8)
    if capability >= oldest:
        return Backend(name)
    if name == "auto":
        return Backend("scan")
    needed, has = (".".join(map(str, version)) for version in (oldest, capability))
    raise UnsupportedError(
        f"attention_backend {name!r} with kv_cache_dtype {kv_cache_dtype!r} needs a GPU of compute capability {needed} or more, "
        f"but {device.device_kind} has {has}; use {' or '.join(XLA_BACKENDS)}"
    )
