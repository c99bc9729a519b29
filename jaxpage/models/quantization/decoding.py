"""How stored tensors become arrays of codes, scales and zeros."""

from __future__ import annotations

import numpy as np

FLOATS = ("float32", "bfloat16", "float16")


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes in the words of the last axis, the lowest bits first: [..., n * words of 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits [out, in], two in a byte."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def signed(codes: np.ndarray) -> np.ndarray:
    """Unsigned codes of eight bits, less 128."""
    return (codes ^ np.uint8(128)).view(np.int8)


def check_scale(numbers: np.ndarray) -> str | None:
    values = np.asarray(numbers, np.float32)
    if not np.isfinite(values).all():
        return f"has {int((~np.isfinite(values)).sum())} scales that are not finite"
    if not values.all():
        return f"has {int((values == 0).sum())} scales that are zero"
    return None


def columns(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Scales as float32 [out, groups]: one of each output, or of all."""
    values = np.asarray(numbers, np.float32)
    return np.broadcast_to(values.reshape(1, 1), (num_out, 1)) if values.size == 1 else values.reshape(num_out, -1)


def transposed(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Of scales [groups, out]."""
    return np.asarray(numbers, np.float32).T
