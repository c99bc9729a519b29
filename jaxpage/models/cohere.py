"""Command R, R+, R7B and A (Cohere, 2024) compute both halves of a layer in parallel.

They have LayerNorm without biases, and rotate interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpage.layers.attention import HeadNorms
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import layer_types, rope_with_windows, windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import (
    DecoderConfig,
    key_value_heads,
    read_common,
    read_head_dim,
)
from jaxpage.models.parts.norms import Norm, layer_norm, scales_by_head
from jaxpage.models.parts.scope import Scope

THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """Reads transformers' `CohereConfig`.

    `model_max_length`, which that class does not have, is the length that Command R was trained
    for. Its `max_position_embeddings` is far shorter.

    Attributes:
        logit_scale: The factor of logits.
        use_qk_norm: True if queries and keys have norms, with a scale for each head.
    """

    model_type = "cohere"

    logit_scale: float
    use_qk_norm: bool = False

    @classmethod
    def read(cls, fields: Fields) -> CohereConfig:
        """Returns what the fields say."""
        max_length = fields.integer("max_position_embeddings", 8192)
        if fields.rope_parameters(max_length, THETA)["rope_type"] == "default":
            max_length = fields.optional_integer("model_max_length", None) or max_length
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=max_length,
                rope={"theta": THETA, "interleaved": True},
                epsilon=("layer_norm_eps", 1e-5),
                tied=True,
            ),
            attention_bias=fields.flag("attention_bias", False),
            logit_scale=fields.number("logit_scale", 0.0625),
            use_qk_norm=fields.flag("use_qk_norm", False),
        )


class Cohere(Llama, config=CohereConfig):
    """Command R and R+ (Cohere, 2024) compute both halves of a layer in parallel.

    R+ has norms of queries and keys.
    """

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        return Block(
            attention_norm=cls.make_norm(config, at / "input_layernorm"),
            attention=cls.make_attention(config, index, at / "self_attn"),
            mlp_norm=None,
            mlp=cls.make_mlp(config, index, at),
            parallel=True,
        )

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Norm:
        """Returns a norm of hidden states."""
        return layer_norm(config, at, bias=False)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = HeadNorms()
        if config.use_qk_norm:
            norms = HeadNorms(
                scales_by_head(config, at / "q_norm", config.num_query_heads, "heads"),
                scales_by_head(config, at / "k_norm", config.kv.num_kv_heads, "kv_heads"),
            )
        return grouped_query_attention(config, index, at, norms=norms)

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return super().logits(hidden_BD) * self.config.logit_scale


class Cohere2Config(CohereConfig):
    """Reads transformers' `Cohere2Config`."""

    model_type = "cohere2"

    @classmethod
    def read(cls, fields: Fields) -> Cohere2Config:
        """Returns what the fields say."""
        head_dim = read_head_dim(fields)
        types = layer_types(fields, fields.integer("sliding_window_pattern", 4))
        max_length = fields.integer("max_position_embeddings", 8192)
        rope, reach = fields.rope(head_dim, max_length, interleaved=True)
        window = fields.optional_integer("sliding_window", 4096)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=reach,
                sliding_windows=windows_of(fields, types, window),
                rope=(rope, reach),
                epsilon=("layer_norm_eps", 1e-5),
                tied=True,
            ),
            rope_by_layer=rope_with_windows(rope, types),
            attention_bias=fields.flag("attention_bias", False),
            logit_scale=fields.number("logit_scale", 0.0625),
        )


class Cohere2(Cohere, config=Cohere2Config):
    """Command R7B and Command A (Cohere, 2024) compute both halves of a layer in parallel.

    Layers with windows rotate; those without have no positions.
    """
