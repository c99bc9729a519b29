"""Files of small models that take pictures: tokenizers, settings, and the processors of
transformers as oracles.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import transformers
from PIL import Image

import jaxpage
from jaxpage.images import PictureProcessor, read_settings, rule_of

_TILES = [
    *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]


class Family(NamedTuple):
    """Holds what the files of a family's model say, in small numbers."""

    processor: str
    image_processor: dict[str, Any]
    of_prompts: dict[str, Any]
    tokens: list[str]
    named: dict[str, str] = {}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012


FAMILIES = {
    "idefics3": Family(
        "Idefics3Processor",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 28},
        },
        {"image_seq_len": 4},
        _TILES,
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
        },
        {"image_seq_len": 4},
        _TILES,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLProcessor",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "min_pixels": 28 * 28,
            "max_pixels": 28 * 28 * 12,
        },
        {},
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    ),
    "qwen3_vl": Family(
        "Qwen3VLProcessor",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 9},
        },
        {},
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    ),
    "gemma3": Family(
        "Gemma3Processor",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 28, "width": 28},
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
        },
        {"image_seq_length": 4},
        ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "gemma4": Family(
        "Gemma4Processor",
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 2},
        {"image_seq_length": 70},
        ["<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"],
        {
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "audio_token": "<|audio|>",
            "eoa_token": "<audio|>",
        },
        {"text_config": {"use_bidirectional_attention": "vision"}},
    ),
    "pixtral": Family(
        "PixtralProcessor",
        {
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 56},
            "patch_size": {"height": 4, "width": 4},
        },
        {"patch_size": 4, "spatial_merge_size": 2},
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    ),
}


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Returns the packaged tokenizer with the special tokens of a family."""
    family = FAMILIES[name]
    directory = Path(jaxpage.__file__).parent / "demo"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        directory, extra_special_tokens=family.named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": family.tokens})
    return tokenizer


@functools.cache
def processor_of(name: str) -> PictureProcessor:
    family = FAMILIES[name]
    settings = read_settings(family.of_prompts, family.image_processor)
    assert settings is not None
    rule = rule_of(settings, tokenizer_of(name), family.config)
    assert rule is not None
    return PictureProcessor(settings, rule, tokenizer_of(name))


def _class_of(name: str, family: Family) -> Any:
    if name != "pixtral":
        return getattr(transformers, family.processor)
    # Its module imports torchvision for a function that prompts do not need.
    parts = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    with mock.patch.dict(sys.modules, {part: mock.MagicMock() for part in parts}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return getattr(module, family.processor)


class Oracle:
    """The processor of transformers for a family, which gives token ids and arrays.

    Those of families with videos demand torchvision and num2words for these, so their objects are
    made without `__init__`, with the attributes that prompts with pictures need.
    """

    def __init__(self, name: str) -> None:
        family = FAMILIES[name]
        self._tokenizer = tokenizer_of(name)
        settings = dict(family.image_processor)
        kind = settings.pop("image_processor_type").removesuffix("Fast")
        self.image_processor = getattr(transformers, f"{kind}Pil").from_dict(settings)
        self._class = _class_of(name, family)
        made = self._class.__new__(self._class)
        made.image_processor = self.image_processor
        made.tokenizer = self._tokenizer
        for attribute, value in self._attributes(name, family).items():
            setattr(made, attribute, value)
        self._made = made

    def _attributes(self, name: str, family: Family) -> Mapping[str, Any]:
        if name in ("smolvlm", "idefics3"):
            return {
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_token": "<global-img>",
                "global_image_tag": "<global-img>",
                "image_seq_len": family.of_prompts["image_seq_len"],
            }
        if name.startswith("qwen"):
            return {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
        if name == "gemma3":
            return vars(self._class(self.image_processor, self._tokenizer, **family.of_prompts))
        if name == "pixtral":
            tokens = zip(("image", "image_break", "image_end"), family.tokens, strict=True)
            return {**family.of_prompts, **{f"{what}_token": token for what, token in tokens}}
        return family.named

    def __call__(self, text: str, pictures: list[Image.Image]) -> tuple[list[int], Any]:
        options = {**getattr(self._class, "images_kwargs", {}), "return_tensors": "np"}
        nested: Any = [pictures]
        has_nests = "Idefics3" in self._class.__name__ or "SmolVLM" in self._class.__name__
        processed, texts = self._made._process_images(nested if has_nests else pictures, **options)
        expanded, _ = self._made.get_text_with_replacements([text], images_replacements=texts)
        return self._tokenizer(expanded[0])["input_ids"], processed


@functools.cache
def oracle_of(name: str) -> Oracle:
    return Oracle(name)


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Returns a picture of noise, which no resize leaves as it is."""
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(values, mode)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns the bytes of a picture's file."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


# The chat template of SmolVLM, which shows parts and no texts, and one that shows both, as Qwen's
# does.
PARTS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
BOTH_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_seeing_model(directory: Path) -> Any:
    """Writes a SmolVLM with random weights and all its files, and returns the model of
    transformers.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from tests.support.hf_models import randomise

    family = FAMILIES["smolvlm"]
    tokenizer = copy.deepcopy(tokenizer_of("smolvlm"))
    tokenizer.chat_template = None
    token_id = tokenizer.convert_tokens_to_ids("<image>")
    kind = transformers.SmolVLMForConditionalGeneration
    config = kind.config_class(
        text_config={
            **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"vocab_size": len(tokenizer), "max_position_embeddings": 512, "pad_token_id": None},
            **{"bos_token_id": None, "eos_token_id": None},
        },
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "patch_size": 8, "image_size": 32},
        },
        scale_factor=2,
        image_token_id=token_id,
        pad_token_id=None,
    )
    made = kind(config).eval()
    randomise(made, torch.Generator().manual_seed(7))
    made.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Older models have their template in this file.
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_TEMPLATE}))
    (directory / "preprocessor_config.json").write_text(json.dumps(family.image_processor))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    return made
