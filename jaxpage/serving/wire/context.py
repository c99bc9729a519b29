"""What the wire has to know of the model and of the server's settings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import shown
from jaxpage.settings.lora_request import LoRARequest


@dataclass(frozen=True)
class RequestLimits:
    """Bounds of one request beside those of its fields (fields.py)."""

    max_prompts: int = 256
    max_sequences: int = 1024  # prompts times sequences of each
    max_tokenize_characters: int = 1_000_000
    max_detokenize_tokens: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """One model as its clients see it."""

    model_names: tuple[str, ...]  # any of them is the model
    adapters: dict[str, LoRARequest] = field(
        default_factory=dict
    )  # by name, beside the model; they change as it serves
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # the width of the logits: token ids are below it
    tokenizer: Any | None  # transformers'; None: prompts are token ids, and there is no text
    # of SamplingParams, where a request says nothing
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    system_fingerprint: str = ""
    model_type: str = ""  # as config.json has it
    tool_parser: str | None = None  # "hermes" | "llama3_json"
    reasoning_parser: str | None = None  # "think"
    strict_requests: bool = False  # unknown fields are refused
    limits: RequestLimits = RequestLimits()

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Of a request's `model`. None: the model without one. Raises ApiError for a name that is not served."""
        if name is None or name in self.model_names:
            return None
        if (adapter := self.adapters.get(name)) is None:
            raise ApiError(
                404,
                f"The model {shown(name)} does not exist",
                param="model",
                code="model_not_found",
            )
        return adapter

    def fingerprint(self, weights_version: int) -> str | None:
        """Of answers: what was computed by other weights than those of the start has their version behind it."""
        if not self.system_fingerprint:
            return None
        return (
            f"{self.system_fingerprint}-{weights_version}"
            if weights_version
            else self.system_fingerprint
        )

    @functools.cached_property
    def max_prompt_characters(self) -> int:
        """No longer text fits in the model, however it is spelled: so much is refused before it is encoded, which takes time."""
        longest = (
            max(map(len, self.tokenizer.get_vocab()), default=1)
            if self.tokenizer is not None
            else 1
        )
        return self.max_model_len * longest

    def checked_prompt(self, prompt: str | list[int], param: str) -> str | tuple[int, ...]:
        """The prompt of a request. Raises ApiError for one that is too long on the face of it, or text where there is no tokenizer."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise ApiError(
                400, "The model has no tokenizer; give the prompt as token ids", param=param
            )
        self.check_length(prompt, param)
        return valid_text(prompt, param)

    def check_length(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long on the face of it."""
        if len(text) > self.max_prompt_characters:
            message = f"The prompt has {len(text)} characters, which cannot fit in max_model_len={self.max_model_len} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def valid_text(text: str, param: str) -> str:
    """Text that UTF-8 can express: tokenizers take no other. Raises ApiError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, f"{param} contains invalid Unicode: a lone surrogate", param=param
        ) from None
    return text
