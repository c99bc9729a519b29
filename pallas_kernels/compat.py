"""Keeps the differences between the supported versions of JAX in one place."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import sharding
from jax.experimental.compilation_cache import compilation_cache

config: Any = jax.config  # its values have no types
MOSAIC_INTERPRETABLE = jax.__version_info__ >= (0, 11, 0)
# Part of the key of JAX's trace cache: a function that was traced for one GPU is traced anew for
# another.
described: Any = jax.make_user_context(None)


@dataclass(frozen=True)
class DescribedGPU:
    """Describes a GPU that is not there, with what kernels ask a `jax.Device` about itself."""

    device_kind: str
    compute_capability: str
    platform: str = "gpu"


@dataclass(frozen=True)
class DescribedTPU:
    """Describes a TPU that is not there."""

    device_kind: str
    platform: str = "tpu"


def target_device() -> Any:
    """Returns the device for which kernels are compiled.

    This is the one of `describe_gpu` or `describe_tpu`, or JAX's first device outside of them.
    """
    return described.value or jax.devices()[0]


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Runs a block in which JAX's persistent compile cache is neither read nor written."""
    enabled = config.values["jax_enable_compilation_cache"]
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # because it reads the setting only once
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def describe_gpu(
    kind: str = "NVIDIA H200", num_cores: int = 132, capability: str = "9.0"
) -> Iterator[None]:
    """Runs a block in which kernels are lowered for a GPU that is not there.

    Before 0.11 JAX itself always assumes a Hopper.
    """
    device = sharding.AbstractDevice(kind, num_cores, "gpu")
    mesh = sharding.AbstractMesh((1,), ("x",), (sharding.AxisType.Auto,), abstract_device=device)
    seen = (
        sharding.use_abstract_mesh(mesh)
        if jax.__version_info__ >= (0, 11, 0)
        else contextlib.nullcontext()
    )
    with described(DescribedGPU(kind, capability)), seen:
        yield


@contextlib.contextmanager
def describe_tpu(device: Any) -> Iterator[None]:
    """Runs a block in which kernels are lowered for a TPU that is not there.

    Args:
        device: A device of a topology that libtpu describes (`jax.experimental.topologies`).
    """
    mesh = sharding.Mesh(np.array([device]), ("x",))
    # Pallas asks the mesh for the kind of TPU.
    with (
        described(DescribedTPU(device.device_kind)),
        sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield


def libtpu_reason() -> str:
    """Returns the command that installs what JAX needs to see a TPU, or "" if it is there."""
    if importlib.util.find_spec("libtpu"):
        return ""
    return "libtpu is not installed: pip install 'jaxpage[tpu]'"


def x64_reason() -> str | None:
    """Returns why no kernel is called under jax_enable_x64, or None if it is off.

    JAX then makes integers of 64 bits, which cannot be combined with a kernel's indices of 32 bits.
    """
    return (
        "jax_enable_x64, under which a kernel's integers have 64 bits"
        if config.jax_enable_x64
        else None
    )
