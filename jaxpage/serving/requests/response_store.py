"""Keeps the responses of a server for a while, so that later requests go on from them.

They are in memory, within a bound of bytes, and with a directory also in files, so that a server
that starts again has them:

    resp_6c1f...json    {"owner": ..., "stored_at": ..., "conversation": [...], "response": {...}}

Each response has its whole conversation, so that it is of use whatever becomes of those before it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxpage.errors import ConfigError
from jaxpage.private_files import lock_directory, open_private

logger = logging.getLogger(__name__)
_ID = re.compile(r"resp_[0-9a-f]{32}")
_MAX_FAULTS = 1  # the most lines of the log about files that cannot be written


class StoredResponse(NamedTuple):
    """Holds a response that has ended.

    Attributes:
        conversation: The items that it answers, as a JSON list.
        response: The response, as a JSON object.
    """

    conversation: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that count towards the bound."""
        return len(self.conversation) + len(self.response)


class OwnerResponses(Protocol):
    """Gives access to the responses that one API key has made."""

    @property
    def keeps(self) -> bool:
        """Returns whether responses are kept at all."""
        ...

    def has_room(self, conversation: bytes) -> bool:
        """Returns whether a response with this conversation may be kept."""
        ...

    def find(self, response_id: str) -> StoredResponse | None:
        """Returns a response; None if this key has none with the id."""
        ...

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, unless it has more bytes than all may have."""
        ...

    def delete(self, response_id: str) -> bool:
        """Deletes a response; returns False if this key has none with the id."""
        ...


class _NoResponses:
    """Keeps nothing."""

    keeps = False

    def has_room(self, conversation: bytes) -> bool:
        return False

    def find(self, response_id: str) -> StoredResponse | None:
        return None

    def put(self, response_id: str, stored: StoredResponse) -> None:
        pass

    def delete(self, response_id: str) -> bool:
        return False


KEEPS_NOTHING: OwnerResponses = _NoResponses()


class _KeptResponse(NamedTuple):
    """Holds a response with its owner, and when it was stored in seconds since 1970."""

    owner: str
    stored_at: float
    stored: StoredResponse


class ResponseStore:
    """Keeps responses of all owners within bounds.

    A response goes when its time is over, when it is deleted, or when others need its room: the one
    that was not used for the longest time goes first. All methods may be called on any thread, and
    none waits for the disk but `close`.
    """

    def __init__(
        self,
        max_bytes: int,
        seconds: float,
        directory: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the store, and reads the files of its directory.

        Args:
            max_bytes: The most bytes of all responses together; 0 to keep none.
            seconds: The time for which a response is kept after it was stored.
            directory: The directory of the files, or None for none.
            clock: Returns the time in seconds since 1970.

        Raises:
            ConfigError: The directory cannot be used, or another server uses it.
        """
        self.max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._changing = threading.Lock()
        # In the order in which they were stored, and in which they were last used.
        self._entries: OrderedDict[str, _KeptResponse] = OrderedDict()
        self._used: OrderedDict[str, None] = OrderedDict()
        self._num_bytes = 0
        self._files = (
            _Files(directory, self._look_up) if directory is not None and max_bytes else None
        )
        if self._files is not None:
            for response_id, entry in self._files.load():
                self._add(response_id, entry)
            self._expire()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all responses."""
        return self._num_bytes

    def of_owner(self, owner: str) -> OwnerResponses:
        """Returns access to the responses of an owner."""
        return _OfOwner(self, owner) if self.max_bytes else KEEPS_NOTHING

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Returns a response, which counts as used now; None if the owner has none with the id."""
        with self._changing:
            self._expire()
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner or self._is_over(entry):
                # If the clock was set back, one may be over that is not the first.
                return None
            self._used.move_to_end(response_id)
            return entry.stored

    def put(self, response_id: str, owner: str, stored: StoredResponse) -> None:
        """Keeps a response, unless it has more bytes than all may have."""
        with self._changing:
            self._expire()
            self._add(response_id, _KeptResponse(owner, self._clock(), stored))
            if self._files is not None and response_id in self._entries:
                self._files.update(response_id)

    def delete(self, response_id: str, owner: str) -> bool:
        """Deletes a response; returns False if the owner has none with the id."""
        with self._changing:
            self._expire()
            entry = self._entries.get(response_id)
            if entry is None or entry.owner != owner or self._is_over(entry):
                return False
            self._remove(response_id)
            return True

    def close(self) -> None:
        """Writes what is not written yet, and lets another server use the directory."""
        if self._files is not None:
            self._files.close()

    def _add(self, response_id: str, entry: _KeptResponse) -> None:
        num_bytes = entry.stored.num_bytes
        if num_bytes > self.max_bytes:
            return
        while self._num_bytes + num_bytes > self.max_bytes:
            self._remove(next(iter(self._used)))
        self._entries[response_id] = entry
        self._used[response_id] = None
        self._num_bytes += num_bytes

    def _remove(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        del self._used[response_id]
        self._num_bytes -= entry.stored.num_bytes
        if self._files is not None:
            self._files.update(response_id)

    def _expire(self) -> None:
        while self._entries and self._is_over(next(iter(self._entries.values()))):
            self._remove(next(iter(self._entries)))

    def _is_over(self, entry: _KeptResponse) -> bool:
        # All are kept for the same time, so the first that was stored is over first.
        return self._clock() - entry.stored_at >= self._seconds

    def _look_up(self, response_id: str) -> _KeptResponse | None:
        return self._entries.get(response_id)


class _OfOwner:
    """Gives access to the responses of one owner; see `OwnerResponses`."""

    keeps = True

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def has_room(self, conversation: bytes) -> bool:
        return len(conversation) < self._store.max_bytes

    def find(self, response_id: str) -> StoredResponse | None:
        return self._store.find(response_id, self._owner)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self._store.put(response_id, self._owner, stored)

    def delete(self, response_id: str) -> bool:
        return self._store.delete(response_id, self._owner)


class _Files:
    """Keeps a directory as the store is, on a thread of its own.

    A file is written under another name and then renamed, so that a kill leaves all of it or
    nothing. What happens to a response before its file is written is written at once.
    """

    def __init__(self, directory: Path, look_up: Callable[[str], _KeptResponse | None]) -> None:
        self._directory = directory
        self._look_up = look_up
        self._num_faults = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxpage-responses")
        self._lock = lock_directory(directory, "response_store_directory")

    def load(self) -> Iterator[tuple[str, _KeptResponse]]:
        """Yields the responses of the directory, the oldest first.

        A file that was cut, as by a full disk, is removed. Files under other names stay.

        Raises:
            ConfigError: The files cannot be read.
        """
        try:
            paths = [path for path in self._directory.iterdir() if _ID.fullmatch(path.stem)]
            for path in paths:
                if path.suffix == ".new":
                    path.unlink()
            read = [(path, _read(path)) for path in paths if path.suffix == ".json"]
            for path, entry in read:
                if entry is None:
                    logger.warning("%s is no response that a server has kept, and is removed", path)
                    path.unlink()
        except OSError as error:
            raise ConfigError(
                f"response_store_directory: cannot read {self._directory}: {error.strerror}"
            ) from None
        whole = [(path.stem, entry) for path, entry in read if entry is not None]
        yield from sorted(whole, key=lambda pair: pair[1].stored_at)

    def update(self, response_id: str) -> None:
        """Has the file of a response written, or removed if the response is gone."""
        self._thread.submit(self._update, response_id)

    def close(self) -> None:
        """Waits until the directory is as the store is, and gives it free."""
        self._thread.shutdown()
        self._lock.close()

    def _update(self, response_id: str) -> None:
        path = self._directory / f"{response_id}.json"
        entry = self._look_up(response_id)
        try:
            if entry is None:
                path.unlink(missing_ok=True)
                return
            other = path.with_suffix(".new")
            with open_private(other, "wb") as file:
                file.writelines(_write(entry))
            other.replace(path)
        except OSError as error:
            self._num_faults += 1
            if self._num_faults <= _MAX_FAULTS:
                logger.error("a response cannot be written to %s: %s", path, error.strerror)


def _write(entry: _KeptResponse) -> Iterator[bytes]:
    begin = json.dumps({"owner": entry.owner, "stored_at": entry.stored_at}).encode()
    yield begin.removesuffix(b"}")
    yield b', "conversation": '
    yield entry.stored.conversation
    yield b', "response": '
    yield entry.stored.response
    yield b"}"


def _read(path: Path) -> _KeptResponse | None:
    """Returns what a file has, or None if it is not such a file."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(path.read_bytes())
        parts = (record["conversation"], record["response"])
        conversation, response = (
            json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode() for part in parts
        )
        stored = StoredResponse(conversation, response)
        return _KeptResponse(str(record["owner"]), float(record["stored_at"]), stored)
    return None
