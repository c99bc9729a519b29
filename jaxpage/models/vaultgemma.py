"""VaultGemma (Google, 2025) is Gemma 2 with two norms in a layer.

It was trained with differential privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.gemma2 import gemma_knobs
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(norms=("input_layernorm", None, "pre_feedforward_layernorm", None), kind="rms+1")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `VaultGemmaConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "vaultgemma") as fields:
            types = layer_types(fields, 2)
            window = fields.optional_integer("sliding_window", 4096)
            knobs = {**gemma_knobs(fields, caps=(50.0, 30.0)), "form": FORM}
            return cls._from_fields(
                fields,
                max_position_embeddings=fields.integer("max_position_embeddings", 8192),
                sliding_windows=windows_of(fields, types, window),
                **knobs,
            )
