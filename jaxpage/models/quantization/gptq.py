"""GPTQ (Frantar et al., 2022) with four or eight bits, checkpoints in the forms "gptq" and "gptq_v2". Not in the order of activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.errors import UnsupportedError
from jaxpage.layers.quantized import StoredArray, WeightFormat
from jaxpage.models.quantization.decoding import (
    FLOATS,
    check_scale,
    group_size,
    nibbles,
    num_groups,
    signed,
    transposed,
    unpacked,
)
from jaxpage.models.quantization.scheme import UNQUANTISED, Scheme, everywhere_but

NAME = "gptq"


def read(config: Mapping[str, Any]) -> Scheme:
    """Of `quantization_config`. Raises CheckpointError or UnsupportedError for what is not understood or not honoured."""
    if (bits := config.get("bits")) not in (4, 8):
        raise UnsupportedError(
            f"config.json: quantization_config: GPTQ with {bits!r} bits is not supported, only 4 and 8"
        )
    size = group_size(config, "group_size")
    if config.get("desc_act") and size is not None:
        raise UnsupportedError(
            "config.json: quantization_config.desc_act = true (inputs in the order of activations) is not supported; use a GPTQ or AWQ "
            f"checkpoint without it, or {UNQUANTISED}"
        )
    for name in ("dynamic", "lm_head"):
        if config.get(name):
            raise UnsupportedError(f"config.json: quantization_config.{name} is not supported")
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedError(
            f"config.json: quantization_config.checkpoint_format = {version!r} is not 'gptq' or 'gptq_v2'"
        )
    symmetric = config.get("sym", True)

    def codes(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        found = unpacked(np.ascontiguousarray(words.T), bits)
        return nibbles(found) if bits == 4 else signed(found)

    def zeros(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        found = unpacked(np.ascontiguousarray(words), bits).T.astype(np.float32)
        return found + (1 if version == "gptq" else 0) - (0 if bits == 4 else 128)

    values = StoredArray("qweight", lambda num_out, num_in: (num_in * bits // 32, num_out), ("int32",), codes)
    scale = StoredArray(
        "scales", lambda num_out, num_in: (num_groups(num_in, size), num_out), FLOATS, transposed, check_scale
    )
    zero = StoredArray(
        "qzeros", lambda num_out, num_in: (num_groups(num_in, size), num_out * bits // 32), ("int32",), zeros
    )
    form = WeightFormat(f"int{bits}", values, scale, None if symmetric else zero, size)
    kept = config.get("modules_to_not_convert") or ()
    described = f"GPTQ: int{bits} weights in groups of {size or -1}"
    ignored = ("*.g_idx", *(("*.qzeros",) if symmetric else ()))
    return Scheme(NAME, described, everywhere_but(kept, form), ignored)
