"""Tiny models that take pictures, made by transformers with random weights, and prompts with
pictures for them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage.images import PictureProcessor
from jaxpage.images.processor import ReadyPicture
from jaxpage.images.processor_settings import ProcessorSettings
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

import transformers  # noqa: E402

from tests.support.hf_models import randomise  # noqa: E402

Arrays = dict[str, np.ndarray]
IMAGE = 250  # the token that stands for a row of a picture
_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 257},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None},
    "pad_token_id": None,
}


@dataclass(frozen=True)
class SeeingModel:
    """A model of transformers that takes pictures.

    Attributes:
        architecture: Its class.
        config: The fields of its config.
        arrays: Makes the arrays of a picture, of a random generator and a size.
        num_rows: The positions that a picture of these arrays fills.
        is_whole: Its tokens see each other both ways.
        kinds: The argument that tells the model which tokens are those of pictures, if it has one.
    """

    architecture: str
    config: Mapping[str, Any]
    arrays: Callable[[np.random.Generator, int], Arrays]
    num_rows: Callable[[Arrays], int]
    is_whole: bool = False
    kinds: str = ""


def _tiles(draw: np.random.Generator, size: int) -> Arrays:
    pixels = draw.standard_normal((1, size, 3, 24, 24), np.float32)
    return {"pixel_values": pixels, "pixel_attention_mask": np.ones((1, size, 24, 24), np.int64)}


def _patches(draw: np.random.Generator, size: int) -> Arrays:
    height, width = 2 * size, 4
    pixels = draw.standard_normal((height * width, 3 * 2 * 4 * 4), np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]], np.int64)}


def _square(draw: np.random.Generator, size: int) -> Arrays:
    return {"pixel_values": draw.standard_normal((1, 3, 32, 32), np.float32)}


SEEING = {
    "smolvlm": SeeingModel(
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "patch_size": 4, "image_size": 24},
            },
            "scale_factor": 3,
            "image_token_id": IMAGE,
            "pad_token_id": None,
        },
        _tiles,
        lambda arrays: 4 * arrays["pixel_values"].shape[1],
    ),
    "qwen3-vl": SeeingModel(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_vl_text",
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1000.0},
                    **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
                },
            },
            "vision_config": {
                **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2},
                **{"patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16},
                "deepstack_visual_indexes": [0, 2],
            },
            "image_token_id": IMAGE,
            "vision_start_token_id": 251,
            "vision_end_token_id": 252,
            "video_token_id": 253,
        },
        _patches,
        lambda arrays: len(arrays["pixel_values"]) // 4,
        kinds="mm_token_type_ids",
    ),
    "gemma3": SeeingModel(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                **{"sliding_window": 20, "sliding_window_pattern": 2},
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "patch_size": 4, "image_size": 32},
                "model_type": "siglip_vision_model",
            },
            **{"mm_tokens_per_image": 16, "image_token_index": IMAGE, "image_token_id": IMAGE},
            **{"boi_token_index": 251, "eoi_token_index": 252},
        },
        _square,
        lambda arrays: 16,
        is_whole=True,
        kinds="token_type_ids",
    ),
}


@functools.cache
def theirs(name: str) -> Any:
    """Returns the model of transformers with random weights."""
    model = SEEING[name]
    kind = getattr(transformers, model.architecture)
    config = {key: dict(v) if isinstance(v, dict) else v for key, v in model.config.items()}
    made = kind(kind.config_class(**config)).eval()
    randomise(made, torch.Generator().manual_seed(5))
    return made


def save(name: str, directory: Path) -> Path:
    """Writes the checkpoint of a model, and returns its directory."""
    theirs(name).save_pretrained(directory)
    return directory


def picture(name: str, seed: int, size: int = 1) -> Picture:
    model = SEEING[name]
    arrays = model.arrays(np.random.default_rng(seed), size)
    return Picture(arrays, model.num_rows(arrays))


class Placeholders:
    """The rule and the vocabulary of a model whose pictures are arrays already."""

    marker = token = "<image>"
    options: Mapping[str, Any] = {}
    notes: frozenset[str] = frozenset()

    def __init__(self, model: SeeingModel) -> None:
        self.is_whole = model.is_whole
        self._model = model

    def text_of(self, arrays: Arrays) -> str:
        return self.token * self._model.num_rows(arrays)

    def get_vocab(self) -> dict[str, int]:
        return {self.token: IMAGE}


@functools.cache
def processor_of(name: str) -> PictureProcessor:
    """Returns what `LLM` has of a model with files of its image processor."""
    placeholders = Placeholders(SEEING[name])
    return PictureProcessor(ProcessorSettings("", {}, {}), placeholders, placeholders)


@functools.cache
def ready(name: str, seed: int, size: int) -> ReadyPicture:
    return processor_of(name).finish(picture(name, seed, size).arrays)


def key_of(each: Picture) -> bytes:
    return hashlib.sha256(
        b"".join(name.encode() + array.tobytes() for name, array in sorted(each.arrays.items()))
    ).digest()


def prompt(name: str, parts: Sequence[Sequence[int] | Picture]) -> tuple[list[int], EmbeddedPrompt]:
    """Returns the token ids of texts and pictures, and where the pictures are."""
    ids: list[int] = []
    spans = []
    sources = {}
    for part in parts:
        if isinstance(part, Picture):
            key = key_of(part)
            sources[key] = part
            whole = SEEING[name].is_whole
            spans.append(EmbeddedSpan(len(ids), part.num_rows, key, is_whole=whole))
            ids += [IMAGE] * part.num_rows
        else:
            ids += part
    return ids, EmbeddedPrompt(tuple(spans), sources)


def their_logprobs(name: str, ids: Sequence[int], pictures: Sequence[Picture]) -> np.ndarray:
    """Returns the log probabilities [V] of the token after a prompt."""
    model = theirs(name)
    joined = {
        key: np.concatenate([each.arrays[key] for each in pictures], axis=int(name == "smolvlm"))
        for key in (pictures[0].arrays if pictures else ())
    }
    if kinds := SEEING[name].kinds:
        joined[kinds] = (np.asarray(ids) == IMAGE).astype(np.int64)[None]
    tensors = {key: torch.from_numpy(array) for key, array in joined.items()}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), **tensors).logits[0, -1]
    return torch.log_softmax(logits.double(), dim=-1).numpy()
