"""Says for which GPUs, driver and libraries code is compiled, and which options XLA has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

# JAX has no public names for the versions of libraries that it loaded, and for what XLA knows.
from jax._src.lib import cuda_versions, xla_client  # type: ignore[attr-defined]

from jaxpage.versions import package_version

DRIVER = Path("/sys/module/nvidia/version")  # Windows' subsystem for Linux has no such file
# The name of a library's package may end by the version of CUDA.
_PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
    "flash-attn3-jax",
)


def gpu_versions(devices: Sequence[Any]) -> list[str]:
    """Returns, as texts, all on which an executable for GPUs depends besides its program.

    These are the cards with their number, the driver, and the versions of CUDA's libraries. An
    algorithm of cuBLAS is a number in an executable, which may name another one in another version.

    Args:
        devices: The `jax.Device` of each card.
    """
    return [
        *(f"{device.device_kind} {device.compute_capability}" for device in devices),
        devices[0].client.platform_version,
        _fingerprint(devices),
        _driver(),
        *(_library_version(library) for library in ("cublas", "cudnn")),
        *(f"{package} {package_version(package)}" for package in _PACKAGES),
    ]


def knows_options(*names: str) -> bool:
    """Returns whether this XLA has compiler options of these names."""
    options = xla_client.CompileOptions().executable_build_options.debug_options
    return all(hasattr(type(options), name) for name in names)


def _fingerprint(devices: Sequence[Any]) -> str:
    """Returns a number for what XLA compiles for: cores, memory, clock rate, driver and CUDA.

    It is in the names of JAX's own compile cache, too.
    """
    try:
        return str(xla_client.get_topology_for_devices(list(devices)).fingerprint())
    except jax.errors.JaxRuntimeError:  # a plugin need not have it
        return ""


def _driver() -> str:
    with contextlib.suppress(OSError):
        return DRIVER.read_text().strip()
    return ""


def _library_version(library: str) -> str:
    """Returns the version of a library that is loaded, which may be the system's own."""
    with contextlib.suppress(AttributeError, RuntimeError):  # no plugin, or no such library
        return f"{library} {getattr(cuda_versions, f'{library}_get_version')()}"
    return ""
