"""Finds the scheme from `quantization_config` of config.json, or from a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.checkpoints.quantization import gguf
from jaxpage.checkpoints.quantization.formats import METHODS
from jaxpage.checkpoints.quantization.on_load import SCHEMES
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import UNQUANTISED, Scheme
from jaxpage.errors import CheckpointError, UnsupportedError

# The second is an older name of the field in config.json.
FIELDS = ("quantization_config", "compression_config")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for the family, which knows nothing of quantisation."""
    return {name: value for name, value in config.items() if name not in FIELDS}


def quantization_of(config: Mapping[str, Any], requested: str | None) -> Scheme | None:
    """Returns the scheme of a model, or None.

    Args:
        config: The config of the model.
        requested: The setting `quantization`.

    Raises:
        CheckpointError: config.json contradicts itself or the setting.
        UnsupportedError: The method is not supported.
        ExceptionGroup: Several fields of a method are wrong; it has an error of these kinds for
            each.
    """
    present = [name for name in FIELDS if config.get(name)]
    quantization = config[present[0]] if present else None
    if not quantization:
        if requested is None or requested in SCHEMES:
            return SCHEMES.get(requested or "")
        if requested == gguf.NAME:
            raise CheckpointError(f"quantization is {requested!r}, but the model is no GGUF file")
        raise CheckpointError(
            f"quantization is {requested!r}, but the checkpoint has no quantization_config; "
            f"use {', '.join(SCHEMES)}, "
            f"{gguf.NAME} for a GGUF file, or none"
        )
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"config.json: quantization_config must be an object, not {quantization!r}"
        )
    for other in present[1:]:
        _check_same(quantization, other, config[other])
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            f"config.json: quantization_config.quant_method = {method!r} is not one of "
            f"{', '.join(METHODS)}; use a checkpoint in one "
            f"of them, or {UNQUANTISED}"
        )
    if requested not in (None, method):
        raise CheckpointError(
            f"quantization is {requested!r}, but the checkpoint is quantised already, by {method!r}"
        )
    with QuantizationFields(quantization) as fields:
        return METHODS[method](fields)


def _check_same(quantization: Mapping[str, Any], place: str, other: Any) -> None:
    """Raises CheckpointError where the same field of two places has two values."""
    if not isinstance(other, dict):
        raise CheckpointError(f"config.json: {place} must be an object, not {other!r}")
    for name in quantization:
        if name in other and quantization[name] != other[name]:
            raise CheckpointError(
                f"config.json: {FIELDS[0]}.{name} = {quantization[name]!r}, but "
                f"{place}.{name} = {other[name]!r}: "
                f"remove {FIELDS[0]} or {place}"
            )
