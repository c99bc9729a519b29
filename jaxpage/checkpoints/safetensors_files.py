"""Reads and writes the tensors of a directory in Hugging Face layout.

They are in one safetensors file, or in shards with an index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpage.checkpoints.files import file_in, has_file, read_object
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_header import TensorInfo, read_header
from jaxpage.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# The types that weights may have, here and in memory: those of a model, and of quantised weights.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


def has_safetensors(directory: Path) -> bool:
    """Returns whether the directory has a safetensors file or an index."""
    return has_file(directory, SINGLE) or has_file(directory, INDEX)


def read_tensors(directory: Path, problems: Problems, other: str = SINGLE) -> dict[str, TensorInfo]:
    """Returns every tensor of the directory by name, from headers alone.

    `model.safetensors` is preferred over an index, as in transformers. Errors are added to
    `problems`.

    Args:
        directory: The directory.
        problems: The list that errors are added to.
        other: A file that is preferred over both.
    """
    for name in (other, SINGLE):
        if has_file(directory, name):
            return _read_file(directory, name, problems)
    if has_file(directory, INDEX):
        return _read_shards(directory, problems)
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        problems.add(
            f"its weights are pickled ({', '.join(map(quote, pickles))}), and opening a pickle "
            "runs code: refused, "
            "unopened. Save the model as safetensors (save_pretrained of transformers does) and "
            "load that"
        )
        return {}
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    other_files = f" (found only {', '.join(map(quote, others))})" if others else ""
    problems.add(f"there is neither {SINGLE} nor {INDEX}{other_files}")
    return {}


def map_array(tensor: TensorInfo) -> np.ndarray:
    """Returns the tensor as a read-only view of its file; its dtype is one of NUMPY_DTYPES."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    if tensor.num_bytes == 0:  # An empty range cannot be mapped.
        return np.empty(tensor.shape, dtype)
    try:
        mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    except (OSError, ValueError) as error:  # It fitted when the header was read.
        raise CheckpointError(f"{tensor.file} has changed while it was read: {error}") from error
    return np.asarray(mapped).view(dtype).reshape(tensor.shape)


def write_safetensors(
    directory: Path,
    tensors: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
    max_shard_bytes: int,
) -> None:
    """Writes arrays, in the order of `tensors` (name, dtype, shape), one at a time.

    They are in one model.safetensors if all fit into `max_shard_bytes`, else in shards with an
    index.
    """
    shards: list[list[tuple[str, np.dtype[Any], tuple[int, ...]]]] = [[]]
    sizes = [0]
    for tensor in tensors:
        num_bytes = _num_bytes(tensor)
        if shards[-1] and sizes[-1] + num_bytes > max_shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(tensor)
        sizes[-1] += num_bytes
    count = len(shards)
    names = (
        [SINGLE]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    remaining = iter(arrays)
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, remaining)
    if count > 1:
        weight_map = {
            tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_file(directory: Path, name: str, problems: Problems) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    with problems.collect():
        tensors = read_header(file_in(directory, name), quote(name), problems)
    return tensors


def _read_shards(directory: Path, problems: Problems) -> dict[str, TensorInfo]:
    placed: dict[str, set[str]] = {}  # The value has the tensors that the index places in a shard.
    with problems.collect():
        for name, shard in weight_map(directory).items():
            placed.setdefault(shard, set()).add(name)
    tensors: dict[str, TensorInfo] = {}
    for shard, names in sorted(placed.items()):
        before = len(problems.lines)
        tensors_of_shard = _read_file(directory, shard, problems)
        # A shard that cannot be read has been reported already.
        if len(problems.lines) == before:
            for name in sorted(names - tensors_of_shard.keys()):
                problems.add(
                    f"{INDEX} places tensor {quote(name)} in {quote(shard)}, which does not hold it"
                )
            for name in sorted(tensors_of_shard.keys() - names):
                problems.add(
                    f"{quote(shard)} holds tensor {quote(name)}, which {INDEX} does not place there"
                )
        tensors.update((name, tensors_of_shard[name]) for name in names & tensors_of_shard.keys())
    return tensors


def weight_map(directory: Path) -> dict[str, str]:
    """Returns the index, from tensor name to file name.

    Raises:
        CheckpointError: The file is not exactly that.
    """
    weight_map = read_object(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is not an object that maps tensors to files")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{INDEX}: weight_map has a file name that is not a string")
    return weight_map


def _num_bytes(tensor: tuple[str, np.dtype[Any], tuple[int, ...]]) -> int:
    _, dtype, shape = tensor
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def write_file(
    file: Path,
    tensors: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes the next arrays, those of `tensors` (name, dtype, shape), to one file."""
    codes = {dtype: code for code, dtype in NUMPY_DTYPES.items()}
    # The library transformers asks for this word.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        name, dtype, shape = tensor
        end = position + _num_bytes(tensor)
        header[name] = {
            "dtype": codes[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        # `arrays` continues in the next shard.
        for (_, dtype, shape), array in zip(tensors, arrays, strict=False):
            assert array.dtype == dtype and array.shape == shape
            stream.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
