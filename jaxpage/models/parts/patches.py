"""Cuts pictures into patches, and fills lists of them up to the size of an executable.

A picture is a list of patches, in the order in which its blocks of patches become rows:

    grid of patches     blocks of 2 x 2         rows
    a b e f             [a b   [e f             abcd, efgh, ...
    c d g h              c d]   g h]

Patches that fill up the list are a segment of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.errors import UnsupportedError

Numbers = np.typing.NDArray[np.float32]


def cut_patches(pixels: np.typing.NDArray[Any], patch_size: int, block: int) -> Numbers:
    """Returns the patches of a picture [C, H, W], as rows [P, C * patch_size^2], block by block.

    Pixels after the last whole block are left out.
    """
    num_channels, height, width = pixels.shape
    side = patch_size * block
    rows, columns = height // side, width // side
    shape = (num_channels, rows, block, patch_size, columns, block, patch_size)
    whole = pixels[:, : rows * side, : columns * side].reshape(shape)
    patches = whole.transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(patches, np.float32).reshape(
        rows * columns * block**2, num_channels * patch_size**2
    )


def by_blocks(grid: np.typing.NDArray[Any], block: int) -> np.typing.NDArray[Any]:
    """Returns the entries of a grid [height, width, ...] in the order of `cut_patches`."""
    height, width, *others = grid.shape
    parts = grid.reshape(height // block, block, width // block, block, *others)
    return parts.swapaxes(1, 2).reshape(height * width, *others)


def check_whole(
    kind: str, height: int, width: int, block: int, num_patches: int | None = None
) -> None:
    """Refuses a picture whose patches are no whole blocks.

    Args:
        kind: What it is, for the error.
        height: The patches of a column.
        width: The patches of a row.
        block: The side of a block, in patches.
        num_patches: The number of patches; None if they fill all rows.

    Raises:
        UnsupportedError: Blocks would leave some patches out.
    """
    if height % block or width % block or height * width != (num_patches or height * width):
        raise UnsupportedError(
            f"a {kind} of {height} x {width} patches has no whole blocks of {block} x {block}"
        )


def fill_up(
    inputs: Mapping[str, np.typing.NDArray[Any]], size: int
) -> dict[str, np.typing.NDArray[Any]]:
    """Returns arrays with rows of zeros after their own, and `segment_P`, in which these have 1."""
    num_patches = len(next(iter(inputs.values())))
    full = {"segment_P": np.ones(size, np.int32)}
    full["segment_P"][:num_patches] = 0
    for name, array in inputs.items():
        full[name] = np.zeros((size, *array.shape[1:]), array.dtype)
        full[name][:num_patches] = array
    return full


def placed_patch_shapes(patch_width: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of patches with their places on two axes, as `fill_up` has them.

    Args:
        patch_width: The numbers of a patch (I).
        size: The number of patches (P).
    """
    return {
        "patch_PI": jax.ShapeDtypeStruct((size, patch_width), jnp.float32),
        "place_P2": jax.ShapeDtypeStruct((size, 2), jnp.int32),
        "segment_P": jax.ShapeDtypeStruct((size,), jnp.int32),
    }


def rotary_frequencies(width: int, theta: float) -> Numbers:
    """Returns the frequencies of rotations of this width, in float32 as transformers has them."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def size_menu(max_patches: int, block: int) -> tuple[int, ...]:
    """Returns the powers of two below a number of patches, from 256, and the number itself.

    Each is rounded up to whole blocks of patches.
    """
    powers = (2**exponent for exponent in range(8, max_patches.bit_length()))
    whole = (-(-size // block**2) * block**2 for size in (*powers, max_patches))
    return tuple(sorted({min(size, max_patches) for size in whole}))


def size_for(sizes: Sequence[int], num_patches: int) -> int:
    """Returns the smallest size that holds so many patches.

    Raises:
        UnsupportedError: The picture has more patches than the largest one.
    """
    for size in sizes:
        if num_patches <= size:
            return size
    raise UnsupportedError(
        f"a picture has {num_patches} patches, and the encoder takes at most {sizes[-1]}: the "
        "settings in preprocessor_config.json do not fit vision_config in config.json"
    )
