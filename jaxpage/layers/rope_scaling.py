"""Computes the frequencies of the rotary embedding for each `rope_type`, in float32.

The arithmetic follows `transformers.modeling_rope_utils` step by step, so that angles far into a
context agree too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpage.errors import CheckpointError
from jaxpage.layers.rope import Rope

Floats = np.ndarray[Any, np.dtype[np.float32]]
LENGTH = "original_max_position_embeddings"
_Scaling = Callable[[Mapping[str, Any], int, int], tuple[Floats, float]]


def make_rope(
    parameters: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int
) -> tuple[Rope, int]:
    """Returns the rope of a config and the number of positions for which it holds.

    The number is less than `max_position_embeddings` only for "longrope".

    Args:
        parameters: The `rope_parameters` of transformers 5, standardised: `rope_type`, `rope_theta`
            and the numbers of the type, in which `wrong_parameters` finds nothing.
        head_dim: The width of a head, or of its part that is turned.
        max_position_embeddings: The number of positions of the config.

    Raises:
        CheckpointError: The numbers make no sense together.
    """
    rope_type = parameters["rope_type"]
    numbers = {
        name: float(value) if type(value) is int and name != LENGTH else value
        for name, value in parameters.items()
    }
    try:
        frequencies, factor = SCALINGS[rope_type](numbers, head_dim, max_position_embeddings)
    # A division by zero, or a number too large for a float, of parameters that pass one by one.
    except ArithmeticError as error:
        raise CheckpointError(
            f"rope parameters {dict(parameters)} make no sense ({error})"
        ) from error
    limit = max_position_embeddings
    if rope_type == "longrope":
        # Past the original length transformers changes the frequencies of the whole sequence,
        # cached keys included. A cache of rotated keys cannot follow, so the model is served up to
        # there, where the short factors hold.
        limit = min(limit, parameters[LENGTH])
    return Rope(tuple(float(f) for f in frequencies), float(factor)), limit


def wrong_parameters(parameters: Mapping[str, Any], head_dim: int) -> list[str]:
    """Returns all that is wrong with the numbers that the type, one of `SCALINGS`, uses."""
    kind = parameters["rope_type"]
    needed = ("rope_theta", *_NEEDED.get(kind, ()))
    optional = _OPTIONAL.get(kind, ())
    wrong = [f"rope_type {kind!r} needs {name}" for name in needed if parameters.get(name) is None]
    for name in (*needed, *optional):
        value = parameters.get(name)
        if (
            value is not None
            and not _is_number(value)
            and not (name in _MAY_BE_ZERO and value == 0)
        ):
            wrong.append(f"rope {name} must be a positive number, not {value!r}")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        values = parameters.get(name)
        if (
            not isinstance(values, list)
            or len(values) != head_dim // 2
            or not all(map(_is_number, values))
        ):
            wrong.append(f"rope {name} must be a list of {head_dim // 2} numbers")
    length = parameters.get(LENGTH)
    if kind in ("llama3", "yarn", "longrope") and (type(length) is not int or length < 1):
        wrong.append(f"{LENGTH} must be a positive integer: {length!r}")
    return wrong


def _plain(parameters: Mapping[str, Any], width: int, _: int) -> tuple[Floats, float]:
    return np.float32(1.0) / _wavelengths(parameters, width), 1.0


def _linear(parameters: Mapping[str, Any], width: int, _: int) -> tuple[Floats, float]:
    return np.float32(1.0) / _wavelengths(parameters, width) / np.float32(parameters["factor"]), 1.0


def _dynamic(parameters: Mapping[str, Any], width: int, max_positions: int) -> tuple[Floats, float]:
    # NTK scaling starts only past `max_position_embeddings`, which no sequence of this engine
    # reaches. There it would turn each key by the length at the time when the key was computed,
    # which depends on the prefill chunks.
    return _plain(parameters, width, max_positions)


def _llama3(parameters: Mapping[str, Any], width: int, _: int) -> tuple[Floats, float]:
    factor, low, high = (
        parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = parameters[LENGTH]
    frequencies = np.float32(1.0) / _wavelengths(parameters, width)
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > original / low, frequencies / np.float32(factor), frequencies)
    if low == high:  # Nothing is between them (Llama 4 Scout).
        return scaled, 1.0
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1.0) - smooth) * scaled / np.float32(factor) + smooth * scaled
    medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return np.where(medium, smoothed, scaled), 1.0


def _yarn(parameters: Mapping[str, Any], width: int, max_positions: int) -> tuple[Floats, float]:
    original = parameters[LENGTH]
    factor = parameters.get("factor")
    factor = max_positions / original if factor is None else factor
    wavelengths = _wavelengths(parameters, width)
    low, high = _yarn_range(parameters, width, original)
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    extrapolated = np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))
    stretched = np.float32(1.0) / (np.float32(factor) * wavelengths)
    frequencies = (
        stretched * (np.float32(1.0) - extrapolated) + np.float32(1.0) / wavelengths * extrapolated
    )
    return frequencies, _yarn_attention_factor(parameters, factor)


def _yarn_range(parameters: Mapping[str, Any], width: int, original: int) -> tuple[float, float]:
    """Returns the pairs of a head between which the scaling ramps from none to full."""

    def pair_of(rotations: float) -> float:
        return (
            width
            * math.log(original / (rotations * 2 * math.pi))
            / (2 * math.log(parameters["rope_theta"]))
        )

    low = pair_of(parameters.get("beta_fast") or 32.0)
    high = pair_of(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = float(max(low, 0))
    # As in transformers, although a head has only half as many pairs as its width.
    high = float(min(high, width - 1))
    # The ramp is divided by the difference.
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale = parameters.get("mscale")
    mscale_all_dim = parameters.get("mscale_all_dim")
    return (
        magnitude(mscale) / magnitude(mscale_all_dim)
        if mscale and mscale_all_dim
        else magnitude(1.0)
    )


def _longrope(
    parameters: Mapping[str, Any], width: int, max_positions: int
) -> tuple[Floats, float]:
    original = parameters[LENGTH]
    factor = parameters.get("factor")
    factor = max_positions / original if factor is None else factor
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = np.asarray(parameters["short_factor"], np.float32)
    return np.float32(1.0) / (short * _wavelengths(parameters, width)), attention


SCALINGS: dict[str, _Scaling] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
# Each type needs `rope_theta` and these numbers, and may have the optional ones.
_NEEDED = {
    **dict.fromkeys(("linear", "dynamic"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}

# A zero has the same effect as a missing number.
_MAY_BE_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _wavelengths(parameters: Mapping[str, Any], width: int) -> Floats:
    """Returns the positions per radian of each pair, unscaled: `theta ** (2 i / width)`."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(parameters["rope_theta"]) ** exponents


def _is_number(value: object) -> bool:
    """Returns whether a value is a number that is positive in float32 too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 < value < 1e30
