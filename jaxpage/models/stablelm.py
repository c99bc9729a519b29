"""StableLM (Bellagente et al., 2024) has LayerNorm and rotates a quarter of each head.

Some of its models compute both halves of a layer in parallel, or have a norm for each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.attention import HeadNorms
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import Decoder
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import gated_mlp
from jaxpage.models.parts.norms import layer_norm, scales_by_head
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """Reads transformers' `StableLmConfig`. Dropouts are for training.

    Attributes:
        use_parallel_residual: True if both halves of a layer take its input.
        qk_layernorm: True if queries and keys have norms, one for each head.
    """

    model_type = "stablelm"
    defaults = Defaults(
        num_kv_heads=32, max_length=4096, partial=0.25, epsilon=("layer_norm_eps", 1e-5)
    )

    use_parallel_residual: bool
    qk_layernorm: bool

    @classmethod
    def read(cls, fields: Fields) -> StableLmConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            head_dim=fields.divide("hidden_size", "num_attention_heads"),
            attention_bias=fields.flag("use_qkv_bias", False),
            use_parallel_residual=fields.flag("use_parallel_residual", False),
            qk_layernorm=fields.flag("qk_layernorm", False),
        )


class StableLm(Decoder, config=StableLmConfig):
    """StableLM (Bellagente et al., 2024) has LayerNorm and rotates a quarter of each head.

    Some of its models compute both halves of a layer in parallel, or have a norm for each head.
    """

    make_norm = staticmethod(layer_norm)

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer; where its halves are parallel, the second one has no norm of its own."""
        parallel = config.use_parallel_residual
        return Block(
            attention_norm=layer_norm(config, at / "input_layernorm"),
            attention=cls.make_attention(config, index, at / "self_attn"),
            mlp_norm=None if parallel else layer_norm(config, at / "post_attention_layernorm"),
            mlp=gated_mlp(config, at / "mlp"),
            parallel=parallel,
        )

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with biases on queries, keys and values alone."""
        norms = HeadNorms()
        if config.qk_layernorm:
            query_heads, key_heads = config.num_query_heads, config.kv.num_kv_heads
            norms = HeadNorms(
                scales_by_head(config, at / "q_norm", query_heads, "heads", apart=True),
                scales_by_head(config, at / "k_norm", key_heads, "kv_heads", apart=True),
            )
        return grouped_query_attention(config, index, at, output_bias=False, norms=norms)
