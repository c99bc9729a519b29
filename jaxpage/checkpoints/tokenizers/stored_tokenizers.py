"""Keeps tokenizers as files: a start that finds one needs the library `tokenizers` alone.

transformers decides what the files of a tokenizer mean, and takes a second to import. Here its
decision is kept: the tokenizer as tokenizer.json has it, and the few facts next to it. The key is
the contents of all files that transformers may read, the versions of the libraries, and the code
of this room.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jaxpage.checkpoints.files import has_file
from jaxpage.checkpoints.gguf.header import is_gguf
from jaxpage.private_files import make_private, open_private
from jaxpage.user_cache import user_cache
from jaxpage.versions import package_version

logger = logging.getLogger(__name__)

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_FILES = 16  # in the directory: the one that was unused for the longest time goes first
# transformers reads some tokenizers in another way where these packages are installed.
_OPTIONAL = ("mistral_common", "sentencepiece", "tiktoken")
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_MAX_BYTES = 256_000_000  # of the files of one tokenizer


class Facts(NamedTuple):
    """Holds what a start asks a tokenizer of transformers for.

    Attributes:
        chat_template: The chat template, or several by name.
        eos_token_id: The id that ends a text.
        all_special_ids: The ids of its special tokens.
        problems: Why chat templates do not parse; these are logged at each start.
    """

    chat_template: str | dict[str, str] | None
    eos_token_id: int | None
    all_special_ids: list[int]
    problems: list[str]


class Encoding(dict[str, Any]):
    """Holds the token ids of a text as "input_ids", as an encoding of transformers does.

    Attributes:
        encodings: The encodings of the library `tokenizers`.
    """

    def __init__(self, token_ids: Any, encodings: Sequence[Any]) -> None:
        super().__init__(input_ids=token_ids)
        self.encodings = encodings


class StoredTokenizer:
    """Serves as a tokenizer of transformers, which is loaded when more is asked for.

    It encodes texts, decodes tokens and has the vocabulary by itself. Everything else, such as
    rendering a chat template, is that of the tokenizer of transformers.

    Args:
        backend: The tokenizer of the library `tokenizers`.
        facts: The facts about it.
        load: Loads the tokenizer of transformers.
    """

    def __init__(self, backend: Tokenizer, facts: Facts, load: Callable[[], Any]) -> None:
        self.backend_tokenizer = backend
        self.chat_template = facts.chat_template
        self.eos_token_id = facts.eos_token_id
        self.all_special_ids = facts.all_special_ids
        self._load = load
        self._loading = threading.Lock()
        self._whole: Any = None

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Returns the token ids of a text, or of several, as "input_ids"."""
        if len(texts) == 1 and options.keys() <= {"add_special_tokens"}:
            if isinstance(text := texts[0], str):
                encoding = self.backend_tokenizer.encode(text, **options)
                return Encoding(encoding.ids, [encoding])
            if isinstance(text, list) and text and all(isinstance(part, str) for part in text):
                encodings = self.backend_tokenizer.encode_batch(text, **options)
                return Encoding([encoding.ids for encoding in encodings], encodings)
        return self.whole(*texts, **options)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Returns the text of token ids."""
        if not options and isinstance(token_ids, list) and all(type(t) is int for t in token_ids):
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.whole.decode(token_ids, skip_special_tokens, **options)

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, by their names."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        # By `__len__` each `if tokenizer` would count the vocabulary; transformers has this, too.
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks every object for, as to copy it
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def whole(self) -> Any:
        """Returns the tokenizer of transformers."""
        with self._loading:
            if self._whole is None:
                self._whole = self._load()
            return self._whole


def whole_tokenizer(tokenizer: Any | None) -> Any | None:
    """Returns the tokenizer of transformers for one that `open_tokenizer` returned."""
    return tokenizer.whole if isinstance(tokenizer, StoredTokenizer) else tokenizer


def open_tokenizer(directory: Path) -> Any | None:
    """Returns the tokenizer of a model directory or GGUF file.

    It is that of `load_tokenizer`, or a `StoredTokenizer`, which does the same without having
    imported transformers, if an earlier start has stored it.

    Raises:
        CheckpointError: The tokenizer cannot be loaded, or is refused.
    """
    if not is_gguf(directory) and not any(has_file(directory, name) for name in VOCABULARY_FILES):
        return None
    if (path := _path(directory)) is None:
        return _load(directory)
    if (stored := _read(path)) is None:
        # Lazy on purpose: transformers takes a second to import.
        from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer, stored_form

        tokenizer = load_tokenizer(directory)
        if tokenizer is not None and (form := stored_form(tokenizer)) is not None:
            _write(path, *form)
        return tokenizer
    backend, facts = stored
    for problem in facts.problems:
        logger.warning("%s: %s", directory, problem)
    return StoredTokenizer(backend, facts, functools.partial(_load, directory))


def _load(directory: Path) -> Any | None:
    # Lazy on purpose, as above.
    from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer

    return load_tokenizer(directory)


def _path(directory: Path) -> Path | None:
    """Returns the file that keeps a directory's tokenizer; None if there can be none."""
    if not directory.is_dir() or not has_file(directory, "tokenizer.json"):
        return None
    key = hashlib.sha256(repr(_surroundings()).encode())
    num_bytes = 0
    try:
        for file in _files(directory):
            num_bytes += file.stat().st_size
            if not file.is_file() or num_bytes > _MAX_BYTES:
                return None
            contents = file.read_bytes()
            key.update(f"\n{file.relative_to(directory)} {len(contents)}\n".encode())
            key.update(contents)
        return user_cache() / "tokenizers" / key.hexdigest()
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


def _files(directory: Path) -> Iterator[Path]:
    """Yields all files that can be part of a tokenizer, in a fixed order."""
    for folder in (directory, directory / "additional_chat_templates"):
        if folder.is_dir():
            yield from sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)


@functools.cache
def _surroundings() -> tuple[Any, ...]:
    """Returns what the meaning of a tokenizer's files depends on besides the files."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    versions = [package_version(name) for name in ("transformers", "tokenizers")]
    optional = [find_spec(name) is not None for name in _OPTIONAL]
    return hashlib.sha256(code).hexdigest(), versions, optional


def _read(path: Path) -> tuple[Tokenizer, Facts] | None:
    """Returns the tokenizer in a file; None if the file is missing or damaged."""
    try:
        contents = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # the file system may be read-only
        os.utime(path)
    digest, _, contents = contents.partition(b"\n")
    facts, _, backend = contents.partition(b"\n")
    if digest != _digest(path, contents):
        logger.warning("%s is made again: its contents are not those that were written", path)
        return None
    return Tokenizer.from_buffer(backend), Facts(**json.loads(facts))


def _write(path: Path, backend: Tokenizer, facts: Facts) -> None:
    """Writes a tokenizer to a file; where this fails, transformers loads it at the next start."""
    contents = f"{json.dumps(facts._asdict())}\n{backend.to_str()}".encode()
    # Several programs and threads may keep the same tokenizer at the same time.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        make_private(path.parent)
        try:
            with open_private(temporary, "wb") as file:
                file.write(_digest(path, contents) + b"\n" + contents)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        files = sorted(path.parent.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for file_to_delete in files[MAX_FILES:]:
            file_to_delete.unlink(missing_ok=True)
    except OSError as error:
        logger.info("cannot keep the tokenizer in %s: %s", path.parent, error)


def _digest(path: Path, contents: bytes) -> bytes:
    """Returns the digest of a file's name and contents, so that a renamed file is noticed, too."""
    return hashlib.sha256(path.name.encode() + contents).hexdigest().encode()
