"""Converts between text and token ids: bad words, and detokenizers that work token by token."""

from __future__ import annotations

import copy
from typing import Any, Self

_REPLACEMENT = "\ufffd"
# A further byte may change up to three replacement characters at the end of a text: a character of
# UTF-8 has four bytes, of which three may be there. One replacement character may replace one to
# three bytes.
_MOST_OPEN = 3
_OPEN_TOKENS = 9
_MOST_PENDING = 16  # the most tokens that are held back while they give no text
# The window begins with some tokens of the prompt, which decide whether the first piece of text has
# a leading space.
_CONTEXT_TOKENS = 8


def words_as_token_ids(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that spell each bad word, both at the start of a text and after a space.

    Space before a word is dropped. vLLM leaves out the form after a space if its number of tokens
    differs. But then a word that is one token after a space, and two at the start, would still come
    out. So both forms are kept, unless the form after a space is a token for the space and then the
    other form.

    Raises:
        ValueError: The tokenizer has no token for a word.
    """

    def spelled(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    found: dict[tuple[int, ...], None] = {}  # used as an ordered set
    for word in words:
        text = word.lstrip() or word  # a word may be only space
        if not (plain := spelled(text)):
            raise ValueError(f"bad_words has {word!r}, of which the tokenizer makes no token")
        found[plain] = None
        if (behind_space := spelled(f" {text}"))[-len(plain) :] != plain:
            found[behind_space] = None
    return tuple(found)


class StreamDetokenizer:
    """Makes the text of one sequence as its tokens come.

    The bytes of an unfinished character are held back until `flush`. A token's text depends on the
    tokens before it (a leading space, the bytes of a character). So a short window of tokens is
    decoded, and the new text is what the decoded window has beyond the known text:

        tokens  [ known ... | new ... ]
        text    "the cat sat" + " down"     only " down" is new

    `tokenizers.DecodeStream` does the same, but it raises an error where a tokenizer with byte
    fallback changes its mind about invalid bytes, and it repeats a prompt that ends in a
    replacement character.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool
    ):
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        # The part of the window's text that was given out, or belongs to the prompt.
        self._known = self._decode(self._window)
        self._num_known = len(self._window)

    def push(self, token_id: int) -> str:
        """Returns the text that is certain with this token; it may be empty."""
        if (
            self._skip
            and not self._decode([token_id])
            and self._backend.decode([token_id], skip_special_tokens=False)
        ):
            return ""  # special tokens are no text
        self._window.append(token_id)
        text = self._decode(self._window)
        new = ""
        num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
        if not num_replaced or num_replaced > _MOST_OPEN:
            new = self._take(text, num_open=min(num_replaced, _MOST_OPEN))
        if not new and len(self._window) - self._num_known > _MOST_PENDING:
            new = self._take(text)
            if not new:
                del self._window[self._num_known]
        return new

    def flush(self) -> str:
        """Returns the text that is held back; incomplete bytes become the replacement character."""
        return self._take(self._decode(self._window))

    def fork(self) -> Self:
        """Returns a detokenizer with the same past, which goes on by itself."""
        other = copy.copy(self)
        other._window = self._window.copy()
        return other

    def _take(self, text: str, num_open: int = 0) -> str:
        """Returns the part of `text` that is not known yet, and moves the window to its tokens.

        Args:
            text: The decoded window.
            num_open: The number of characters at the end that are held back. Their tokens stay in
                the window.
        """
        text = text[: len(text) - num_open]
        if new := text[_num_common(self._known, text) :]:
            self._window = self._window[self._num_known :]
            known = self._decode(self._window)
            self._known = known[: len(known) - num_open]
            self._num_known = (
                max(0, len(self._window) - _OPEN_TOKENS) if num_open else len(self._window)
            )
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip))


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
