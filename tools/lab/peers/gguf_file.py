"""Writes a Llama in Hugging Face's format as a GGUF file, for llama.cpp and OpenVINO."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.utility import LocalTensor, SafetensorsLocal

TYPES = {  # for each type, that of the tensors and that of the file
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "int4": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@contextlib.contextmanager
def gguf_of(model: Path, config: dict[str, Any], dtype: str) -> Iterator[str]:
    """Yields the path of a GGUF file of a Llama, which is deleted afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.gguf")
        write_gguf(model, config, path, dtype)
        yield path


def write_gguf(model: Path, config: dict[str, Any], path: str, dtype: str) -> None:
    """Writes a Llama, with the tokens of its tokenizer if it has one.

    Its rows of queries and keys are in the order of interleaved rotary embeddings.
    """
    matrices, file_type = TYPES[dtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokens(writer, model, config["vocab_size"])
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            values = _float32(tensor)
            if "q_proj" in name or "k_proj" in name:
                values = _interleave(
                    values, heads if "q_proj" in name else config["num_key_value_heads"]
                )
            kind = matrices if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_rename(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, model: Path, vocab_size: int) -> None:
    """Adds the tokens and merges of a byte-level tokenizer.

    How it divides a text into words is not said, since requests have token ids.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, token_id in stored["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, gguf.TokenType.NORMAL
    for added in stored["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(model, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _rename(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in fixed:
        return f"{fixed[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _float32(tensor: LocalTensor) -> npt.NDArray[np.float32]:
    """Returns a tensor in float32 or bfloat16; NumPy has no bfloat16, which is half a float32."""
    values = tensor.mmap_bytes()
    if tensor.dtype == "BF16":
        halves = values.view(np.uint16).astype(np.uint32)
        values = (halves << 16).view(np.float32)
    elif tensor.dtype == "F32":
        values = values.view(np.float32)
    else:
        raise ValueError(f"a tensor of {tensor.dtype}: only F32 and BF16 are read")
    return values.reshape(tensor.shape)


def _interleave(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    rows, columns = values.shape
    halves = values.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)
