"""Lists the formats of quantised checkpoints, and what each says of its fields."""

from __future__ import annotations

from collections.abc import Callable

from jaxpage.checkpoints.quantization import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import Scheme

FORMATS = (compressed_tensors, fp8, awq, gptq, mxfp4, modelopt, bitsandbytes)
# The key is `quant_method`. Each function reads `quantization_config`.
METHODS: dict[str, Callable[[QuantizationFields], Scheme]] = {
    module.NAME: module.read for module in FORMATS
}
# The key is `quant_method`. The shapes of its tensors depend on these fields.
SIZES = {module.NAME: module.SIZE_FIELDS for module in FORMATS if module.SIZE_FIELDS}
# The key is `quant_method`. This field names the modules that are not quantised.
EXCLUDED = {module.NAME: module.EXCLUDED_FIELD for module in FORMATS}
