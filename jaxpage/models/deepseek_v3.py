"""Has names for families that are no pages yet."""

from __future__ import annotations

from typing import Any

from jaxpage.layers.rope import Rope
from jaxpage.models.corrected_experts import (
    first_dense,
    read_corrected_experts,
    read_groups,
    sparse_by_type,
)
from jaxpage.models.deepseek import ALIASES
from jaxpage.models.fields import Fields
from jaxpage.models.parts.latent import LatentSpec, read_latent

__all__ = ["ALIASES", "first_dense", "read_corrected_experts", "read_groups", "sparse_by_type"]


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
