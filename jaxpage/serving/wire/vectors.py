"""Reads the vectors that a request has in place of a prompt."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from safetensors.numpy import load

from jaxpage.images import decode_base64
from jaxpage.serving.wire.errors import ApiError

_NPY = b"\x93NUMPY"
_TORCH = (b"PK\x03\x04", b"\x80")  # what torch.save writes: a zip file, or a pickle


def read_vectors(text: str, param: str) -> npt.NDArray[Any]:
    """Returns an array that is in a request.

    Args:
        text: Base64 of a file of safetensors with one tensor, or of a .npy file.
        param: The path of the field.

    Raises:
        ApiError: It is neither.
    """
    try:
        return _array_of(decode_base64(text))
    except ValueError as error:
        raise ApiError(400, f"{param} {error}", param=param) from None


def _array_of(data: bytes) -> npt.NDArray[Any]:
    if data.startswith(_NPY):
        return _read_npy(data)
    if data.startswith(_TORCH):
        raise ValueError(
            "is a file of torch.save, which may run code where it is read; send base64 of "
            "safetensors.torch.save({'prompt_embeds': tensor}), or of a .npy file"
        )
    try:
        tensors = load(data)
    except Exception as error:  # the library has errors of its own
        raise ValueError(f"must be base64 of a safetensors or .npy file: {error!s:.100}") from None
    if len(tensors) != 1:
        raise ValueError(f"must have one tensor, not {len(tensors)}")
    return next(iter(tensors.values()))


def _read_npy(data: bytes) -> npt.NDArray[Any]:
    """Returns the array of a .npy file, whose header says no more than there is."""
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
    except Exception as error:  # the header is a literal of Python
        raise ValueError(f"has a damaged header of a .npy file: {error!s:.100}") from None
    values = data[file.tell() :]
    if dtype.hasobject or dtype.itemsize * int(np.prod(shape, dtype=object)) != len(values):
        raise ValueError(f"has {len(values)} bytes, and its header says {dtype} {tuple(shape)}")
    return np.frombuffer(values, dtype).reshape(shape, order="F" if is_fortran else "C")
