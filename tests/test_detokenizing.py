"""Text that is made token by token is the tokenizer's own, and tokens that bring none cost no more
than others.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import jaxpage
from jaxpage.checkpoints.tokenizers.stored_tokenizers import StoredTokenizer, open_tokenizer
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.engine.text import StreamDetokenizer
from jaxpage.outputs import Logprob
from jaxpage.receipts.hashing import hash_tokenizer
from jaxpage.serving.wire.logprobs import TextOffsets, TokenTexts, chat_logprobs
from tests.support.sweeps import examples
from tests.support.tokenizers import byte_letters, write_tokenizer
from tests.support.word_tokenizer import word_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(Path(jaxpage.__file__).parent / "demo")
BYTES = {byte: TOKENIZER.convert_tokens_to_ids(letter) for byte, letter in byte_letters().items()}
END = (TOKENIZER.eos_token_id,)
PIECES = [
    *(tuple(BYTES[byte] for byte in text.encode()) for text in ("€", "😀", "A")),
    (BYTES[0x80],),
    (BYTES[0xFF],),
    END,
]
MAX_AT_ONCE = 24  # tokens


class Counting(StreamDetokenizer):
    """Knows how many tokens were decoded at once, at most."""

    maximum = 0

    def _decode(self, token_ids: list[int]) -> str:
        self.maximum = max(self.maximum, len(token_ids))
        return super()._decode(token_ids)


@examples(80)
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
def test_the_text_is_the_tokenizers_and_the_window_has_an_end(pieces):
    """There are broken characters, bytes that no character has, and special tokens, up to twelve
    times in a row.
    """
    token_ids = [token_id for piece, cut, times in pieces for token_id in times * piece[:cut]]
    stream = Counting(TOKENIZER, (), skip_special_tokens=True)
    text = "".join([stream.push(token_id) for token_id in token_ids])
    assert text + stream.flush() == TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert stream.maximum <= MAX_AT_ONCE


@pytest.mark.parametrize(
    "piece", [PIECES[3], END, PIECES[0][:1]], ids=["a byte", "special", "beginnings"]
)
@pytest.mark.parametrize("skip", [True, False])
def test_a_thousand_of_them_are_shown_as_they_come(piece, skip):
    stream = Counting(TOKENIZER, (), skip_special_tokens=skip)
    shown = "".join([stream.push(piece[0]) for _ in range(1000)])
    whole = TOKENIZER.decode(1000 * piece, skip_special_tokens=skip)
    assert (
        len(whole) - len(shown) <= 3 and whole.startswith(shown) and shown + stream.flush() == whole
    )
    assert stream.maximum <= MAX_AT_ONCE


def of_vocabulary(texts: list[str], decoder: Any, added: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, "?"))
    backend.decoder = decoder
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCE_PIECES = [
    *FALLBACK,
    "\ufffd",
    "\u2581",
    "a",
    "\u2581a",
    "\u2581\u2581b",
    "\u00e9",
    "\u2581\ufffd",
]
OF_PIECES = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
CUT_PIECES = (
    " ab",
    "\ufffd",
    "\u00e9",
    "\u9f98",
    b" \xe9",
    b"\xbe\x98\xf0\x9f",
    b"\x98\x80a",
    b"a\xef\xbf",
)
BYTE_PIECES = [
    "".join(byte_letters()[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
    for piece in (*(bytes([byte]) for byte in range(256)), *CUT_PIECES)
]
# Of these, one consists of letters that stand for bytes, one of others, and one is a byte that is
# no character.
ADDED = ["<tool>", "<a \u9f98>", "\u00ff"]
WORDS = ["a", "##b", "\ufffd", ".", "##\ufffd", "\u2581a", "\u2581", "b</w>", "a</w>", "<pad>", "|"]
VOCABULARIES = {
    "llama": of_vocabulary(SENTENCE_PIECES,
                           decoders.Sequence([*OF_PIECES, decoders.Strip(" ", 1, 0)]), ADDED),
    "gemma": of_vocabulary(SENTENCE_PIECES, decoders.Sequence(OF_PIECES), ADDED),
    "byte level": of_vocabulary(BYTE_PIECES, decoders.ByteLevel(), ADDED),
    "byte level and more": of_vocabulary(
        BYTE_PIECES, decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), ADDED
    ),
    "words": of_vocabulary(WORDS, decoders.WordPiece(), ADDED),
    "metaspace": of_vocabulary(WORDS, decoders.Metaspace(), ADDED),
    "suffixes": of_vocabulary(WORDS, decoders.BPEDecoder(), ADDED),
    "ctc": of_vocabulary(WORDS, decoders.CTC(), ADDED),
    "no decoder": of_vocabulary(WORDS, None, ADDED),
}  # fmt: skip


OF_RUNS = ("llama", "gemma")  # with byte fallback


def text_of(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], *, skips: bool) -> str:
    special = tokenizer.convert_tokens_to_ids("<s>")
    shown = [token_id for token_id in token_ids if not skips or token_id != special]
    return str(tokenizer.decode(shown, skip_special_tokens=skips))


def agree_with_the_tokenizer(name: str, token_ids: list[int], cut: int, *, skips: bool) -> None:
    """Checks that what was shown and what an end here would bring are the text, at each token.

    A prompt that ends in a run of bytes shows its characters whatever follows, so it is cut before
    such a run.
    """
    tokenizer = VOCABULARIES[name]
    while name in OF_RUNS and 0 < cut < len(token_ids) and max(token_ids[cut - 1 : cut + 1]) < 256:
        cut -= 1
    stream = StreamDetokenizer(tokenizer, tuple(token_ids[:cut]), skip_special_tokens=skips)
    before, shown = text_of(tokenizer, token_ids[:cut], skips=skips), ""
    for end in range(cut, len(token_ids) + 1):
        whole = text_of(tokenizer, token_ids[:end], skips=skips)
        ended = shown + stream.fork().flush()
        # A prompt may end within a character, which belongs to the output once it is complete.
        starts = [before[: len(before) - num_open] for num_open in range(4)]
        assert any(
            whole == start + ended and before == start + (len(before) - len(start)) * "\ufffd"
            for start in starts
        ), (whole, before, ended)
        assert len(ended) - len(shown) <= (96 if name in OF_RUNS else 3)
        if end < len(token_ids):
            shown += stream.push(token_ids[end])


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Returns tokens of a vocabulary: characters of all planes as bytes, random bytes, other
    tokens.
    """
    size = len(VOCABULARIES[name])
    tokens = [st.integers(0, size - 1).map(lambda token_id: [token_id])]
    if size > 256:
        letters = {letter: byte for byte, letter in byte_letters().items()}
        of_byte = (
            {letters[text]: index for index, text in enumerate(BYTE_PIECES[:256])}
            if "byte" in name
            else {byte: byte for byte in range(256)}
        )

        def spell(text: str, length: int) -> list[int]:
            return [of_byte[byte] for byte in text.encode()[:length]]

        tokens += [
            st.characters(codec="utf-8").map(lambda text: spell(text, 4)),
            st.text("\U0001f389\u9f98\u0c24\U0001f1e9\U0001f3fd\u00e9\ufffda ", max_size=4).map(
                lambda text: spell(text, 16)
            ),
            st.tuples(st.characters(codec="utf-8"), st.integers(1, 3)).map(lambda cut: spell(*cut)),
            st.integers(256, size - 1).map(lambda token_id: [token_id]),
        ]
    return st.lists(st.one_of(tokens), max_size=6).map(  # a run has at most 96 bytes
        lambda parts: [token_id for part in parts for token_id in part]
    )


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_in_pieces_is_the_text_of_the_whole(name):
    @examples(30)
    @given(ids_of(name), st.integers(0, 20), st.booleans())
    def search(token_ids: list[int], cut: int, skips: bool) -> None:
        agree_with_the_tokenizer(name, token_ids, min(cut, len(token_ids)), skips=skips)

    search()


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize(
    "text",
    [
        "\U0001f389\U0001f389",
        "\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd",
        "\u0c24\u0c46\u0c32\u0c41",
        "\u9f98\u9f98",
    ],
)
def test_characters_that_are_no_tokens_follow_each_other(name, text):
    """They come out when the run of bytes ends, or each with its last byte if none is held."""
    tokenizer = VOCABULARIES[name]
    token_ids = [*text.encode(), tokenizer.convert_tokens_to_ids("a")]
    stream = StreamDetokenizer(tokenizer, (), skip_special_tokens=True)
    shown = [stream.push(token_id) for token_id in token_ids]
    assert [piece for piece in shown if piece] == [text + "a"]
    assert "".join(shown) == tokenizer.decode(token_ids)
    stream = StreamDetokenizer(tokenizer, (), skip_special_tokens=True, max_held_bytes=0)
    assert [piece for each in token_ids if (piece := stream.push(each))] == [*text, "a"]


def test_of_a_run_without_an_end_complete_characters_are_shown():
    """Little is held back, and what was shown stays when an invalid byte follows."""
    stream = StreamDetokenizer(VOCABULARIES["gemma"], (), skip_special_tokens=True)
    token_ids = list(("\U0001f389" * 100).encode())
    shown = "".join(map(stream.push, token_ids))
    assert len(shown) > 75 and shown + stream.fork().flush() == "\U0001f389" * 100
    ended = shown + stream.push(0xFF) + stream.flush()
    assert ended.startswith(shown) and set(ended[len(shown) :]) == {"\ufffd"}


@pytest.mark.parametrize("length", [4, 250, 256, 257, 1000])
def test_a_prompt_may_end_anywhere_in_a_long_run_of_bytes(length):
    token_ids = list(("\U0001f389\u9f98\u00e9" * 200).encode())
    prompt, follows = token_ids[:length], token_ids[length : length + 9]
    stream = StreamDetokenizer(
        VOCABULARIES["llama"], prompt, skip_special_tokens=True, max_held_bytes=0
    )
    before = bytes(prompt).decode(errors="ignore")
    shown = "".join(map(stream.push, follows))
    assert before + shown == bytes(prompt + follows).decode(errors="ignore")


@pytest.mark.parametrize("name", ["gemma", "byte level"])
@given(parts=st.data())
@examples(20)
def test_log_probabilities_tell_the_bytes_of_tokens_and_where_they_begin(name, parts):
    """A token begins where the character begins that it is a part of.

    All bytes together are the text.
    """
    token_ids = parts.draw(ids_of(name))
    tokenizer = VOCABULARIES[name]
    text = tokenizer.decode(token_ids)
    texts, places, said = TokenTexts(tokenizer), TextOffsets(tokenizer), b""
    for token_id in token_ids:
        entry = {token_id: Logprob(-1.0, 1, tokenizer.decode([token_id]))}
        (row,) = chat_logprobs([token_id], [entry], 0, texts)["content"]
        at = places.after(token_id, row["token"])
        assert at <= len(text)
        if "\ufffd" not in text:
            assert at == len(said.decode(errors="ignore"))
        said += bytes(row["bytes"])
    if "\ufffd" not in text:
        assert said.decode() == text


def test_the_second_token_of_an_answer_begins_after_the_space_of_the_first():
    tokenizer = VOCABULARIES["llama"]
    word, letter = tokenizer.convert_tokens_to_ids(["\u2581a", "a"])
    places = TextOffsets(tokenizer, prompt_token_ids=[letter])
    assert [places.after(token_id, "a") for token_id in (word, letter)] == [0, 2]


# What tokenizer_config.json may say of the demo's tokenizer.json, and whether `tokenizers` alone
# does the same.
CONFIGS = {
    "as it is": ({}, True),
    "with BOS": ({"bos_token": "<s>", "add_bos_token": True}, True),
    "of a class that makes its parts": ({"tokenizer_class": "Qwen2Tokenizer"}, True),
    "of GPT-2": ({"tokenizer_class": "GPT2Tokenizer"}, True),
    "that has two templates": ({"chat_template": {"default": "{{ 1 }}", "tool_use": "x"}}, True),
    "that removes spaces": (
        {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        },
        False,
    ),
    "that cuts special tokens": ({"split_special_tokens": True}, False),
}
MARKS = ("<|endoftext|>", "<s>", "[CLS]", "<|end|>", " .", "\u2581", "12", "e\u0301", "\r\n")


def agree(stored: Any, whole: Any) -> None:
    """Compares all that a start asks for, and texts."""
    assert stored.get_vocab() == whole.get_vocab() and len(stored) == len(whole)
    for name in ("eos_token_id", "all_special_ids", "chat_template"):
        assert getattr(stored, name) == getattr(whole, name)
    assert hash_tokenizer(stored) == hash_tokenizer(whole)

    @examples(10)
    @given(
        st.lists(st.one_of(st.text(max_size=5), st.sampled_from(MARKS)), max_size=4).map("".join),
        st.lists(st.integers(0, len(whole) - 1), max_size=8),
        st.booleans(),
    )
    def same(text, token_ids, flag):
        for texts in (text, [text, "a"]):
            assert ids_or_error(stored, texts, flag) == ids_or_error(whole, texts, flag)
        text = whole.decode(token_ids, skip_special_tokens=flag)
        assert stored.decode(token_ids, skip_special_tokens=flag) == text

    same()


def ids_or_error(tokenizer: Any, texts: Any, adds: bool) -> Any:
    try:
        return tokenizer(texts, add_special_tokens=adds)["input_ids"]
    except Exception as error:  # such as that of a vocabulary that has no token for other words
        return str(error)


def open_twice(directory: Path) -> tuple[Any, Any]:
    """Returns the tokenizer that a second start opens, and that of transformers."""
    first = open_tokenizer(directory)
    assert not isinstance(first, StoredTokenizer)
    return open_tokenizer(directory), first


@pytest.mark.parametrize("name", [*VOCABULARIES, "words of BERT", "demo", "demo_vision"])
def test_a_stored_tokenizer_is_that_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path / "cache"))
    directory = Path(jaxpage.__file__).parent / name
    if not name.startswith("demo"):
        directory = tmp_path / "model"
        (word_tokenizer() if name == "words of BERT" else VOCABULARIES[name]).save_pretrained(
            directory
        )
    again, whole = open_twice(directory)
    # Decoders that are not BPE's lose spaces before full stops, as this setting of old wants it.
    assert isinstance(again, StoredTokenizer) == (not whole.clean_up_tokenization_spaces)
    agree(again, load_tokenizer(directory))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tokenizer_that_asks_for_more_is_left_to_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(tmp_path / "cache"))
    config, is_plain = CONFIGS[name]
    directory = tmp_path / "model"
    TOKENIZER.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    again, whole = open_twice(directory)
    assert isinstance(again, StoredTokenizer) == is_plain
    agree(again, load_tokenizer(directory))
    if is_plain:
        # Everything else is that of transformers, which is loaded for it.
        assert again.pad_token_id == whole.pad_token_id and again("a", "b") == whole("a", "b")
        assert type(again.whole) is type(whole) and again.whole is again.whole


def test_a_stored_tokenizer_follows_its_files(tmp_path, monkeypatch, caplog):
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", str(cache))
    directory = write_tokenizer(tmp_path / "model", template="{% if %}")
    again, _ = open_twice(directory)
    assert isinstance(again, StoredTokenizer) and again.chat_template == "{% if %}"
    warnings = [text for text in caplog.messages if "does not parse" in text]
    assert len(warnings) == 2 and len(set(warnings)) == 1, "each start says so"
    # Other files are another tokenizer, and a file that was changed or renamed is none.
    write_tokenizer(directory, special=("<|stop|>",))
    again, _ = open_twice(directory)
    assert "<|stop|>" in again.get_vocab() and "<|end|>" not in again.get_vocab()
    first, second = sorted((cache / "tokenizers").iterdir(), key=lambda file: file.stat().st_mtime)
    assert first.stat().st_mode & 0o077 == 0
    for change in (lambda: first.replace(second), lambda: second.write_bytes(b"")):
        change()
        again, _ = open_twice(directory)
        assert isinstance(again, StoredTokenizer) and "<|stop|>" in again.get_vocab()

    # One that is kept in a file system that is only read is found.
    def refuse(path):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        assert isinstance(open_tokenizer(directory), StoredTokenizer)
    # Where nothing can be kept, transformers loads it each time.
    monkeypatch.setenv("JAXPAGE_CACHE_DIR", "/dev/null")
    assert not isinstance(open_twice(directory)[0], StoredTokenizer)
