"""Turns stored tensors into arrays of codes, scales and zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpage.layers.quantized import StoredArray

FLOATS = ("float32", "bfloat16", "float16")
NVFP4_GROUP = 16  # inputs that share a scale


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the unsigned codes in the words of the last axis, the lowest bits first.

    The last axis has 32 / bits codes for each word.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    # A shift of a signed word would fill it with ones from the left.
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Returns codes of four bits [out, in] packed two in a byte."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def to_signed(codes: np.ndarray) -> np.ndarray:
    """Returns unsigned codes of eight bits, less 128."""
    # With its highest bit flipped a byte, read as signed, is 128 less.
    return (codes ^ np.uint8(128)).view(np.int8)


def check_scale(numbers: np.ndarray) -> str | None:
    """Returns what is wrong with scales: some are zero or not finite. None if nothing is."""
    values = np.asarray(numbers, np.float32)
    counts = {"not finite": int((~np.isfinite(values)).sum()), "zero": int((values == 0).sum())}
    wrong = [f"{count} scales that are {defect}" for defect, count in counts.items() if count]
    return f"has {' and '.join(wrong)}" if wrong else None


def columns(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns scales as float32 [out, groups]. A stored scale is for one output, or for all."""
    values = np.asarray(numbers, np.float32)
    return (
        np.broadcast_to(values.reshape(1, 1), (num_out, 1))
        if values.size == 1
        else values.reshape(num_out, -1)
    )


def transpose(numbers: np.ndarray, num_out: int, num_in: int) -> np.ndarray:
    """Returns scales that are stored [groups, out] as float32 [out, groups]."""
    return np.asarray(numbers, np.float32).T


def scale_of_groups(name: str, size: int | None) -> StoredArray:
    """Describes scales of groups of inputs that are stored [groups, out]."""

    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        return num_groups(num_in, size), num_out

    return StoredArray(name, shape, FLOATS, transpose, check_scale)


def num_groups(num_in: int, size: int | None) -> int:
    """Returns the number of groups of inputs; one if all share a scale."""
    return 1 if size is None else -(-num_in // size)


def plain(dtype: str) -> StoredArray:
    """Describes a `weight` that is stored as its codes are used."""
    return StoredArray("weight", lambda num_out, num_in: (num_out, num_in), (dtype,))


def describe_packed_bytes(name: str) -> StoredArray:
    """Describes fp4, two in a byte, that is stored as its codes are used."""
    return StoredArray(name, lambda num_out, num_in: (num_out, num_in // 2), ("uint8",))


def nvfp4_scale(name: str, whole: str, shape: tuple[int, ...], *, divides: bool) -> StoredArray:
    """Describes scales of 16 inputs in float8 that are combined with a scale of the whole weight.

    The result is their product, or with `divides` their quotient, in float32.
    """

    def decode(numbers: np.ndarray, num_out: int, num_in: int, of_all: np.ndarray) -> np.ndarray:
        scale = np.asarray(numbers, np.float32)
        factor = np.asarray(of_all, np.float32).reshape(())
        return scale / factor if divides else scale * factor

    def check(numbers: np.ndarray) -> str | None:
        # In float8 the scale of a group of very small numbers may be 0.
        return (
            "has scales that are not finite"
            if not np.isfinite(np.asarray(numbers, np.float32)).all()
            else None
        )

    of_all = StoredArray(whole, lambda num_out, num_in: shape, ("float32",), check=check_scale)
    return StoredArray(
        name,
        lambda num_out, num_in: (num_out, num_in // NVFP4_GROUP),
        ("float8_e4m3fn",),
        decode,
        check,
        beside=of_all,
    )


def scale_of_weight(name: str) -> StoredArray:
    """Describes one scale for all numbers of a weight."""
    return StoredArray(name, lambda *_: (), FLOATS, columns, check_scale)


def block_scale(name: str, block: Sequence[int]) -> StoredArray:
    """Describes one scale for each block of so many outputs and inputs."""

    def shape(num_out: int, num_in: int) -> tuple[int, ...]:
        return num_groups(num_out, block[0]), num_groups(num_in, block[1])

    return StoredArray(name, shape, FLOATS, check=check_scale)
