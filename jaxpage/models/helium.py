"""Helium (Kyutai, 2025) is Llama that rotates interleaved."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.config_fields import RefusedField
from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.scope import Scope


class HeliumConfig(DecoderConfig):
    """Reads transformers' `HeliumConfig`."""

    model_type = "helium"

    @classmethod
    def read(cls, fields: Fields) -> HeliumConfig:
        """Returns what the fields say."""
        head_dim = fields.integer("head_dim", 128)
        usual = fields.divide("hidden_size", "num_attention_heads")
        if head_dim != usual:
            text = f"head_dim = {head_dim} is not hidden_size / num_attention_heads = {usual}"
            fields.note(RefusedField(text), head_dim=usual)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 20),
                head_dim=usual,
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                rope={"theta": 100_000.0, "interleaved": True},
                epsilon=("rms_norm_eps", 1e-8),
            ),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )


class Helium(Llama, config=HeliumConfig):
    """Helium (Kyutai, 2025) is Llama that rotates interleaved."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with biases on queries, keys and values alone."""
        return grouped_query_attention(config, index, at, output_bias=False)
