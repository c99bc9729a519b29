"""Converts a model between safetensors and Orbax bit for bit, and from GGUF to safetensors.

Quantised numbers of a GGUF file are dequantised. An Orbax checkpoint may have the names of a
trainer (`trainer_names`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.checkpoints.config_file import read_config, read_generation_config
from jaxpage.checkpoints.embedding_files import EMBEDDING_FILES
from jaxpage.checkpoints.files import file_in
from jaxpage.checkpoints.fitting import LoadPlan
from jaxpage.checkpoints.in_memory.parameters import open_parameters
from jaxpage.checkpoints.in_memory.trainer_names import trainer_of
from jaxpage.checkpoints.loading import insert, make_array_reader
from jaxpage.checkpoints.opening import ModelFiles, open_model
from jaxpage.checkpoints.orbax_files import (
    has_orbax,
    read_orbax_tensors,
    restore_orbax,
    save_orbax,
)
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES, write_safetensors
from jaxpage.errors import CheckpointError

# All files of a model directory but its weights.
COPIED = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    *(
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
    ),
    *("preprocessor_config.json", "processor_config.json"),
    *("chat_template.jinja", "chat_template.json", "README.md", "LICENSE", "LICENSE.txt", "NOTICE"),
)
MAX_SHARD_BYTES = 5_000_000_000


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    progress: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes the model in the directory or GGUF file `source` to `destination` in the other layout.

    Every parameter keeps its dtype and its bits. Quantised tensors of a GGUF file become float32,
    and its metadata becomes the config and the tokenizer of a Hugging Face directory. Tensors that
    carry nothing (a tied head saved in full, old buffers) are left out; config, tokenizer and
    generation files are copied. The result appears whole or not at all: it is written next to
    `destination` and renamed. The host holds the model once when Orbax is written or read.

    Args:
        source: The directory, or the GGUF file.
        destination: The directory that is made.
        progress: True to show a bar over bytes on standard error.
        max_shard_bytes: The size above which safetensors files are divided.

    Returns:
        The destination.

    Raises:
        CheckpointError: The source does not fit, `destination` exists and is not an empty
            directory, or it cannot be written.
    """
    source = Path(source)
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination) and (
        destination.is_symlink() or not destination.is_dir() or any(destination.iterdir())
    ):
        raise CheckpointError(
            f"{destination} exists and is not an empty directory; nothing was written"
        )
    files = _of_trainer(source) or open_model(source)
    plan = files.plan
    temporary = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        if plan.layout == "gguf":
            _write_metadata(files, temporary)
        else:
            _copy_files(source, temporary)
        total = sum(
            math.prod(info.shape) * NUMPY_DTYPES[info.dtype].itemsize
            for info in plan.tensors.values()
        )
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="converting",
            disable=None if progress else True,
        ) as bar:
            if plan.layout == "safetensors":
                _to_orbax(plan, temporary, bar)
                bar.update(total - bar.n)
            else:
                _to_safetensors(plan, temporary, bar, max_shard_bytes)
        temporary.replace(destination)
    except OSError as error:
        raise CheckpointError(f"{destination} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return destination


def _of_trainer(source: Path) -> ModelFiles | None:
    """Returns the model in a directory whose Orbax checkpoint has the names of a trainer."""
    if not source.is_dir() or not has_orbax(source):
        return None
    problems = Problems(source)
    stored = read_orbax_tensors(source, problems)
    if trainer_of(stored) is None or problems.lines:
        return None  # `open_model` opens it, or says what is wrong.
    targets: dict[str, Any] = {}
    for name, info in stored.items():
        dtype = NUMPY_DTYPES.get(info.dtype, info.dtype)
        # Orbax takes only the shape and the dtype from a target, so one element is enough memory.
        insert(targets, name.split("."), np.broadcast_to(np.empty((), dtype), info.shape))
    return open_parameters(read_config(source), restore_orbax(source, targets))


def _copy_files(source: Path, destination: Path) -> None:
    embedding = [file for pattern in EMBEDDING_FILES for file in source.glob(pattern)]
    for name in (*COPIED, *(str(file.relative_to(source)) for file in embedding)):
        if os.path.lexists(source / name):
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file_in(source, name), destination / name)


def _write_metadata(files: ModelFiles, destination: Path) -> None:
    """Writes the config, the generation config and the tokenizer of a GGUF file."""
    # The import is here because transformers takes a second to import.
    from jaxpage.checkpoints.tokenizers.gguf_tokenizer import gguf_tokenizer

    config = {**files.config, "dtype": _most_common_dtype(files.plan)}
    contents = {
        "config.json": config,
        "generation_config.json": read_generation_config(files.directory),
    }
    for name, content in contents.items():
        (destination / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if tokenizer := gguf_tokenizer(files.directory):
        tokenizer.save_pretrained(destination)


def _most_common_dtype(plan: LoadPlan) -> str:
    """Returns the type that most numbers have."""
    counts: Counter[str] = Counter()
    for info in plan.tensors.values():
        counts[NUMPY_DTYPES[info.dtype].name] += math.prod(info.shape)
    return counts.most_common(1)[0][0]


def _to_orbax(plan: LoadPlan, destination: Path, bar: tqdm[Any]) -> None:
    tree: dict[str, Any] = {}
    read = make_array_reader(plan)
    for name, info in plan.tensors.items():
        owned = np.array(read(info), order="C")
        insert(tree, name.split("."), owned)
        bar.update(owned.nbytes // 2)  # half for reading, half for writing
    save_orbax(destination, tree)


def _to_safetensors(
    plan: LoadPlan, destination: Path, bar: tqdm[Any], max_shard_bytes: int
) -> None:
    def arrays() -> Iterator[np.ndarray]:
        read = make_array_reader(plan)
        for info in plan.tensors.values():
            array = read(info)
            bar.update(array.nbytes)
            yield array

    tensors = [(name, NUMPY_DTYPES[info.dtype], info.shape) for name, info in plan.tensors.items()]
    write_safetensors(destination, tensors, arrays(), max_shard_bytes)
