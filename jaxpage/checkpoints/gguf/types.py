"""Describes the types of tensors in GGUF files, as the package `gguf` knows them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

# Types that hold numbers as they are, with the names that safetensors has for them. All others hold
# blocks of quantised numbers.
PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


@dataclass(frozen=True)
class TensorType:
    """Describes a type of GGML: blocks of numbers of a row.

    Attributes:
        name: The name of the type.
        block: The number of numbers in a block.
        num_bytes: The number of bytes of a block.
        number: The number of the type in the package.
    """

    name: str
    block: int
    num_bytes: int
    number: Any

    def dequantise(self, blocks: np.ndarray) -> np.ndarray:
        """Returns float32 numbers [N, K] of the bytes [N, K / block * num_bytes].

        Raises:
            NotImplementedError: The package cannot dequantise this type.
        """
        return _gguf().dequantize(blocks, self.number)

    @functools.cached_property
    def is_read(self) -> bool:
        """Returns whether the package can dequantise this type."""
        try:
            self.dequantise(np.zeros((1, self.num_bytes), np.uint8))
        except NotImplementedError:
            return False
        return True


@functools.cache
def tensor_types() -> dict[int, TensorType]:
    """Returns the types by the numbers that files have for them."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {
        int(number): TensorType(number.name, sizes[number][0], sizes[number][1], number)
        for number in sizes
    }


def tensor_type(name: str) -> TensorType:
    """Returns the type with this name."""
    return next(kind for kind in tensor_types().values() if kind.name == name)


@functools.cache
def tensor_names(architecture: str, num_layers: int) -> Any:
    """Returns the package's map from names of checkpoints to names in GGUF files.

    The architecture is one that the package knows.
    """
    gguf = _gguf()
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, num_layers)


def _gguf() -> Any:
    import gguf  # lazy on purpose: a model in another format needs none of it

    return gguf
