"""The differences among the versions of JAX that are supported, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import sharding
from jax.experimental.compilation_cache import compilation_cache

config: Any = jax.config  # whose values have no types
MOSAIC_INTERPRETABLE = jax.__version_info__ >= (0, 11, 0)
# Part of the key of JAX's trace cache: a function that was traced for one GPU is traced anew for
# another.
_described: Any = jax.make_user_context(None)


@dataclass(frozen=True)
class DescribedGPU:
    """A GPU that is not there, as far as kernels ask a `jax.Device` about itself."""

    device_kind: str
    compute_capability: str
    platform: str = "gpu"


def target_device() -> Any:
    """Returns what kernels are compiled for: the GPU of `described_gpu`, else JAX's first device."""
    return _described.value or jax.devices()[0]


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """JAX's persistent compile cache is neither read nor written."""
    enabled = config.values["jax_enable_compilation_cache"]
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks the setting once
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def described_gpu(
    kind: str = "NVIDIA H200", num_cores: int = 132, capability: str = "9.0"
) -> Iterator[None]:
    """Makes kernels lower for a GPU that is not there. JAX itself takes a Hopper for granted before 0.11."""
    device = sharding.AbstractDevice(kind, num_cores, "gpu")
    mesh = sharding.AbstractMesh((1,), ("x",), (sharding.AxisType.Auto,), abstract_device=device)
    seen = (
        sharding.use_abstract_mesh(mesh)
        if jax.__version_info__ >= (0, 11, 0)
        else contextlib.nullcontext()
    )
    with _described(DescribedGPU(kind, capability)), seen:
        yield


def x64_reason() -> str | None:
    """Why no kernel is called where JAX makes integers of 64 bits unless told otherwise: in a kernel they meet indices of 32."""
    return (
        "jax_enable_x64, under which a kernel's integers have 64 bits"
        if config.jax_enable_x64
        else None
    )
