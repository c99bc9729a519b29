"""Saves a nested dict of arrays with Orbax, and restores it from a checked directory.

The dict has the names and shapes of the Hugging Face checkpoint, nested at the dots. Such a format
outlives the order in which the engine keeps its matrices (a square one in the wrong order would go
unnoticed). Orbax takes seconds to import and most runs never need it, so it is imported at first
use, here and nowhere else. The stable interface (`StandardCheckpointer`) is used, because
`orbax.checkpoint.v1` is not in every supported version.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.checkpoints.files import has_file, read_object
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.errors import CheckpointError

FOLDER = "orbax"  # It is next to config.json and the tokenizer files.
COMMIT = "commit_success.txt"  # It is written last: without it the directory is half a checkpoint.

# Orbax stores numpy's names; checkpoints are compared under the names of safetensors.
_CODES = {
    **{"float32": "F32", "bfloat16": "BF16", "float16": "F16"},
    **{"int8": "I8", "uint8": "U8", "int32": "I32", "float8_e4m3fn": "F8_E4M3"},
}


def _checkpointer() -> Any:
    import orbax.checkpoint  # lazy on purpose: see above

    return orbax.checkpoint.StandardCheckpointer()


def has_orbax(directory: Path) -> bool:
    """Returns whether the directory has an Orbax checkpoint."""
    return has_file(directory, FOLDER)


def read_orbax_tensors(directory: Path, problems: Problems) -> dict[str, TensorInfo]:
    """Returns every array of the Orbax checkpoint by its dotted path, from metadata alone.

    The offsets and sizes of the result mean nothing. Errors are added to `problems`. Not read at
    all are checkpoints that were never committed, or have links and special files (their targets
    could lie anywhere), or metadata that is not JSON.
    """
    folder = directory / FOLDER
    before = len(problems.lines)
    _check_files(folder, problems)
    with problems.collect():
        read_object(folder, "_METADATA")
    if len(problems.lines) > before:
        return {}
    try:
        with _checkpointer() as checkpointer:
            item = checkpointer.metadata(folder.resolve()).item_metadata
        leaves = dict(_leaves(item.tree, ()))
        tensors = {name: _tensor_info(name, leaf, folder) for name, leaf in leaves.items()}
        # A chunk is allocated whole, so it may not be larger than its tensor.
        for name, leaf in leaves.items():
            if any(
                chunk > max(size, 1)
                for chunk, size in zip(leaf.storage.chunk_shape, leaf.shape, strict=True)
            ):
                problems.add(
                    f"{FOLDER}: tensor {quote(name)} has chunks larger than its shape {leaf.shape}"
                )
    except Exception as error:  # tensorstore raises many kinds for a damaged database
        problems.add(f"{FOLDER}: cannot be read as an Orbax checkpoint: {_reason(error)}")
        return {}
    return tensors


def save_orbax(directory: Path, tree: Mapping[str, Any]) -> None:
    """Saves a nested dict of arrays under `directory`/orbax, and returns when it is committed."""
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / FOLDER).resolve(), tree)
        checkpointer.wait_until_finished()


def restore_orbax(directory: Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the whole tree in the form of `targets`, in their types.

    Leaves are numpy arrays. Their shapes must have been compared before: Orbax pads and cuts
    silently.

    Raises:
        CheckpointError: The data is damaged.
    """
    try:
        with _checkpointer() as checkpointer:
            restored: dict[str, Any] = checkpointer.restore(
                (directory / FOLDER).resolve(), target=targets
            )
    except Exception as error:  # as above
        raise CheckpointError(
            f"{directory / FOLDER} cannot be restored: {_reason(error)}"
        ) from error
    return restored


def _check_files(folder: Path, problems: Problems) -> None:
    if folder.is_symlink() or not folder.is_dir():
        problems.add(f"{FOLDER} is not a directory")
        return
    if not (folder / COMMIT).is_file():
        problems.add(f"{FOLDER} has no {COMMIT}: it was not saved to the end")
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            mode = (Path(root) / name).lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                where = quote(str((Path(root) / name).relative_to(folder.parent)))
                problems.add(
                    f"{where} is a symbolic link or a special file; an Orbax checkpoint has only "
                    "plain ones"
                )


def _leaves(tree: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, branch in tree.items() for leaf in _leaves(branch, (*path, str(key)))]
    return [(".".join(path), tree)]


def _tensor_info(name: str, leaf: Any, folder: Path) -> TensorInfo:
    shape = tuple(int(size) for size in leaf.shape)
    return TensorInfo(name, _CODES.get(str(leaf.dtype), str(leaf.dtype)), shape, folder, 0, 0)


def _reason(error: Exception) -> str:
    return quote(str(error).split("\n", 1)[0] or type(error).__name__)
