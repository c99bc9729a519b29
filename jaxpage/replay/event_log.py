"""Reads and writes the file of an event log.

It has one JSON object in each line. The first one is a header that says which engine it was. A log
holds the prompts and outputs of every request, as token ids; so only its owner can read it (mode
0600), and it never overwrites a file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NoReturn

from jaxpage.errors import ConfigError, EventLogError
from jaxpage.replay.log_vectors import directory_of_log, weights_of_log, write_sources
from jaxpage.replay.recorder import Record, Recorder
from jaxpage.settings.argument_checks import show
from jaxpage.step.request import SequenceGroup

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 26  # a prompt of several million tokens


class EventLog(Recorder):
    """Writes the events of an engine to a file.

    The operating system has a line before the engine goes on, so that a crash, even SIGKILL, loses
    none. If the file cannot be written any more (a full disk), the log ends with an error message,
    and requests go on.
    """

    def __init__(self, path: str | os.PathLike[str], header: Record) -> None:
        """Makes the file and writes the header.

        Args:
            path: The path of the file.
            header: The first record.

        Raises:
            ConfigError: The file exists, or cannot be made.
        """
        super().__init__(self._write)
        check_new(path)
        self._path = os.fspath(path)
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(
                f"event_log: {self._path} cannot be made: {error.strerror}"
            ) from error
        self._write(header)

    def arrived(self, group: SequenceGroup) -> None:
        """Writes what vectors a prompt has to files of their own, and then the record."""
        embedded = group.request.embedded
        if embedded is not None and self._file is not None:
            try:
                write_sources(directory_of_log(self._path), embedded)
            except OSError as error:
                self._end(error)
        super().arrived(group)

    def closed(self) -> None:
        """Writes the last record and closes the file."""
        super().closed()
        self._close()

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        line = encode_record(record)
        try:
            while line:
                # The system may take a part of the line only.
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.error(
            "the event log %s ends here, and requests go on without it: %s", self._path, error
        )
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def encode_record(record: Record) -> bytes:
    """Returns a record as a line of the file."""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def is_after(record: Record, until: int | None) -> bool:
    """Returns whether this record begins the step after `until`; never if `until` is None."""
    return until is not None and record["event"] == "plan" and record.get("step", 0) > until


def write_log(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Writes a whole log at once.

    Raises:
        OSError: The file exists, or cannot be written.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.writelines(map(encode_record, records))


def check_new(path: str | os.PathLike[str]) -> None:
    """Checks that a log can be begun there, before weights are loaded.

    Raises:
        ConfigError: The file exists, or its directory cannot be written to.
    """
    directories = (directory_of_log(path), weights_of_log(path))
    if os.path.lexists(path) or any(directory.exists() for directory in directories):
        raise ConfigError(
            f"event_log: {os.fspath(path)} exists, and a log never overwrites a file; name "
            "another, or remove it"
        )
    directory = Path(path).absolute().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"event_log: {directory} is not a directory that can be written to")


class LogReader(AbstractContextManager["LogReader"]):
    """Reads the records of a log, one after the other; the first `take` reads the header.

    A last line that is cut off, as a full disk or a killed process leaves it, ends the log.

    Attributes:
        next: The current record; None at the end of the log.
        line: Its line number.
        torn: True if the last line is cut off.
        path: The path of the log.

    Raises:
        EventLogError: The file cannot be read, or a line is no record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.next: Record | None = None
        self.line = 0
        self.torn = False
        self.path = os.fspath(path)
        try:
            self._file = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise EventLogError(f"{self.path}: {error.strerror}") from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self) -> None:
        """Goes on to the next record."""
        # One byte more tells that a line is too long, without reading all of it.
        line = self._file.readline(MAX_LINE_BYTES + 1)
        self.next = None
        if not line:
            return
        self.line += 1
        if len(line) > MAX_LINE_BYTES:
            self.refuse(f"a line has more than {MAX_LINE_BYTES:,} bytes")
        try:
            record = json.loads(line, parse_constant=_no_number)
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                raise ValueError(f"got {show(record)}")
            self.next = record
        except (ValueError, RecursionError) as error:
            if line.endswith(b"\n"):
                self.refuse(f"not a record of an event log: {error}")
            self.torn = True

    def refuse(self, reason: str) -> NoReturn:
        """Raises EventLogError with the line number of the current record."""
        raise EventLogError(f"{self.path}, line {self.line}: {reason}")


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
