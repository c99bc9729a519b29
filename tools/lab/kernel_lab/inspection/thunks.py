"""Finds what the host does between the kernels of an executable.

It reads XLA's list of thunks, which XLA runs in order. A command buffer is a CUDA graph: everything
within it runs without the host. A conditional or a loop outside of one makes the host wait for its
condition.
"""

from __future__ import annotations

import re

_THUNK = re.compile(r"^( *)\d+: k(\w+)")
COMMAND_BUFFER = "CommandBuffer"
_CONTROL = ("Conditional", "While")


def on_host(text: str) -> list[str]:
    """Returns the kinds of the conditionals and loops that are in no command buffer, in order.

    Args:
        text: The list that `compile_with_thunks` gives; what a thunk holds is indented below it.
    """
    listed, within = [], None  # the indentation of the command buffer that this line is in
    for match in filter(None, map(_THUNK.match, text.splitlines())):
        indentation, kind = len(match[1]), match[2]
        if within is not None and indentation > within:
            continue
        within = indentation if kind == COMMAND_BUFFER else None
        if kind in _CONTROL:
            listed.append(kind)
    return listed


def num_command_buffers(text: str) -> int:
    """Returns how many command buffers the list has."""
    return sum(
        match[2] == COMMAND_BUFFER for match in filter(None, map(_THUNK.match, text.splitlines()))
    )
