"""Converts between text and token ids: bad words, and detokenizers that work token by token."""

from __future__ import annotations

import codecs
import copy
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, Self

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # the name of a byte, with byte fallback
# Tokens that are decoded with the next one: they decide whether it begins with a space, and have
# the bytes of an unfinished character, at most three.
_CONTEXT_TOKENS = 8
_MAX_CONTEXT_TOKENS = 256  # of a prompt that ends with a run of bytes
_MAX_TOKENS = 24  # in a window that grows by tokens without text
# With byte fallback a run of bytes is held back until it ends, as far as it is not longer. It is a
# word, or some emoji: a reader hardly waits for it.
MAX_HELD_BYTES = 96


def words_as_token_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that spell each bad word, both at the start of a text and after a space.

    Space before a word is dropped. vLLM leaves out the form after a space if its number of tokens
    differs. But then a word that is one token after a space, and two at the start, would still come
    out. So both forms are kept, unless the form after a space is a token for the space and then the
    other form.

    Raises:
        ValueError: The tokenizer has no token for a word.
    """

    def spell(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    spellings: dict[tuple[int, ...], None] = {}  # used as an ordered set
    for word in words:
        text = word.lstrip() or word  # a word may be only space
        if not (plain := spell(text)):
            raise ValueError(f"bad_words has {word!r}, of which the tokenizer makes no token")
        spellings[plain] = None
        if (after_space := spell(f" {text}"))[-len(plain) :] != plain:
            spellings[after_space] = None
    return tuple(spellings)


class _TokenBytes(dict[int, bytes | None]):
    """Remembers the bytes of each token; None for a token that is a text of its own.

    Attributes:
        has_fallback: True if some tokens are one byte each, such as `<0xE7>`, and others are texts.
        special: The ids of special tokens.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        decoders = _decoder_types(backend.decoder)
        self._is_of_bytes = "ByteLevel" in decoders
        self.has_fallback = "ByteFallback" in decoders
        added = backend.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id in added if added[token_id].special)

    def __missing__(self, token_id: int) -> bytes | None:
        self[token_id] = piece = self._piece(self._backend.id_to_token(token_id))
        return piece

    def _piece(self, name: str | None) -> bytes | None:
        if name is None:
            return b""  # decoders pass over ids that no token has
        if self._is_of_bytes:
            letters = _byte_of_letter()
            is_spelled = all(letter in letters for letter in name)
            return bytes(map(letters.__getitem__, name)) if is_spelled else name.encode()
        if self.has_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(match[1])
        return None


def _decoder_types(decoder: Any) -> set[str]:
    """Returns the types of a decoder and of those that it consists of."""
    if decoder is None:
        return set()
    described = json.loads(decoder.__getstate__())
    return {part["type"] for part in (described, *described.get("decoders", ()))}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte that each letter of a vocabulary of bytes stands for.

    Printable bytes stand for themselves, and the letters from U+0100 on for the others.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


@functools.lru_cache(maxsize=4)
def _bytes_by_token(backend: Any) -> _TokenBytes:
    return _TokenBytes(backend)


def token_bytes(tokenizer: Any, token_id: int) -> bytes | None:
    """Returns the bytes that a token stands for, or None if it is a text of its own."""
    return _bytes_by_token(tokenizer.backend_tokenizer)[token_id]


class StreamDetokenizer:
    """Makes the text of one sequence as its tokens come.

    The bytes of an unfinished character are held back until `flush`. A token's text depends on the
    tokens before it (a leading space, the bytes of a character). So a short window of tokens is
    decoded, and the new text is what the decoded window has beyond the known text:

        tokens  [ known ... | new ... ]
        text    "the cat sat" + " down"     only " down" is new

    The bytes of the tokens say whether a character is finished. The text does not: decoders write a
    replacement character for an unfinished character, for invalid bytes, and for U+FFFD itself.

    With byte fallback (`<0xE7>`) a decoder writes a run of bytes as a text, or, if any of it is
    invalid, a replacement character for each byte, those of complete characters included. So a run
    is held back until it ends or something of it is invalid. Of a longer one the complete
    characters are given out and stay, whatever follows them.

    `tokenizers.DecodeStream` raises an error in such a run, and it repeats a prompt that ends in a
    replacement character.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        max_held_bytes: int = MAX_HELD_BYTES,
    ):
        """Begins after a prompt.

        Args:
            tokenizer: The tokenizer.
            prompt_token_ids: The tokens before the first one; their text is not given out.
            skip_special_tokens: True if special tokens are no text.
            max_held_bytes: The longest run of bytes that is held back until it ends. With 0 each
                character is given out with its last byte.
        """
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._bytes = _bytes_by_token(self._backend)
        # The last tokens, and the part of their text that was given out or belongs to the prompt.
        self._window: list[int] = []
        self._known = ""
        self._unfinished = b""  # the bytes of an unfinished character
        # With byte fallback the run of bytes that is held back, which is not in the window.
        self._open: list[int] = []
        self._max_held = 0  # a prompt shows its complete characters
        self._num_prompted = 0  # of `_open`, which the prompt shows already
        self._is_broken = False  # in a run of bytes of which some were invalid
        for token_id in self._context(prompt_token_ids):
            self.push(token_id)
        self._max_held = max_held_bytes
        self._num_prompted = len(self._open)
        if self._unfinished and not self._open:
            self._known = self._decode(self._window)

    def _context(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the last tokens of the prompt, with a run of bytes from its beginning on."""
        begin = max(0, len(prompt_token_ids) - _CONTEXT_TOKENS)
        if self._bytes.has_fallback:
            minimum = max(0, len(prompt_token_ids) - _MAX_CONTEXT_TOKENS)
            while begin > minimum and self._bytes[prompt_token_ids[begin]] is not None:
                begin -= 1
            if begin == minimum > 0:
                # Bytes of a character that begins before these tokens would make the run invalid.
                positions = range(begin, len(prompt_token_ids))
                starts = (
                    at for at in positions if not _continues(self._bytes[prompt_token_ids[at]])
                )
                begin = next(starts, len(prompt_token_ids))
        return prompt_token_ids[begin:]

    def push(self, token_id: int) -> str:
        """Returns the text that is certain with this token; it may be empty."""
        piece = self._bytes[token_id]
        if piece == b"" or (self._skip and token_id in self._bytes.special):
            return ""
        if piece is None:
            new = self._end_run()
            self._is_broken = False
            return new + self._append([token_id])
        if self._bytes.has_fallback:
            return self._push_byte(token_id, piece)
        whole = self._unfinished + piece
        # `[1]` is the number of bytes that are decoded: what follows begins a character.
        self._unfinished = whole[codecs.utf_8_decode(whole, "replace", False)[1] :]
        return self._append([token_id])

    def flush(self) -> str:
        """Returns the text that is held back; incomplete bytes become the replacement character."""
        if self._open:
            return self._end_run()
        self._unfinished = b""
        return self._take(self._decode(self._window))

    def flush_copy(self) -> str:
        """Returns what `flush` would give; it is empty between characters."""
        return self.fork().flush() if self._unfinished else ""

    def fork(self) -> Self:
        """Returns a detokenizer with the same past, which goes on by itself."""
        other = copy.copy(self)
        other._window = self._window.copy()
        other._open = self._open.copy()
        return other

    def _push_byte(self, token_id: int, piece: bytes) -> str:
        """Returns the text that is certain with a byte of a vocabulary with byte fallback."""
        if self._is_broken:
            return _REPLACEMENT
        self._open.append(token_id)
        self._unfinished += piece
        try:
            _, num_read = codecs.utf_8_decode(self._unfinished, "strict", False)
        except UnicodeDecodeError:
            return self._break_off()
        if num_read:
            self._unfinished = b""
        if self._unfinished or len(self._open) <= self._max_held:
            return ""
        return self._end_run()

    def _end_run(self) -> str:
        """Returns the text of the run of bytes that is held back, if there is one."""
        if self._unfinished:
            return self._break_off()
        run, self._open = self._open, []
        self._num_prompted = 0
        return self._append(run) if run else ""

    def _break_off(self) -> str:
        """Returns the text of bytes that will be no character, if there are any."""
        if not self._open:
            return ""
        num_new = len(self._open) - self._num_prompted
        self._window, self._open = self._open, []
        self._known = self._decode(self._window)
        self._unfinished = b""
        self._num_prompted = 0
        self._is_broken = True
        return num_new * _REPLACEMENT

    def _append(self, token_ids: list[int]) -> str:
        """Adds tokens to the window, and returns the text that is new and certain."""
        self._window += token_ids
        new = self._take(self._certain())
        if new:
            # A run of bytes stays valid if it begins with a character.
            is_run = self._bytes.has_fallback and self._bytes[token_ids[0]] is not None
            self._window = self._window[-(len(token_ids) if is_run else _CONTEXT_TOKENS) :]
            self._known = self._certain()
        elif len(self._window) > _MAX_TOKENS:
            self._window.pop()  # a token without text
        return new

    def _certain(self) -> str:
        """Returns the text of the window without that of an unfinished character.

        The text has one replacement character for it, because it could still become a character.
        """
        text = self._decode(self._window)
        return text[:-1] if self._unfinished else text

    def _take(self, text: str) -> str:
        """Returns the part of the window's text that is not known yet."""
        new = text[_num_common(self._known, text) :]
        if new:
            self._known = text
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip))


def _continues(piece: bytes | None) -> bool:
    """Returns whether a byte is one of a character that began before it."""
    return piece is not None and b"\x80" <= piece < b"\xc0"


def _num_common(first: str, second: str) -> int:
    """Returns the number of characters that two strings have in common at their start."""
    if second.startswith(first):
        return len(first)
    return next(index for index in range(len(first)) if first[: index + 1] != second[: index + 1])


class NoText:
    """Gives no text, for a model without a tokenizer."""

    def push(self, token_id: int) -> str:
        """Returns no text."""
        return ""

    def flush(self) -> str:
        """Returns no text."""
        return ""

    def fork(self) -> Self:
        """Returns itself, since it keeps nothing."""
        return self
