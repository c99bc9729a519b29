"""Reads the rotary embedding of a GGUF file as `rope_parameters` of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxpage.checkpoints.gguf.header import GGUFFile, as_number
from jaxpage.checkpoints.gguf.tensors import read_gguf_array
from jaxpage.checkpoints.problems import quote
from jaxpage.errors import UnsupportedError

_PREFIX = "rope.scaling."
# The keys of YaRN and their names in config.json; below, those that may have this value only.
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_NEUTRAL = {
    "attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
_KNOWN = {"dimension_count", "freq_base", "freq_base_swa", "scale_linear"}
# The base of layers with a window, where they have another; a file need not say so.
_THETA_OF_WINDOWS = {"gemma3": 10_000.0}
# The values of Llama 3.1; a file has only the factors that these make.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_parameters(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Returns the rope parameters; the family says whether their numbers make sense.

    Raises:
        UnsupportedError: The file asks for something that is not computed here.
    """
    scaling = {key: value for key, value in _own_fields(file).items() if key.startswith(_PREFIX)}
    values = {key.removeprefix(_PREFIX): as_number(value) for key, value in scaling.items()}
    kind = values.pop("type", "none")
    factor = values.pop("factor", None)
    values.pop("finetuned", None)  # says how the model was trained
    if unknown := [
        key
        for key in _own_fields(file)
        if key.removeprefix("rope.") not in _KNOWN and not key.startswith(_PREFIX)
    ]:
        raise UnsupportedError(
            f"{file.architecture}.{unknown[0]} = {quote(_own_fields(file)[unknown[0]])} is not supported"
        )
    linear = as_number(file.of_model("rope.scale_linear"))  # in old files
    if kind == "none" and linear not in (None, 1.0):
        kind = "linear"
        factor = linear
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": as_number(file.of_model("rope.freq_base")) or 10_000.0,
    }
    if kind == "yarn":
        parameters |= {_YARN[key]: values.pop(key) for key in list(values) if key in _YARN}
    elif kind == "linear":
        values.pop("original_context_length", None)
    elif kind != "none":
        raise UnsupportedError(
            f"{file.architecture}.{_PREFIX}type is {quote(kind)}; none, linear and yarn are "
            "supported"
        )
    if others := {
        key: value for key, value in values.items() if kind != "none" and value != _NEUTRAL.get(key)
    }:
        raise UnsupportedError(
            f"{file.architecture}.{_PREFIX}{', '.join(others)} = {quote([*others.values()])} is "
            "not supported"
        )
    if kind != "none":
        parameters |= {"rope_type": kind, "factor": factor}
    parameters |= _of_factors(file, parameters, head_dim)
    if (
        theta := file.of_model("rope.freq_base_swa") or _THETA_OF_WINDOWS.get(file.architecture)
    ) is None:
        return parameters
    if file.architecture not in _THETA_OF_WINDOWS:
        raise UnsupportedError(
            f"{file.architecture}.rope.freq_base_swa = {quote(theta)} is not supported"
        )
    of_windows = {"rope_type": "default", "rope_theta": as_number(theta)}
    return {"full_attention": parameters, "sliding_attention": of_windows}


def _own_fields(file: GGUFFile) -> dict[str, Any]:
    prefix = f"{file.architecture}."
    fields = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    return {key: value for key, value in fields.items() if key.startswith("rope.")}


def _of_factors(file: GGUFFile, parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns Llama 3.1's scaling, of which a file has only the factor of each frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return {}
    if (
        parameters["rope_type"] != "default"
        or tensor.shape != (head_dim // 2,)
        or tensor.dtype != "F32"
    ):
        raise UnsupportedError(
            f"tensor 'rope_freqs.weight' of shape {tensor.shape} with {parameters} is not supported"
        )
    factors = read_gguf_array(tensor)
    scaling = {"rope_type": "llama3", "factor": as_number(float(factors.max())), **_LLAMA3}
    with np.errstate(all="ignore"):  # for numbers that make no sense
        expected = _llama3_factors(scaling, parameters["rope_theta"], head_dim)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedError(
            "tensor 'rope_freqs.weight' has other factors than Llama 3.1's scaling by "
            f"{scaling['factor']:g} makes of {_LLAMA3}"
        )
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    low, high, original = (scaling[name] for name in _LLAMA3)
    # This is the formula of transformers (`_compute_llama3_parameters`), written as what divides
    # each frequency: the factor for long wavelengths, 1 for short ones.
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
