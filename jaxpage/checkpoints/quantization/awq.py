"""AWQ, version "gemm", has weights of four bits with zeros (Lin et al., 2023).

Eight outputs are in a word, in an order of their own.
"""

from __future__ import annotations

import numpy as np

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import Scheme, everywhere_but
from jaxpage.layers.quantized import StoredArray, WeightFormat

NAME = "awq"
SIZE_FIELDS = "group_size"
EXCLUDED_FIELD = "modules_to_not_convert"
# Kernels as those of FasterTransformer turn the nibbles i and i + 4 of a word into two numbers at
# once, so neighbours are kept that far apart.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # Output i of eight is this nibble of its word.


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    config.one_of(config.first_of("w_bit", "bits"), (4,))
    config.one_of("version", ("gemm", "GEMM"), "gemm")
    size = config.group_size("group_size", "q_group_size")

    values = StoredArray(
        "qweight", lambda num_out, num_in: (num_in, num_out // 8), ("int32",), _codes
    )
    scale = decoding.scale_of_groups("scales", size)
    zero = StoredArray(
        "qzeros",
        lambda num_out, num_in: (decoding.num_groups(num_in, size), num_out // 8),
        ("int32",),
        _zeros,
    )
    has_zeros = config.flag("zero_point", True)
    form = WeightFormat("int4", values, scale, zero if has_zeros else None, size)
    excluded = config.names(EXCLUDED_FIELD)
    ignored = () if has_zeros else ("*.qzeros",)
    return Scheme(
        NAME,
        f"AWQ: int4 weights in groups of {size or -1}",
        everywhere_but(excluded, form),
        ignored,
    )


def _outputs(words: np.ndarray) -> np.ndarray:
    """Returns the codes of the words' outputs [..., out]."""
    codes = decoding.unpack(np.ascontiguousarray(words), 4)
    return codes.reshape(*words.shape, 8)[..., ORDER].reshape(codes.shape)


def _codes(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    return decoding.nibbles(_outputs(words).T)


def _zeros(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    return _outputs(words).T.astype(np.float32)
