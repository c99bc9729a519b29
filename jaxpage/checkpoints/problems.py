"""Lists everything that is wrong with a checkpoint, so that one error says all of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpage.errors import CheckpointError, UnsupportedError

# A hostile index can name millions of tensors; more lines than this help no reader.
MAX_LINES = 100
MAX_LINE = 2000  # characters


class Problems:
    """Collects what is wrong with the checkpoint in a directory or file.

    Attributes:
        directory: The directory or file.
        subject: The thing that it holds, for the error.
        lines: The problems.
    """

    def __init__(self, directory: Path, subject: str = "checkpoint") -> None:
        self.directory = directory
        self.subject = subject
        self.lines: list[str] = []
        # A family reads a config that is made of a GGUF file's metadata.
        self._config = "its metadata, as config.json" if directory.is_file() else "config.json"

    def __bool__(self) -> bool:
        return bool(self.lines)

    def add(self, line: str) -> None:
        """Adds a problem."""
        self.lines.append(line.replace("config.json", self._config)[:MAX_LINE])

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Turns each CheckpointError and UnsupportedError of the body into a line of this list."""
        try:
            yield
        except* (CheckpointError, UnsupportedError) as group:
            for error in group.exceptions:
                self.add(str(error))

    def raise_if_any(self) -> None:
        """Raises CheckpointError with every line, if there is one."""
        if not self.lines:
            return
        shown = [f"  - {line}" for line in self.lines[:MAX_LINES]]
        if len(self.lines) > MAX_LINES:
            shown.append(f"  - and {len(self.lines) - MAX_LINES} more")
        count = f"{len(self.lines)} problem{'s' if len(self.lines) > 1 else ''}"
        raise CheckpointError(
            f"the {self.subject} in {self.directory} does not fit ({count}):\n" + "\n".join(shown)
        )


def list_names(names: Collection[object], maximum: int = 5) -> str:
    """Returns the first of `names`, made safe to print, and how many more there are."""
    shown = ", ".join(quote(name) for name in itertools.islice(names, maximum))
    return shown if len(names) <= maximum else f"{shown} and {len(names) - maximum} more"


def quote(name: object, limit: int = 200) -> str:
    """Returns a name from a file made safe to print: in ASCII, and at most `limit` characters."""
    text = ascii(name)
    return text if len(text) <= limit else f"{text[:limit]}..."
