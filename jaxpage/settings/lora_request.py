"""Defines `LoRARequest`, which names the adapter of a request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """Names a LoRA adapter, in files of PEFT's layout or in memory.

    Files are read by the first call that uses the adapter.

    Args:
        lora_name: The name for people and for error messages.
        lora_int_id: An id of at least 1. It means one name and one path for the life of an engine.
        lora_path: The directory of `adapter_config.json` and `adapter_model.safetensors`; None for
            an adapter whose numbers `LLM.update_adapter` gives.

    Raises:
        TypeError: A field has the wrong type; the message names the field and its value.
        ValueError: A field is empty or out of range; the message names the field and its value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str):
            raise TypeError(f"lora_name must be a string, got {self.lora_name!r:.80}")
        if not self.lora_name:
            raise ValueError("lora_name must not be empty")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise TypeError(f"lora_int_id must be an integer, got {self.lora_int_id!r:.80}")
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if self.lora_path is None:
            return
        if not isinstance(self.lora_path, str | os.PathLike):
            raise TypeError(f"lora_path must be a path, got {self.lora_path!r:.80}")
        # In one form, because requests are compared: a `Path` and its text name the same adapter.
        object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not self.lora_path:
            raise ValueError("lora_path must not be empty")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or of each
