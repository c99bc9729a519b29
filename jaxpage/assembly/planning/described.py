"""Defines the records that an engine is planned with, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpage.assembly.planning.drafting import Drafting
from jaxpage.assembly.planning.vectors import VectorInput
from jaxpage.device.hardware import Backend, DeviceSpec
from jaxpage.models import ModelSpec
from jaxpage.models.parameters import LoRASpec
from jaxpage.settings.engine_config import EngineConfig


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
        kernels: The kernel set; None if only the memory of the device is known.
        dtype_reason: The reason why the dtype differs from the checkpoint's or depends on the
            machine, or an empty text.
        max_text: The tokens of the longest text that an encoder's files allow; None if they say
            nothing.
        vectors: What may take the place of tokens in prompts; None if nothing may.
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
    max_text: int | None = None
    vectors: VectorInput | None = None

    @property
    def block_size(self) -> int:
        """Returns the tokens of a KV block, where the setting is "auto", too."""
        config = self.config
        return self.device.choose_block_size(config.block_size, config.max_num_batched_tokens)

    @property
    def interleaves_pages(self) -> bool:
        """Returns whether keys and values share an array of pages, which the kernel set decides."""
        return self.device.interleaves_pages(self.config.attention_backend)
