"""StableLM (Bellagente et al., 2024) has LayerNorm and rotates a quarter of each head.

Some of its models compute both halves of a layer in parallel, or have a norm for each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
FORM = BlockForm(kind="layer", head_scales="apart")
PARALLEL = replace(FORM, norms=("input_layernorm", None, None, None), parallel=True)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `StableLmConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "stablelm") as fields:
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 4096)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=fields.rope(head_dim, longest, partial=0.25),
                attention_input_bias=fields.flag("use_qkv_bias", False),
                epsilon=("layer_norm_eps", 1e-5),
                form=PARALLEL if fields.flag("use_parallel_residual", False) else FORM,
                norm_heads=fields.flag("qk_layernorm", False),
            )
