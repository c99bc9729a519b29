"""LFM2 (Liquid AI, 2025) has gated short convolutions in most layers, and attention in the others.

A convolution keeps the inputs of the last few tokens, and no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.layers.convolution import ConvolutionSpec
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.mlp import MLPNames
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FULL = "full_attention"
CONVOLUTION = "conv"
MLP_NAMES = MLPNames("feed_forward", "w1", "w3", "w2", None)
FORM = BlockForm(norms=("operator_norm", None, "ffn_norm", None))
NAMES = DecoderNames(
    norm="embedding_norm", output="out_proj", head_norms=("q_layernorm", "k_layernorm")
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Lfm2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        config = dict(config)
        # The names of these fields in published files outrank those of the class.
        for older, name in (
            ("tie_embedding", "tie_word_embeddings"),
            ("block_ff_dim", "intermediate_size"),
        ):
            if older in config:
                config[name] = config.pop(older)
        with Fields(config, "lfm2") as fields:
            return cls._from_fields(
                fields,
                feed_forward_width=_feed_forward_width(fields),
                **lfm2_knobs(fields, _usual_types(fields), older={"attention": FULL}),
            )


def lfm2_knobs(fields: Fields, types: Sequence[str], **more: Any) -> dict[str, Any]:
    """Returns the arguments of `_from_fields` for LFM2 with and without experts.

    Args:
        fields: The fields of the config.
        types: The kinds of the layers where `layer_types` is absent.
        **more: Further arguments of `Fields.layer_types`.
    """
    types = fields.layer_types(types, kinds=(FULL, CONVOLUTION), **more)
    head_dim = read_head_dim(fields)
    rope, longest = fields.rope(
        head_dim, fields.integer("max_position_embeddings", 128_000), theta=1_000_000.0
    )
    return {
        "num_kv_heads": key_value_heads(fields, 8),
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "rope": (rope, longest),
        "epsilon": ("norm_eps", 1e-5),
        "activation": "silu",
        "tied": True,
        "norm_heads": True,
        "form": FORM,
        "names": NAMES,
        "mlp_names": MLP_NAMES,
        **convolution_knobs(fields, types, kernel=3),
    }


def convolution_knobs(fields: Fields, types: Sequence[str], *, kernel: int) -> dict[str, Any]:
    """Returns the arguments of `_from_fields` about convolution layers.

    Args:
        fields: The fields of the config.
        types: The kinds of the layers.
        kernel: The default kernel width, in tokens.
    """
    convolution = ConvolutionSpec(
        width=fields.integer("hidden_size"),
        kernel=fields.integer("conv_L_cache", kernel),
        bias=fields.flag("conv_bias", False),
    )
    return {
        "states": tuple(convolution.state if kind == CONVOLUTION else None for kind in types),
        "recurrent": convolution if CONVOLUTION in types else None,
    }


def _usual_types(fields: Fields) -> list[str]:
    """Returns the kinds of the layers: those of `full_attn_idxs` attend, or all without it."""
    numbers = range(fields.integer("num_hidden_layers"))
    attending = fields.get("full_attn_idxs", None)
    if attending is not None and not isinstance(attending, list):
        text = f"full_attn_idxs must be a list, not {attending!r}"
        fields.note(WrongField(text), full_attn_idxs=None)
        attending = None
    return [FULL if attending is None or index in attending else CONVOLUTION for index in numbers]


def _feed_forward_width(fields: Fields) -> int:
    """Returns the inner width: two thirds of the field's, times a factor, rounded up."""
    width = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = fields.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(factor * width) // multiple) * multiple
