"""Names devices that `jaxpage plan` plans for without having them, with their makers' numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.device.hardware.device_spec import DeviceSpec


@dataclass(frozen=True)
class KnownDevice:
    """Describes one device as JAX shows it, from public documents.

    Attributes:
        name: The platform of JAX, a space, and the name that people know.
        memory_gb: Its memory, in 10^9 bytes.
        has_bfloat16: True if it computes in bfloat16.
    """

    name: str
    memory_gb: int
    has_bfloat16: bool = True

    def spec(self, utilization: float) -> DeviceSpec:
        """Returns the description of the device, of whose memory an engine may use a share."""
        platform, _, kind = self.name.partition(" ")
        return DeviceSpec(
            f"{platform} ({kind}, {self.memory_gb} GB by its maker's numbers, "
            f"gpu_memory_utilization {utilization:g})",
            int(self.memory_gb * 10**9 * utilization),
            has_bfloat16=self.has_bfloat16,
        )


KNOWN_DEVICES = {
    "v4": KnownDevice("tpu TPU v4", 32),
    "v5e": KnownDevice("tpu TPU v5e", 16),
    "v5p": KnownDevice("tpu TPU v5p", 95),
    "v6e": KnownDevice("tpu TPU v6e", 32),
    # A chip has 192 GB, and JAX shows it as two devices.
    "v7x": KnownDevice("tpu TPU v7x, half a chip of 192 GB", 96),
    "t4": KnownDevice("gpu NVIDIA T4", 16, has_bfloat16=False),
    "l4": KnownDevice("gpu NVIDIA L4", 24),
    "l40s": KnownDevice("gpu NVIDIA L40S", 48),
    "a10": KnownDevice("gpu NVIDIA A10", 24),
    "a100": KnownDevice("gpu NVIDIA A100 of 40 GB", 40),
    "a100-80gb": KnownDevice("gpu NVIDIA A100 of 80 GB", 80),
    "h100": KnownDevice("gpu NVIDIA H100", 80),
    "h200": KnownDevice("gpu NVIDIA H200", 141),
    "b200": KnownDevice("gpu NVIDIA B200", 180),
    "rtx3090": KnownDevice("gpu NVIDIA RTX 3090", 24),
    "rtx4090": KnownDevice("gpu NVIDIA RTX 4090", 24),
    "rtx5090": KnownDevice("gpu NVIDIA RTX 5090", 32),
}
