"""Apertus (Swiss AI, 2025) has a learned activation function, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# Files may have the two constants of the activation function, which are the same in all layers.
ignored = ("*rotary_emb.inv_freq", "*.act_fn.beta", "*.act_fn.eps")
FORM = BlockForm(norms=("attention_layernorm", None, "feedforward_layernorm", None))
ROPE = {
    **{"rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0},
    **{"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `ApertusConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        xielu = config.get("hidden_act", "xielu") == "xielu"
        changed: dict[str, Any] = {} if rope else {"rope_parameters": ROPE}
        changed |= {"hidden_act": "silu"} if xielu else {}
        with Fields({**config, **changed}, "apertus") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 65_536)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=fields.rope(head_dim, longest, theta=12_000_000.0),
                plain_mlp=("up_proj", "down_proj"),
                xielu=xielu,
                epsilon=("rms_norm_eps", 1e-5),
                form=FORM,
                norm_heads=True,
            )
