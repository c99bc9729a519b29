"""Describes a device before anything is put on it: its memory, its types, and its kernel sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from jax.typing import DTypeLike

from jaxpage.device.hardware import gpu_memory
from jaxpage.device.hardware.backends import (
    Backend,
    choose_backend,
    find_invariant_set,
    has_bfloat16,
    is_interpreted,
    keeps_interleaved,
)
from jaxpage.device.packing import takes
from pallas_kernels.sets import SETS, candidates

_CGROUP = Path("/sys/fs/cgroup")
USUAL_BLOCK_SIZE = 16
# The tokens of a KV block with which attention was fastest on a card, by a part of its name. None
# was measured yet: the part "bench" of tools/gpu_slot.py says which number is best.
MEASURED_BLOCK_SIZES: dict[str, int] = {}


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
        hardware: The `jax.Device`, or a description of one, which kernel sets are asked about; None
            if only its memory is known.
    """

    name: str
    available_bytes: int
    notice: str = ""
    has_bfloat16: bool = True
    keeps_bfloat16: bool = True
    hardware: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, device: Any, utilization: float, num_devices: int = 1) -> DeviceSpec:
        """Describes a device that is at hand.

        Args:
            device: The `jax.Device`.
            utilization: The share of a GPU's memory that the engine may use.
            num_devices: The number of devices, which are all alike. Devices that are made of one
                CPU share its memory.
        """
        notice = gpu_memory.notice(utilization) if device.platform == "gpu" else ""
        available = available_bytes(device, utilization) // (
            num_devices if device.platform == "cpu" else 1
        )
        return cls(
            f"{device.platform} ({device.device_kind})",
            available,
            notice,
            has_bfloat16(device),
            device.platform != "cpu" or takes("bfloat16"),
            device,
        )

    @property
    def is_cpu(self) -> bool:
        """Returns whether the device is a CPU."""
        return self.name.startswith("cpu")

    @property
    def platform(self) -> str:
        """Returns the platform whose kernel sets are asked.

        A device that is neither a CPU nor a TPU counts as a GPU.
        """
        return next((each for each in ("cpu", "tpu") if self.name.startswith(each)), "gpu")

    def prefers_mixed_steps(self, attention_backend: str) -> bool:
        """Returns whether a kernel set computes decodes and prompt chunks best in one step.

        "auto" is here the kernel set that is tried first.
        """
        chosen = candidates(attention_backend, self.platform)[0]
        return chosen.prefers_mixed_steps and chosen.runs_on(self.platform)

    def choose_block_size(
        self, requested: int | Literal["auto"], max_tokens: int | None = None
    ) -> int:
        """Returns the tokens of a KV block.

        Args:
            requested: The setting `block_size`; "auto" is what was measured on this card, or 16.
            max_tokens: The most query tokens of a step, if the settings say so; "auto" takes no
                larger blocks.
        """
        if requested != "auto":
            return requested
        measured = (size for card, size in MEASURED_BLOCK_SIZES.items() if card in self.name)
        size = next(measured, USUAL_BLOCK_SIZE)
        # The largest power of two that is no more than the tokens of a step.
        return size if max_tokens is None else min(size, 1 << (max_tokens.bit_length() - 1))

    def choose_kernels(
        self, attention_backend: str, kv_cache_dtype: str, *, batch_invariant: bool
    ) -> Backend | None:
        """Returns the kernels of an engine on such a device; see `choose_backend`.

        Returns:
            None if only the memory of the device is known. It counts as a GPU, and what no GPU
            takes is refused.

        Raises:
            UnsupportedError: The device neither runs nor interprets the kernel set, or its sums
                would depend on the batch.
        """
        if self.hardware is not None:
            return choose_backend(
                attention_backend, self.hardware, kv_cache_dtype, batch_invariant=batch_invariant
            )
        if batch_invariant:
            find_invariant_set(attention_backend, self.platform)
        is_interpreted(attention_backend, self.platform)
        return None

    def ordered_bytes(self, num_tokens: int, outputs_of_token: int, num_positions: int) -> int:
        """Returns the most bytes of sums that kernels keep apart, where these have one order.

        Args:
            num_tokens: The tokens of a step whose rows have few.
            outputs_of_token: The numbers of the outputs of attention, of all heads of a token.
            num_positions: The positions of a block table.
        """
        invariant = find_invariant_set("auto", self.platform)
        if invariant is None:
            return 0
        return SETS[invariant].ordered_bytes(num_tokens, outputs_of_token, num_positions)

    def interleaves_pages(self, attention_backend: str) -> bool:
        """Returns whether an engine with a kernel set keeps interleaved pages."""
        return keeps_interleaved(attention_backend, self.platform)

    def unaddressable_blocks(
        self, attention_backend: str, block_elements: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """Returns the numbers of blocks with which a kernel set cannot address a layer's keys.

        Args:
            attention_backend: The kernel set; of "auto", the one that is tried first.
            block_elements: The elements of one block in one layer's keys.
            dtype: The type of the pages.

        Returns:
            The first such number, and the next number of blocks that it can address.
        """
        elements = candidates(attention_backend, self.platform)[0].unaddressable(dtype)
        return -(-elements.start // block_elements), -(-elements.stop // block_elements)


def available_bytes(device: Any, utilization: float) -> int:
    """Returns how many bytes may be allocated on a `jax.Device`.

    On an accelerator it is the engine's share less the bytes in use, on a CPU all that is free now.
    """
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return gpu_memory.share(statistics["bytes_limit"], utilization) - int(
            statistics.get("bytes_in_use", 0)
        )
    return available_host_bytes()


def available_host_bytes() -> int:
    """Returns the bytes of host memory that are free and that the control group allows."""
    return min(psutil.virtual_memory().available, _cgroup_bytes())


def _cgroup_bytes() -> int:
    """Returns the bytes that the control group still allows; a huge number if it has no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)
