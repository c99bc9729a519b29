"""Falcon computes both halves of a layer in parallel (Almazrouei et al., 2023).

It has few key/value heads, and LayerNorm. There are models of 7B, 11B, 40B and 180B; those of
RefinedWeb (RW) have ALiBi in place of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.attention import Scores
from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.config.alibi import alibi_slopes
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.attention import AttentionNames, grouped_query_attention
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import Decoder, ModuleNames
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """Reads transformers' `FalconConfig`.

    Attributes:
        alibi_slopes: The slopes of ALiBi; None in a model that rotates.
        parallel: True if both halves of a layer take its input.
        num_norms: The number of norms of a layer: one, or one for each half.
    """

    model_type = "falcon"
    aliases = {"hidden_size": "n_embed"}
    defaults = Defaults(
        epsilon=("layer_norm_epsilon", 1e-5), activation=("activation", "gelu"), tied=True
    )

    alibi_slopes: tuple[float, ...] | None
    parallel: bool
    num_norms: int

    @classmethod
    def read(cls, fields: Fields) -> FalconConfig:
        """Returns what the fields say."""
        num_heads = fields.integer("num_attention_heads")
        width = fields.integer("hidden_size")
        head_dim = fields.divide("hidden_size", "num_attention_heads")
        has_alibi = fields.flag("alibi", False)
        bias = fields.flag("bias", False)
        max_length = fields.integer("max_position_embeddings", 2048)
        parallel, num_norms = _order(fields)
        return cls.from_fields(
            fields,
            num_kv_heads=_kv_heads(fields, num_heads),
            head_dim=head_dim,
            rope=(NO_ROTATION, max_length) if has_alibi else None,
            intermediate_size=fields.optional_integer("ffn_hidden_size", None) or 4 * width,
            attention_bias=bias,
            mlp_bias=bias,
            name="transformer",
            alibi_slopes=_slopes(num_heads, head_dim) if has_alibi else None,
            parallel=parallel,
            num_norms=num_norms,
        )


def _slopes(num_heads: int, head_dim: int) -> tuple[float, ...]:
    """Returns the slopes, which Falcon scales like the scores.

    transformers rounds them to bfloat16, and their products with positions too.
    """
    return tuple(slope * head_dim**-0.5 for slope in alibi_slopes(num_heads))


def _kv_heads(fields: Fields, num_heads: int) -> int:
    if not fields.flag("new_decoder_architecture", False):
        return 1 if fields.flag("multi_query", True) else num_heads
    count = fields.optional_integer("num_kv_heads", None) or num_heads
    if num_heads % count:
        text = f"num_kv_heads = {count} must divide num_attention_heads = {num_heads}"
        fields.note(WrongField(text), num_kv_heads=num_heads, num_attention_heads=num_heads)
        return num_heads
    return count


def _order(fields: Fields) -> tuple[bool, int]:
    """Returns whether the halves of a layer are parallel, and how many norms it has."""
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True)
    if new and not parallel:
        text = "parallel_attn = false with new_decoder_architecture is not supported"
        fields.note(RefusedField(text), parallel_attn=True)
        parallel = True
    if not parallel:
        return False, 2
    count = fields.optional_integer("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if count > 2 or (count == 2 and not new):
        text = f"num_ln_in_parallel_attn = {count} is not supported for this form"
        fields.note(RefusedField(text), num_ln_in_parallel_attn=None)
    return True, count


class Falcon(Decoder, config=FalconConfig):
    """Falcon computes both halves of a layer in parallel (Almazrouei et al., 2023)."""

    prefix = "transformer."
    names = ModuleNames(tokens="word_embeddings", layers="h", norm="ln_f")
    make_norm = staticmethod(layer_norm)

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        has_two = config.num_norms == 2
        first, second = "input_layernorm", "post_attention_layernorm"
        if config.parallel and has_two:
            first, second = "ln_attn", "ln_mlp"
        return Block(
            attention_norm=layer_norm(config, at / first),
            attention=grouped_query_attention(
                config,
                index,
                at / "self_attention",
                names=AttentionNames(output="dense", fused="query_key_value"),
                scores=Scores(alibi_slopes=config.alibi_slopes),
            ),
            mlp_norm=layer_norm(config, at / second) if has_two else None,
            mlp=plain_mlp(config, at / "mlp", "dense_h_to_4h", "dense_4h_to_h"),
            parallel=config.parallel,
        )
