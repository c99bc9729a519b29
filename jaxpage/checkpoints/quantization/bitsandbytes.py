"""Reads `quant_method: bitsandbytes` in eight bits (Dettmers et al., 2022).

Each output has a scale, 127 times that of its codes. Inputs are multiplied as they are: the library
rounds them to eight bits but for outliers, which is farther from the unquantised model.
"""

from __future__ import annotations

import numpy as np

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import UNQUANTISED, Check, Scheme, everywhere_but
from jaxpage.layers.quantized import StoredArray, WeightFormat

NAME = "bitsandbytes"
SIZE_FIELDS = ""
EXCLUDED_FIELD = "llm_int8_skip_modules"


def _scale(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    # The file has the greatest magnitude of an output, which the code 127 stands for.
    return decoding.columns(numbers, num_out, num_in) / np.float32(127)


def _check_rows(module: str, numbers: np.ndarray) -> str | None:
    """Returns what is wrong with the order of the codes; 0 stands for rows."""
    return f"has {numbers}, not 0: its codes are not in rows" if numbers.any() else None


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    if not config.flag("load_in_8bit", False):
        config.refuse("load_in_8bit", f"is not supported, only true; use {UNQUANTISED}")
    config.absent("load_in_4bit", "llm_int8_has_fp16_weight")
    excluded = config.names(EXCLUDED_FIELD)
    scale = StoredArray(
        "SCB", lambda num_out, _: (num_out,), decoding.FLOATS, _scale, decoding.check_scale
    )
    form_of = everywhere_but(excluded, WeightFormat("int8", decoding.plain("int8"), scale))
    return Scheme(
        NAME,
        "bitsandbytes: int8 weights, a scale for each output",
        form_of,
        ("*.weight_format",),
        checks=(Check(".weight_format", _check_rows, ("U8",)),),
    )
