"""Keeps the answers of a batch in a file, so that a run that was killed can be continued.

Each answer is appended as a whole line when it is there. After a kill only the last line can be cut
off, and the next run takes it away:

    {"id": "batch_req_2_...", ...}     line 2 of the input is answered
    {"id": "batch_req_1_...", ...}     line 1 is answered
    {"id": "batch_re                   was being written: line 3 is asked again
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxpage.errors import ConfigError
from jaxpage.private_files import open_private

_ID = re.compile(r"batch_req_([0-9]+)_[0-9a-f]{12}")
LARGE_LINE_BYTES = 1 << 16
_USAGE = b'"usage":'
_USAGE_BYTES = 4096  # more than a usage has


@dataclass
class Counts:
    """Counts the answers of a batch and their tokens.

    Attributes:
        lines: The lines that were answered, with or without an error.
        errors: The lines that were answered with an error.
        prompt_tokens: The tokens of their prompts.
        cached_tokens: Those of them that were in the prefix cache.
        completion_tokens: The tokens that were generated.
        reasoning_tokens: Those of them that are reasoning.
    """

    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Adds a line of the output."""
        self.lines += 1
        response = answer.get("response")
        if response is None or response["status_code"] != 200:
            self.errors += 1
            return
        # /v1/responses has other names for these numbers than the other paths.
        usage = response["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.completion_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.cached_tokens += details.get("cached_tokens", 0)
        details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.reasoning_tokens += details.get("reasoning_tokens", 0)


class OutputFile:
    """The output of a batch, which one process writes at a time; use it as a context manager.

    Attributes:
        done: The names of the lines that were answered before, by their ids.
        before: Counts these lines.
        counts: Counts them and those that were answered since.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and reads the answers that it has.

        Raises:
            ConfigError: The file cannot be written, another process writes it, or a line of it is
                no answer.
        """
        self.path = path
        try:
            # Nothing may be cut before the lock says that no other process writes the file.
            self._file = open_private(path, "a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self.done: dict[str, str | None] = {}
        self.before = Counts()
        self.counts = Counts()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another process") from None
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            # A kill has cut the last answer, which is removed; its line will be answered again.
            if not line.endswith(b"\n"):
                break
            try:
                answer = outline(line)
                if not _ID.fullmatch(answer["id"]) or answer["id"] in self.done:
                    raise ValueError
                self.done[answer["id"]] = answer["custom_id"]
                self.before.add(answer)
                self.counts.add(answer)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self.path}, line {number} is not an answer of a batch: give another file"
                ) from None
            end += len(line)
        self._file.truncate(end)

    def append(self, line: bytes) -> None:
        """Appends an answer; once this returns, no kill of the process loses it."""
        self._file.write(line)
        self._file.flush()
        answer = outline(line)
        self.done[answer["id"]] = answer["custom_id"]
        self.counts.add(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def outline(line: bytes) -> dict[str, Any]:
    """Returns a line of the output as an object.

    Reading a large answer would keep all other threads waiting, so its body has nothing but the
    usage then.

    Raises:
        ValueError: The line is no JSON, or a large line was not written by `write_answer`.
    """
    if len(line) <= LARGE_LINE_BYTES:
        answer: dict[str, Any] = json.loads(line)
        return answer
    # Quotes within texts are escaped, so these bytes are keys.
    head, key, _ = line[:LARGE_LINE_BYTES].partition(b',"body":')
    if not key:
        raise ValueError("a line of the output has no body")
    answer = json.loads(head + b'},"error":null}')
    start = line.rfind(_USAGE + b"{")
    usage: dict[str, Any] = {}
    if start >= 0:
        text = line[start + len(_USAGE) :][:_USAGE_BYTES].decode(errors="replace")
        usage, _ = json.JSONDecoder().raw_decode(text)
    answer["response"]["body"] = {"usage": usage}
    return answer


def number_of(answer_id: str) -> int:
    """Returns the number of the line that an answer belongs to."""
    match = _ID.fullmatch(answer_id)
    assert match is not None
    return int(match[1])
