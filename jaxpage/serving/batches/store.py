"""Keeps the files and the batches of clients below one directory, within bounds.

Each file has its content and a record, each batch a record and, while it runs, its answers so far:

    file-6c1f.jsonl   file-6c1f.json      uploaded, or made of answers
    batch_9a02.json   batch_9a02.answers  runs; a server that starts again goes on with it

A record is written to another name first and then renamed, so that a kill leaves the old one or the
new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpage.errors import ConfigError
from jaxpage.private_files import lock_directory, open_private
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

MAX_FILES = 1000
MAX_BATCHES = 1000
OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # the states of batches that run
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}(-output|-errors)?")

Record = dict[str, Any]  # OpenAI's object


class Store:
    """Holds the records of one directory, which one server uses at a time.

    `write`, `write_file` and `delete_files` wait for the disk, so they belong on worker threads;
    the other methods are quick. A new record is there before it is written, and a removed one is
    gone before its files are, so that nothing changes between a check and the act that follows it.
    Clients see what their own API key has made, and nothing else.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Opens the directory, which is made if it does not exist, and reads its records.

        Other users lose their rights to the directory and its files, which are users' texts.

        Args:
            directory: The directory.
            max_bytes: The most bytes of all contents together.

        Raises:
            ConfigError: The directory cannot be used, or another server uses it.
        """
        self._directory = directory
        self.max_bytes = max_bytes
        self._records: dict[str, Record] = {}
        self._owners: dict[str, str] = {}
        self._changing = threading.Lock()  # guards both; nobody waits for the disk with it
        self._writing = threading.Lock()
        self._reserved: list[int] = []  # the bytes of files that are being written
        self._lock = lock_directory(directory, "batch_directory")
        try:
            for path in sorted(directory.glob("*.json")):
                self._load(path)
            for path in directory.iterdir():
                # Other users could read what earlier versions have written.
                if _ID.fullmatch(path.stem) and path.stat().st_mode & 0o077:
                    path.chmod(0o600)
        except OSError as error:
            raise ConfigError(
                f"batch_directory: cannot use {directory}: {error.strerror}"
            ) from None

    def _load(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_bytes())
            record = stored["record"]
            if record["id"] != path.stem or not _ID.fullmatch(path.stem):
                raise ValueError
            self._owners[record["id"]] = stored["owner"]
            self._records[record["id"]] = record
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"batch_directory: {path} is not a record: remove it, or name another directory"
            ) from None

    def close(self) -> None:
        """Lets another server use the directory."""
        self._lock.close()

    def content(self, record_id: str) -> Path:
        """Returns the path of a file's content."""
        return self._directory / f"{record_id}.jsonl"

    def answers(self, batch_id: str) -> Path:
        """Returns the path of the answers of a batch that runs."""
        return self._directory / f"{batch_id}.answers"

    def owner(self, record_id: str) -> str:
        """Returns who made a file or a batch."""
        return self._owners[record_id]

    def every(self, kind: str) -> list[Record]:
        """Returns the records of a kind, "file" or "batch", of all owners, the oldest first."""
        with self._changing:
            records = list(self._records.values())
        of_kind = [record for record in records if record["object"] == kind]
        return sorted(of_kind, key=lambda record: (record["created_at"], record["id"]))

    def of_owner(self, kind: str, owner: str) -> list[Record]:
        """Returns an owner's records of a kind, the oldest first."""
        return [record for record in self.every(kind) if self._owners.get(record["id"]) == owner]

    def find(self, kind: str, record_id: str, owner: str) -> Record:
        """Returns a record.

        Raises:
            ApiError: The owner has none with this id.
        """
        record = self._records.get(record_id)
        if record is None or record["object"] != kind or self._owners.get(record_id) != owner:
            raise ApiError(
                404, f"There is no {kind} {show(record_id)}", param=f"{kind}_id", code="not_found"
            )
        return record

    def put(self, record: Record, owner: str) -> None:
        """Adds a record; `write` keeps it."""
        with self._changing:
            self._records[record["id"]] = record
            self._owners[record["id"]] = owner

    def write(self, record: Record) -> None:
        """Writes a record as it is now, unless it was removed."""
        record_id = record["id"]
        path = self._directory / f"{record_id}.json"
        other = path.with_suffix(".new")
        with self._writing:
            with self._changing:
                if record_id not in self._records:
                    return
                owner = self._owners[record_id]
            _write(other, json.dumps({"owner": owner, "record": record}).encode())
            other.replace(path)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all contents, those of batches that run included."""
        files: int = sum(record["bytes"] for record in self.every("file"))
        return files + sum(path.stat().st_size for path in self._directory.glob("*.answers"))

    @contextlib.contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Keeps room for another file while it is written.

        Raises:
            ApiError: There is no room for so many bytes.
        """
        count = len(self.every("file")) + len(self._reserved)
        if count >= MAX_FILES:
            raise ApiError(
                400, f"{count} files are stored, which is the most; delete one", code="storage_full"
            )
        num_stored = self.num_bytes + sum(self._reserved)
        if num_stored + num_bytes > self.max_bytes:
            raise ApiError(
                400,
                f"The files have {num_stored} bytes, and {num_bytes} more are over the "
                f"{self.max_bytes} that are stored; delete some",
                code="storage_full",
            )
        self._reserved.append(num_bytes)
        try:
            yield
        finally:
            self._reserved.remove(num_bytes)

    def write_file(
        self, filename: str, purpose: str, owner: str, file_id: str, content: bytes
    ) -> Record:
        """Stores a file with its record, which it returns; for the arguments see `add_file`."""
        path = self.content(file_id)
        try:
            _write(path, content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return self.add_file(filename, purpose, owner, file_id)

    def add_file(self, filename: str, purpose: str, owner: str, file_id: str) -> Record:
        """Stores the record of a file whose content is written, and returns it.

        Args:
            filename: The name that the client gave to it, which is no path here.
            purpose: OpenAI's word for its purpose.
            owner: The one who may read it.
            file_id: Its id.
        """
        record = {
            "id": file_id,
            "object": "file",
            "bytes": self.content(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self.put(record, owner)
        self.write(record)
        return record

    def forget(self, record: Record) -> None:
        """Removes the record of a file or a batch; `delete_files` removes what is on the disk."""
        with self._changing:
            self._records.pop(record["id"], None)
            self._owners.pop(record["id"], None)

    def delete_files(self, record: Record) -> None:
        """Deletes the files of a record that is forgotten."""
        # A write that has begun would else bring the file of the record back.
        with self._writing:
            (self._directory / f"{record['id']}.json").unlink(missing_ok=True)
            self.content(record["id"]).unlink(missing_ok=True)

    def forget_ended_batch(self) -> Record | None:
        """Makes room for another batch, where there are as many as are kept.

        Returns:
            The batch that is forgotten, whose files are still there; None if there was room.

        Raises:
            ApiError: None of them has ended.
        """
        batches = self.every("batch")
        if len(batches) < MAX_BATCHES:
            return None
        ended = [record for record in batches if record["status"] not in OPEN]
        if not ended:
            raise ApiError(400, f"{MAX_BATCHES} batches have not ended, which is the most")
        self.forget(ended[0])
        return ended[0]


def _write(path: Path, content: bytes) -> None:
    with open_private(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
