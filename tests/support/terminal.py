"""A program in a pseudo-terminal: what it writes there is waited for, and keys are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WAIT_SECONDS = 120.0  # for what is bound to come: far beyond what it takes
READY = "\x1b[?2004h"  # the line editor asks for bracketed paste: it reads keys from now on
ENTER, CTRL_C, CTRL_D, ALT_ENTER, UP = "\r", "\x03", "\x04", "\x1b\r", "\x1b[A"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x08|\r")


class Terminal:
    """The terminal of one running program."""

    def __init__(self, program: subprocess.Popen[bytes], descriptor: int) -> None:
        self._program = program
        self.written = ""  # all that it wrote
        self._descriptor = descriptor
        self._read = b""
        self._at = 0  # up to where it was waited for

    def expect(self, text: str) -> str:
        """Waits until `text` comes behind what was waited for before. Returns what came, up to it,
        without control sequences.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while (start := self.written.find(text, self._at)) < 0:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._descriptor], [], [], left)[0], (
                f"no {text!r} in {self.written[self._at :]!r}"
            )
            assert self._more(), f"it ended without {text!r}: {self.written[self._at :]!r}"
        came, self._at = self.written[self._at : start], start + len(text)
        return _CONTROL.sub("", came)

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def paste(self, text: str) -> None:
        """Pastes as a terminal does that was asked for bracketed paste."""
        self.press(f"\x1b[200~{text}\x1b[201~")

    def end(self) -> int:
        """Waits for the program's end; its exit status."""
        while self._more():
            pass
        return self._program.wait(WAIT_SECONDS)

    def _more(self) -> bool:
        try:
            part = os.read(self._descriptor, 65536)
        except OSError:  # nobody has the other end
            return False
        self._read += part
        self.written = self._read.decode(errors="ignore")
        return bool(part)


# Makes the terminal that is its standard input the one whose Ctrl-C it hears. Not by a fork of this
# process, where jax may run.
_INSIDE = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], "
    "sys.argv[1:])"
)


@contextmanager
def terminal(command: Sequence[str], **environment: str) -> Iterator[Terminal]:
    """Runs a program in a terminal of 100 columns."""
    descriptor, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    program = subprocess.Popen(
        [sys.executable, "-c", _INSIDE, *command],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(inside)
    try:
        yield Terminal(program, descriptor)
    finally:
        program.kill()
        program.wait()
        os.close(descriptor)
