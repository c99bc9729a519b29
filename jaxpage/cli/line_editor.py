"""Reads texts from a terminal, with a history, several lines, and pastes that stay one text.

The line editor is that of prompt_toolkit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from jaxpage.cli.conversation import is_open
from jaxpage.cli.resolving import say


class LineEditor:
    """Reads texts from the terminal until Ctrl-D.

    If standard error is a terminal, the editor writes there, and standard output is for the answers
    alone. Use it in a `with` block: at its end unread input is thrown away, so that it does not
    become commands of the shell.
    """

    is_terminal = True

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bindings(),
            history=open_history(),
            output=_output(),
        )

    def read(self) -> str | None:
        """Returns the next text; None after Ctrl-D."""
        while True:
            try:
                text = self._session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    say("Ctrl-D or /exit ends the conversation")
                continue
            if text.strip():
                # Bytes that are no UTF-8 come as surrogates, which no tokenizer takes.
                return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(termios.error, OSError, ValueError):
            # Standard input may be no terminal, or be closed already.
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def _bindings() -> KeyBindings:
    """Returns the key bindings: Enter sends a complete text, and Alt-Enter begins a line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            # A text in triple quotes goes on until they are closed.
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _output() -> Output:
    output = create_output(stdout=sys.stderr if sys.stderr.isatty() else sys.stdout)
    if isinstance(output, Vt100_Output):
        # A slow terminal would answer a cursor position request after the end of this program, and
        # type the answer into the next one.
        output.enable_cpr = False
    return output


def open_history() -> History:
    """Opens the history of questions, in a file that its user alone can read.

    If there can be no file, the history has the questions of this conversation only.
    """
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "jaxpage" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
            # The mode of `os.open` counts for a new file alone; this one may be older.
            os.fchmod(file.fileno(), 0o600)
        return _PrivateHistory(str(path))
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return InMemoryHistory()


class _PrivateHistory(FileHistory):
    """A history whose file may become unreadable or unwritable at any time."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            super().store_string(string)
