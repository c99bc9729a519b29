"""StarCoder2 (Lozhkov et al., 2024) has LayerNorm, biases, and a feed-forward half without gates.

Its window is that of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Starcoder2Config`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "starcoder2") as fields:
            window = fields.optional_integer("sliding_window", None)
            bias = fields.flag("use_bias", True)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                sliding_windows=(window,) * fields.integer("num_hidden_layers"),
                attention_bias=bias,
                mlp_bias=bias,
                plain_mlp=("c_fc", "c_proj"),
                epsilon=("norm_epsilon", 1e-5),
                activation=("hidden_act", "gelu_pytorch_tanh"),
                form=BlockForm(kind="layer"),
                tied=True,
            )
