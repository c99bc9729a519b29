"""Writes a trained model as a Hugging Face directory, in bfloat16.

It has a config, and safetensors in [out, in] layout.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.flax import load_file, save_file

from tools.lab.demo_model.model import ModelSpec, Params, init_params
from tools.lab.demo_model.tokenizer import END_OF_TEXT_ID

DEFAULT_TEMPERATURE = 0.65  # for generation_config.json: at 1 so small a model invents words

LAYER_MODULES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def round_to_bfloat16(params: Params) -> Params:
    """Returns the float32 values that the exported file holds.

    Losses and samples are then those of the file.
    """
    return {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in params.items()}


def huggingface_name(name: str) -> str:
    """Returns the checkpoint's name of a parameter.

    The embedding is tied, so there is no lm_head.
    """
    if name == "embed":
        return "model.embed_tokens.weight"
    if name == "norm":
        return "model.norm.weight"
    prefix, part = name.rsplit(".", 1)
    return f"model.{prefix}.{LAYER_MODULES.get(part, part)}.weight"


def llama_config(spec: ModelSpec) -> dict[str, object]:
    """Returns config.json of LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.width,
        "intermediate_size": spec.feed_forward,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "dtype": "bfloat16",
    }


def export_model(spec: ModelSpec, params: Params, directory: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    tensors = {
        huggingface_name(name): (value.T if name.endswith("_proj") else value).astype(jnp.bfloat16)
        for name, value in params.items()
    }
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes the file private; a packaged file is for everyone
    write_json(directory / "config.json", llama_config(spec))
    generation = {
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": DEFAULT_TEMPERATURE,
    }
    write_json(directory / "generation_config.json", generation)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Returns what the config of a text model says."""
    return ModelSpec(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        feed_forward=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )


def import_model(directory: Path) -> tuple[ModelSpec, Params]:
    """Returns what `export_model` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text())
    spec = read_spec(config)
    stored = load_file(directory / "model.safetensors")
    params = {}
    for name in init_params(spec, jax.random.key(0)):
        value = stored[huggingface_name(name)].astype(jnp.float32)
        params[name] = value.T if name.endswith("_proj") else value
    return spec, params


def write_json(path: Path, content: object) -> None:
    """Writes JSON, indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
