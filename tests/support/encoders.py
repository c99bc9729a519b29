"""Small encoders with random weights, and their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

WORDS = ("the", "cat", "is", "here", "where", "dog", "find", "query", "passage", ":", "a")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "initializer_range": 0.3,
}
POSITIONS = 128  # tokens of the longest text


def word_tokenizer(*, has_types: bool = True) -> Any:
    """A tokenizer of words and letters, which puts texts and pairs into BERT's form."""
    names = [*SPECIAL, *WORDS, *"bcdefghijklmnopqrstuvwxyz0123456789.,"]
    model = tokenizers.models.WordPiece(
        {name: index for index, name in enumerate(names)},
        unk_token="[UNK]",
        continuing_subword_prefix="",
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    second = "1" if has_types else "0"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[(name, names.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=POSITIONS,
    )


def save_encoder(directory: Path, architecture: str, **fields: Any) -> Any:
    """Saves an encoder with random weights and the tokenizer, and returns it.

    Args:
        directory: The directory.
        architecture: The class in transformers.
        fields: Fields of its config, for those of `SIZES`.
    """
    tokenizer = word_tokenizer()
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**SIZES, "vocab_size": len(tokenizer), **fields})
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
    """Token ids of texts; the same for the same lengths."""
    draw = np.random.default_rng(7)
    most = len(word_tokenizer())
    return [draw.integers(first, most, length).tolist() for length in lengths]


@torch.no_grad()
def states_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """The states of the last layer, by transformers."""
    base = getattr(model, model.base_model_prefix, model)
    states: np.ndarray = base(torch.tensor([list(ids)])).last_hidden_state[0].double().numpy()
    return states
