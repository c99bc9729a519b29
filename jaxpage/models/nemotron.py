"""Nemotron 3 and 4 (NVIDIA, 2024) and Jais 2 (2025) have LayerNorm and squared ReLU."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import Norm, layer_norm
from jaxpage.models.parts.scope import Scope


class NemotronConfig(DecoderConfig):
    """Reads transformers' `NemotronConfig`."""

    model_type = "nemotron"

    @classmethod
    def read(cls, fields: Fields) -> NemotronConfig:
        """Returns what the fields say."""
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                rope={"partial": 0.5},
                epsilon=("norm_eps", 1e-5),
                activation=("hidden_act", "relu2"),
            ),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )


class Nemotron(Llama, config=NemotronConfig):
    """Nemotron 3 and 4, dense, and Minitron (NVIDIA, 2024), have LayerNorm and squared ReLU.

    The scales of norms are stored less 1, and half of each head is rotated.
    """

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Norm:
        """Returns a norm of hidden states."""
        return layer_norm(config, at, offset=1.0)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer."""
        return plain_mlp(config, layer / "mlp", "up_proj", "down_proj")


class Jais2Config(DecoderConfig):
    """Reads transformers' `Jais2Config`."""

    model_type = "jais2"

    @classmethod
    def read(cls, fields: Fields) -> Jais2Config:
        """Returns what the fields say."""
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 8192),
                epsilon=("layer_norm_eps", 1e-5),
                activation=("hidden_act", "relu2"),
            ),
            attention_bias=fields.flag("attention_bias", True),
            mlp_bias=fields.flag("mlp_bias", True),
        )


class Jais2(Nemotron, config=Jais2Config):
    """Jais 2 (MBZUAI, Inception, Cerebras, 2025) has LayerNorm, squared ReLU and biases."""

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Norm:
        """Returns a norm of hidden states, whose scale is stored as it is."""
        return layer_norm(config, at)
