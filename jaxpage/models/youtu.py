"""Youtu-LLM (Tencent, 2025) has the latent attention of DeepSeek-V3, and no experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.deepseek_v3 import latent_knobs
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `YoutuConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "youtu") as fields:
            return cls._from_fields(
                fields, tied=True, **latent_knobs(fields, longest=131_072, query_rank=1536)
            )
