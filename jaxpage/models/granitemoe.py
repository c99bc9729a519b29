"""Granite 3 with experts (IBM, 2024) is Granite whose layers all have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.granite import granite_knobs
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
NAMES = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    in_memory=("block_sparse_moe", "router", ""),
    only_stacked=("input_linear.weight", "output_linear.weight"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoe") as fields:
            return cls._from_fields(
                fields,
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 8),
                    per_token=2,
                    width=("intermediate_size", 11008),
                    normalized=True,
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
                **granite_knobs(fields),
            )
