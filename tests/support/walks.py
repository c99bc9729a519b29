"""Counts how a call walks through the modules of jaxpage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jaxpage

PACKAGE = str(Path(jaxpage.__file__).parent) + "/"


class Stay(NamedTuple):
    """A function that a function of another module called; `caller` is empty for the first."""

    caller: str
    module: str
    function: str


def walk(call: Callable[[], object]) -> list[Stay]:
    """Returns the stays of a call: the functions that it enters from another module.

    Coming back counts for nothing, and neither does what other packages do.
    """
    stays: list[Stay] = []
    modules = [""]

    def follow(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return
        if event == "return":
            modules.pop()
        elif event == "call":
            module = path.removeprefix(PACKAGE)
            if modules[-1] != module:
                stays.append(Stay(modules[-1], module, frame.f_code.co_qualname))
            modules.append(module)

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def within(stays: list[Stay], room: str) -> list[Stay]:
    """Returns the stays that begin and end in a room, such as "serving/wire/"."""
    return [
        stay
        for stay in stays
        if stay.module.startswith(room) and (not stay.caller or stay.caller.startswith(room))
    ]
