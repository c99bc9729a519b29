"""GPT-J (EleutherAI, 2021) computes both halves of a layer in parallel, after one LayerNorm.

It rotates the first part of each head, interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.layers.rope import Rope
from jaxpage.layers.rope_scaling import make_rope
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "transformer."
ignored = ("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask")
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
NAMES = DecoderNames(tokens="wte", layers="h", norm="ln_f", attention="attn", output="out_proj")
FORM = BlockForm(norms=("ln_1", None, None, None), kind="layer", parallel=True)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GPTJConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        return cls._read(config, "gptj", NAMES)

    @classmethod
    def _read(
        cls, config: Mapping[str, Any], model_type: str, names: DecoderNames
    ) -> RotaryDecoderSpec:
        """Returns the spec of a family of this model type, whose modules have these names."""
        with Fields(config, model_type, ALIASES) as fields:
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 2048)
            return cls._from_fields(
                fields,
                num_kv_heads=fields.integer("num_attention_heads"),
                head_dim=head_dim,
                max_position_embeddings=longest,
                feed_forward_width=inner_width(fields, "n_inner"),
                rope=(_rope(fields, head_dim, longest), longest),
                mlp_bias=True,
                head_bias=True,
                plain_mlp=("fc_in", "fc_out"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation=("activation_function", "gelu_new"),
                form=FORM,
                name="transformer",
                names=names,
            )


def inner_width(fields: Fields, name: str) -> int:
    """Returns the width of a feed-forward layer; four times the model's where it is null."""
    return fields.optional_integer(name, None) or 4 * fields.integer("hidden_size")


def _rope(fields: Fields, head_dim: int, longest: int) -> Rope:
    turned = fields.integer("rotary_dim", 64)
    if turned % 2 or turned > head_dim:
        text = f"rotary_dim = {turned} must be even, and at most the width of a head, {head_dim}"
        fields.note(WrongField(text), rotary_dim=2)
        turned = 2
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    rope, _ = make_rope(parameters, head_dim=turned, max_position_embeddings=longest)
    return replace(rope, interleaved=True)
