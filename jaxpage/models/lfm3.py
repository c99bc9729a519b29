"""LFM3 (Liquid AI, 2026) is LFM2 with sliding windows in some layers, and a gate for each head.

By default there are norms before and after attention, the convolution and the MLP. Full-attention
and sliding-window layers have different rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.layers.rope import NO_ROTATION, Rope
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import NO_ROPE, Fields
from jaxpage.models.layer_windows import windows_of
from jaxpage.models.lfm2 import CONVOLUTION, FORM, FULL, MLP_NAMES, convolution_knobs
from jaxpage.models.proportional_rope import read_rope
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
SLIDING = "sliding_attention"
SANDWICH = BlockForm(norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"))
NAMES = DecoderNames(norm="embedding_norm")
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Lfm3Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "lfm3", {"norm_eps": "rms_norm_eps"}) as fields:
            numbers = range(fields.integer("num_hidden_layers"))
            types = fields.layer_types(
                [_usual_type(number) for number in numbers], kinds=(FULL, SLIDING, CONVOLUTION)
            )
            head_dim = fields.integer("head_dim", 128)
            ropes = _ropes(fields, types, head_dim)
            longest = fields.integer("max_position_embeddings", 128_000)
            is_sandwich = fields.flag("use_sandwich_norm", True)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, types, fields.optional_integer("sliding_window", 256)
                ),
                attention_bias=fields.flag("attention_bias", False),
                rope=(ropes.get(FULL, NO_ROTATION), longest),
                rope_by_layer=tuple(ropes.get(kind) for kind in types),
                epsilon=("norm_eps", 1e-5),
                activation="silu",
                tied=True,
                norm_heads=True,
                separate_gates=int(fields.flag("use_attention_gate", True)),
                form=SANDWICH if is_sandwich else FORM,
                names=NAMES,
                mlp_names=MLP_NAMES,
                **convolution_knobs(fields, types, kernel=7),
            )


def _usual_type(number: int) -> str:
    """Returns the default type of a layer."""
    if number % 4 == 2:
        return FULL
    return CONVOLUTION if number % 2 or number == 0 else SLIDING


def _ropes(fields: Fields, types: Sequence[str], head_dim: int) -> dict[str, Rope]:
    """Returns the rotary embedding of each type of attention layer.

    As in transformers, fields at the top of the config are defaults for all types.
    """
    stated = fields.get("rope_scaling", None) or fields.get("rope_parameters", None)
    stated = ROPES if stated is None else stated
    usual = {
        "rope_theta": fields.get("rope_theta", 1_000_000.0),
        "partial_rotary_factor": fields.get("partial_rotary_factor", None),
    }
    if head_dim % 2:
        text = f"the rotary embedding needs an even head width, not head_dim = {head_dim}"
        fields.note(WrongField(text), head_dim=128)
    ropes = {}
    for kind in [kind for kind in ROPES if kind in types]:
        rope = stated.get(kind) if isinstance(stated, dict) else None
        if not isinstance(rope, dict):
            text = f"rope_parameters must have an object for {kind}, not {stated!r}"
            fields.note(WrongField(text), **NO_ROPE)
            rope = ROPES[kind]
        ropes[kind] = read_rope(fields, kind, {**usual, **rope}, head_dim)
    return ropes
