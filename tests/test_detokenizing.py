"""Tokens that bring no text: they cost no more than others, and what follows them is the tokenizer's own text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import jaxpage
from jaxpage.engine.text import StreamDetokenizer
from tests.support.tokenizers import byte_letters

TOKENIZER = AutoTokenizer.from_pretrained(Path(jaxpage.__file__).parent / "demo")
BYTES = {byte: TOKENIZER.convert_tokens_to_ids(letter) for byte, letter in byte_letters().items()}
END = (TOKENIZER.eos_token_id,)
PIECES = [
    *(tuple(BYTES[byte] for byte in text.encode()) for text in ("€", "😀", "A")),
    (BYTES[0x80],),
    (BYTES[0xFF],),
    END,
]
MOST_AT_ONCE = 24  # tokens


class Counting(StreamDetokenizer):
    """Knows how many tokens were decoded at once, at most."""

    most = 0

    def _decode(self, token_ids: list[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return super()._decode(token_ids)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(PIECES), st.integers(1, 4), st.sampled_from([1, 1, 1, 12])),
        max_size=12,
    )
)
@example(
    [(PIECES[0], 2, 1), (PIECES[0], 2, 1), (PIECES[1], 3, 1), (PIECES[0], 3, 1)]
)  # one broken character after the other
@example([(PIECES[2], 1, 1), (END, 1, 12), (PIECES[0], 3, 1)])
def test_the_text_is_the_tokenizers_and_the_window_has_an_end(
    pieces: list[tuple[tuple[int, ...], int, int]],
) -> None:
    """Broken characters, bytes that no character has, and special tokens, up to twelve times in a row."""
    token_ids = [token_id for piece, cut, times in pieces for token_id in times * piece[:cut]]
    stream = Counting(TOKENIZER, (), skip_special_tokens=True)
    text = "".join([stream.push(token_id) for token_id in token_ids])
    assert text + stream.flush() == TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert stream.most <= MOST_AT_ONCE


@pytest.mark.parametrize(
    "piece", [PIECES[3], END, PIECES[0][:1]], ids=["a byte", "special", "beginnings"]
)
@pytest.mark.parametrize("skip", [True, False])
def test_a_thousand_of_them_are_shown_as_they_come(piece: tuple[int, ...], skip: bool) -> None:
    stream = Counting(TOKENIZER, (), skip_special_tokens=skip)
    shown = "".join([stream.push(piece[0]) for _ in range(1000)])
    whole = TOKENIZER.decode(1000 * piece, skip_special_tokens=skip)
    assert (
        len(whole) - len(shown) <= 3 and whole.startswith(shown) and shown + stream.flush() == whole
    )
    assert stream.most <= MOST_AT_ONCE
