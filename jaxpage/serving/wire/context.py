"""What the wire has to know of the model and of the server's settings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Bounds of one request body. What they do not bound is bounded by the size of the body."""

    max_n: int = 128  # also of best_of and of the width of a beam search
    max_prompts: int = 256
    max_sequences: int = 1024  # prompts times sequences of each
    max_messages: int = 4096
    max_tools: int = 128
    max_tokenize_characters: int = 1_000_000
    max_detokenize_tokens: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """One model as its clients see it."""

    model_names: tuple[str, ...]  # any of them is the model
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # the width of the logits: token ids are below it
    tokenizer: Any | None  # transformers'; None: prompts are token ids, and there is no text
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, where a request says nothing
    system_fingerprint: str = ""
    tool_parser: str | None = None  # "hermes" | "llama3_json"
    reasoning_parser: str | None = None  # "think"
    strict_requests: bool = False  # unknown fields are refused
    limits: Limits = Limits()

    @functools.cached_property
    def max_prompt_characters(self) -> int:
        """No longer text fits in the model, however it is spelled: so much is refused before it is encoded, which takes time."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer is not None else 1
        return self.max_model_len * longest
