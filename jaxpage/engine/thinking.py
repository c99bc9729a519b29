"""Makes the budget of a request for its reasoning: markers as bytes, and the tokens that end it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxpage.engine.text import token_bytes
from jaxpage.step.thinking import ThinkingBudget

# A prompt that opens the reasoning has at most white space after the marker.
_TAIL_TOKENS = 64
_SPACE = "\u2581"  # the name of a token without bytes has it in place of a space
# Some tokenizers put a space before the first word of a text, but not after a line break.
_BEFORE = ("", "\n")


def budget_of(
    tokenizer: Any, vocab_size: int, num_tokens: int, markers: tuple[str, str, bool]
) -> ThinkingBudget:
    """Returns the budget for prompts that do not open the reasoning; see `for_prompt`.

    Args:
        tokenizer: The tokenizer.
        vocab_size: The number of token ids (V).
        num_tokens: The most tokens of reasoning.
        markers: `SamplingParams.thinking_markers`.

    Raises:
        ValueError: The tokenizer has no tokens that spell the closing marker.
    """
    opened, closed, again = markers
    pieces = _pieces_of(tokenizer)
    return ThinkingBudget(
        num_tokens=num_tokens,
        is_open=not opened,
        open=opened.encode(),
        close=closed.encode(),
        again=again,
        endings=_endings_of(tokenizer, closed),
        vocab_size=vocab_size,
        bytes_of=pieces.__getitem__,
    )


def for_prompt(budget: ThinkingBudget, token_ids: Sequence[int]) -> ThinkingBudget:
    """Returns the budget for an answer to this prompt, which may end with the opening marker."""
    if budget.is_open:
        return budget
    tail = b"".join(map(budget.bytes_of, token_ids[-_TAIL_TOKENS:])).rstrip()
    return replace(budget, is_open=tail.endswith(budget.open))


class _Pieces(dict[int, bytes]):
    """Remembers the bytes of each token, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.added = frozenset(self._backend.get_added_tokens_decoder())

    def __missing__(self, token_id: int) -> bytes:
        piece = token_bytes(self._tokenizer, token_id)
        if piece is None or token_id in self.added:
            name = self._backend.id_to_token(token_id) or ""
            piece = (name if token_id in self.added else name.replace(_SPACE, " ")).encode()
        self[token_id] = piece
        return piece


@functools.lru_cache(maxsize=4)
def _pieces_of(tokenizer: Any) -> _Pieces:
    return _Pieces(tokenizer)


@functools.lru_cache(maxsize=16)
def _endings_of(tokenizer: Any, close: str) -> tuple[tuple[int, ...], ...]:
    """Returns `ThinkingBudget.endings`.

    A marker with an added token is forced by its tokens, from the first one that is not there: to
    the model, the text of such a token is something else than the token. Where only a part of a
    character is there, the whole marker is forced.
    """
    pieces = _pieces_of(tokenizer)
    whole = _spell(tokenizer, close, pieces.__getitem__)
    text = close.encode()
    if not pieces.added.isdisjoint(whole):
        begins = [len(b"".join(map(pieces.__getitem__, whole[:n]))) for n in range(len(whole))]
        return tuple(
            whole[begins.index(num_there) :] if num_there in begins else whole
            for num_there in range(len(text))
        )
    endings = [whole]
    for num_there in range(1, len(text)):
        try:
            endings.append(_spell(tokenizer, text[num_there:].decode(), pieces.__getitem__))
        except ValueError:
            endings.append(whole)
    return tuple(endings)


def _spell(tokenizer: Any, text: str, bytes_of: Callable[[int], bytes]) -> tuple[int, ...]:
    """Returns the tokens of exactly this text.

    Raises:
        ValueError: There are none.
    """
    for before in _BEFORE:
        token_ids = tokenizer(before + text, add_special_tokens=False)["input_ids"]
        for begin in range(len(token_ids)):
            if b"".join(map(bytes_of, token_ids[begin:])) == text.encode():
                return tuple(token_ids[begin:])
    raise ValueError(f"thinking_markers: the tokenizer has no tokens that spell {text!r}")
