"""Defines the records that an engine is planned with, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from jaxpage.assembly.drafting import Drafting
from jaxpage.device import gpu_memory
from jaxpage.device.backends import Backend, has_bfloat16
from jaxpage.device.packing import takes
from jaxpage.device.sizing import available_bytes
from jaxpage.models.base import ModelSpec
from jaxpage.models.lora import LoRASpec
from jaxpage.settings.engine_config import EngineConfig


@dataclass(frozen=True)
class DeviceSpec:
    """Describes the device that an engine runs on, or one that `jaxpage plan` plans for.

    Attributes:
        name: The name, which begins with the platform.
        available_bytes: The memory that the engine may use.
        notice: A warning if that memory is not what the settings ask for, else empty.
        has_bfloat16: True if the device computes in bfloat16.
        keeps_bfloat16: True if dtype "auto" keeps a checkpoint in bfloat16: on a CPU without the
            kernels in C++, XLA is slow in it.
    """

    name: str
    available_bytes: int
    notice: str = ""
    has_bfloat16: bool = True
    keeps_bfloat16: bool = True

    @property
    def is_cpu(self) -> bool:
        """Returns whether the device is a CPU."""
        return self.name.startswith("cpu")

    @property
    def platform(self) -> str:
        """Returns the platform whose kernel sets are asked; all devices but CPUs count as GPUs."""
        return "cpu" if self.is_cpu else "gpu"


def device_spec_of(device: jax.Device, utilization: float, num_devices: int = 1) -> DeviceSpec:
    """Describes a device.

    Args:
        device: The device.
        utilization: The share of a GPU's memory that the engine may use.
        num_devices: The number of devices, which are all alike. Devices that are made of one CPU
            share its memory.
    """
    notice = gpu_memory.notice(utilization) if device.platform == "gpu" else ""
    available = available_bytes(device, utilization) // (
        num_devices if device.platform == "cpu" else 1
    )
    return DeviceSpec(
        f"{device.platform} ({device.device_kind})",
        available,
        notice,
        has_bfloat16(device),
        device.platform != "cpu" or takes("bfloat16"),
    )


@dataclass(frozen=True)
class ModelLayout:
    """Says in which types a model's numbers are kept, and on how many devices.

    The fields have the names of settings.

    Attributes:
        dtype: The type of weights and activations, never "auto".
        kv_cache_dtype: The type of the KV cache; "auto" is the same type as `dtype`.
        tensor_parallel_size: The number of devices.
    """

    dtype: str
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Described:
    """Describes a model with these settings on that device.

    Attributes:
        config: The settings.
        model: The model, as its config.json describes it.
        device: One of the devices, which are all alike.
        layout: The types of the model's numbers, and the number of devices, each of which has its
            part of the weights and its heads of every block.
        weights_bytes: The bytes of the whole model in `layout.dtype`.
        drafting: The drafter. Its layers take a part of every block, and each device has all of its
            weights.
        lora: The LoRA adapters, counted as if each shard had all of A and B; in truth it has a part
            of one of the two.
        kernels: The kernel set; None if the device is not at hand.
        dtype_reason: The reason why the dtype differs from the checkpoint's or depends on the
            machine, or an empty text.
    """

    config: EngineConfig
    model: ModelSpec
    device: DeviceSpec
    layout: ModelLayout
    weights_bytes: int
    drafting: Drafting = field(default_factory=Drafting)
    lora: LoRASpec | None = None
    kernels: Backend | None = None
    dtype_reason: str = ""
