"""GraniteMoeShared (IBM, 2025) is Granite with routed experts and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.granitemoe import expert_knobs
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeSharedConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoeshared") as fields:
            return cls._from_fields(
                fields,
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                **expert_knobs(fields, shared=True),
                **factors(fields),
            )
