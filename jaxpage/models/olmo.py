"""OLMo 1 to 3 (Ai2, 2024 and 2025), OLMoE and FlexOlmo, which have experts.

OLMo 1 is Llama with LayerNorm. OLMo 2 has norms after both halves of a layer, and OLMo 3 windows as
well. OLMo Hybrid is in `olmo_hybrid.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import layer_types, read_ropes, read_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts import decoder_config
from jaxpage.models.parts.attention import grouped_query_attention, norms_over_all_heads
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.experts import ExpertsConfig
from jaxpage.models.parts.norms import layer_norm, rms_norm
from jaxpage.models.parts.scope import Scope

# In `Olmo3Config` too, `rope_theta` does not reach layers with windows.
THETA = {"full_attention": ("rope_theta", 500_000.0), "sliding_attention": ("", 500_000.0)}


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """Reads transformers' `OlmoConfig`. The epsilon of its norms is no field.

    Attributes:
        clip_qkv: The limit of queries, keys and values; None for none.
    """

    model_type = "olmo"
    defaults = Defaults(epsilon=("", 1e-5), attention_bias=False)

    clip_qkv: float | None

    @classmethod
    def read(cls, fields: Fields) -> OlmoConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, clip_qkv=fields.optional_number("clip_qkv", None))


class Olmo(Llama, config=OlmoConfig):
    """OLMo 1 (Groeneveld et al., 2024) is Llama with LayerNorm that has neither scale nor bias."""

    make_norm = staticmethod(functools.partial(layer_norm, affine=False))

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return grouped_query_attention(config, index, at, clip_qkv=config.clip_qkv)


class Olmo2Config(DecoderConfig):
    """Reads transformers' `Olmo2Config`."""

    model_type = "olmo2"
    defaults = Defaults(epsilon=1e-5, attention_bias=False)


class Olmo2(Llama, config=Olmo2Config):
    """OLMo 2 (OLMo et al., 2025) has norms after both halves of a layer, and none before them.

    Norms of queries and keys are over all heads together.
    """

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        return Block(
            attention_norm=None,
            attention=cls.make_attention(config, index, at / "self_attn"),
            post_attention_norm=rms_norm(config, at / "post_attention_layernorm"),
            mlp_norm=None,
            mlp=cls.make_mlp(config, index, at),
            post_mlp_norm=rms_norm(config, at / "post_feedforward_layernorm"),
        )

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = norms_over_all_heads(config, at, rms_norm)
        return grouped_query_attention(config, index, at, norms=norms)


class Olmo3Config(DecoderConfig):
    """Reads transformers' `Olmo3Config`."""

    model_type = "olmo3"
    defaults = Defaults(epsilon=1e-5, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Olmo3Config:
        """Returns what the fields say."""
        head_dim = decoder_config.read_head_dim(fields)
        types = layer_types(fields, 4)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            sliding_windows=read_windows(fields, types, 4096),
            **read_ropes(fields, types, head_dim, 2048, THETA),
        )


class Olmo3(Olmo2, config=Olmo3Config):
    """OLMo 3 (Ai2, 2025) is OLMo 2 with a sliding window in three of four layers.

    The rotation of these layers is not scaled.
    """


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """Reads transformers' `OlmoeConfig`; for `clip_qkv` see `OlmoConfig`."""

    model_type = "olmoe"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(max_length=4096, epsilon=1e-5, attention_bias=False)

    clip_qkv: float | None

    @classmethod
    def read(cls, fields: Fields) -> OlmoeConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            clip_qkv=fields.optional_number("clip_qkv", None),
            experts=read_experts(
                fields,
                count=("num_experts", 64),
                per_token=8,
                width=("intermediate_size", 2048),
                normalized=None,
            ),
        )


class Olmoe(Llama, config=OlmoeConfig):
    """OLMoE (Muennighoff et al., 2024) has experts and norms of queries and keys over all heads."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = norms_over_all_heads(config, at, rms_norm)
        return grouped_query_attention(config, index, at, norms=norms, clip_qkv=config.clip_qkv)


class FlexOlmoConfig(ExpertsConfig):
    """Reads transformers' `FlexOlmoConfig`."""

    model_type = "flex_olmo"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(max_length=4096, theta=500_000.0, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> FlexOlmoConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            experts=read_experts(
                fields,
                count=("num_experts", 7),
                per_token=5,
                width=("intermediate_size", 11008),
                normalized=None,
            ),
        )


class FlexOlmo(Olmo2, config=FlexOlmoConfig):
    """FlexOlmo (Shi et al., 2025) has the layers of OLMo 2 and the experts of OLMoE."""
