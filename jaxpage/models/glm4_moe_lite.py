"""GLM-4.7 Flash (Z.ai, 2026) has the layers of DeepSeek-V3 in another size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.deepseek_v3 import latent_knobs, read_corrected_experts, sparse_by_type
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# The MTP head of published files, where config.json does not count it.
ignored = (*rotary_decoder.ignored, "*layers.47.*")
ALIASES = {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Glm4MoeLiteConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "glm4_moe_lite", ALIASES) as fields:
            num_layers = fields.integer("num_hidden_layers")
            return cls._from_fields(
                fields,
                epsilon=("rms_norm_eps", 1e-5),
                experts=read_corrected_experts(
                    fields, count=64, per_token=4, width=1536, groups=(1, 1), factor=1.8
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=sparse_by_type(fields, (False, *(True,) * (num_layers - 1))),
                draft_heads=read_numbered_names(fields),
                **latent_knobs(fields, longest=202_752, query_rank=768, plain=192, value=256),
            )
