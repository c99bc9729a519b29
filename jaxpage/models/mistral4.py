"""Mistral 4 (Mistral AI, 2026) has latent attention, queries scaled by position, and experts.

Experts are routed by a softmax. Queries are scaled as in Ministral 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import mistral
from jaxpage.models.deepseek_v3 import first_dense, latent_knobs, read_corrected_experts
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ROPE = {  # The parameters of a config that has neither `rope_parameters` nor `rope_scaling`.
    **mistral.ROPE,
    **{"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Mistral4Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config = {**config, "rope_parameters": ROPE}
        with Fields(config, "mistral4", {"n_routed_experts": "num_local_experts"}) as fields:
            longest = fields.integer("max_position_embeddings", 1_048_576)
            return cls._from_fields(
                fields,
                experts=read_corrected_experts(
                    fields,
                    count=128,
                    per_token=4,
                    width=2048,
                    groups=(1, 1),
                    factor=1.0,
                    sigmoid=False,
                    corrected=False,
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 0),
                temperature_tuning=mistral.read_growth(fields, longest),
                **latent_knobs(
                    fields, longest=longest, rank=256, query_rank=1024, plain=64, turns_share=True
                ),
            )
