"""Medusa heads in files of both published formats, and a model that heads can know by heart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_tensors, write_tensors

WIDTH = 64  # of the model, and its vocabulary
CYCLE = {**LLAMA, "hidden_size": WIDTH, "vocab_size": WIDTH, "num_hidden_layers": 1}
NEXT = np.random.default_rng(5).permutation(WIDTH)  # the likeliest token behind each token
SHARPNESS = 0.7  # at temperature 1 that token has a chance of 0.81


class Head(NamedTuple):
    """Numbers of a head: residual blocks (W, b), then a table."""

    blocks: list[tuple[np.ndarray, np.ndarray]]
    table: np.ndarray


def random_heads(
    count: int, layers: int = 1, rows: int = WIDTH, width: int = WIDTH, seed: int = 0
) -> list[Head]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    return [
        Head([(matrix(width, width), matrix(width)) for _ in range(layers)], matrix(rows, width))
        for _ in range(count)
    ]


def table_of(following: np.ndarray) -> np.ndarray:
    """Returns rows [V, D] that give token `following[t]` the one large logit.

    They do so where the hidden state is that of token t.
    """
    table = np.zeros((WIDTH, WIDTH), np.float32)
    table[following, np.arange(WIDTH)] = SHARPNESS
    return table


def times(count: int) -> np.ndarray:
    """Returns what stands so many tokens behind each token, if every token is the likeliest."""
    following = np.arange(WIDTH)
    for _ in range(count):
        following = NEXT[following]
    return following


def knowing_heads(count: int) -> list[Head]:
    """Returns heads whose best guess is what the cycle model finds likeliest, and then again."""
    zeros = [(np.zeros((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32))]
    return [Head(zeros, table_of(times(head + 2))) for head in range(count)]


def cycle_checkpoint(directory: Path) -> Path:
    """Writes a model whose hidden state is a function of the last token alone.

    So is what it finds likeliest next.
    """
    directory.mkdir(parents=True)
    tensors = random_tensors(CYCLE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
        elif name.endswith("norm.weight"):
            tensor[:] = 1
    tensors["model.embed_tokens.weight"] = np.float32(8) * np.eye(WIDTH, dtype=np.float32)
    tensors["lm_head.weight"] = table_of(NEXT)
    (directory / "config.json").write_text(json.dumps({**CYCLE, "torch_dtype": "float32"}))
    write_tensors(directory, tensors)
    return directory


def write_original(directory: Path, heads: Sequence[Head], **config: Any) -> Path:
    """Writes heads as the authors of Medusa publish them."""
    tensors = {}
    for index, head in enumerate(heads):
        for layer, (kernel, bias) in enumerate(head.blocks):
            tensors[f"{index}.{layer}.linear.weight"] = kernel
            tensors[f"{index}.{layer}.linear.bias"] = bias
        tensors[f"{index}.{len(head.blocks)}.weight"] = head.table
    fields = {
        "medusa_num_heads": 2,
        "medusa_num_layers": len(heads[0].blocks),
        "base_model_name_or_path": "base",
    }
    return _write(directory, {**fields, **config}, "medusa_lm_head.safetensors", tensors)


def write_vllm(
    directory: Path,
    heads: Sequence[Head],
    prefix: str = "",
    token_map: np.ndarray | None = None,
    **config: Any,
) -> Path:
    """Writes heads as vLLM takes them."""
    tensors = {}
    for index, head in enumerate(heads):
        for layer, (kernel, bias) in enumerate(head.blocks):
            tensors[f"{prefix}blocks.{index}.layers.{layer}.weight"] = kernel
            tensors[f"{prefix}blocks.{index}.layers.{layer}.bias"] = bias
        tensors[f"{prefix}lm_heads.{index}.weight"] = head.table
    if token_map is not None:
        tensors["token_map"] = token_map
    fields = {
        "model_type": "medusa",
        "hidden_size": WIDTH,
        "vocab_size": WIDTH,
        "num_heads": len(heads),
    }
    fields |= {"num_hidden_layers": len(heads[0].blocks)} if heads[0].blocks else {}
    fields |= {"medusa_fc_bias": True}
    return _write(directory, {**fields, **config}, "model.safetensors", tensors)


def _write(
    directory: Path, config: dict[str, Any], file: str, tensors: dict[str, np.ndarray]
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / file)
    return directory
