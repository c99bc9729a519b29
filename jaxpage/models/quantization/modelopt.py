"""Reads FP8 and NVFP4 as NVIDIA's ModelOpt writes them.

FP8 has a scale for each weight. NVFP4 has four bits, a float8 scale for 16 inputs, and a float32
scale of the whole weight. Inputs are not rounded, which is nearer to the unquantised model than the
checkpoint asks for.
"""

from __future__ import annotations

import fnmatch

from jaxpage.layers.quantized import WeightFormat
from jaxpage.models.quantization.decoding import (
    NVFP4_GROUP,
    nvfp4_scale,
    packed_bytes,
    plain,
    scale_of_weight,
)
from jaxpage.models.quantization.quantization_fields import QuantizationFields
from jaxpage.models.quantization.scheme import KV_SCALES, Scheme, matches, read_kv_cache

NAME = "modelopt"
SIZE_FIELDS = ""
KEPT_FIELD = "ignore"


# The key is `quant_algo`; the text is for readers.
_FORMS = {
    "FP8": (
        WeightFormat("fp8", plain("float8_e4m3fn"), scale_of_weight("weight_scale")),
        "fp8 weights, a scale for each",
    ),
    "NVFP4": (
        WeightFormat(
            "fp4",
            packed_bytes("weight"),
            nvfp4_scale("weight_scale", "weight_scale_2", (), divides=False),
            group_size=NVFP4_GROUP,
        ),
        "NVFP4 weights in groups of 16",
    ),
}


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    form, described = _FORMS[config.one_of("quant_algo", tuple(_FORMS))]
    kept = config.names(KEPT_FIELD, "exclude_modules")

    def form_of(*names: str) -> WeightFormat | None:
        is_kept = any(
            matches(name, kept) or any(fnmatch.fnmatchcase(name, each) for each in kept)
            for name in names
        )
        return None if is_kept else form

    return Scheme(NAME, described, form_of, ("*.input_scale", *KV_SCALES), read_kv_cache(config))
