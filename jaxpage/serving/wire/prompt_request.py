"""What the wire asks of the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


class PromptRequest(NamedTuple):
    """One prompt for the engine. Text is encoded by the server, off the event loop."""

    prompt: str | tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    add_special_tokens: bool
    lora: LoRARequest | None = None


def prompts_of(given: Any) -> list[Any]:
    """One or several prompts, each text or token ids, as a list."""
    return (
        [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    )
