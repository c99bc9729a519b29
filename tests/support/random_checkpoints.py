"""Checkpoints with random weights in Hugging Face layout, written without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxpage.checkpoints.fitting import LoadPlan, fit, read_layout
from jaxpage.checkpoints.problems import Problems
from jaxpage.models.base import model_weights
from jaxpage.models.parameters import Weight
from jaxpage.models.registry import load_family

# The order in which numbers are drawn, by parts of names within a layer and outside of one.
_OUTSIDE = "embed_tokens wte lm_head embed_positions wpe project_in project_out"
_INSIDE = (
    "input_layernorm post_attention_layernorm ln_1 q_proj k_proj v_proj o_proj out_proj q_norm "
    "k_norm c_attn attn.c_proj "
    "self_attn_layer_norm ln_2 gate_proj up_proj down_proj fc1 fc2 c_fc mlp.c_proj final_layer_norm"
)
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


def random_tensors(
    config: dict[str, Any], seed: int = 0, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors by name.

    Matrices keep the size of what they multiply, so logits are well spread.
    """
    family = load_family(config)
    rng = np.random.default_rng(seed)
    tensors = {}
    weights = model_weights(family, family.Spec.from_config(config))
    shapes = {
        piece.name: piece.stored_shape for weight in weights for piece in weight.sources[0].pieces
    }
    for name in sorted(shapes, key=_order):
        noise = rng.standard_normal(shapes[name], dtype=np.float32)
        if noise.ndim > 1:
            values = noise * np.clip(1.6 / np.sqrt(noise.shape[-1]), 0.05, 0.3)
        else:
            values = 0.1 * noise + (
                0.0 if name.endswith("bias") else -2.0 if name.endswith("A_log") else 1.0
            )
        tensors[name] = values.astype(DTYPES[dtype])
    return tensors


def _order(name: str) -> tuple[int, int, bool, str]:
    """Sorts tables first, then layer by layer, then what is left; the weight before the bias."""
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    parts = (_OUTSIDE if layer is None else _INSIDE).split()
    place = next((index for index, part in enumerate(parts) if part in name), len(parts))
    last = layer is None and place == len(parts)
    return (10**6 if last else -1 if layer is None else layer), place, name.endswith("bias"), name


def random_checkpoint(
    directory: Path,
    config: dict[str, Any],
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    *,
    tied_head: bool = False,
    headless_names: bool = False,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json and random weights to `directory`, which is returned.

    The same seed gives the same weights.

    shards: number of files (more than one comes with an index). tied_head: for tied embeddings,
    lm_head is saved as well. headless_names: without the prefix of the model inside (as saved from
    the bare decoder).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed, dtype)
    if tied_head:
        # every table starts with the token embeddings
        tensors["lm_head.weight"] = next(iter(tensors.values()))
    if headless_names:
        tensors = {
            name.removeprefix("model.").removeprefix("transformer."): value
            for name, value in tensors.items()
        }
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    write_tensors(directory, tensors, shards)
    return directory


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """Writes model.safetensors, or that many shards and their index."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata)
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    placed = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file(
            {name: tensors[name] for name in tensors if placed[name] == file},
            directory / file,
            metadata,
        )
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def check_weights(
    directory: Path, weights: Sequence[Weight], ignored: Sequence[str] = ()
) -> LoadPlan:
    """Fits the checkpoint to `weights`, and raises a CheckpointError with all that does not fit."""
    problems = Problems(Path(directory))
    layout, stored = read_layout(Path(directory), problems)
    plan = fit(Path(directory), layout, stored, weights, ignored, problems)
    problems.raise_if_any()
    return plan
