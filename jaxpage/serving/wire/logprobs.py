"""Writes log probabilities as OpenAI does: columns for completions, a row per token for chats."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jaxpage.engine import StreamDetokenizer, token_bytes
from jaxpage.outputs import Logprob

# The candidates of each position, the chosen token first; None for the first token of an echoed
# prompt.
Entries = list[dict[int, Logprob] | None]


class TokenTexts:
    """Gives tokens their names: the text, or the number where the model has no tokenizer."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, logprob: Logprob | None = None) -> str:
        """Returns the name of a token."""
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return (
            f"token_id:{token_id}"
            if self._tokenizer is None
            else str(self._tokenizer.decode([token_id]))
        )

    def bytes_of(self, token_id: int, text: str) -> bytes | None:
        """Returns the bytes of a token with a text; None if only the tokenizer would know them."""
        if "\ufffd" not in text:
            return text.encode()
        if self._tokenizer is None:
            return None
        piece = token_bytes(self._tokenizer, token_id)
        return text.encode() if piece is None else piece


@functools.lru_cache(maxsize=4)
def special_token_ids(tokenizer: Any | None) -> frozenset[int]:
    """Returns the ids that `decode(skip_special_tokens=True)` leaves out."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids).union(
        token_id for token_id, token in added.items() if token.special
    )


class TextOffsets:
    """Finds where the tokens of one choice begin in its text.

    Tokens that are pieces of one character begin where the character begins.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        skips_special: bool = False,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Makes the offsets of a choice, before its first token.

        Args:
            tokenizer: The tokenizer, or None.
            skips_special: True if special tokens are not in the text.
            prompt: The text of an echoed prompt. It is part of the text as it was given.
            prompt_token_ids: The tokens before the first one, which are not in the text.
        """
        self._special = special_token_ids(tokenizer) if skips_special else frozenset()
        self._prompt = prompt
        self._offset = 0
        self._stream = (
            None
            if tokenizer is None
            else StreamDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=False, max_held_bytes=0
            )
        )

    @property
    def end(self) -> int:
        """Returns where the text of the last token ends; an unfinished character counts."""
        return self._offset + len("" if self._stream is None else self._stream.flush_copy())

    def after(self, token_id: int, text: str) -> int:
        """Returns where the next token begins, in characters.

        Args:
            token_id: The next token.
            text: The text of that token alone.
        """
        offset, stream = self._offset, self._stream
        held = "" if stream is None else stream.flush_copy()
        if token_id in self._special and not self._is_shown(text):
            return offset + len(held)
        new = text if stream is None else stream.push(token_id)
        self._offset += len(new)
        # A character that was begun and never became whole comes before this token.
        return offset + len(held) if held and new.startswith(held) else offset

    def _is_shown(self, text: str) -> bool:
        """Returns whether a special token is text of the echoed prompt.

        A tokenizer may add special tokens to a prompt, and a user may write others.
        """
        return self._prompt is not None and self._prompt.startswith(text, self._offset)


def limit_logprob(logprob: float) -> float:
    """Returns the log probability, but at least -9999.

    JSON has no infinity, and OpenAI writes -9999 for a token that cannot come.
    """
    return max(logprob, -9999.0)


def top_logprobs(entry: dict[int, Logprob], num_logprobs: int) -> dict[int, Logprob]:
    """Returns the token itself and the `num_logprobs` most likely candidates.

    The entry may have more candidates, if another field asked for them.
    """
    chosen = next(iter(entry))
    return {
        token_id: logprob
        for token_id, logprob in entry.items()
        if token_id == chosen or logprob.rank <= num_logprobs
    }


def completion_logprobs(
    token_ids: list[int],
    entries: Entries,
    num_logprobs: int,
    places: TextOffsets,
    texts: TokenTexts,
) -> dict[str, Any]:
    """Returns log probabilities as completions have them.

    Args:
        token_ids: The tokens.
        entries: The candidates of each token.
        num_logprobs: The number of candidates in addition to the token itself.
        places: The offsets of the choice, after the tokens before these.
        texts: Gives the texts of tokens.
    """
    tokens = []
    logprobs = []
    tops = []
    offsets = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = texts(token_id, entry[token_id] if entry else None)
        tokens.append(token)
        logprobs.append(limit_logprob(entry[token_id].logprob) if entry else None)
        tops.append(
            _by_text(top_logprobs(entry, num_logprobs), texts) if entry and num_logprobs else None
        )
        offsets.append(places.after(token_id, token))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops if num_logprobs else None,
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: list[int], entries: Entries, num_logprobs: int, texts: TokenTexts
) -> dict[str, Any]:
    """Returns log probabilities as chats have them.

    Args:
        token_ids: The tokens.
        entries: The candidates of each token.
        num_logprobs: The number of candidates of each token; the most likely comes first.
        texts: Gives the texts of tokens.
    """
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        logprobs_of_token = entry or {}
        top = sorted(logprobs_of_token.items(), key=lambda item: item[1].rank)[:num_logprobs]
        row = _row(token_id, logprobs_of_token[token_id], texts)
        content.append(
            {**row, "top_logprobs": [_row(other, logprob, texts) for other, logprob in top]}
        )
    return {"content": content, "refusal": None}


def _by_text(entry: dict[int, Logprob], texts: TokenTexts) -> dict[str, float]:
    """Returns log probabilities by text, with the chosen token first.

    Several tokens may have one text, as pieces of characters do; the later ones are named by their
    numbers. lm-eval takes the largest value for that of the most likely token, so none may be lost.
    """
    by_text: dict[str, float] = {}
    for token_id, logprob in entry.items():
        text = texts(token_id, logprob)
        by_text[f"token_id:{token_id}" if text in by_text else text] = limit_logprob(
            logprob.logprob
        )
    return by_text


def _row(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, Any]:
    """Returns the row of one token."""
    token = texts(token_id, logprob)
    piece = texts.bytes_of(token_id, token)
    return {
        "token": token,
        "logprob": limit_logprob(logprob.logprob),
        "bytes": None if piece is None else list(piece),
    }
