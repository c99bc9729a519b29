"""The types of tensors in GGUF files, as the package `gguf` knows them: how large their blocks are, and how they are dequantised."""

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
    """A type of GGML: blocks of `block` numbers of a row, in `num_bytes` bytes each."""

    name: str
    block: int
    num_bytes: int
    number: Any  # the package's

    def dequantise(self, blocks: np.ndarray) -> np.ndarray:
        """float32 numbers [N, K] of the bytes [N, K / block * num_bytes]. Raises NotImplementedError if the package cannot."""
        return _gguf().dequantize(blocks, self.number)

    @functools.cached_property
    def is_read(self) -> bool:
        try:
            self.dequantise(np.zeros((1, self.num_bytes), np.uint8))
        except NotImplementedError:
            return False
        return True


@functools.cache
def tensor_types() -> dict[int, TensorType]:
    """By the numbers that files have for them."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {
        int(number): TensorType(number.name, sizes[number][0], sizes[number][1], number)
        for number in sizes
    }


def tensor_type(name: str) -> TensorType:
    return next(kind for kind in tensor_types().values() if kind.name == name)


@functools.cache
def tensor_names(architecture: str, num_layers: int) -> Any:
    """The package's map from names of checkpoints to names in GGUF files, of an architecture that it knows."""
    gguf = _gguf()
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, num_layers)


def _gguf() -> Any:
    import gguf  # lazy on purpose: a model in another format needs none of it

    return gguf
