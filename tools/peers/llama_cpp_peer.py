"""Runs llama.cpp, by llama-cpp-python.

All sequences are in one batch, but prompts and decodes are apart, which is the best way for it on a
CPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from gguf.utility import LocalTensor, SafetensorsLocal

from tools.peers.task import Prompts, Task, answer, read_task

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_1,
}
BATCH = 512  # the most tokens of a call
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


def main() -> None:
    """Answers the task."""
    task = read_task()
    config = json.loads((Path(task.model) / "config.json").read_text())
    model = _load(task, config)
    context: Any = None
    num_sequences = 0

    def prepare(wanted: int) -> None:
        """Makes a context for this number of sequences, unless it is that of the last run."""
        nonlocal context, num_sequences
        if wanted == num_sequences:
            return
        if context is not None:
            llama_cpp.llama_free(context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = wanted * (task.longest + 256), wanted
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = task.threads
        params.kv_unified = task.mode["kv_unified"]
        params.flash_attn_type = int(task.mode["flash_attention"])
        context, num_sequences = llama_cpp.llama_init_from_model(model, params), wanted

    vocab_size = config["vocab_size"]
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Computes at most BATCH tokens, and returns the most likely next tokens.

        A token is (token id, position, sequence, whether it draws); only those that draw have a
        result.
        """
        batch.n_tokens = len(tokens)
        for place, (token_id, position, sequence, draws) in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token_id, position, draws
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        drawn = [place for place, token in enumerate(tokens) if token[3]]
        logits = (llama_cpp.llama_get_logits_ith(context, place) for place in drawn)
        return [int(np.ctypeslib.as_array(each, (vocab_size,)).argmax()) for each in logits]

    def generate(prompts: Prompts, lengths: Sequence[int]) -> list[list[int]]:
        prepare(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        stream = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        drawn: list[int] = []
        for first in range(0, len(stream), BATCH):
            drawn += run(stream[first : first + BATCH])
        outputs = [[token_id] for token_id in drawn]
        while going := [
            index for index, output in enumerate(outputs) if len(output) < lengths[index]
        ]:
            places = [len(prompts[index]) + len(outputs[index]) - 1 for index in going]
            step = [
                (outputs[index][-1], place, index, True)
                for index, place in zip(going, places, strict=True)
            ]
            for index, token_id in zip(going, run(step), strict=True):
                outputs[index].append(token_id)
        return outputs

    answer(task, f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}", generate)


def _load(task: Task, config: dict[str, Any]) -> Any:  # a pointer of ctypes
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.gguf")
        write_gguf(Path(task.model), config, path, task.dtype)
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        # Version 0.3.36 ends by a signal where it multiplies Q8_0 by AMX, which is one of its extra
        # buffer types.
        loading.use_extra_bufts = task.dtype != "int8"
        return llama_cpp.llama_model_load_from_file(path.encode(), loading)


def write_gguf(model: Path, config: dict[str, Any], path: str, dtype: str) -> None:
    """Writes a Llama without a tokenizer.

    Its rows of queries and keys are in the order of interleaved rotary embeddings.
    """
    writer = gguf.GGUFWriter(path, "llama")
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
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            values = _float32(tensor)
            if "q_proj" in name or "k_proj" in name:
                values = _interleaved(
                    values, heads if "q_proj" in name else config["num_key_value_heads"]
                )
            kind = TYPES[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_renamed(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
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


def _interleaved(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    rows, columns = values.shape
    halves = values.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


if __name__ == "__main__":
    main()
