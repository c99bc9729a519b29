"""Which kernel set an engine runs on its device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxpage.device.kv_pages import QUANTIZED
from jaxpage.errors import UnsupportedError
from pallas_kernels import SETS, XLA_BACKENDS, Call, candidates
from pallas_kernels.cpu.library import load as load_cpu_library


class Backend(NamedTuple):
    """What computes attention, and what writes and moves keys and values."""

    name: str  # of a kernel set, or "auto"
    interpret: bool = False  # a kernel on CPU, operation by operation

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every operation of `pallas_kernels`."""
        return {"backend": self.name, "interpret": self.interpret}


def choose_backend(name: str, device: Any, kv_cache_dtype: str = "auto") -> Backend:
    """What an engine on this device (a `jax.Device`) uses for a value of the setting `attention_backend`. Kernels are interpreted on CPU.
    "auto" chooses call by call.

    Raises:
        UnsupportedError: the device does not run that kernel set; the text says what it needs.
    """
    if name == "auto":
        return Backend(name)
    chosen = SETS[name]
    interpret = not chosen.runs_on(device.platform)
    if interpret and not (chosen.interpretable and device.platform == "cpu"):
        needed = " or ".join(chosen.platforms).upper()
        raise UnsupportedError(
            f"attention_backend {name!r} needs a {needed}: jax {jax.__version__} does not interpret it on this device"
        )
    if reason := chosen.supports(device, Call(interpret=interpret, page_dtype=QUANTIZED.get(kv_cache_dtype))):
        raise UnsupportedError(
            f"attention_backend {name!r} with kv_cache_dtype {kv_cache_dtype!r}: {reason}; use {' or '.join(XLA_BACKENDS)}"
        )
    return Backend(name, interpret)


def cpu_kernels() -> str:
    """The instruction set that the kernels for CPUs are compiled for, or why there are none."""
    library = load_cpu_library()
    return library.instruction_set or f"none: {library.reason}; attention is left to plain XLA, which is slow"


def prefers_mixed_steps(name: str, platform: str) -> bool:
    """Whether this kernel set, or that which "auto" tries first, computes rows that decode and prompt chunks best in one step."""
    chosen = candidates(name, platform)[0]
    return chosen.prefers_mixed_steps and chosen.runs_on(platform)
