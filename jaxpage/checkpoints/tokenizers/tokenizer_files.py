"""Checks and loads the tokenizer of a model, never with code of the model's own."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from jaxpage.checkpoints.config_file import eos_token_ids
from jaxpage.checkpoints.files import has_file, read_object, read_object_if_there
from jaxpage.checkpoints.finding.resolve import TOKENIZER_FILES, resolve_model, resolve_tokenizer
from jaxpage.checkpoints.gguf.header import is_gguf
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.checkpoints.problems import list_names, quote
from jaxpage.checkpoints.tokenizers.gguf_tokenizer import gguf_tokenizer
from jaxpage.checkpoints.tokenizers.sentence_piece import sentence_piece_tokenizer
from jaxpage.checkpoints.tokenizers.text_growth import check_growth
from jaxpage.errors import CheckpointError
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: Path) -> Any | None:
    """Returns the tokenizer of a model directory or GGUF file.

    It is None if there is none: such a model serves token ids.

    Raises:
        CheckpointError: The tokenizer cannot be loaded, or is refused.
    """
    if is_gguf(directory):
        return _check(gguf_tokenizer(directory), directory)
    if not any(has_file(directory, name) for name in _TOKENIZER_FILES):
        return None
    _check_regular(directory)
    if not has_file(directory, "tokenizer.json") and has_file(directory, "tokenizer.model"):
        if not has_file(directory, "tokenizer_config.json"):
            return _check(sentence_piece_tokenizer(directory), directory)
        _check_sentence_piece(directory)
    # A class that only the model's own code has is not needed where tokenizer.json says everything.
    loader = PreTrainedTokenizerFast if _needs_code(directory) else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # The library raises anything that its parsers raise.
        raise CheckpointError(
            f"{directory}: the tokenizer cannot be loaded: {error!s:.500}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{directory}: the tokenizer has no tokenizer.json and cannot be converted to one"
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = _template_of_processor(directory)
    return _check(tokenizer, directory)


def _template_of_processor(directory: Path) -> str | None:
    """Returns the template in chat_template.json, which older models with pictures have."""
    template = (read_object_if_there(directory, "chat_template.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None


def _check(tokenizer: Any | None, directory: Path) -> Any | None:
    """Returns the tokenizer, after a warning of templates that do not parse.

    Raises:
        CheckpointError: The tokenizer can make a text much longer than it was.
    """
    if tokenizer is None:
        return None
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        try:
            check_growth(tokenizer)
        except ValueError as error:
            raise CheckpointError(f"{directory}: the tokenizer is refused: {error}") from None
    _warn_of_templates(directory, tokenizer)
    return tokenizer


def _check_regular(directory: Path) -> None:
    """Refuses entries that are no regular files among those that transformers reads.

    A pipe would block it forever.

    Raises:
        CheckpointError: There is such an entry.
    """
    files = sorted(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern))
    wrong = [
        str(file.relative_to(directory))
        for file in files
        if not file.is_file() and not file.is_dir()
    ]
    if wrong:
        raise CheckpointError(
            f"{directory}: {list_names(wrong)} can be no file of a tokenizer: it is not a regular "
            "file"
        )


def _warn_of_templates(directory: Path, tokenizer: Any) -> None:
    """Logs which chat templates do not parse.

    Such a model completes text, and its chats are all refused.
    """
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    environment = _compile_jinja_template("").environment
    for name, template in templates.items():
        try:
            # It is not compiled: this would compute its constants, which may take all memory.
            environment.parse(template)
        except Exception as error:  # The parser may raise anything.
            logger.warning(
                "%s: the chat template %s does not parse, and every chat will be refused: %s",
                directory,
                quote(name),
                f"{error!s:.300}",
            )


def _check_sentence_piece(directory: Path) -> None:
    """Checks that transformers can read tokenizer.model.

    Without the package it would take the file for one of another format.

    Raises:
        CheckpointError: The package `sentencepiece` is not installed.
    """
    if find_spec("sentencepiece") is None:
        raise CheckpointError(
            f"{directory}: its tokenizer is tokenizer.model alone, and the package that reads "
            "SentencePiece models is not "
            "installed: pip install sentencepiece, or give a directory with tokenizer.json with "
            "tokenizer= (--tokenizer)"
        )


def _needs_code(directory: Path) -> bool:
    """Returns whether tokenizer_config.json asks for code that tokenizer.json makes unnecessary."""
    if not all(has_file(directory, name) for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    return bool(read_object(directory, "tokenizer_config.json").get("auto_map"))


def tokenizer_of(config: EngineConfig) -> Any | None:
    """Returns the tokenizer of a configuration's model, or None if it has none.

    Raises:
        ModelNotFoundError: There is no such model.
        CheckpointError: The tokenizer cannot be loaded, or is refused.
    """
    model = resolve_model(config.model, config.revision)
    return load_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else model)


def ends_of_text(files: ModelFiles, tokenizer: Any | None) -> frozenset[int]:
    """Returns the ids that end a text: those of the model's files and the tokenizer's own.

    vLLM adds the tokenizer's too. Ids beyond the model's vocabulary are left out, with a warning.
    """
    token_ids = eos_token_ids(files.directory, files.config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        token_ids |= {tokenizer.eos_token_id}
    beyond = {token_id for token_id in token_ids if token_id >= files.spec.vocab_size}
    if beyond:
        logger.warning(
            "eos_token_id %s can never be drawn: the model's ids end at %d",
            list_names(sorted(beyond)),
            files.spec.vocab_size - 1,
        )
    return token_ids - beyond
