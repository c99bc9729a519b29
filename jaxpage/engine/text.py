"""Text in and out: the model's tokenizer, and detokenizers that give text token by token."""

from __future__ import annotations

import copy
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from jaxpage.checkpoints import ModelFiles, eos_token_ids, resolve_model, resolve_tokenizer
from jaxpage.checkpoints.files import has_file, read_object
from jaxpage.checkpoints.gguf_header import is_gguf
from jaxpage.checkpoints.gguf_tokenizer import gguf_tokenizer
from jaxpage.checkpoints.problems import listed, quoted
from jaxpage.checkpoints.resolve import TOKENIZER_FILES
from jaxpage.checkpoints.sentence_piece import sentence_piece_tokenizer
from jaxpage.engine.text_growth import check_growth
from jaxpage.errors import CheckpointError
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REPLACEMENT = "\ufffd"
# Replacement characters at the end of a text that another byte may change: a character of UTF-8 has four bytes, of which three may be
# there. Each of them stands for one byte or for up to three.
_MOST_OPEN = 3
_OPEN_TOKENS = 9
_MOST_PENDING = 16  # tokens that are held back in hope of text
_CONTEXT_TOKENS = 8  # of the prompt, so that the first piece of text gets or lacks its leading space rightly


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer of a model directory or GGUF file, or None if it has none: such a model serves token ids."""
    if is_gguf(directory):
        return _checked(gguf_tokenizer(directory), directory)
    if not any(has_file(directory, name) for name in _TOKENIZER_FILES):
        return None
    _check_regular(directory)
    if not has_file(directory, "tokenizer.json") and has_file(directory, "tokenizer.model"):
        if not has_file(directory, "tokenizer_config.json"):
            return _checked(sentence_piece_tokenizer(directory), directory)
        _check_sentence_piece(directory)
    # A class that only code of the model's own has is not needed where tokenizer.json says everything.
    loader = PreTrainedTokenizerFast if _needs_code(directory) else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {error!s:.500}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"{directory}: the tokenizer has no tokenizer.json and cannot be converted to one")
    return _checked(tokenizer, directory)


def _checked(tokenizer: Any | None, directory: Path) -> Any | None:
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
    """Raises CheckpointError for what is no file among those that transformers reads: a pipe would block it for good."""
    found = sorted(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern))
    wrong = [str(file.relative_to(directory)) for file in found if not file.is_file() and not file.is_dir()]
    if wrong:
        raise CheckpointError(f"{directory}: {listed(wrong)} can be no file of a tokenizer: it is not a regular file")


def _warn_of_templates(directory: Path, tokenizer: Any) -> None:
    """Says which chat templates do not parse: the model completes text, and its chats will all be refused."""
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    environment = _compile_jinja_template("").environment
    for name, template in templates.items():
        try:
            environment.parse(template)  # compiling it would compute its constants, which may take all memory
        except Exception as error:  # whatever the parser raises
            logger.warning(
                "%s: the chat template %s does not parse, and every chat will be refused: %s",
                directory,
                quoted(name),
                f"{error!s:.300}",
            )


def _check_sentence_piece(directory: Path) -> None:
    """Raises CheckpointError where transformers could not read tokenizer.model, which it then takes for another format."""
    if find_spec("sentencepiece") is None:
        raise CheckpointError(
            f"{directory}: its tokenizer is tokenizer.model alone, and the package that reads SentencePiece models is not "
            "installed: pip install sentencepiece, or give a directory with tokenizer.json with tokenizer= (--tokenizer)"
        )


def _needs_code(directory: Path) -> bool:
    """Returns whether tokenizer_config.json asks for code of the model's own while tokenizer.json is there."""
    if not all(has_file(directory, name) for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    return bool(read_object(directory, "tokenizer_config.json").get("auto_map"))


def tokenizer_of(config: EngineConfig) -> Any | None:
    """The tokenizer of a configuration's model, or None if it has none. Raises ModelNotFoundError or CheckpointError."""
    model = resolve_model(config.model, config.revision)
    return load_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else model)


def ends_of_text(files: ModelFiles, tokenizer: Any | None) -> frozenset[int]:
    """Returns the ids that end a text: those of the model's files and the tokenizer's own, which vLLM adds, too."""
    token_ids = eos_token_ids(files.directory, files.config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        token_ids |= {tokenizer.eos_token_id}
    beyond = {token_id for token_id in token_ids if token_id >= files.spec.vocab_size}
    if beyond:
        logger.warning(
            "eos_token_id %s can never be drawn: the model's ids end at %d",
            listed(sorted(beyond)),
            files.spec.vocab_size - 1,
        )
    return token_ids - beyond


def words_as_token_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens that spell each of `bad_words`, at the beginning of a text and behind a space; other space before a word is dropped.

    vLLM leaves the form behind a space out where it has not as many tokens. But then a word that is one token behind a space and two
    at the beginning would come out all the same, so both are kept, unless one is the other behind a token for the space alone.

    Raises ValueError if the tokenizer makes nothing of a word.
    """

    def spelled(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    found: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        text = word.lstrip() or word  # a word may be nothing but space
        if not (plain := spelled(text)):
            raise ValueError(f"bad_words has {word!r}, of which the tokenizer makes no token")
        found[plain] = None
        if (behind_space := spelled(f" {text}"))[-len(plain) :] != plain:
            found[behind_space] = None
    return tuple(found)


class StreamDetokenizer:
    """Text of one sequence as its tokens come; bytes of an unfinished character are held back until `flush`.

    A token's text depends on the tokens before it (a leading space, the bytes of a character), so a short window is decoded with and
    without what is new, and the difference is the new text. `tokenizers.DecodeStream` does the same, but it raises where a tokenizer
    with byte fallback changes its mind about invalid bytes, and it repeats a prompt that ends in a replacement character.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool):
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._known = self._decode(self._window)  # the text of the window that has been given out, or was the prompt's
        self._num_known = len(self._window)

    def push(self, token_id: int) -> str:
        if self._skip and not self._decode([token_id]) and self._backend.decode([token_id], skip_special_tokens=False):
            return ""  # a special token: it is no part of any text
        self._window.append(token_id)
        text, new = self._decode(self._window), ""
        num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
        if not num_replaced or num_replaced > _MOST_OPEN:
            new = self._take(text, num_open=min(num_replaced, _MOST_OPEN))
        if not new and len(self._window) - self._num_known > _MOST_PENDING:
            new = self._take(text)
            if not new:
                del self._window[self._num_known]
        return new

    def flush(self) -> str:
        """What is held back, with the replacement character for bytes that never became one."""
        return self._take(self._decode(self._window))

    def fork(self) -> Self:
        other = copy.copy(self)
        other._window = self._window.copy()
        return other

    def _take(self, text: str, num_open: int = 0) -> str:
        """What `text` has beyond what is known; the window moves on to the tokens that brought it.

        num_open: characters at the end that stay held back, and in the window the tokens that they are of.
        """
        text = text[: len(text) - num_open]
        if new := text[_num_common(self._known, text) :]:
            self._window = self._window[self._num_known :]
            known = self._decode(self._window)
            self._known = known[: len(known) - num_open]
            self._num_known = max(0, len(self._window) - _OPEN_TOKENS) if num_open else len(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip))


def _num_common(first: str, second: str) -> int:
    """How many characters two strings begin with alike."""
    if second.startswith(first):
        return len(first)
    return next(index for index in range(len(first)) if first[: index + 1] != second[: index + 1])


class NoText:
    """The detokenizer of a model without tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def fork(self) -> Self:
        return self
