"""Reads maps from the rows of a head that knows a part of the vocabulary to token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_header import TensorInfo

_INTEGERS: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}


def read_token_map(
    info: TensorInfo, vocab_size: int, problems: Problems, *, differences: bool = False
) -> npt.NDArray[np.int32] | None:
    """Returns the token id of each row.

    It is None, with the reason among the problems, if the tensor is not such a map.

    Args:
        info: The tensor.
        vocab_size: The size of the model's vocabulary.
        problems: The list that errors are added to.
        differences: True if it holds token ids less the numbers of their rows (EAGLE-3's d2t).
    """
    if info.dtype not in _INTEGERS or len(info.shape) != 1 or not 0 < info.shape[0] <= vocab_size:
        problems.add(
            f"tensor {info.name!r} is {info.dtype} of shape {info.shape}, and must be I64 or I32 "
            f"of at most {vocab_size} token ids"
        )
        return None
    if problems:  # Nothing is read from damaged files.
        return None
    token_ids = np.fromfile(info.file, _INTEGERS[info.dtype], info.shape[0], offset=info.offset)
    if differences:
        token_ids = token_ids + np.arange(len(token_ids))
    if (
        token_ids.min() < 0
        or token_ids.max() >= vocab_size
        or len(np.unique(token_ids)) < len(token_ids)
    ):
        problems.add(
            f"tensor {info.name!r} has token ids twice, or beyond the model's, which end at "
            f"{vocab_size - 1}"
        )
        return None
    return token_ids.astype(np.int32)
