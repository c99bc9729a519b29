"""Writes the demo that sees as transformers writes Idefics 3, in bfloat16, and reads it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import load_file, save_file
from tokenizers import Tokenizer

from tools.lab.demo_model.exporting import (
    huggingface_name,
    llama_config,
    read_spec,
    write_json,
)
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.picture_talk import BEGIN, END, IMAGE, PAD
from tools.lab.demo_model.seeing_model import CELLS, SeeingSpec, init_seeing

VISION = "model.vision_model."
NAMES = {
    "patch_proj": f"{VISION}embeddings.patch_embedding.weight",
    "patch_bias": f"{VISION}embeddings.patch_embedding.bias",
    "position": f"{VISION}embeddings.position_embedding.weight",
    "vision_norm": f"{VISION}post_layernorm.weight",
    "vision_norm_bias": f"{VISION}post_layernorm.bias",
    "connector_proj": "model.connector.modality_projection.proj.weight",
}
MODULES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    **{name: f"mlp.{name}" for name in ("fc1", "fc2")},
}


def checkpoint_name(name: str) -> str:
    """Returns the checkpoint's name of a parameter; lm_head is tied to the embedding."""
    if name in NAMES:
        return NAMES[name]
    if name.startswith("text."):
        inner = huggingface_name(name.removeprefix("text."))
        return f"model.text_model.{inner.removeprefix('model.')}"
    _, layer, part = name.split(".")
    prefix = f"{VISION}encoder.layers.{layer}."
    kind = "bias" if part.endswith("_bias") else "weight"
    module = part.removesuffix("_proj").removesuffix("_bias")
    return f"{prefix}{MODULES.get(module, module.replace('norm', 'layer_norm'))}.{kind}"


def idefics_config(spec: SeeingSpec, tokenizer: Tokenizer) -> dict[str, object]:
    """Returns config.json of Idefics3ForConditionalGeneration."""
    pad, begin, end = (tokenizer.token_to_id(text) for text in (PAD, BEGIN, END))
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "scale_factor": spec.shuffle,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **ids,
        "text_config": llama_config(spec.text) | ids,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": spec.width,
            "intermediate_size": spec.feed_forward,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_channels": 3,
            "image_size": spec.image_size,
            "patch_size": spec.patch_size,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": spec.norm_epsilon,
        },
    }


def export(params: Params) -> Params:
    """Returns the parameters that belong to the model; one serves training alone."""
    return {name: value for name, value in params.items() if name != CELLS}


def export_seeing(spec: SeeingSpec, params: Params, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    tensors = {}
    for name, value in export(params).items():
        stored = value.T if name.endswith("_proj") else value
        if name == "patch_proj":
            stored = stored.reshape(-1, 3, spec.patch_size, spec.patch_size)
        tensors[checkpoint_name(name)] = stored.astype(jnp.bfloat16)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes the file private; a packaged file is for everyone
    config = idefics_config(spec, tokenizer)
    write_json(directory / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", generation | {"do_sample": False})


def import_seeing(directory: Path) -> tuple[SeeingSpec, Params]:
    """Returns what `export_seeing` wrote, in float32."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    text, vision = config["text_config"], config["vision_config"]
    spec = SeeingSpec(
        read_spec(text),
        width=vision["hidden_size"],
        layers=vision["num_hidden_layers"],
        heads=vision["num_attention_heads"],
        feed_forward=vision["intermediate_size"],
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        shuffle=config["scale_factor"],
        norm_epsilon=vision["layer_norm_eps"],
    )
    stored = load_file(directory / "model.safetensors")
    params = {}
    for name in export(init_seeing(spec, jax.random.key(0))):
        value = stored[checkpoint_name(name)].astype(jnp.float32)
        if name == "patch_proj":
            value = value.reshape(value.shape[0], -1)
        params[name] = value.T if name.endswith("_proj") else value
    return spec, params
