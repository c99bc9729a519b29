"""Text in and out: the model's tokenizer, and detokenizers that give text token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from jaxpage.errors import CheckpointError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_CONTEXT_TOKENS = 8  # of the prompt, so that the first piece of text gets or lacks its leading space rightly


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer of a model directory, or None if there are no files of one: such a model serves token ids."""
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"{directory}: the tokenizer has no tokenizer.json and cannot be converted to one")
    return tokenizer


class StreamDetokenizer:
    """Text of one sequence as its tokens come; bytes of an unfinished character are held back until `flush`."""

    def __init__(self, tokenizer: Any, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool):
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._stream.step(self._backend, token_id)
        if piece is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return str(piece)

    def flush(self) -> str:
        """What is held back, with the replacement character for bytes that never became one."""
        held, self._held = self._held, []
        return str(self._backend.decode(held, skip_special_tokens=self._skip)) if held else ""


class NoText:
    """The detokenizer of a model without tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
