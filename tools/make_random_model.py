"""Writes a Hugging Face model directory with random weights of a well-known shape.

It is something to benchmark without a download. Random weights cost as much to run as trained ones.
They are drawn wide enough that greedy text is not one repeated token, so equal outputs of two
engines mean something. Needs the `test` extra (transformers on torch); prompts are token ids, there
is no tokenizer.

    python tools/make_random_model.py llama-110m models/llama-110m
"""

from __future__ import annotations

import argparse
from typing import Any

try:
    import torch
    import transformers
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install torch transformers") from None

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
SHAPES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama-15m": (
        transformers.LlamaConfig,
        {
            **_LLAMA,
            "hidden_size": 288,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "vocab_size": 32000,
            "tie_word_embeddings": True,
        },
    ),
    "llama-110m": (
        transformers.LlamaConfig,
        {
            **_LLAMA,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
            "tie_word_embeddings": True,
        },
    ),
    # Llama-3-8B's; its file has 15 GiB, and so much memory is needed while it is made.
    "llama-8b": (
        transformers.LlamaConfig,
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "dtype": "bfloat16",
        },
    ),
    "opt-125m": (
        transformers.OPTConfig,
        {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": 768,
            "word_embed_proj_dim": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50272,
        },
    ),
}
# The deviation of every matrix; at the usual 0.02 a deep random model repeats one token.
DEVIATION = 0.06


def main() -> None:
    """Writes the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kind, fields = SHAPES[arguments.shape]
    torch.manual_seed(arguments.seed)
    deviation = {"init_std" if kind is transformers.OPTConfig else "initializer_range": DEVIATION}
    config = kind(**fields, **deviation, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(arguments.directory)
    print(
        f"{arguments.shape}: {sum(p.numel() for p in model.parameters()):,} parameters in {arguments.directory}"
    )


if __name__ == "__main__":
    main()
