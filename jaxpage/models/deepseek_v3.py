"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024) have latent attention, and experts in groups.

The scores of experts are sigmoids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import Rope
from jaxpage.models import rotary_decoder
from jaxpage.models.corrected_experts import (
    first_dense,
    read_corrected_experts,
    read_groups,
    sparse_by_type,
)
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import Fields
from jaxpage.models.latent import LatentSpec, read_latent
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, prefix

__all__ = [
    "Model",
    "Spec",
    "first_dense",
    "ignored",
    "prefix",
    "read_corrected_experts",
    "read_groups",
    "sparse_by_type",
]

Model = RotaryDecoder
# The MTP head of published files, where config.json does not count it.
ignored = (*rotary_decoder.ignored, "*layers.61.*")
ALIASES = {
    "n_routed_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `DeepseekV3Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "deepseek_v3", ALIASES) as fields:
            return cls._from_fields(
                fields,
                experts=read_corrected_experts(
                    fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 3),
                draft_heads=read_numbered_names(fields),
                **latent_knobs(fields, longest=4096, query_rank=1536),
            )


def latent_knobs(fields: Fields, **defaults: Any) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields`; see `read_latent` for the defaults."""
    fields.only(moe_layer_freq=1, ep_size=1)
    return knobs_of(*read_latent(fields, **defaults))


def knobs_of(latent: LatentSpec, rope: Rope, length: int) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields` for what `read_latent` returns."""
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.widths.kept,
        "value_width": latent.widths.rank,
        "max_position_embeddings": length,
        "rope": (rope, length),
    }
