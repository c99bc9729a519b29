"""Falcon computes both halves of a layer in parallel (Almazrouei et al., 2023).

It has few key/value heads, and LayerNorm. There are models of 7B, 11B, 40B and 180B; those of
RefinedWeb (RW) have ALiBi in place of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.alibi import alibi_slopes
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "transformer."
NAMES = DecoderNames(
    tokens="word_embeddings",
    layers="h",
    norm="ln_f",
    attention="self_attention",
    fused="query_key_value",
    output="dense",
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `FalconConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "falcon", {"hidden_size": "n_embed"}) as fields:
            num_heads = fields.integer("num_attention_heads")
            width = fields.integer("hidden_size")
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 2048)
            has_alibi = fields.flag("alibi", False)
            bias = fields.flag("bias", False)
            return cls._from_fields(
                fields,
                num_kv_heads=_kv_heads(fields, num_heads),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=(NO_ROTATION, longest) if has_alibi else None,
                alibi_slopes=_slopes(num_heads, head_dim) if has_alibi else None,
                feed_forward_width=fields.optional_integer("ffn_hidden_size", None) or 4 * width,
                attention_bias=bias,
                mlp_bias=bias,
                plain_mlp=("dense_h_to_4h", "dense_4h_to_h"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation=("activation", "gelu"),
                form=_form(fields),
                name="transformer",
                names=NAMES,
                tied=True,
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


def _form(fields: Fields) -> BlockForm:
    """Returns the norms of a layer, and the order of its halves."""
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True)
    if new and not parallel:
        text = "parallel_attn = false with new_decoder_architecture is not supported"
        fields.note(RefusedField(text), parallel_attn=True)
        parallel = True
    if not parallel:
        return BlockForm(kind="layer")
    count = fields.optional_integer("num_ln_in_parallel_attn", None) or (2 if new else 1)
    if count > 2 or (count == 2 and not new):
        text = f"num_ln_in_parallel_attn = {count} is not supported for this form"
        fields.note(RefusedField(text), num_ln_in_parallel_attn=None)
    before, before_mlp = ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm", None)
    return BlockForm(norms=(before, None, before_mlp, None), kind="layer", parallel=True)
