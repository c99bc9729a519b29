"""GLM-4, dense (Zeng et al., 2024; 0414 and later), is GLM-4-9B with four norms in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import glm
from jaxpage.models.block_form import BlockForm
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    prefix,
)

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
OVERFLOWS_FLOAT16 = True
FORM = BlockForm(
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
)


class Spec(glm.Spec):
    """Reads transformers' `Glm4Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        return cls._read(config, "glm4", FORM)
