"""Names the weights of updates in an event log, keeps their arrays, and finds them for a replay.

LOG                                      has a checksum for each update
LOG.weights/CHECKSUM/model.safetensors   the arrays, with `event_log_weights`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpage.assembly import Built, check_replaceable, checkpoint_parts, weights_on_device
from jaxpage.checkpoints import ModelFiles, in_memory, with_weights_of
from jaxpage.errors import CheckpointError, EventLogError
from jaxpage.replay.log_header import weights_hash
from jaxpage.replay.log_vectors import weights_of_log
from jaxpage.replay.recorder import Record
from jaxpage.settings.argument_checks import show
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.update import Mode


def log_weights(built: Built, config: EngineConfig) -> Built:
    """Returns the engine of a log, which gives a checksum for other weights before it takes them.

    With `event_log_weights` it also keeps them, as a checkpoint without a config.json.
    """
    assert config.event_log is not None
    directory = weights_of_log(config.event_log) if config.event_log_weights else None
    return replace(built, checksum_of=partial(_checksum_of, built, directory))


def place_of_model(built: Built, config: EngineConfig) -> Path:
    """Returns the directory, next to its log, in which `keep_model` keeps a model in memory.

    Raises:
        UnsupportedError: The weights are quantised, so that they have no names.
    """
    assert config.event_log is not None
    check_replaceable(built.model, "event_log")
    return weights_of_log(config.event_log).absolute() / hash_update(built, built.engine.parameters)


def keep_model(built: Built, directory: Path) -> None:
    """Writes the weights and the config.json of a model in memory.

    Raises:
        EventLogError: They cannot be written.
    """
    _keep(built, built.engine.parameters, directory)
    (directory / "config.json").write_text(json.dumps(built.model.config))


def _checksum_of(built: Built, directory: Path | None, weights: Mapping[str, Any]) -> str:
    """Returns the hash of weights, and writes them to the directory if there is one.

    Raises:
        EventLogError: They cannot be written.
    """
    checksum = hash_update(built, weights)
    if directory is not None:
        _keep(built, weights, directory / checksum)
    return checksum


def hash_update(built: Built, weights: Mapping[str, Any]) -> str:
    """Returns the hash of the names, shapes, types and bytes of other weights."""
    present = {name: part for name, part in weights.items() if part is not None}
    return weights_hash(present if len(present) > 1 else present["target"], built.engine.packed)


def _keep(built: Built, weights: Mapping[str, Any], directory: Path) -> None:
    """Writes weights by their names in the checkpoint; only their owner can read them.

    Raises:
        EventLogError: They cannot be written.
    """
    path = directory / "model.safetensors"
    if path.exists():
        return  # those of an earlier update
    files = built.model if "vision" in weights else replace(built.model, vision=None)
    arrays = {
        name: np.ascontiguousarray(array)
        for plan, part in checkpoint_parts(files, built.spec, built.engine.packed, weights)
        for name, array in in_memory.name_parameters(plan, part).items()
    }
    unfinished = path.with_suffix(".unfinished")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_file(arrays, unfinished)
        unfinished.chmod(0o600)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise EventLogError(
            f"event_log_weights: {directory} cannot be written, and the weights stay as they were: "
            f"{error}"
        ) from error


class Update(NamedTuple):
    """Holds the arguments of `Engine.replace_weights`."""

    weights: Mapping[str, Any]
    mode: Mode
    checksum: str | None


class WeightsOfUpdates:
    """Finds the weights of the updates in a log.

    They are those that were kept next to the log, or those of a directory that the user gives. The
    checksums in the log decide.
    """

    def __init__(self, log: str | os.PathLike[str], directories: Sequence[Path] = ()) -> None:
        self._log_directory = weights_of_log(log)
        self._directories = directories
        self._checksums: dict[Path, str] = {}  # of the directories that were read

    def check(self, update: Record) -> None:
        """Checks that there is somewhere to look for the weights of an update.

        Raises:
            EventLogError: Nothing was kept, and no directory is given.
        """
        checksum = update.get("checksum")
        if (
            checksum
            and not self._directories
            and not (self._log_directory / str(checksum)).is_dir()
        ):
            raise EventLogError(
                f"the log has an update to weights with the checksum {checksum}, and no arrays of "
                f"them in {self._log_directory}: name a directory with these weights (--weights), "
                "or record the log with event_log_weights"
            )

    def load(self, built: Built, record: Record) -> Update:
        """Returns what `Engine.replace_weights` takes for an update, with weights on the device.

        Args:
            built: The engine of the replay.
            record: The record of the update.

        Raises:
            ValueError: The record is not valid.
            EventLogError: No directory has weights with this checksum; the message lists all.
        """
        mode: Any = record.get("mode")
        checksum = record.get("checksum")
        if mode not in get_args(Mode) or not isinstance(checksum, str | None):
            raise ValueError(f"mode is {show(mode)}, checksum is {show(checksum)}")
        if checksum is None:  # a model that woke from sleep read its own checkpoint again
            return Update(self._load(built, built.model), mode, None)
        problems = []
        for path in (self._log_directory / checksum, *self._directories):
            known = self._checksums.get(path, checksum)
            if known == checksum and path.is_dir():
                try:
                    weights = self._load(built, with_weights_of(built.model, path))
                except CheckpointError as error:
                    problems.append(f"{path} cannot be used: {error}")
                    continue
                known = self._checksums[path] = hash_update(built, weights)
                if known == checksum:
                    return Update(weights, mode, checksum)
            problems.append(f"{path} has {known}" if path.is_dir() else f"{path} does not exist")
        raise EventLogError(
            f"no weights with the checksum {checksum} were found, for the update to version "
            f"{record.get('version')}:\n" + "\n".join(problems)
        )

    def _load(self, built: Built, files: ModelFiles) -> Mapping[str, Any]:
        return weights_on_device(files, built.spec, built.engine.packed, finite=False)
