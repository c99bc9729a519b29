"""GGUF files for tests, written by the package `gguf` as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

_METADATA = {
    "num_hidden_layers": ("block_count", "uint32"),
    "max_position_embeddings": ("context_length", "uint32"),
    "hidden_size": ("embedding_length", "uint32"),
    "intermediate_size": ("feed_forward_length", "uint32"),
    "num_attention_heads": ("attention.head_count", "uint32"),
    "num_key_value_heads": ("attention.head_count_kv", "uint32"),
    "vocab_size": ("vocab_size", "uint32"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "float32"),
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)


_OF_GEMMA = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    *,
    metadata: Mapping[str, tuple[str, Any]] | None = None,
    added: Mapping[str, np.ndarray] | None = None,
    left_out: str = "",
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """Writes a checkpoint with Hugging Face's names and orders as a GGUF file, and returns its
    path.

    Args: path: The file. config: The config.json. tensors: The tensors. kind: The kind of its
    matrices. kinds: The kind of some of them, by a part of their names. metadata: More metadata by
    key, each with the name of its type ("uint32", ...), or another value for what there is. added:
    Tensors under names of GGUF. left_out: A key that is left out.
    """
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    heads = config["num_attention_heads"]
    fields: dict[str, tuple[str, Any]] = {
        f"{architecture}.{key}": (type_, config[name]) for name, (key, type_) in _METADATA.items()
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fields[f"{architecture}.attention.key_length"] = ("uint32", head_dim)
    fields[f"{architecture}.attention.value_length"] = ("uint32", head_dim)
    fields[f"{architecture}.rope.freq_base"] = ("float32", config.get("rope_theta", 10000.0))
    for name, key in _OF_GEMMA.items():
        if name in config:
            fields[f"{architecture}.{key}"] = (
                "float32" if name.endswith("capping") else "uint32",
                config[name],
            )
    if architecture == "llama":
        fields["llama.rope.dimension_count"] = ("uint32", head_dim)
    for key, (type_, value) in {**fields, **(metadata or {})}.items():
        if key != left_out:
            getattr(writer, f"add_{type_}")(key, value)
    names = gguf.get_tensor_name_map(_number(architecture), config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = np.asarray(tensor, np.float32)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _permuted(values, heads if "q_proj" in name else config["num_key_value_heads"])
        kind_of_part = next((each for part, each in (kinds or {}).items() if part in name), kind)
        add_tensor(
            writer, names.get_name(name, try_suffixes=(".weight", ".bias")), values, kind_of_part
        )
    for name, values in (added or {}).items():
        add_tensor(writer, name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Returns what is no matrix stays float32."""
    number = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    data = gguf.quantize(values, number)
    writer.add_tensor(name, data, raw_dtype=number)


def byte_level(
    pre: str, vocabulary: Mapping[str, int], merges: list[tuple[str, str]]
) -> dict[str, tuple[str, Any]]:
    """Returns the metadata of a tokenizer.

    Tokens that are written <|so|> are control tokens; "<|end|>" ends a text.
    """
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [_CONTROL if token.startswith("<|") else _NORMAL for token in tokens]
    return {
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", pre),
        "tokenizer.ggml.tokens": ("array", tokens),
        "tokenizer.ggml.token_type": ("array", types),
        "tokenizer.ggml.merges": ("array", [" ".join(merge) for merge in merges]),
        "tokenizer.ggml.eos_token_id": ("uint32", vocabulary["<|end|>"]),
        "tokenizer.ggml.bos_token_id": ("uint32", vocabulary["<|end|>"]),
        "tokenizer.chat_template": ("string", TEMPLATE),
    }


def byte_level_vocabulary(
    words: list[str], letters: Iterable[str] | None = None
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns `letters`, by default those of all bytes, and `words` put together from the left."""
    letters = sorted(ByteLevel.alphabet() if letters is None else letters)
    vocabulary = {"<|end|>": 0, **{letter: index + 1 for index, letter in enumerate(letters)}}
    merges = []
    for word in words:
        ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocabulary:
                vocabulary[spelled[:end]] = len(vocabulary)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    return vocabulary, merges


def sentence_piece(words: list[str]) -> dict[str, tuple[str, Any]]:
    """Returns what `byte_level` does, of SentencePiece's kind: bytes, and pieces of `words` with
    scores that fall.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    letters = sorted({letter for word in words for letter in word})
    pieces = [word[:end] for word in words for end in range(2, len(word) + 1)]
    pieces += [word[start:] for word in words for start in range(1, len(word) - 1)]
    pieces = list(dict.fromkeys([*pieces, *letters]))
    scores = [0.0] * len(tokens) + [-float(index) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.pre": ("string", "default"),
        "tokenizer.ggml.tokens": ("array", tokens + pieces),
        "tokenizer.ggml.scores": ("array", scores),
        "tokenizer.ggml.token_type": ("array", types + [_NORMAL] * len(pieces)),
        "tokenizer.ggml.bos_token_id": ("uint32", 1),
        "tokenizer.ggml.eos_token_id": ("uint32", 2),
        "tokenizer.ggml.unknown_token_id": ("uint32", 0),
    }


def sentence_piece_metadata(processor: Any) -> dict[str, tuple[str, Any]]:
    """Returns what `sentence_piece` does, of a model of the library."""
    numbers = range(len(processor))
    kinds = [
        (processor.is_unknown, _UNKNOWN),
        (processor.is_control, _CONTROL),
        (processor.is_byte, _BYTE),
        (lambda number: processor.id_to_piece(number) == "<|user|>", _USER_DEFINED),
    ]
    types = [next((kind for is_of, kind in kinds if is_of(number)), _NORMAL) for number in numbers]
    return {
        **sentence_piece([]),
        "tokenizer.ggml.tokens": ("array", [processor.id_to_piece(number) for number in numbers]),
        "tokenizer.ggml.scores": ("array", [processor.get_score(number) for number in numbers]),
        "tokenizer.ggml.token_type": ("array", types),
    }


def _number(architecture: str) -> Any:
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows of queries and keys in llama.cpp's order, for RoPE over neighbours instead of
    halves.
    """
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
