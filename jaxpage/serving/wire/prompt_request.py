"""What the wire asks of the engine."""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


class PromptRequest(NamedTuple):
    """One prompt for the engine. Text is encoded by the server, off the event loop."""

    prompt: str | tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    add_special_tokens: bool
    lora: LoRARequest | None = None
