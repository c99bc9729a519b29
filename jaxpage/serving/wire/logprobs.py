"""Log probabilities as OpenAI writes them, in two forms: columns in completions, a row for each token in chat."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxpage.outputs import Logprob

Entries = list[
    dict[int, Logprob] | None
]  # by position; the chosen token first. None: the first token of an echoed prompt


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # as SentencePiece names those that are no text
_MOST_PIECES = 4  # bytes of a character in UTF-8


class TokenTexts:
    """What tokens are called: their text, or their number where the model has no tokenizer."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int, logprob: Logprob | None = None) -> str:
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return (
            f"token_id:{token_id}"
            if self._tokenizer is None
            else str(self._tokenizer.decode([token_id]))
        )

    def piece(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token that is a piece of a character, where the vocabulary is one of bytes."""
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(name, str):
            return None
        if found := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(found[1])
        known = [_byte_of_letter().get(letter) for letter in name]
        return None if None in known else bytes(byte for byte in known if byte is not None)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The letters by which vocabularies of bytes (GPT-2's and those after it) name them."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@functools.lru_cache(maxsize=4)
def special_token_ids(tokenizer: Any | None) -> frozenset[int]:
    """The ids that `decode(skip_special_tokens=True)` leaves out."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids).union(
        token_id for token_id, token in added.items() if token.special
    )


class TextOffsets:
    """Where the tokens of one choice begin in its text. Those that are pieces of one character begin where it does."""

    def __init__(
        self, tokenizer: Any | None, *, skips_special: bool = False, prompt: str | None = None
    ) -> None:
        """skips_special: special tokens are not in the text; prompt: an echoed one that was given as text, and is shown as it was given."""
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer) if skips_special else frozenset()
        self._prompt = prompt
        self._offset = 0
        self._pieces: list[int] = []  # of a character that is not whole yet

    def after(self, token_id: int, text: str) -> int:
        """The offset of the next token, in characters."""
        if token_id in self._special and not self._is_shown(text):
            return self._offset + self._length_of_pieces()
        if self._tokenizer is None or "\ufffd" not in text:
            self._offset += self._length_of_pieces()
            self._pieces.clear()
            offset = self._offset
            self._offset += len(text)
            return offset
        offset = self._offset
        self._pieces.append(token_id)
        joined = self._tokenizer.decode(self._pieces)
        if not joined.endswith("\ufffd") or len(self._pieces) == _MOST_PIECES:
            self._offset += len(joined)
            self._pieces.clear()
        return offset

    def _is_shown(self, text: str) -> bool:
        """Returns whether a special token is text of the echoed prompt, where a tokenizer adds some and a user may write others."""
        return self._prompt is not None and self._prompt.startswith(text, self._offset)

    def _length_of_pieces(self) -> int:
        """Of pieces that were none: as many characters as the text has for them."""
        return (
            len(self._tokenizer.decode(self._pieces))
            if self._tokenizer is not None and self._pieces
            else 0
        )


def bounded(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot come."""
    return max(logprob, -9999.0)


def likeliest(entry: dict[int, Logprob], wanted: int) -> dict[int, Logprob]:
    """The token itself and the `wanted` likeliest: there may be more, where another field asked for them."""
    chosen = next(iter(entry))
    return {
        token_id: one for token_id, one in entry.items() if token_id == chosen or one.rank <= wanted
    }


def completion_logprobs(
    token_ids: list[int], entries: Entries, wanted: int, places: TextOffsets, texts: TokenTexts
) -> dict[str, Any]:
    """Of completions. `places`: after the tokens of the choice before these; `wanted`: candidates beside the token itself."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = texts(token_id, entry[token_id] if entry else None)
        tokens.append(token)
        logprobs.append(bounded(entry[token_id].logprob) if entry else None)
        tops.append(_by_text(likeliest(entry, wanted), texts) if entry and wanted else None)
        offsets.append(places.after(token_id, token))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops if wanted else None,
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: list[int], entries: Entries, wanted: int, texts: TokenTexts
) -> dict[str, Any]:
    """Of chat. `wanted`: candidates for each token, the likeliest first."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        given = entry or {}
        top = sorted(given.items(), key=lambda item: item[1].rank)[:wanted]
        row = _row(token_id, given[token_id], texts)
        content.append({**row, "top_logprobs": [_row(other, one, texts) for other, one in top]})
    return {"content": content, "refusal": None}


def _by_text(entry: dict[int, Logprob], texts: TokenTexts) -> dict[str, float]:
    """The chosen token first. Of several with one text, which pieces of a character have, the others go by their number: lm-eval
    takes the largest value for the likeliest token's."""
    found: dict[str, float] = {}
    for token_id, one in entry.items():
        text = texts(token_id, one)
        found[f"token_id:{token_id}" if text in found else text] = bounded(one.logprob)
    return found


def _row(token_id: int, one: Logprob, texts: TokenTexts) -> dict[str, Any]:
    """`bytes` is null where neither the text of a token nor the vocabulary tells them."""
    token = texts(token_id, one)
    found = texts.piece(token_id) if "\ufffd" in token else token.encode()
    return {
        "token": token,
        "logprob": bounded(one.logprob),
        "bytes": None if found is None else list(found),
    }
