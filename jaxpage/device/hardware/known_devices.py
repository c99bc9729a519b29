"""Names devices that `jaxpage plan` plans for without having them, with their makers' numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.device.hardware.backends import has_bfloat16
from jaxpage.device.hardware.device_spec import DeviceSpec
from pallas_kernels.compat import DescribedGPU, DescribedTPU


@dataclass(frozen=True)
class KnownDevice:
    """Describes one device as JAX shows it, from public documents.

    Attributes:
        name: The name that people know.
        memory_gb: Its memory, in 10^9 bytes.
        capability: The compute capability of a GPU; empty for a TPU.
    """

    name: str
    memory_gb: int
    capability: str = ""

    def spec(self, utilization: float) -> DeviceSpec:
        """Returns the description of the device, of whose memory an engine may use a share."""
        hardware = (
            DescribedGPU(self.name, self.capability) if self.capability else DescribedTPU(self.name)
        )
        return DeviceSpec(
            f"{hardware.platform} ({self.name}, {self.memory_gb} GB by its maker's numbers, "
            f"gpu_memory_utilization {utilization:g})",
            int(self.memory_gb * 10**9 * utilization),
            has_bfloat16=has_bfloat16(hardware),
            hardware=hardware,
        )


KNOWN_DEVICES = {
    "v4": KnownDevice("TPU v4", 32),
    "v5e": KnownDevice("TPU v5e", 16),
    "v5p": KnownDevice("TPU v5p", 95),
    "v6e": KnownDevice("TPU v6e", 32),
    # A chip has 192 GB, and JAX shows it as two devices.
    "v7x": KnownDevice("TPU v7x, half a chip of 192 GB", 96),
    "t4": KnownDevice("NVIDIA T4", 16, "7.5"),
    "l4": KnownDevice("NVIDIA L4", 24, "8.9"),
    "l40s": KnownDevice("NVIDIA L40S", 48, "8.9"),
    "a10": KnownDevice("NVIDIA A10", 24, "8.6"),
    "a100": KnownDevice("NVIDIA A100 of 40 GB", 40, "8.0"),
    "a100-80gb": KnownDevice("NVIDIA A100 of 80 GB", 80, "8.0"),
    "h100": KnownDevice("NVIDIA H100", 80, "9.0"),
    "h200": KnownDevice("NVIDIA H200", 141, "9.0"),
    "b200": KnownDevice("NVIDIA B200", 180, "10.0"),
    "rtx3090": KnownDevice("NVIDIA RTX 3090", 24, "8.6"),
    "rtx4090": KnownDevice("NVIDIA RTX 4090", 24, "8.9"),
    "rtx5090": KnownDevice("NVIDIA RTX 5090", 32, "12.0"),
}
