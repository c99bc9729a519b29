"""Small encoders with random weights, and their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.word_tokenizer import SPECIAL, word_tokenizer

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "initializer_range": 0.3,
}


def save_encoder(directory: Path, architecture: str, **fields: Any) -> Any:
    """Saves an encoder with random weights and the tokenizer, and returns it.

    Args:
        directory: The directory.
        architecture: The class in transformers.
        fields: Fields of its config, for those of `SIZES`; None leaves one of these out.
    """
    tokenizer = word_tokenizer()
    kind = getattr(transformers, architecture)
    fields = {**SIZES, "vocab_size": len(tokenizer), **fields}
    config = kind.config_class(**{name: x for name, x in fields.items() if x is not None})
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():  # biases and norms are not what they start as
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def write_json(path: Path, content: Any) -> None:
    """Writes a file, and the folder that it is in."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def random_texts(lengths: Sequence[int], first: int = len(SPECIAL)) -> list[list[int]]:
    """Returns the token ids of texts; they are the same for the same lengths."""
    draw = np.random.default_rng(7)
    maximum = len(word_tokenizer())
    return [draw.integers(first, maximum, length).tolist() for length in lengths]


@torch.no_grad()
def states_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Returns the states of the last layer, by transformers."""
    base = getattr(model, model.base_model_prefix, model)
    states: np.ndarray = base(torch.tensor([list(ids)])).last_hidden_state[0].double().numpy()
    return states
