"""GLM-4-9B, GLM-Edge and dense GLM-4 (Zeng et al., 2024) rotate half of each head, interleaved."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import decoder_config
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope


class GlmConfig(DecoderConfig):
    """Reads transformers' `GlmConfig`."""

    model_type = "glm"

    @classmethod
    def read(cls, fields: Fields) -> GlmConfig:
        """Returns what the fields say."""
        head_dim = fields.optional_integer("head_dim", 128)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                head_dim=head_dim or decoder_config.read_head_dim(fields),
                max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
                rope={"partial": 0.5, "interleaved": True},
                epsilon=("rms_norm_eps", 1.5625e-7),
            ),
            attention_bias=fields.flag("attention_bias", True),
        )


class Glm(Llama, config=GlmConfig):
    """GLM-4-9B and GLM-Edge (Zeng et al., 2024) rotate half of each head, interleaved."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with biases on queries, keys and values alone."""
        return grouped_query_attention(config, index, at, output_bias=False)


class Glm4Config(GlmConfig):
    """Reads transformers' `Glm4Config`."""

    model_type = "glm4"


class Glm4(Glm, config=Glm4Config):
    """GLM-4, dense (Zeng et al., 2024; 0414 and later), is GLM-4-9B with four norms in a layer."""

    OVERFLOWS_FLOAT16 = True

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        return Block(
            attention_norm=rms_norm(config, at / "input_layernorm"),
            attention=cls.make_attention(config, index, at / "self_attn"),
            post_attention_norm=rms_norm(config, at / "post_self_attn_layernorm"),
            mlp_norm=rms_norm(config, at / "post_attention_layernorm"),
            mlp=cls.make_mlp(config, index, at),
            post_mlp_norm=rms_norm(config, at / "post_mlp_layernorm"),
        )
