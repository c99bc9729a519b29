"""Starts llama.cpp's server for one measurement, and sends it prompts in parallel."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import IO, Any

HOST = "127.0.0.1"
START_SECONDS = 300.0  # a large model is read from a disk
LOG_LINES = 8  # what an error shows of the server's log


@dataclass(frozen=True)
class Run:
    """Holds the answers to groups of prompts, each of which was sent together.

    Attributes:
        seconds: The time from the first request to the last answer of each group, in all.
        outputs: The token ids of each answer.
        num_accepted: The drafts that were accepted, in all answers.
    """

    seconds: float
    outputs: list[list[int]]
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """Returns the tokens per second of all answers."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Returns the tokens of a sequence per step, after its first token."""
        num_tokens = sum(len(output) - 1 for output in self.outputs)
        return num_tokens / (num_tokens - self.num_accepted)


def ngram_types(program: str) -> list[str]:
    """Returns the types of speculation by n-grams that a server has, by its own help.

    Raises:
        SystemExit: The program cannot be run, or has no such types.
    """
    try:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    except OSError as error:
        raise SystemExit(f"--server {program}: it cannot be run: {error.strerror}") from None
    match = re.search(r"--spec-type\s+(\S+)", shown)
    if not (types := re.findall(r"ngram-[a-z0-9-]+", match[1] if match else "")):
        raise SystemExit(f"--server {program}: its --help names no --spec-type with n-grams")
    return types


def version_of(program: str) -> str:
    """Returns the version of a server, by its own words."""
    shown = subprocess.run([program, "--version"], capture_output=True, text=True)
    match = re.search(r"version: (.+)", shown.stdout + shown.stderr)
    return match[1] if match else "of unknown version"


@contextmanager
def run_server(program: str, port: int, flags: Sequence[str]) -> Iterator[None]:
    """Runs a server as long as the block lasts, however it ends.

    The server and what it started are in a process group of their own, and are killed: they have
    nothing to write. A Ctrl-C reaches this process alone.

    Raises:
        SystemExit: The port is taken, or the server ended or gave no answer.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SystemExit(f"--port {port}: {error.strerror}; give another port") from None
    command = [program, "--host", HOST, "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, port)
            yield
        except (OSError, HTTPException) as error:
            raise SystemExit(f"{program}: {error}\n{_last_lines(log)}") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    """Waits until the server has loaded the model."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if (status := process.poll()) is not None:
            raise OSError(f"the server ended with status {status}")
        with suppress(ConnectionError):
            if _answer(port, "GET", "/health")[0] == 200:
                return
        time.sleep(0.02)
    raise OSError(f"the server was not ready after {START_SECONDS:.0f} seconds")


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_LINES:])


def complete(
    pool: ThreadPoolExecutor,
    port: int,
    groups: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
) -> Run:
    """Sends the prompts of a group all at once, each for the same number of most likely tokens.

    A group begins when the one before it has been answered.

    The pool has to outlive the server: its threads wait for answers, which come or fail when the
    server ends.

    Raises:
        OSError: The server refused a request, ended, or gave fewer tokens.
    """
    start = time.perf_counter()
    answers = [
        answer
        for prompts in groups
        for answer in list(pool.map(partial(_completion, port, num_tokens), prompts))
    ]
    seconds = time.perf_counter() - start
    accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
    return Run(seconds, [answer["tokens"] for answer in answers], accepted)


def _completion(port: int, num_tokens: int, prompt: Sequence[int]) -> dict[str, Any]:
    requested = {
        "prompt": list(prompt),
        "n_predict": num_tokens,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    status, body = _answer(port, "POST", "/completion", json.dumps(requested))
    if status != 200:
        raise OSError(f"the server refused a request with status {status}: {body[:500]!r}")
    answer: dict[str, Any] = json.loads(body)
    # The server may add some tokens that complete the last character.
    if len(answer["tokens"]) < num_tokens:
        raise OSError(f"the server gave {len(answer['tokens'])} tokens instead of {num_tokens}")
    return answer


def _answer(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(HOST, port)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
