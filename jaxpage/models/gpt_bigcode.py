"""GPT-BigCode (SantaCoder and StarCoder, 2023) is GPT-2 with one key/value head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.block_form import BlockForm
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.gptj import ALIASES, inner_width
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "transformer."
ignored = ("*.attn.bias", "*.attn.masked_bias")
NAMES = DecoderNames(
    tokens="wte",
    positions="wpe",
    layers="h",
    norm="ln_f",
    attention="attn",
    fused="c_attn",
    output="c_proj",
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GPTBigCodeConfig`.

    Dropouts are for training. Softmax is always in float32 here.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "gpt_bigcode", ALIASES) as fields:
            longest = fields.integer("max_position_embeddings", 1024)
            heads = fields.integer("num_attention_heads")
            return cls._from_fields(
                fields,
                num_kv_heads=1 if fields.flag("multi_query", True) else heads,
                head_dim=fields.divide("hidden_size", "num_attention_heads"),
                max_position_embeddings=longest,
                feed_forward_width=inner_width(fields, "n_inner"),
                rope=(NO_ROTATION, longest),
                attention_bias=True,
                attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
                mlp_bias=True,
                plain_mlp=("c_fc", "c_proj"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation=("activation_function", "gelu_pytorch_tanh"),
                form=BlockForm(norms=("ln_1", None, "ln_2", None), kind="layer"),
                name="transformer",
                names=NAMES,
                tied=True,
            )
