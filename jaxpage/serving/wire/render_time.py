"""A bound on the time of chat templates: they are programs that came with a model, and a program may go round for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_TEMPLATE = "<template>"  # what jinja2 calls the file of a template that has none


@contextmanager
def templates_end_within(seconds: float) -> Iterator[None]:
    """Templates that this thread renders meanwhile raise TimeoutError at the first of their lines behind this time.

    Only lines of templates are watched, so that it costs nothing to speak of. How long one line takes is not bounded.
    """
    deadline = time.monotonic() + seconds

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took longer than {seconds:g} s")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
