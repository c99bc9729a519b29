"""A small tokenizer for the small models: byte-level BPE without every byte, and with tokens of
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

# ASCII, and pieces of longer characters.
BYTES = sorted({*range(32, 127), 9, 10, 0xC3, 0xA9, 0xA4, 0xF0, 0x9F, 0x98, 0x80})
PIECES = (
    '{"',
    '":',
    '", ',
    "true",
    "null",
    "dog",
    "cat",
    "ab",
    "ba",
    "aa",
    "bb",
    "abc",
    "10",
    "00",
    "é",
    "ä",
)
END = 0  # the token that ends a text


def write_tokenizer(
    directory: Path, special: Sequence[str] = ("<|end|>",), template: str | None = None
) -> Path:
    """Writes a tokenizer into a model's directory, which is returned.

    It has fewer tokens than LLAMA of `tests.support.engines` has ids.

    The first of the special tokens ends a text.
    """
    backend = Tokenizer(_bpe(special[0]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], chat_template=template
    ).save_pretrained(directory)
    return directory


def _bpe(end: str) -> models.BPE:
    letters = byte_letters()
    vocabulary, merges = {end: END}, []
    for byte in BYTES:
        vocabulary[letters[byte]] = len(vocabulary)
    for piece in PIECES:
        left, *letters_after = (letters[byte] for byte in piece.encode())
        for right in letters_after:
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
            left += right
    return models.BPE(vocab=vocabulary, merges=merges)


def byte_letters() -> dict[int, str]:
    """Returns the character that stands for each byte.

    Printable ones stand for themselves, the others are counted up from 256.
    """
    alphabet = set(ByteLevel.alphabet())
    others = iter(range(256, 512))
    return {byte: chr(byte) if chr(byte) in alphabet else chr(next(others)) for byte in range(256)}
