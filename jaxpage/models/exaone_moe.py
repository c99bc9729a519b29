"""K-EXAONE (LG AI Research, 2026) has EXAONE 4's sliding windows, and DeepSeek-V3's experts.

Sliding-window layers have rotary embeddings, and the others have none. Norms come before attention
and before the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.corrected_experts import first_dense, read_corrected_experts, sparse_by_type
from jaxpage.models.exaone4 import usual_types
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import rope_with_windows, windows_of
from jaxpage.models.mtp_names import unread_heads
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ignored = (*rotary_decoder.ignored, "*mtp.*")
NAMES = replace(DEEPSEEK_NAMES, correction="e_score_correction_bias")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `ExaoneMoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "exaone_moe") as fields:
            head_dim = read_head_dim(fields)
            window = fields.integer("sliding_window", 4096)
            types = fields.layer_types(usual_types(fields, window))
            rope, longest = fields.rope(head_dim, fields.integer("max_position_embeddings", 2048))
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, types, window),
                rope=(rope, longest),
                rope_by_layer=rope_with_windows(rope, types),
                epsilon=("rms_norm_eps", 1e-5),
                norm_heads=True,
                experts=read_corrected_experts(
                    fields,
                    count_field="num_experts",
                    shared_field="num_shared_experts",
                    count=64,
                    per_token=8,
                    width=1024,
                    groups=(1, 1),
                    factor=2.5,
                ),
                expert_names=NAMES,
                sparse_layers=sparse_by_type(fields, first_dense(fields, 1)),
                draft_heads=unread_heads(fields),
            )
