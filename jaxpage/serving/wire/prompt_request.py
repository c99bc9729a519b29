"""Defines what the wire format asks of the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.engine.texts import Truncation
from jaxpage.serving.wire.pictures import RequestedPictures
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


class PromptRequest(NamedTuple):
    """Holds one prompt for the engine.

    Attributes:
        prompt: The text or the token ids; none if the prompt is vectors. The server encodes text
            outside of its event loop.
        params: The parameters of sampling or of a beam search.
        add_special_tokens: True if encoding adds special tokens.
        lora: The adapter, or None.
        truncation: The way in which the prompt is cut; None if it is not.
        pictures: The pictures of the prompt, if it has any.
        vectors: The vectors that the prompt is, an array [T, D]; None if it is a text or token ids.
        receipt: True if the answer has a receipt.
        request_id: The client's id for the request, which it may be continued by; None if it has
            none.
        continues: True if the aborted request of this id goes on. Then it has the prompt and the
            parameters.
    """

    prompt: str | tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    add_special_tokens: bool
    lora: LoRARequest | None = None
    truncation: Truncation | None = None
    pictures: RequestedPictures | None = None
    vectors: Any = None
    receipt: bool = False
    request_id: str | None = None
    continues: bool = False


def prompts_of(prompts: Any) -> list[Any]:
    """Returns one or several prompts, each a text or token ids, as a list."""
    return (
        [prompts]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        else list(prompts)
    )
