"""Granite Swash with experts (IBM, 2026) may have a shared expert next to the routed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.granite_swa import swash_knobs
from jaxpage.models.granitemoe import expert_knobs
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeSWAConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoe_swa") as fields:
            return cls._from_fields(
                fields,
                **expert_knobs(fields, shared=True),
                **swash_knobs(fields, fields.integer("max_position_embeddings", 2048)),
            )
