"""Reads the default or proportional rotary embedding of one layer type (Gemma 4, LFM3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.layers import Rope
from jaxpage.models.config.fields import Fields

NUMBERS = {"rope_theta": None, "partial_rotary_factor": 1.0, "factor": 1.0}


def read_rope(fields: Fields, kind: str, parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """Returns the rotary embedding of one type of layer.

    A proportional one turns only the first pairs of a head. Their frequencies are those that they
    have where all pairs are turned.

    Args:
        fields: The fields of the config.
        kind: The type of layer.
        parameters: The rope parameters of this type.
        head_dim: The width of a head.
    """
    numbers = {
        **NUMBERS,
        **{name: value for name, value in parameters.items() if value is not None},
    }
    rope_type = numbers.pop("rope_type", "default")
    theta, share, factor = (numbers[name] for name in NUMBERS)
    about = f"rope_parameters of {kind}: {dict(parameters)!r}"
    if rope_type not in ("default", "proportional") or numbers.keys() != NUMBERS.keys():
        text = f"{about} is not supported: only default and proportional are"
        fields.note_unsupported(text, rope_parameters=None)
        theta = share = factor = 1.0
    elif not all(type(each) in (int, float) and 0 < each < math.inf for each in numbers.values()):
        text = f"{about} must have rope_theta, and all its numbers must be positive"
        fields.note_wrong(text, rope_parameters=None)
        theta = share = factor = 1.0
    if rope_type == "default":
        share = factor = 1.0
    rotated = int(min(share, 1.0) * head_dim // 2)
    powers = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0 / factor) / np.float32(theta) ** powers
    # A frequency of 0 leaves a pair as it is, so that heads need not be split.
    return Rope((*map(float, frequencies), *(0.0,) * (head_dim // 2 - rotated)))
