"""Tells programs the form in which a model writes tool calls and reasoning."""

from __future__ import annotations

from pathlib import Path

from jaxpage.chat_forms import ChatFormat
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.checkpoints.tokenizers import load_tokenizer
from jaxpage.errors import ConfigError
from jaxpage.serving import derive_form, derive_from

# A template alone, without a tokenizer, gets the tokens that most of them call so.
_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat_format(path: str | Path) -> ChatFormat:
    """Returns the form in which a model writes tool calls and reasoning.

    Args:
        path: A model, as for `LLM`, or a file `.jinja` with a chat template.

    Raises:
        ConfigError: There is no such file.
        JaxpageError: There is no such model, or its tokenizer cannot be read.
    """
    file = Path(path)
    if file.suffix != ".jinja":
        return derive_form(load_tokenizer(resolve_model(str(path)))).form
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a chat template: {error}") from None
    return derive_from(source, _SPECIAL_TOKENS).form
