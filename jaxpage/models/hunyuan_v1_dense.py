"""HunYuan, dense (Tencent, 2025), is Llama with norms of queries and keys after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import NO_ROPE, Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(turned_first=True)
NAMES = DecoderNames(head_norms=("query_layernorm", "key_layernorm"))


class Spec(RotaryDecoderSpec):
    """Reads transformers' `HunYuanDenseV1Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "hunyuan_v1_dense") as fields:
            return cls._from_fields(fields, **hunyuan_knobs(fields))


def hunyuan_knobs(fields: Fields) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields` that both families have.

    A "dynamic" rope with `alpha` has a larger base at every length, and no other scaling.
    """
    head_dim = read_head_dim(fields)
    longest = fields.integer("max_position_embeddings", 2048)
    parameters = fields.rope_parameters(longest, 10_000.0)
    alpha = parameters.get("alpha")
    if parameters["rope_type"] == "dynamic" and alpha:
        theta = parameters["rope_theta"]
        numbers = [alpha, theta]
        if all(isinstance(each, int | float) and 0 < each < 1e30 for each in numbers):
            stretched = float(theta) * float(alpha) ** (head_dim / (head_dim - 2))
            fields.config |= {
                **dict.fromkeys(("rope_scaling", "rope_theta")),
                "rope_parameters": {"rope_type": "default", "rope_theta": stretched},
            }
        else:
            text = f"rope alpha and rope_theta must be positive numbers, not {numbers}"
            fields.note(WrongField(text), **NO_ROPE)
    return {
        "num_kv_heads": key_value_heads(fields, None),
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "attention_bias": fields.flag("attention_bias", False),
        "epsilon": ("rms_norm_eps", 1e-5),
        "norm_heads": True,
        "form": FORM,
        "names": NAMES,
    }
