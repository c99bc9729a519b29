"""Quantises weights at load, by rounding to nearest: `quantization="int8"` and `"int4"`.

With int8 each output has a scale, and inputs are rounded to eight bits too (W8A8), each token with
its own scale. With int4 each group of 32 inputs has a scale, as in GGUF's Q4_0, and inputs are not
rounded. `"int8+head"` and `"int4+head"` round the head as well, with the token table where it is
tied to it, in both as int8 does: SmolLM2's head in four bits made the perplexity 32.8 for 28.2.
"""

from __future__ import annotations

import functools

import numpy as np

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.scheme import Scheme
from jaxpage.layers.quantized import StoredArray, WeightFormat

GROUP_SIZE = 32


def int8_scale(weight: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns the scale of each output."""
    maximum = np.abs(np.asarray(weight, np.float32)).max(axis=1, keepdims=True)
    # Zeros alone have the code 0 with any scale, and a scale of 0 could not be divided by.
    return np.where(maximum > 0, maximum / np.float32(127), np.float32(1))


def int8_codes(weight: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns the codes of eight bits."""
    return np.rint(np.asarray(weight, np.float32) / int8_scale(weight, num_out, num_in)).astype(
        np.int8
    )


def int4_scale(weight: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns the scale of each group.

    It gives the group's number of greatest magnitude the code 0, which is -8.
    """
    groups = np.asarray(weight, np.float32).reshape(num_out, -1, GROUP_SIZE)
    maximum = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    return np.where(maximum != 0, maximum / np.float32(-8), np.float32(1))


def int4_codes(weight: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns the codes of four bits, two in a byte."""
    groups = np.asarray(weight, np.float32).reshape(num_out, -1, GROUP_SIZE)
    scaled = groups / int4_scale(weight, num_out, num_in)[..., None]
    # A number as great as that of the code -8, but of the other sign, would need the code 8.
    return decoding.nibbles(
        np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8).reshape(num_out, num_in)
    )


_weight = functools.partial(
    StoredArray, "weight", lambda num_out, num_in: (num_out, num_in), decoding.FLOATS, rounded=True
)
INT8 = WeightFormat("int8", _weight(int8_codes), _weight(int8_scale), int8_inputs=True)
INT4 = WeightFormat("int4", _weight(int4_codes), _weight(int4_scale), group_size=GROUP_SIZE)

SCHEMES = {
    "int8": Scheme("int8", "int8 weights and inputs, rounded at load", lambda *names: INT8),
    "int4": Scheme("int4", "int4 weights in groups of 32, rounded at load", lambda *names: INT4),
    "int8+head": Scheme(
        "int8+head",
        "int8 weights and inputs, and an int8 head, rounded at load",
        lambda *names: INT8,
        head=INT8,
    ),
    "int4+head": Scheme(
        "int4+head",
        "int4 weights in groups of 32, and an int8 head, rounded at load",
        lambda *names: INT4,
        head=INT8,
    ),
}
