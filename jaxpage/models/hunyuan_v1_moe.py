"""HunYuan A13B (Tencent, 2025) has experts in all layers, one of them for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.hunyuan_v1_dense import hunyuan_knobs
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ALIASES = {"num_experts_per_tok": "moe_topk", "num_experts": "num_local_experts"}
NAMES = ExpertNames(router="gate.wg", shared=("shared_mlp", None), in_memory=("mlp", "gate.wg", ""))


class Spec(RotaryDecoderSpec):
    """Reads transformers' `HunYuanMoEV1Config`.

    Published files have a list with the same number for each layer where one number is meant.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        named = {name: _one(config[name]) for name in ("moe_topk", "num_experts") if name in config}
        with Fields({**config, **named}, "hunyuan_v1_moe", ALIASES) as fields:
            width = fields.integer("intermediate_size")
            return cls._from_fields(
                fields,
                experts=read_experts(
                    fields,
                    count=("num_experts", 1),
                    per_token=1,
                    width=("intermediate_size", width),
                    normalized=True,
                    shared_width=width,
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
                **hunyuan_knobs(fields),
            )


def _one(value: Any) -> Any:
    """Returns the number that all layers have, or what is there if it is no such list."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value
