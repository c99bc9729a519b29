"""Granite 3 with experts (IBM, 2024) is Granite whose layers all have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.mlp import MLPNames
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
MLP_NAMES = MLPNames("shared_mlp", None, None, "output_linear", "input_linear")
EXPERT_NAMES = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    shared=(None, None),
    in_memory=("block_sparse_moe", "router", ""),
    together=("input_linear", "output_linear"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoe") as fields:
            return cls._from_fields(
                fields,
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                **expert_knobs(fields),
                **factors(fields),
            )


def expert_knobs(fields: Fields, *, shared: bool = False) -> dict[str, Any]:
    """Returns the arguments of `_from_fields` for Granite whose layers all have experts.

    Args:
        fields: The fields of the config.
        shared: True if there may be a shared expert, whose width is `shared_intermediate_size`.
    """
    shared_width = fields.integer("shared_intermediate_size", 0, least=0) if shared else 0
    return {
        "num_kv_heads": key_value_heads(fields, None),
        "experts": granite_experts(fields, shared_width or None),
        "expert_names": EXPERT_NAMES,
        "mlp_names": MLP_NAMES,
        "sparse_layers": (True,) * fields.integer("num_hidden_layers"),
    }


def granite_experts(fields: Fields, shared_width: int | None) -> ExpertsSpec:
    """Returns the experts, with a shared one of this width unless it is None."""
    return read_experts(
        fields,
        count=("num_local_experts", 8),
        per_token=2,
        width=("intermediate_size", 11008),
        normalized=True,
        shared_width=shared_width,
    )
