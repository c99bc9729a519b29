"""Llama 1 to 3 have the form in which many other models are published.

See Touvron et al., 2023, and Grattafiori et al., 2024.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mtp_names import read_numbered_names
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import Decoder
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common
from jaxpage.models.parts.mlp import gated_mlp
from jaxpage.models.parts.scope import Scope


class LlamaConfig(DecoderConfig):
    """Reads transformers' `LlamaConfig`.

    `attention_bias` puts biases on all four products. `pretraining_tp` only splits products. A head
    for multi-token prediction has DeepSeek's names.
    """

    model_type = "llama"

    @classmethod
    def read(cls, fields: Fields) -> LlamaConfig:
        """Returns what the fields say."""
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            ),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            draft_heads=read_numbered_names(fields),
        )


class Llama(Decoder, config=LlamaConfig):
    """Llama 1 to 3 have the form in which many other models are published.

    Many families differ from it in one of these methods alone.
    """

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        return Block(
            attention_norm=cls.make_norm(config, at / "input_layernorm"),
            attention=cls.make_mixer(config, index, at),
            mlp_norm=cls.make_norm(config, at / "post_attention_layernorm"),
            mlp=cls.make_mlp(config, index, at),
        )

    @classmethod
    def make_mixer(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the half of a layer in which tokens see others: attention, or a recurrence."""
        return cls.make_attention(config, index, layer / "self_attn")

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, whose scope is `at`."""
        return grouped_query_attention(config, index, at)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer, or its experts."""
        return gated_mlp(config, layer / "mlp")
