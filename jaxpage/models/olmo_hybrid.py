"""OLMo Hybrid (Ai2, 2026) is OLMo 2 with a gated delta rule in three of four layers.

These layers have norms before the delta rule and before the MLP. The others have norms after
attention and after the MLP, as in OLMo 2. Published models have no rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.delta_net import DeltaWidths
from jaxpage.layers.rope import NO_ROTATION, Rope
from jaxpage.models.block_form import LLAMA_FORM
from jaxpage.models.delta_config import check_activation, check_heads
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import unread_heads
from jaxpage.models.olmo2 import FORM
from jaxpage.models.qwen3_next import FULL, LINEAR
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix", "renamed"]

Model = RotaryDecoder
# Older files, and those that transformers saves, have the second names.
renamed = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `OlmoHybridConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "olmo_hybrid") as fields:
            check_activation(fields)
            types = _layer_types(fields)
            delta = _read_delta(fields)
            head_dim = read_head_dim(fields)
            rope, longest = _read_rope(fields, head_dim)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                states=tuple(delta.state if kind == LINEAR else None for kind in types),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                norm_heads=True,
                form=FORM,
                form_by_layer=tuple(LLAMA_FORM if kind == LINEAR else FORM for kind in types),
                recurrent=delta,
                draft_heads=unread_heads(fields),
            )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Returns the kinds of the layers.

    By default every fourth has attention. If there are fewer than four, the last one has.
    """
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    usual = [LINEAR if number % 4 else FULL for number in numbers]
    if FULL not in usual:
        usual[-1] = FULL
    return fields.layer_types(usual, kinds=(FULL, LINEAR))


def _read_delta(fields: Fields) -> DeltaWidths:
    heads = fields.integer("num_attention_heads")
    key_heads = fields.optional_integer("linear_num_key_heads", None) or heads
    share = int(0.75 * fields.integer("hidden_size") / key_heads)
    key = fields.optional_integer("linear_key_head_dim", None) or share
    widths = DeltaWidths(
        key_heads=key_heads,
        value_heads=fields.optional_integer("linear_num_value_heads", None) or heads,
        key=key,
        value=fields.optional_integer("linear_value_head_dim", None) or 2 * key,
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        apart=True,
        beta_factor=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        epsilon=1e-5,
    )
    check_heads(fields, widths)
    return widths


def _read_rope(fields: Fields, head_dim: int) -> tuple[Rope, int]:
    """Returns the rotary embedding and its number of positions.

    There is no rotary embedding if `rope_theta` is null.
    """
    longest = fields.integer("max_position_embeddings", 65_536)
    rope = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    theta = fields.get("rope_theta", 10_000.0)
    if isinstance(rope, dict):
        theta = rope.get("rope_theta", theta)
    return (NO_ROTATION, longest) if theta is None else fields.rope(head_dim, longest)
