"""GLM-4.5, 4.6 and 4.7 (Z.ai, 2025) rotate half of a head, and have the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.deepseek_v3 import ALIASES, first_dense, read_corrected_experts
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# The MTP heads of published files (GLM-4.5 and its Air), where config.json does not count them.
ignored = (*rotary_decoder.ignored, "*layers.92.*", "*layers.46.*")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Glm4MoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "glm4_moe", ALIASES) as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 131_072)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_input_bias=fields.flag("attention_bias", False),
                rope=fields.rope(head_dim, longest, partial=0.5),
                epsilon=("rms_norm_eps", 1e-5),
                norm_heads=fields.flag("use_qk_norm", False),
                experts=read_corrected_experts(
                    fields, count=128, per_token=8, width=1408, groups=(1, 1), factor=1.0
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 1),
                draft_heads=read_numbered_names(fields),
            )
