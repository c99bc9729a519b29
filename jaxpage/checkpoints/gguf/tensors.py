"""Reads the tensors of a GGUF file by the names of the model's family, and dequantises them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.checkpoints.gguf.header import GGUFFile, GGUFTensor, read_gguf
from jaxpage.checkpoints.gguf.types import tensor_names, tensor_type
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.quantization import Scheme, choose_scheme
from jaxpage.checkpoints.safetensors_files import map_array
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.models.parameters import Weight

_AT_ONCE = 1 << 18  # The numbers that are dequantised at a time.
# The config is made of these (`gguf_config`); they are no parameters.
OF_CONFIG = ("rope_freqs.weight",)


def read_gguf_tensors(path: Path, problems: Problems) -> dict[str, GGUFTensor]:
    """Returns the tensors by their names in the file; errors are added to `problems`."""
    file = read_gguf(path)
    for line in file.tensor_problems:
        problems.add(line)
    return {name: tensor for name, tensor in file.tensors.items() if name not in OF_CONFIG}


def gguf_names(path: Path, weights: Sequence[Weight]) -> dict[str, str]:
    """Returns the name in the file of each tensor that fills one of `weights`.

    The keys are the names of the model's family. Only first sources count: the package has a name
    also for a fused tensor of a family, and it is that of a part.
    """
    file = read_gguf(path)
    names = _names_in(file)
    model_names = [piece.name for weight in weights for piece in weight.sources[0].pieces]
    by_model_name = {
        name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model_names
    }
    return {name: inside for name, inside in by_model_name.items() if inside is not None}


def _names_in(file: GGUFFile) -> Any:
    """Returns the names of tensors; see `tensor_names`."""
    return tensor_names(file.architecture, int(file.of_model("block_count") or 0))


def under_model_names(
    stored: Mapping[str, TensorInfo], names: Mapping[str, str], weights: Sequence[Weight]
) -> dict[str, TensorInfo]:
    """Returns `stored` by the family's names, as bytes where weights are made of bytes.

    A tensor without a name of the family keeps its own, and is unexpected.
    """
    reverse = {inside: name for name, inside in names.items() if inside in stored}
    pieces = [piece for weight in weights for piece in weight.sources[0].pieces]
    in_bytes = {
        piece.name for piece in pieces if piece.stored and piece.stored.dtypes == ("uint8",)
    }
    tensors = {reverse.get(name, name): tensor for name, tensor in stored.items()}
    return {
        name: tensor.as_stored if name in in_bytes and isinstance(tensor, GGUFTensor) else tensor
        for name, tensor in tensors.items()
    }


def gguf_scheme(path: Path) -> Scheme:
    """Returns the scheme for `quantization="gguf"`.

    Raises:
        CheckpointError: No matrix of the file can be kept.
    """
    file = read_gguf(path)
    counts = Counter(tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1)

    def kind_of(module: str) -> str | None:
        tensor = file.tensors.get(
            _names_in(file).get_name(f"{module}.weight", try_suffixes=(".weight",))
        )
        return tensor.kind if tensor else None

    return choose_scheme(counts, kind_of)


def read_gguf_array(tensor: TensorInfo) -> np.ndarray:
    """Returns the numbers of a tensor in its dtype.

    They are a view of the file if they are stored in this dtype, else float32 in memory of its own.
    """
    assert isinstance(tensor, GGUFTensor)
    array = _dequantise(tensor) if tensor.is_quantised else map_array(tensor)
    if tensor.one_more:
        return array - np.float32(1)
    if not tensor.interleaved_heads:
        return array
    # The rows of a head are stored as pairs (i, i + H / 2), one after the other; the model wants
    # the first halves, then the second ones.
    pairs = array.reshape(tensor.interleaved_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _dequantise(tensor: GGUFTensor) -> np.ndarray:
    """Dequantises some rows at a time, so that little is in memory but the result."""
    kind = tensor_type(tensor.kind)
    width = tensor.shape[-1]
    stored = map_array(replace(tensor, dtype="U8", shape=(tensor.num_bytes,)))
    blocks_NB = stored.reshape(-1, width // kind.block * kind.num_bytes)
    result_NK = np.empty((len(blocks_NB), width), np.float32)
    step = max(1, _AT_ONCE // width)
    with np.errstate(all="ignore"):  # stored numbers may overflow or be NaN
        for start in range(0, len(blocks_NB), step):
            # The rows are given as one: the package takes a few rows at a time, and small ones cost
            # it more than their numbers.
            numbers = kind.dequantise(blocks_NB[start : start + step].reshape(1, -1))
            result_NK[start : start + step] = numbers.reshape(-1, width)
    return result_NK.reshape(tensor.shape)
