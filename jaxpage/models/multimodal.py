"""Finds the text model in checkpoints that hold others too: for images, videos or sound.

Each kind of checkpoint is an entry of `MULTIMODAL`. The text model is that of a family of its own,
whose names in the checkpoint have one more level; older files write it in another place:

    today      model.language_model.layers.0...    lm_head.weight                  model.visual...
    LLaVA's    language_model.model.layers.0...    language_model.lm_head.weight   vision_tower...
    Qwen-VL's  model.layers.0...                   lm_head.weight                  visual...

Positions of images have several axes (mrope), which are all the same in a text. The encoder of
images is a page of `models.vision`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpage.errors import UnsupportedError
from jaxpage.models.base import Family, ModelFactory, ModelSpec, SpecFactory
from jaxpage.models.config import text_part, without_axes
from jaxpage.models.parts.vision import VisionFamily

DECODER = "model.language_model"
# The names that older files have in place of the first ones.
OLDER_NAMES = (
    (f"{DECODER}.", ("language_model.model.", "model.")),
    ("lm_head.", ("language_model.lm_head.",)),
)


@dataclass(frozen=True, eq=False)
class MultimodalCheckpoint:
    """Describes the checkpoints of one architecture.

    Attributes:
        texts: The module of the text model's family, by the `model_type` of its config. The first
            is that of a config without one.
        others: The names that tensors of the other models begin with, and may have `model.` before.
        takes: What the other models take, for messages.
        defaults: The fields of the text model's config that mean something else in their absence
            than they do to the family.
        fixed: The fields that the family has, and the architecture has not.
        tied_by_files: True if published configs do not say whether the head is tied to the token
            table: it is, where the files have no head.
        vision: The class of the encoder of images, `module:class`; empty for none that is computed.
        decoder: The name of the text model's decoder.
    """

    texts: Mapping[str, str]
    others: tuple[str, ...] = ("visual.",)
    takes: str = "images and videos"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tied_by_files: bool = False
    vision: str = ""
    decoder: str = DECODER


_GEMMA = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_LLAVA = ("vision_tower.", "multi_modal_projector.")
_QWEN2 = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_QWEN3 = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
_NO_WINDOWS = {"use_sliding_window": False, "layer_types": None}
_IDEFICS3 = MultimodalCheckpoint(
    {"llama": "llama:Llama"},
    ("vision_model.", "connector."),
    "images",
    decoder="model.text_model",
    vision="vision.siglip:Idefics3Vision",
)
MULTIMODAL = {
    "Exaone4_5_ForConditionalGeneration": MultimodalCheckpoint(
        {"exaone4": "exaone:Exaone4", "exaone4_5_text": "exaone:Exaone4"}
    ),
    "Gemma3ForConditionalGeneration": MultimodalCheckpoint(
        {"gemma3_text": "gemma:Gemma3"},
        _LLAVA,
        "images",
        # The published config of the 4B model has neither.
        {"num_attention_heads": 8, "vocab_size": 262_208},
        vision="vision.gemma3:Gemma3Vision",
    ),
    "Gemma3nForConditionalGeneration": MultimodalCheckpoint(
        {"gemma3n_text": "gemma3n:Gemma3n"}, _GEMMA, "images, videos and sound"
    ),
    "Gemma4ForConditionalGeneration": MultimodalCheckpoint(
        {"gemma4_text": "gemma4:Gemma4"},
        _GEMMA,
        "images, videos and sound",
        vision="vision.gemma4:Gemma4Vision",
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "Llama4ForConditionalGeneration": MultimodalCheckpoint(
        {"llama4_text": "llama:Llama4"}, ("vision_model.", "multi_modal_projector."), "images"
    ),
    "Mistral3ForConditionalGeneration": MultimodalCheckpoint(
        {
            "mistral": "mistral:Mistral",
            "ministral3": "mistral:Ministral3",
            "mistral4": "mistral:Mistral4",
        },
        _LLAVA,
        "images",
        tied_by_files=True,
        vision="vision.pixtral:PixtralVision",
    ),
    "Qwen2VLForConditionalGeneration": MultimodalCheckpoint(
        {"qwen2_vl_text": "qwen:Qwen2", "qwen2_vl": "qwen:Qwen2"},
        defaults={**_QWEN2, "rope_theta": 1_000_000.0},
        vision="vision.qwen_vl:Qwen2Vision",
    ),
    "Qwen2_5_VLForConditionalGeneration": MultimodalCheckpoint(
        {"qwen2_5_vl_text": "qwen:Qwen2", "qwen2_5_vl": "qwen:Qwen2"},
        defaults={**_QWEN2, "rope_theta": 1_000_000.0},
        vision="vision.qwen_vl:Qwen2_5Vision",
    ),
    "Qwen3VLForConditionalGeneration": MultimodalCheckpoint(
        {"qwen3_vl_text": "qwen:Qwen3"},
        defaults=_QWEN3,
        fixed=_NO_WINDOWS,
        vision="vision.qwen_vl:Qwen3Vision",
    ),
    "Qwen3VLMoeForConditionalGeneration": MultimodalCheckpoint(
        {"qwen3_vl_moe_text": "qwen:Qwen3VLMoeText"},
        defaults={
            **_QWEN3,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        fixed={**_NO_WINDOWS, "norm_topk_prob": True},
        vision="vision.qwen_vl:Qwen3Vision",
    ),
    "Qwen3_5ForConditionalGeneration": MultimodalCheckpoint(
        {"qwen3_5_text": "qwen:Qwen3_5"},
        vision="vision.qwen_vl:Qwen3_5Vision",
    ),
    "Qwen3_5MoeForConditionalGeneration": MultimodalCheckpoint(
        {"qwen3_5_moe_text": "qwen:Qwen3_5Moe"},
        vision="vision.qwen_vl:Qwen3_5Vision",
    ),
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}


@dataclass(frozen=True, eq=False)
class TextSpecs:
    """Reads the config of a text model with that of its family."""

    wrapper: MultimodalCheckpoint
    family: Family
    vision: VisionFamily | None

    def from_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Returns the spec of a config.json."""
        text = {**self.wrapper.defaults, **without_axes(text_part(config)), **self.wrapper.fixed}
        # Files may have the name of the whole model here, which is not that of the family.
        text.pop("model_type", None)
        spec: Any = self.family.Spec.from_config(text)
        changes: dict[str, Any] = {"name": self.wrapper.decoder, "not_loaded": self.wrapper.takes}
        # An encoder whose pictures have positions on several axes says which pairs turn by each.
        if (sections := getattr(getattr(self.vision, "Spec", None), "sections", None)) is not None:
            axes = sections.axes(config, len(spec.rope.frequencies))
            changes["rope"] = dataclasses.replace(spec.rope, axes=axes)
        changed: ModelSpec = dataclasses.replace(spec, **changes)
        return changed


@dataclass(eq=False)
class TextFamily:
    """Is the family of the text models in checkpoints of one architecture; see `Family`.

    Attributes:
        others: Globs over the names of tensors of the other models.
        Vision: The family of the encoder of images; None if there is none.
        older_names: See `models.base.other_names`.
    """

    Spec: SpecFactory
    Model: ModelFactory
    prefix: str | tuple[str, ...]
    ignored: tuple[str, ...]
    others: tuple[str, ...]
    OVERFLOWS_FLOAT16: bool
    Vision: VisionFamily | None = None
    older_names: tuple[tuple[str, tuple[str, ...]], ...] = OLDER_NAMES


def text_module(architecture: str, config: Mapping[str, Any]) -> str:
    """Returns the module of the text model's family.

    Raises:
        UnsupportedError: jaxpage does not know the text model.
    """
    texts = MULTIMODAL[architecture].texts
    kind = text_part(config).get("model_type", next(iter(texts)))
    if kind not in texts:
        raise UnsupportedError(
            f"config.json: the text model of {architecture} has model_type {kind!r}, which is not "
            f"one of {', '.join(texts)}"
        )
    return texts[kind]


def text_family(architecture: str, family: Family, vision: VisionFamily | None) -> TextFamily:
    """Returns the family of the text models in checkpoints of this architecture.

    Args:
        architecture: The architecture.
        family: The family of the text model.
        vision: The family of the encoder of images; None if there is none.
    """
    wrapper = MULTIMODAL[architecture]
    others = tuple(f"{before}{name}*" for name in wrapper.others for before in ("model.", ""))
    return TextFamily(
        TextSpecs(wrapper, family, vision),
        family.Model,
        family.prefix,
        (*family.ignored, *others),
        others,
        getattr(family, "OVERFLOWS_FLOAT16", False),
        vision,
    )


def leaves_tying_open(config: Mapping[str, Any]) -> bool:
    """Returns whether only the files say if the head is tied to the token table."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    wrapper = MULTIMODAL.get(first) if isinstance(first, str) else None
    return bool(
        wrapper and wrapper.tied_by_files and "tie_word_embeddings" not in text_part(config)
    )
