"""Measures where the time of a step goes on the device, with JAX's profiler.

Each operation belongs to the named scope that it was traced in.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

# An operation belongs to the first of these in its path: gathers are a part of attention.
SCOPES = ("matmul", "gather", "attention", "sampling")
OTHER = "other"
# A line of XLA's text is `name = type opcode(operands), metadata`; a type ends with a bracket.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?[\])}] (?P<opcode>[a-z][\w\-]*)\(", re.MULTILINE
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# These contain other operations, whose time is counted there.
_CONTAINERS = frozenset({"call", "conditional", "while"})


def profile(run: Callable[[], None], code: str) -> dict[str, float]:
    """Returns the seconds of the operations of each scope while `run` runs.

    On a CPU operations may run in parallel, so the sum can be more than the time that passed.

    Args:
        run: The function that is profiled.
        code: The text of the executable that it runs.
    """
    scopes = scopes_of(code)
    options = ProfileOptions()
    options.python_tracer_level = 0  # tracing would slow Python's calls down
    with tempfile.TemporaryDirectory(prefix="jaxpage-profile-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        files = sorted(Path(directory).rglob("*.xplane.pb"))
        return seconds_by_scope(ProfileData.from_file(str(files[-1])), scopes)


def seconds_by_scope(profile: ProfileData, scopes: Mapping[str, str]) -> dict[str, float]:
    """Returns the seconds of each scope in a profile.

    Args:
        profile: The profile.
        scopes: The scope of each instruction, by name.
    """
    seconds: Counter[str] = Counter(dict.fromkeys((*SCOPES, OTHER), 0.0))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                # On a GPU an event has the name of its kernel.
                name = event.name if event.name in scopes else str(dict(event.stats).get("hlo_op"))
                if name in scopes:
                    seconds[scopes[name]] += event.duration_ns * 1e-9
    return dict(seconds)


def scopes_of(code: str) -> dict[str, str]:
    """Returns the scope of each instruction in an executable's text, by name.

    Instructions that contain others are left out.
    """
    scopes = {}
    for line in code.splitlines():
        if (instruction := _INSTRUCTION.match(line)) and instruction["opcode"] not in _CONTAINERS:
            path = name[1].split("/") if (name := _OP_NAME.search(line)) else []
            scopes[instruction["name"]] = next((scope for scope in SCOPES if scope in path), OTHER)
    return scopes
