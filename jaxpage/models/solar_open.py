"""Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.corrected_experts import read_corrected_experts
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `SolarOpenConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "solar_open", {"n_routed_experts": "num_local_experts"}) as fields:
            # Published files have these fields; transformers' class does not.
            fields.only(first_k_dense_replace=0, use_qk_norm=False)
            head_dim = fields.integer("head_dim", 128)
            longest = fields.integer("max_position_embeddings", 131_072)
            experts = read_corrected_experts(
                fields, count=128, per_token=8, width=1280, groups=(1, 1), factor=1.0
            )
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_input_bias=fields.flag("attention_bias", False),
                rope=fields.rope(head_dim, longest, theta=1_000_000.0),
                epsilon=("rms_norm_eps", 1e-5),
                feed_forward_width=experts.width,  # No layer is dense.
                experts=experts,
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
            )
