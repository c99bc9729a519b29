"""Phi-1, 1.5 and 2 (Microsoft, 2023) compute both halves of a layer in parallel, with LayerNorm.

They rotate half of each head, and have biases everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.decoder_names import DecoderNames
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
NAMES = DecoderNames(
    norm="final_layernorm", output="dense", head_norms=("q_layernorm", "k_layernorm")
)
FORM = BlockForm(norms=("input_layernorm", None, None, None), kind="layer", parallel=True)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `PhiConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "phi") as fields:
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 2048)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=fields.rope(head_dim, longest, partial=0.5),
                attention_bias=True,
                mlp_bias=True,
                head_bias=True,
                plain_mlp=("fc1", "fc2"),
                epsilon=("layer_norm_eps", 1e-5),
                activation=("hidden_act", "gelu_new"),
                form=FORM,
                names=NAMES,
                norm_heads=fields.flag("qk_layernorm", False),
            )
