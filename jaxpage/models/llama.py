"""Llama 1 to 3 have the form in which many other models are published.

See Touvron et al., 2023, and Grattafiori et al., 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mtp_names import read_numbered_names
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import Decoder
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.experts import PLAIN_NAMES, ExpertNames, ExpertsConfig, mlp_or_experts
from jaxpage.models.parts.mlp import LLAMA_NAMES, MLPNames, gated_mlp
from jaxpage.models.parts.scope import Scope


class LlamaConfig(DecoderConfig):
    """Reads transformers' `LlamaConfig`.

    `attention_bias` puts biases on all four products. `pretraining_tp` only splits products. A head
    for multi-token prediction has DeepSeek's names.
    """

    model_type = "llama"
    defaults = Defaults(attention_bias=False, mlp_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> LlamaConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, draft_heads=read_numbered_names(fields))


class Llama(Decoder, config=LlamaConfig):
    """Llama 1 to 3 have the form in which many other models are published.

    Many families differ from it in one of these methods alone, or in these attributes.
    """

    mlp_names: ClassVar[MLPNames] = LLAMA_NAMES
    expert_names: ClassVar[ExpertNames] = PLAIN_NAMES
    # True if the product for the output of attention has a bias; None if it is like the others.
    output_bias: ClassVar[bool | None] = None

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
        return grouped_query_attention(config, index, at, output_bias=cls.output_bias)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the feed-forward half of a layer, or its experts."""
        names = cls.mlp_names
        if isinstance(config, ExpertsConfig):
            return mlp_or_experts(config, index, layer, names=cls.expert_names, mlp_names=names)
        return gated_mlp(config, layer / names.module, names=names)
