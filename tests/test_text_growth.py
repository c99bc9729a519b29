"""Tokenizers of a checkpoint that would multiply a text are refused when they are loaded, before
any text is.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors

import jaxpage
from jaxpage.checkpoints.tokenizers.text_growth import check_growth
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.errors import CheckpointError
from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tests.support.tokenizers import write_tokenizer


def tokenizer_with(**parts: Any) -> Any:
    backend = Tokenizer(models.WordLevel({"a": 0, "[B]": 1, "[UNK]": 2}, unk_token="[UNK]"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return SimpleNamespace(backend_tokenizer=backend)


def charsmap(max_length: int) -> bytes:
    return (4).to_bytes(4, "little") + bytes(4) + b"ab\0" + b"x" * max_length + b"\0"


FIFTY = normalizers.Replace("a", "a" * 50)


@pytest.mark.parametrize(
    ("parts", "growth"),
    [
        ({"normalizer": normalizers.Sequence([FIFTY] * 5)}, "3.125e+08 times"),
        ({"normalizer": normalizers.Replace("a", "b" * 65)}, "65 times"),
        ({"normalizer": normalizers.Replace(Regex("x*"), "b" * 64)}, "65 times"),
        (
            {"normalizer": normalizers.Sequence([normalizers.Sequence([FIFTY]), FIFTY])},
            "2500 times",
        ),
        ({"decoder": decoders.Sequence([decoders.Replace("a", "a" * 50)] * 2)}, "2500 times"),
        ({"normalizer": normalizers.Precompiled(charsmap(100))}, "100 times"),
        (
            {"post_processor": processors.TemplateProcessing(single="$A $A", special_tokens=[])},
            "repeats a text 2 times",
        ),
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(parts, growth):
    with pytest.raises(ValueError, match=growth.replace("+", r"\+")):
        check_growth(tokenizer_with(**parts))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        },
        {
            "normalizer": normalizers.Sequence(
                [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
            )
        },
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Replace("``", '"'), normalizers.Precompiled(charsmap(18))]
            )
        },
        {
            "decoder": decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        },
        {
            "post_processor": processors.TemplateProcessing(
                single="[B] $A [B]", special_tokens=[("[B]", 1)]
            )
        },
    ],
)
def test_what_published_tokenizers_do_is_taken(parts):
    check_growth(tokenizer_with(**parts))


def test_a_checkpoint_with_such_a_tokenizer_does_not_load(tmp_path):
    directory = write_tokenizer(random_checkpoint(tmp_path, LLAMA))
    assert load_tokenizer(directory) is not None
    assert load_tokenizer(Path(jaxpage.__file__).parent / "demo") is not None
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.normalizer = normalizers.Sequence([FIFTY] * 5)
    backend.save(str(directory / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="normalizer could make a text 3.125e"):
        load_tokenizer(directory)
