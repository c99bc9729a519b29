"""Reads `quant_method: fp8`, as DeepSeek and Qwen publish it.

Weights are float8, with a scale for each block of 128 x 128, or for each weight. AutoFP8, which
made the first float8 checkpoints of vLLM, has another name for the scale. Inputs are not rounded
to float8, which is nearer to the unquantised model than the checkpoint asks for.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import KV_SCALES, Scheme, everywhere_but
from jaxpage.layers.quantized import WeightFormat

NAME = "fp8"
SIZE_FIELDS = "weight_block_size"
EXCLUDED_FIELD = "modules_to_not_convert"
NAME_OF_SCALE = "weight_scale_inv"  # although it multiplies
OF_AUTO_FP8 = "weight_scale"


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    block = config.sizes("weight_block_size", 2)
    scale = (
        decoding.block_scale(NAME_OF_SCALE, block)
        if block
        else decoding.scale_of_weight(NAME_OF_SCALE)
    )
    scale = replace(scale, aliases=(OF_AUTO_FP8,))
    rows, size = block or (1, None)
    form = WeightFormat(
        "fp8", decoding.plain("float8_e4m3fn"), scale, group_size=size, block_rows=rows
    )
    excluded = config.names(EXCLUDED_FIELD, "ignored_layers")
    described = (
        "fp8 weights, a scale for each "
        f"{'block of ' + ' x '.join(map(str, block)) if block else 'weight'}"
    )
    return Scheme(
        NAME,
        described,
        everywhere_but(excluded, form),
        ("*.input_scale", "*.activation_scale", *KV_SCALES),
    )
