"""Builds the tokenizer and the chat template of a GGUF file from its metadata.

It may be byte-level BPE or SentencePiece's BPE. transformers builds some itself (`gguf_file=`), but
only where torch is installed, and it cuts text in one way where the models differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpage.checkpoints.gguf.header import read_gguf
from jaxpage.checkpoints.problems import list_names, quote
from jaxpage.errors import CheckpointError

_KEY = "tokenizer.ggml."
# Types of tokens: control tokens are no text; user-defined ones are always one token.
_CONTROL = 3
_USER_DEFINED = 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# These rules cut a text before its parts become tokens. The tokenizers were trained with them.
_WORDS_OF_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_WORDS_OF_CASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
# With these rules, a word that is a token is not merged from parts.
_WHOLE_WORDS = {name for name, split in _SPLITS.items() if split != _QWEN2}
# With these rules, a text begins with the BOS token unless the file says otherwise.
_WITH_BOS = {name for name, split in _SPLITS.items() if split == _LLAMA3}
_MAX_NAME = 64  # characters of the name of a chat template
_TEMPLATE_NAME = rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}"
_RULES = (*_SPLITS, "gpt-2", "smollm")


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast | None:
    """Returns the tokenizer of a file; None if it has none.

    Raises:
        CheckpointError: The tokenizer is damaged, or of a kind that is not known.
    """
    metadata = read_gguf(path).metadata
    kind = metadata.get(f"{_KEY}model", "no_vocab")
    if kind == "no_vocab":
        return None
    metadata_of_tokenizer = {
        key.removeprefix(_KEY): value for key, value in metadata.items() if key.startswith(_KEY)
    }
    if kind not in _BUILDERS:
        raise _refusal(path, f"{_KEY}model is {quote(kind)}, not {' or '.join(_BUILDERS)}")
    tokens = _texts(path, metadata_of_tokenizer, "tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise _refusal(path, f"{_KEY}tokens has {len(tokens) - len(vocabulary)} tokens twice")
    backend = _BUILDERS[kind](path, metadata_of_tokenizer, vocabulary)
    add_tokens(backend, tokens, metadata_of_tokenizer.get("token_type", []))
    special = {
        name: _token(path, metadata_of_tokenizer, tokens, key) for name, key in _SPECIAL.items()
    }
    adds_bos = kind == "llama" or metadata_of_tokenizer.get("pre") in _WITH_BOS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(path, metadata),
        # Where nothing is said, some versions of transformers remove spaces before punctuation.
        clean_up_tokenization_spaces=False,
        add_bos_token=bool(metadata_of_tokenizer.get("add_bos_token", adds_bos))
        and special["bos_token"] is not None,
        add_eos_token=bool(metadata_of_tokenizer.get("add_eos_token", False))
        and special["eos_token"] is not None,
        **{name: token for name, token in special.items() if token is not None},
    )


def _byte_level(path: Path, metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    rule = metadata.get("pre")
    if rule not in _RULES:
        raise _refusal(
            path, f"{_KEY}pre is {quote(rule)}: how text is cut is known for {', '.join(_RULES)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _texts(path, metadata, "merges")]
    backend = Tokenizer(_bpe(path, vocabulary, merges, ignore_merges=rule in _WHOLE_WORDS))
    cuts: list[Any] = []
    if rule in _SPLITS:
        cuts.append(pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated"))
    elif rule == "smollm":
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _SPLITS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    # The tokenizer.json of Qwen2 normalises so, and the metadata of GGUF has no word for it.
    if _SPLITS.get(rule) == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(
    path: Path, metadata: Mapping[str, Any], vocabulary: dict[str, int]
) -> Tokenizer:
    """Returns SentencePiece's BPE as llama.cpp applies it.

    The text before, between and after special tokens is cut on its own, each with the mark of a
    space first. Models whose chats begin with text right after `<s>` were trained so too.
    """
    scores = metadata.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise _refusal(
            path, f"{_KEY}scores has not one number for each of the {len(vocabulary)} tokens"
        )
    merges = _merges_by_score(vocabulary, scores)
    # The type 2 is that of the unknown token, as in SentencePiece.
    unknown = next(
        (
            token
            for token, kind in zip(vocabulary, metadata.get("token_type", []), strict=False)
            if kind == 2
        ),
        None,
    )
    backend = Tokenizer(
        _bpe(path, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    adds_space = metadata.get("add_space_prefix", True)
    mark = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), mark]) if adds_space else mark
    )
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*parts, decoders.Strip(content=" ", left=1)] if adds_space else parts
    )
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": sentence_piece}


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns every way to make a token of two others.

    The token of the best score is merged first, as SentencePiece does.
    """
    merges = []
    for token, score in zip(vocabulary, scores, strict=True):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(-score, cut) for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    merges.sort(key=lambda merge: (merge[0], -len(merge[1][0])))
    return [cut for _, cut in merges]


def _bpe(path: Path, vocabulary: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    # The library raises this for a merge of something that is no token, or not of two.
    except Exception as error:
        raise _refusal(path, f"its merges do not fit its tokens ({error})") from error


def add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Adds the control tokens and the user-defined tokens to a tokenizer."""
    kinds = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )


def _texts(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    texts = metadata.get(key)
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise _refusal(path, f"{_KEY}{key} is not a list of texts")
    return texts


def _token(path: Path, metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    token_id = metadata.get(f"{name}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise _refusal(
            path, f"{_KEY}{name}_token_id is {quote(token_id)}, and there are {len(tokens)} tokens"
        )
    return tokens[token_id]


def _chat_template(path: Path, metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name where a file has more ("tool_use").

    Raises:
        CheckpointError: A template is no text, or a name could be a path: `save_pretrained` writes
            each template into a file of its name.
    """
    template = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    if not isinstance(names, list):
        raise _refusal(path, f"tokenizer.chat_templates is {quote(names)}, and not a list")
    if wrong := [name for name in names if not _is_template_name(name)]:
        raise _refusal(
            path,
            f"tokenizer.chat_templates has {list_names(wrong)}: a name is 1 to {_MAX_NAME} "
            "letters, "
            "digits, _, - and ., the first a letter or a digit",
        )
    templates = {} if template is None else {"default": template}
    for name in names if template is not None else ():
        if (key := f"tokenizer.chat_template.{name}") in metadata:
            templates.setdefault(name, metadata[key])
    if wrong := [name for name, text in templates.items() if not isinstance(text, str)]:
        raise _refusal(path, f"the chat template {quote(wrong[0])} is not a text")
    return templates if len(templates) > 1 else template


def _is_template_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(_TEMPLATE_NAME, name) is not None


def _refusal(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: its tokenizer cannot be built: {reason}. Give the directory of the model's own "
        "tokenizer with tokenizer= (--tokenizer)"
    )
