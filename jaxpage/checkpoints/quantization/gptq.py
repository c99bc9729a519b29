"""GPTQ has weights of four or eight bits (Frantar et al., 2022).

Checkpoints are in the forms "gptq" and "gptq_v2". The order of activations is not supported.
"""

from __future__ import annotations

import numpy as np

from jaxpage.checkpoints.quantization import decoding
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields, is_pattern
from jaxpage.checkpoints.quantization.scheme import (
    UNQUANTISED,
    Check,
    Scheme,
    check_order,
    check_zeros,
    everywhere_but,
)
from jaxpage.layers.quantized import StoredArray, WeightFormat

NAME = "gptq"
SIZE_FIELDS = "bits or group_size"
EXCLUDED_FIELD = "modules_to_not_convert"
_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each code of a word


def read(config: QuantizationFields) -> Scheme:
    """Reads `quantization_config`."""
    bits = config.one_of("bits", (4, 8))
    size = config.group_size("group_size")
    # Where all inputs share a scale their order does not matter.
    if config.flag("desc_act", False) and size is not None:
        config.refuse(
            "desc_act",
            "(inputs in the order of activations) is not supported; use a GPTQ or AWQ checkpoint without it, or "
            + UNQUANTISED,
        )
    config.flag("lm_head", False)  # The tensors decide: see `Scheme.with_head`.
    version = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    symmetric = config.flag("sym", True)

    def codes(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        codes = decoding.unpack(np.ascontiguousarray(words.T), bits)
        return decoding.nibbles(codes) if bits == 4 else decoding.to_signed(codes)

    def zero_codes(words: np.ndarray) -> np.ndarray:
        words32 = np.ascontiguousarray(words).view(np.uint32)
        # The first form subtracted one from each code by subtracting whole words, so a zero of 0
        # borrowed from its neighbour.
        return decoding.unpack(
            words32 + np.uint32(_ONES[bits]) if version == "gptq" else words32, bits
        )

    def zeros(words: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
        # Codes of eight bits are kept less 128, and so are their zeros.
        return zero_codes(words).T.astype(np.float32) - (0 if bits == 4 else 128)

    values = StoredArray(
        "qweight", lambda num_out, num_in: (num_in * bits // 32, num_out), ("int32",), codes
    )
    scale = decoding.scale_of_groups("scales", size)
    zero = StoredArray(
        "qzeros",
        lambda num_out, num_in: (decoding.num_groups(num_in, size), num_out * bits // 32),
        ("int32",),
        zeros,
    )

    def check_middle(module: str, words: np.ndarray) -> str | None:
        # In the first form some checkpoints have the middle itself, which was meant: with sym =
        # true no reader uses the zeros.
        middle = 2 ** (bits - 1) - (1 if version == "gptq" else 0)
        codes = np.unique(decoding.unpack(np.ascontiguousarray(words), bits))
        if codes.size == 1 and codes[0] in (middle, 2 ** (bits - 1)):
            return None
        return (
            f"has zeros that are not {middle}, but quantization_config.sym of config.json is true, and checkpoint_format {version!r}: set "
            "the one that is wrong to what the checkpoint has (sym = false uses the zeros)"
        )

    form = WeightFormat(f"int{bits}", values, scale, None if symmetric else zero, size)
    excluded = (*config.names(EXCLUDED_FIELD), *_find_excluded(config))
    described = f"GPTQ: int{bits} weights in groups of {size or -1}"
    form_of = everywhere_but(excluded, form)
    checks = [
        Check(".g_idx", check_order(form_of)),
        Check(".bias", check_zeros(form_of), ("F32", "BF16", "F16")),
    ]
    if symmetric:
        checks.append(Check(".qzeros", check_middle))
    return Scheme(
        NAME, described, form_of, tuple(f"*{check.end}" for check in checks), checks=tuple(checks)
    )


def _find_excluded(config: QuantizationFields) -> tuple[str, ...]:
    """Returns patterns of the modules that `dynamic` leaves as they are.

    It refuses a `dynamic` that quantises modules in another way.
    """
    dynamic = config.part("dynamic").config
    others = {
        pattern: change
        for pattern, change in dynamic.items()
        if not pattern.startswith("-:") and change
    }
    if others:
        config.refuse("dynamic", "is supported for modules that are not quantised (-:) alone")
    patterns = [f"re:{pattern[2:]}" for pattern in dynamic if pattern.startswith("-:")]
    if not all(map(is_pattern, patterns)):
        config.refuse_wrong("dynamic", "has keys that are no regular expressions")
        return ()
    return tuple(patterns)
