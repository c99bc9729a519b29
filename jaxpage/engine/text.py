"""Text in and out of token ids: the words of a request, and detokenizers that give text token by token."""

from __future__ import annotations

import copy
from typing import Any, Self

_REPLACEMENT = "\ufffd"
# Replacement characters at the end of a text that another byte may change: a character of UTF-8 has
# four bytes, of which three may be there. Each of them stands for one byte or for up to three.
_MOST_OPEN = 3
_OPEN_TOKENS = 9
_MOST_PENDING = 16  # tokens that are held back in hope of text
# of the prompt, so that the first piece of text gets or lacks its leading space rightly
_CONTEXT_TOKENS = 8


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

    def __init__(
        self, tokenizer: Any, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool
    ):
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        # the text of the window that has been given out, or was the prompt's
        self._known = self._decode(self._window)
        self._num_known = len(self._window)

    def push(self, token_id: int) -> str:
        if (
            self._skip
            and not self._decode([token_id])
            and self._backend.decode([token_id], skip_special_tokens=False)
        ):
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
            self._num_known = (
                max(0, len(self._window) - _OPEN_TOKENS) if num_open else len(self._window)
            )
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
