"""`quant_method: fp8`, as DeepSeek and Qwen publish it: float8 weights with a scale for each block of 128 x 128, or for each weight.

Inputs are not rounded to float8, which is nearer to the unquantised model than the checkpoint asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpage.errors import CheckpointError
from jaxpage.layers.quantized import StoredArray, WeightFormat
from jaxpage.models.quantization.decoding import FLOATS, check_scale, columns
from jaxpage.models.quantization.scheme import Scheme, matches

NAME = "fp8"


def read(config: Mapping[str, Any]) -> Scheme:
    """Of `quantization_config`. Raises CheckpointError for what is not understood."""
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise CheckpointError(f"config.json: quantization_config.weight_block_size must be two sizes, not {block!r}")
    values = StoredArray("weight", lambda num_out, num_in: (num_out, num_in), ("float8_e4m3fn",))
    form = WeightFormat("fp8", values, _scale(block), group_size=block[1] if block else None)
    kept = ("lm_head", *(config.get("modules_to_not_convert") or config.get("ignored_layers") or ()))
    described = f"fp8 weights, a scale for each {'block of ' + ' x '.join(map(str, block)) if block else 'weight'}"
    return Scheme(
        NAME, described, lambda name: None if matches(name, kept) else form, ("*.input_scale", "*.activation_scale")
    )


def _scale(block: list[int] | None) -> StoredArray:
    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        return (-(-num_out // block[0]), -(-num_in // block[1])) if block else ()

    def decode(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        values = np.asarray(numbers, np.float32)
        return np.repeat(values, block[0], axis=0)[:num_out] if block else columns(values, num_out, num_in)

    return StoredArray("weight_scale_inv", shape, FLOATS, decode, check_scale)
