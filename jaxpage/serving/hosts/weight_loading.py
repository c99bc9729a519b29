"""Loads other weights on a host, and keeps them until rank 0 takes its own.

All hosts take the same weights before the same step, or none does:

    rank 0 ── load: number, path ──▶ follower      it reads its part on a thread, while steps go on
    rank 0 ◀─ loaded: hash, or why not ─ follower
    rank 0 ── update: hash ──▶ follower            an event of the engine, like those of steps
    rank 0 ── forget: number ──▶ follower          when the update has ended, in whatever way
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxpage.assembly import Built, weights_on_device
from jaxpage.checkpoints import with_weights_of
from jaxpage.errors import CheckpointError, JaxpageError
from jaxpage.replay import Differs, Record
from jaxpage.serving.hosts.joining import model_hash
from jaxpage.serving.model.directories import directory_inside
from jaxpage.serving.wire.errors import ApiError

logger = logging.getLogger(__name__)


class LoadedWeights(NamedTuple):
    """Holds weights as they are on the devices of this host.

    Attributes:
        weights: The weights, for `Engine.replace_weights`.
        checksum: The hash of their files; None on a single host that writes no event log.
    """

    weights: Any
    checksum: str | None


def load_other_weights(built: Built, directory: Path, *, check_finite: bool) -> Any:
    """Returns the weights of a directory on the device; see `weights_on_device` for the errors.

    Args:
        built: The engine that takes them.
        directory: The directory of the weights.
        check_finite: True refuses NaN and infinite numbers.
    """
    others = with_weights_of(built.model, directory)
    return weights_on_device(others, built.spec, built.engine.packed, finite=check_finite)


def load_with_hash(built: Built, directory: Path, *, check_finite: bool) -> LoadedWeights:
    """Returns the weights of a directory with the hash of its files; see `load_other_weights`."""
    weights = load_other_weights(built, directory, check_finite=check_finite)
    return LoadedWeights(weights, model_hash(directory))


class WeightsOfFollower:
    """Loads the weights that rank 0 names, one after the other, and keeps them until it takes them.

    All methods run on the thread that follows rank 0; files are read on another one.
    """

    def __init__(self, built: Built, directory: Path) -> None:
        """Starts without weights.

        Args:
            built: The engine of this host.
            directory: The directory of this host below which the weights are.
        """
        self._built = built
        self._directory = directory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpage-weights")
        self._loaded: dict[int, LoadedWeights] = {}  # by the number of the update
        self._forgotten: set[int] = set()  # updates that may still be loaded here

    def load(self, record: Record, report: Callable[[Record], None]) -> None:
        """Begins to load.

        Args:
            record: What rank 0 says: number, path and `check_finite`.
            report: Called on another thread with a record for `answer`.
        """
        # Rank 0 waits for the answers of an update before it begins with the next one.
        self._forgotten = {number for number in self._forgotten if number >= record["number"]}

        def finish(loading: Future[LoadedWeights]) -> None:
            report({"event": "loaded", "number": record["number"], "loading": loading})

        self._pool.submit(self._load, record).add_done_callback(finish)

    def _load(self, record: Record) -> LoadedWeights:
        directory = directory_inside(
            self._directory, record["path"], setting="weights_directory", param="path"
        )
        try:
            return load_with_hash(self._built, directory, check_finite=record["check_finite"])
        except JaxpageError as error:
            # Clients see the message, and not where the directory is.
            raise CheckpointError(str(error).replace(str(directory), record["path"])) from error

    def answer(self, number: int, loading: Future[LoadedWeights]) -> Record:
        """Keeps what was loaded, and returns the answer for rank 0: a hash, or what is wrong."""
        if (error := loading.exception()) is not None:
            logger.error("other weights cannot be loaded", exc_info=error)
            is_notified = isinstance(error, JaxpageError | ApiError)
            why = str(error) if is_notified else f"{type(error).__name__}: {error}"
            return {"event": "loaded", "why": why}
        loaded = loading.result()
        if number not in self._forgotten:
            self._loaded[number] = loaded
        return {"event": "loaded", "checksum": loaded.checksum}

    def take(self, checksum: str | None) -> Any:
        """Returns the weights that rank 0 has taken, which are kept here no longer.

        Raises:
            Differs: They are not here.
        """
        for number, loaded in self._loaded.items():
            if loaded.checksum == checksum:
                del self._loaded[number]
                return loaded.weights
        raise Differs(f"rank 0 has taken weights that this rank has not loaded (hash {checksum})")

    def forget(self, number: int) -> None:
        """Drops the weights of an update that has ended, also if they are still being loaded."""
        self._loaded.pop(number, None)
        self._forgotten.add(number)
