"""Checks and loads the tokenizer of a model, never with code of the model's own."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from jaxpage.checkpoints.files import has_file, read_object, read_object_if_there
from jaxpage.checkpoints.finding.resolve import TOKENIZER_FILES
from jaxpage.checkpoints.gguf.header import is_gguf
from jaxpage.checkpoints.problems import list_names, quote
from jaxpage.checkpoints.tokenizers.gguf_tokenizer import gguf_tokenizer
from jaxpage.checkpoints.tokenizers.sentence_piece import sentence_piece_tokenizer
from jaxpage.checkpoints.tokenizers.stored_tokenizers import (
    VOCABULARY_FILES,
    Facts,
    StoredTokenizer,
)
from jaxpage.checkpoints.tokenizers.text_growth import check_growth
from jaxpage.errors import CheckpointError

logger = logging.getLogger(__name__)

# What a class of transformers inherits if the library `tokenizers` alone does the same.
_INHERITED = ("__call__", "_encode_plus", "decode", "_decode", "get_vocab", "backend_tokenizer")
# Texts by which this is tried, too; the third one is the names of special tokens.
_TRIED = ("", " Hello,\t 1234  \u00e9t\u00e9 e\u0301 \u4f60\u597d \U0001f600\r\n\n ")


def load_tokenizer(directory: Path) -> Any | None:
    """Returns the tokenizer of a model directory or GGUF file.

    It is None if there is none: such a model serves token ids.

    Raises:
        CheckpointError: The tokenizer cannot be loaded, or is refused.
    """
    if is_gguf(directory):
        return _check(gguf_tokenizer(directory), directory)
    if not any(has_file(directory, name) for name in VOCABULARY_FILES):
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
    for problem in _template_problems(tokenizer):
        logger.warning("%s: %s", directory, problem)
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


def _template_problems(tokenizer: Any) -> list[str]:
    """Returns which chat templates do not parse, and why.

    Such a model completes text, and its chats are all refused.
    """
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    environment = _compile_jinja_template("").environment
    problems = []
    for name, template in templates.items():
        try:
            # It is not compiled: this would compute its constants, which may take all memory.
            environment.parse(template)
        except Exception as error:  # The parser may raise anything.
            problems.append(
                f"the chat template {quote(name)} does not parse, and every chat will be refused: "
                f"{error!s:.300}"
            )
    return problems


def stored_form(tokenizer: Any) -> tuple[Tokenizer, Facts] | None:
    """Returns a tokenizer of the library `tokenizers` that does the same, and the facts next to it.

    It is None for a tokenizer that does more with texts than that library: its class has methods of
    its own, or it removes spaces from texts. It is tried on a few texts, too.
    """
    if _removes_spaces(tokenizer) or any(
        getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name)
        for name in _INHERITED
    ):
        return None
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # transformers cuts and pads where a call asks for it, whatever tokenizer.json says.
    backend.no_truncation()
    backend.no_padding()
    facts = Facts(
        tokenizer.chat_template,
        tokenizer.eos_token_id,
        list(tokenizer.all_special_ids),
        _template_problems(tokenizer),
    )
    alone = StoredTokenizer(backend, facts, lambda: None)
    texts = (*_TRIED, "".join(map(str, tokenizer.all_special_tokens)))
    is_same = all(
        _encode_and_decode(alone, text) == _encode_and_decode(tokenizer, text) for text in texts
    )
    return (backend, facts) if is_same and alone.get_vocab() == tokenizer.get_vocab() else None


def _encode_and_decode(tokenizer: Any, text: str) -> list[Any]:
    """Returns the token ids of a text, and the texts of these, in all ways in which they differ.

    Of a text for which the tokenizer has no tokens, it returns the error.
    """
    try:
        ids = [tokenizer(text, add_special_tokens=adds)["input_ids"] for adds in (True, False)]
        texts = [tokenizer.decode(ids[0], skip_special_tokens=skips) for skips in (True, False)]
    except BaseException as error:  # Rust's panics are no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return [str(error)]
    return [*ids, *texts]


def _removes_spaces(tokenizer: Any) -> bool:
    """Returns whether decoding removes spaces before punctuation marks."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not is_bpe or bool(getattr(tokenizer, name, True))


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
