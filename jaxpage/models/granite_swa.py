"""Granite Swash (IBM, 2026) is Granite with attention sinks and sliding windows.

By default three of four layers have a sliding window. Each layer has its own `rope_theta`, or no
rotary embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.layer_windows import layer_types, windows_of
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


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteSWAConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granite_swa") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                mlp_bias=fields.flag("mlp_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                tied=True,
                **swash_knobs(fields, fields.integer("max_position_embeddings", 8192)),
            )


def swash_knobs(fields: Fields, longest: int) -> dict[str, Any]:
    """Returns the arguments of `_from_fields` for Granite Swash with and without experts.

    Args:
        fields: The fields of the config.
        longest: The number of positions of the config.
    """
    head_dim = read_head_dim(fields)
    types = layer_types(fields, 4, first=0)
    rope, reach = fields.rope(head_dim, longest)
    parameters = fields.rope_parameters(longest, 10_000.0)
    thetas = _thetas(fields, parameters["rope_theta"])
    ropes = {
        theta: fields.rope_of({**parameters, "rope_theta": theta}, head_dim, longest)[0]
        for theta in thetas
        if theta
    }
    return {
        "head_dim": head_dim,
        "max_position_embeddings": reach,
        "sliding_windows": windows_of(
            fields, types, fields.optional_integer("sliding_window", 128)
        ),
        "attention_bias": fields.flag("attention_bias", False),
        "sinks": True,
        "rope": (rope, reach),
        "rope_by_layer": tuple(ropes.get(theta) for theta in thetas),
        **factors(fields),
    }


def _thetas(fields: Fields, usual: float) -> list[float]:
    """Returns `rope_theta` of each layer, by default `usual`; 0 means no rotary embedding."""
    num_layers = fields.integer("num_hidden_layers")
    thetas = fields.get("layer_rope_theta", None)
    thetas = [usual] * num_layers if thetas is None else thetas
    if (
        not isinstance(thetas, list)
        or len(thetas) != num_layers
        or not all(type(each) in (int, float) and 0 <= each < math.inf for each in thetas)
    ):
        text = f"layer_rope_theta must have a number, or 0, for each of {num_layers} layers, not {thetas!r}"
        fields.note(WrongField(text), layer_rope_theta=None, num_hidden_layers=num_layers)
        thetas = [usual] * num_layers
    return thetas
