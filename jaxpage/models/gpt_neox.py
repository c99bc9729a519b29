"""GPT-NeoX and Pythia (EleutherAI, 2022) compute both halves of a layer in parallel.

Each half has a LayerNorm of its own, and a quarter of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields, without
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "gpt_neox."
ignored = ("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq")
NAMES = DecoderNames(
    tokens="embed_in",
    norm="final_layer_norm",
    heads=("embed_out", "lm_head"),
    attention="attention",
    fused="query_key_value",
    output="dense",
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GPTNeoXConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        # transformers writes it into files, and passes it over in favour of rotary_pct.
        config = without(config, "partial_rotary_factor")
        with Fields(config, "gpt_neox") as fields:
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 2048)
            theta = fields.number("rotary_emb_base", 10_000.0)
            share = fields.number("rotary_pct", 0.25)
            # transformers passes these over, too; who wrote them expects something of them.
            fields.only(rope_theta=theta, head_dim=head_dim)
            return cls._from_fields(
                fields,
                num_kv_heads=fields.integer("num_attention_heads"),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=fields.rope(head_dim, longest, theta=theta, partial=share),
                attention_bias=fields.flag("attention_bias", True),
                mlp_bias=True,
                plain_mlp=("dense_h_to_4h", "dense_4h_to_h"),
                epsilon=("layer_norm_eps", 1e-5),
                activation=("hidden_act", "gelu"),
                form=BlockForm(kind="layer", parallel=fields.flag("use_parallel_residual", True)),
                name="gpt_neox",
                names=NAMES,
            )
