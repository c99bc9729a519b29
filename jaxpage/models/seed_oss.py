"""Seed-OSS (ByteDance Seed, 2025) is Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """Reads transformers' `SeedOssConfig`. Dropouts are for training.

    Attributes:
        attention_out_bias: True if the product for the output of attention has a bias.
    """

    model_type = "seed_oss"
    defaults = Defaults(num_kv_heads=8, max_length=524_288, attention_bias=True, mlp_bias=False)

    attention_out_bias: bool

    @classmethod
    def read(cls, fields: Fields) -> SeedOssConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            head_dim=fields.optional_integer("head_dim", 128),
            attention_out_bias=fields.flag("attention_out_bias", False),
        )


class SeedOss(Llama, config=SeedOssConfig):
    """Seed-OSS (ByteDance Seed, 2025) is Llama with biases on queries, keys and values."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return grouped_query_attention(config, index, at, output_bias=config.attention_out_bias)
