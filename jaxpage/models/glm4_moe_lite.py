"""GLM-4.7 Flash (Z.ai, 2026) has the layers of DeepSeek-V3 in another size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import WrongField
from jaxpage.models.deepseek_v3 import corrected_experts, latent_knobs
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ALIASES = {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Glm4MoeLiteConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "glm4_moe_lite", ALIASES) as fields:
            return cls._from_fields(
                fields,
                epsilon=("rms_norm_eps", 1e-5),
                experts=corrected_experts(
                    fields, count=64, per_token=4, width=1536, groups=(1, 1), factor=1.8
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=_sparse_layers(fields),
                draft_heads=read_numbered_names(fields),
                **latent_knobs(fields, longest=202_752, query_rank=768, plain=192, value=256),
            )


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    types = fields.get("mlp_layer_types", None)
    if types is not None:
        fits = isinstance(types, list) and len(types) == num_layers
        if fits and all(kind in ("dense", "sparse") for kind in types):
            return tuple(kind == "sparse" for kind in types)
        text = f"mlp_layer_types must say dense or sparse of {num_layers} layers, not {types!r}"
        fields.note(WrongField(text), mlp_layer_types=None, num_hidden_layers=num_layers)
    return tuple(index > 0 for index in range(num_layers))
