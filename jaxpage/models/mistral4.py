"""Mistral 4 (Mistral AI, 2026) has latent attention, experts and queries scaled by position.

Experts are routed by a softmax. Queries are scaled as in Ministral 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.models import mistral
from jaxpage.models.config.corrected_experts import first_dense, read_corrected_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.deepseek import DeepseekV2, DeepseekV2Config
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.latent import latent_attention, read_latent_decoder
from jaxpage.models.parts.scope import Scope

ROPE = {  # The parameters of a config that has neither `rope_parameters` nor `rope_scaling`.
    **mistral.ROPE,
    **{"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
}


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekV2Config):
    """Reads transformers' `Mistral4Config`.

    Attributes:
        temperature_tuning: How queries are scaled by position; see `Scores`.
    """

    model_type = "mistral4"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults()

    temperature_tuning: tuple[float, int, int] | None

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the rotation that it means."""
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            return {**config, "rope_parameters": ROPE}
        return config

    @classmethod
    def read(cls, fields: Fields) -> Mistral4Config:
        """Returns what the fields say."""
        max_length = fields.integer("max_position_embeddings", 1_048_576)
        return cls.from_fields(
            fields,
            **read_latent_decoder(
                fields, max_length=max_length, rank=256, query_rank=1024, plain=64, turns_share=True
            ),
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
            sparse_layers=first_dense(fields, 0),
            temperature_tuning=mistral.read_growth(fields, max_length),
        )


class Mistral4(DeepseekV2, config=Mistral4Config):
    """Mistral 4 (Mistral AI, 2026) has latent attention, experts and queries scaled by position."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        tuning = config.temperature_tuning
        return latent_attention(config, config.latent, index, at, temperature_tuning=tuning)
