"""GLM-4-9B, GLM-Edge and dense GLM-4 (Zeng et al., 2024) rotate half of each head, interleaved."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope


class GlmConfig(DecoderConfig):
    """Reads transformers' `GlmConfig`."""

    model_type = "glm"
    defaults = Defaults(
        num_kv_heads=2,
        max_length=131_072,
        partial=0.5,
        interleaved=True,
        epsilon=1.5625e-7,
        attention_bias=True,
    )

    @classmethod
    def read(cls, fields: Fields) -> GlmConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, head_dim=fields.optional_integer("head_dim", 128))


class Glm(Llama, config=GlmConfig):
    """GLM-4-9B and GLM-Edge (Zeng et al., 2024) rotate half of each head, interleaved."""

    output_bias = False


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
