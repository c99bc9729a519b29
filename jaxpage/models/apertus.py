"""Apertus (Swiss AI, 2025) has a learned activation function, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.mlp import XIELU
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import Decoder
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope

ROPE = {  # The parameters of a config that has neither `rope_parameters` nor `rope_scaling`.
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """Reads transformers' `ApertusConfig`.

    Attributes:
        xielu: True if the activation function is the learned one, and not `activation`.
    """

    model_type = "apertus"
    defaults = Defaults(
        max_length=65_536,
        theta=12_000_000.0,
        epsilon=1e-5,
        attention_bias=False,
    )

    xielu: bool

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the rotation that it means."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        return config if rope else {**config, "rope_parameters": ROPE}

    @classmethod
    def read(cls, fields: Fields) -> ApertusConfig:
        """Returns what the fields say."""
        learned = fields.get("hidden_act", "xielu") == "xielu"
        if learned:
            fields.config["hidden_act"] = "silu"
        return cls.from_fields(fields, xielu=learned)


class Apertus(Decoder, config=ApertusConfig):
    """Apertus (Swiss AI, 2025) has a learned activation function, and norms of queries and keys."""

    # Files may have the two constants of the activation function, which are the same in all layers.
    ignored = (*Decoder.ignored, "*.act_fn.beta", "*.act_fn.eps")

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        attention = at / "self_attn"
        mlp = at / "mlp"
        learned = XIELU(name=f"{mlp.name}.act_fn", dtype=at.dtype) if config.xielu else None
        return Block(
            attention_norm=rms_norm(config, at / "attention_layernorm"),
            attention=grouped_query_attention(
                config, index, attention, norms=norms_of_heads(config, attention, rms_norm)
            ),
            mlp_norm=rms_norm(config, at / "feedforward_layernorm"),
            mlp=plain_mlp(config, mlp, "up_proj", "down_proj", activation=learned),
        )
