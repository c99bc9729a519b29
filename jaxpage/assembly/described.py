"""The records that an engine is planned with, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from jaxpage.assembly.drafting import Drafting
from jaxpage.device import gpu_memory
from jaxpage.device.backends import Backend, has_bfloat16
from jaxpage.device.sizing import available_bytes
from jaxpage.models.base import ModelSpec
from jaxpage.models.lora import LoRASpec
from jaxpage.settings.engine_config import EngineConfig


@dataclass(frozen=True)
class DeviceSpec:
    """The device that an engine runs on, or one that `jaxpage plan` plans for."""

    name: str  # begins with the platform
    available_bytes: int
    notice: str = ""  # where that is not what the settings say
    has_bfloat16: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def platform(self) -> str:
        """Returns the platform whose kernel sets are asked: any device but a CPU is taken as a GPU."""
        return "cpu" if self.is_cpu else "gpu"


def device_spec_of(device: jax.Device, utilization: float, num_devices: int = 1) -> DeviceSpec:
    """Returns what is known of a device.

    num_devices: how many there are, all alike. Those that are made of one CPU share its memory.
    """
    notice = gpu_memory.notice(utilization) if device.platform == "gpu" else ""
    available = available_bytes(device, utilization) // (
        num_devices if device.platform == "cpu" else 1
    )
    return DeviceSpec(
        f"{device.platform} ({device.device_kind})", available, notice, has_bfloat16(device)
    )


@dataclass(frozen=True)
class ModelLayout:
    """Says in which types a model's numbers are kept, and on how many devices. The fields are settings."""

    dtype: str  # never "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Described:
    """Describes a model with these settings on that device.

    Attributes:
        config: The settings.
        model: The model, as its config.json says.
        device: One of the devices, which are all alike.
        layout: The types of the model's numbers, and the number of devices, each of which has its
            part of the weights and its heads of every block.
        weights_bytes: The bytes of the whole model in `layout.dtype`.
        drafting: What drafts; its layers take a part of every block, and each device has all of
            its weights.
        lora: Adapters, counted as if each shard had all of them; it has a part of either A or B.
        kernels: The kernel set; None where the device is not at hand.
        dtype_reason: Why the dtype is another than the checkpoint's, or depends on the machine.
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
