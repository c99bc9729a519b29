"""Reads what clients ask about a model's files, from their headers and a few bytes."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jaxpage.checkpoints import ModelFiles, open_model
from jaxpage.checkpoints.finding import local_model
from jaxpage.errors import JaxpageError
from jaxpage.models import model_weights
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.settings.engine_config import EngineConfig

_SAMPLE_BYTES = 4096  # of each end of a file; whole files would take minutes
_MAX_FILES = 4096


def card_of(files: ModelFiles, quantization: str | None) -> ModelCard:
    """Returns the card of a model.

    Args:
        files: The model's files.
        quantization: The quantisation that the settings ask for, in which the weights are held.
    """
    plan = files.plan
    counts: Counter[str] = Counter()
    for filled in plan.parameters:
        for _, info in filled.pieces:
            # Tensors of GGUF files have a kind, and those of safetensors a dtype.
            counts[str(getattr(info, "kind", info.dtype))] += filled.weight.size
    if files.rule is None:
        weights = [filled.weight for filled in plan.parameters]
    else:
        # A quantised weight counts as the plain one of the model does.
        weights = list(model_weights(files.family, files.spec))
    stored = counts.most_common(1)[0][0] if counts else ""
    scheme = quantization or (files.quantization.name if files.quantization else None)
    return ModelCard(
        family=str(files.config.get("model_type", "")),
        format=plan.layout,
        num_parameters=sum(weight.size for weight in weights),
        quantization=stored if plan.layout == "gguf" or scheme is None else scheme.upper(),
        num_bytes=plan.num_bytes(),
        digest=_digest(files.directory),
        modified_at=max(
            (file.stat().st_mtime for file in _first_files(files.directory)), default=0
        ),
    )


def card_of_settings(config: EngineConfig) -> ModelCard:
    """Returns the card of a model that is not loaded; an empty one if its files are not here."""
    try:
        path = local_model(config.model)
        if path is None:
            return ModelCard(digest=_digest_of(config.model.encode()))
        return card_of(open_model(path, config.quantization), config.quantization)
    except (JaxpageError, OSError):
        return ModelCard(digest=_digest_of(config.model.encode()))


def _digest(path: Path) -> str:
    """Returns a digest of the names, the sizes and the ends of a model's files."""
    digest = hashlib.sha256()
    for file in _first_files(path):
        size = file.stat().st_size
        # No file name can have a NUL, so names and sizes cannot run into each other.
        digest.update(f"{file.relative_to(path)}\0{size}\0".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLE_BYTES))
            content.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _first_files(path: Path) -> Iterator[Path]:
    return itertools.islice(_files(path), _MAX_FILES)


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for directory, folders, names in os.walk(path):
        # `os.walk` goes on into the folders that are left in its list, in their order.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (file := Path(directory) / name).is_file():
                yield file
