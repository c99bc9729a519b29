"""Reads FP8 and NVFP4 as NVIDIA's ModelOpt writes them, one of them or each in its own modules.

FP8 has a scale for each weight. NVFP4 has four bits, a float8 scale for 16 inputs, and a float32
scale of the whole weight. Inputs are not rounded, which is nearer to the unquantised model than the
checkpoint asks for.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import (
    KV_SCALES,
    UNQUANTISED,
    Scheme,
    matches,
    read_kv_cache,
)
from jaxpage.errors import UnsupportedError
from jaxpage.layers.quantized import WeightFormat

NAME = "modelopt"
SIZE_FIELDS = ""
EXCLUDED_FIELD = "ignore"

_FP8 = WeightFormat(
    "fp8", decoding.plain("float8_e4m3fn"), decoding.scale_of_weight("weight_scale")
)
_NVFP4 = WeightFormat(
    "fp4",
    decoding.describe_packed_bytes("weight"),
    decoding.nvfp4_scale("weight_scale", "weight_scale_2", (), divides=False),
    group_size=decoding.NVFP4_GROUP,
)
# The key is `quant_algo`. The last two differ in the inputs, which are not rounded here.
_FORMS = {"FP8": _FP8, "NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4}
_DESCRIBED = {"fp8": "fp8 weights, a scale for each", "fp4": "NVFP4 weights in groups of 16"}
_MIXED = "MIXED_PRECISION"
_UNQUANTIZED = (None, "UNQUANTIZED", "NONE")


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    algorithm = config.one_of("quant_algo", (*_FORMS, _MIXED))
    if algorithm == _MIXED:
        by_module = _read_layers(config)
    else:
        by_module = {"": algorithm}
        if _FORMS[algorithm].group_size:
            config.one_of("group_size", (decoding.NVFP4_GROUP,), decoding.NVFP4_GROUP)
    excluded = config.names(EXCLUDED_FIELD, "exclude_modules")

    def form_of(*names: str) -> WeightFormat | None:
        # The lists of ModelOpt also have patterns as a shell knows them, such as `lm_head*`.
        is_excluded = any(
            matches(name, excluded) or any(fnmatch.fnmatchcase(name, each) for each in excluded)
            for name in names
        )
        return None if is_excluded else _form(by_module, names)

    codes = {_FORMS[each].code for each in by_module.values() if each in _FORMS}
    described = ", ".join(_DESCRIBED[code] for code in sorted(codes, reverse=True))
    return Scheme(NAME, described, form_of, ("*.input_scale", *KV_SCALES), read_kv_cache(config))


def _form(by_module: Mapping[str, str | None], names: tuple[str, ...]) -> WeightFormat | None:
    """Returns the format of a module, of which a config may use any of these names.

    Raises:
        UnsupportedError: The module has an algorithm that is not supported. Modules that are not
            part of the model, such as those of drafting heads, may have any.
    """
    parents = {each for name in names for each in _parents(name) if each in by_module}
    if not parents:
        return None
    module = max(parents, key=len)
    algorithm = by_module[module]
    if algorithm in _UNQUANTIZED:
        return None
    if algorithm not in _FORMS:
        raise UnsupportedError(
            f"config.json: {algorithm} of {module} in quantization_config.quantized_layers is not "
            f"one of {', '.join(_FORMS)}; use {UNQUANTISED}"
        )
    return _FORMS[algorithm]


def _parents(name: str) -> list[str]:
    """Returns the name of a module, those of the modules that it is in, and "" for all."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _read_layers(config: QuantizationFields) -> dict[str, str | None]:
    """Returns the algorithm of each module that is listed, or in another one that is."""
    layers = config.part("quantized_layers")
    by_module = {name: _read_layer(layers, name) for name in layers.config}
    groups = config.part("config_groups")
    for group in map(groups.part, groups.config) if not by_module else ():
        by_module |= dict.fromkeys(group.names("targets"), _read_group(group))
    if not by_module:
        config.refuse_wrong("quantized_layers", f"must name modules for quant_algo = {_MIXED!r}")
    return by_module


def _read_layer(layers: QuantizationFields, name: str) -> str | None:
    """Returns the algorithm of an entry of `quantized_layers`."""
    layer = layers.part(name)
    algorithm: Any = layer.config.get("quant_algo")
    if algorithm is None:
        return None
    if not isinstance(algorithm, str):
        layer.refuse_wrong("quant_algo", "must be a string")
        return None
    algorithm = algorithm.upper()
    if algorithm in _FORMS and _FORMS[algorithm].group_size:
        layer.one_of("group_size", (decoding.NVFP4_GROUP,), decoding.NVFP4_GROUP)
    return algorithm


def _read_group(group: QuantizationFields) -> str:
    """Returns the algorithm of a group of `config_groups`, which says the same by its numbers."""
    weights = group.part("weights")
    weights.one_of("type", ("float",))
    if weights.one_of("num_bits", (8, 4)) == 8:
        weights.absent("group_size")
        return "FP8"
    weights.one_of("group_size", (decoding.NVFP4_GROUP,))
    return "NVFP4"
