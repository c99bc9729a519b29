"""Defines the hooks of a start: its listeners, and parts that replace the engine's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpage.assembly.planning.engine_spec import EngineSpec
from jaxpage.device.inputs import Bucket, BucketMenu
from jaxpage.engine import EngineParts

PHASES = (
    "finding the model",
    "loading the kernels",
    "planning the memory",
    "loading the weights",
    "compiling the steps",
)


@dataclass(frozen=True)
class Hooks:
    """Holds the hooks of one start; the defaults show nothing and change nothing.

    Attributes:
        progress: True shows bars on standard error.
        verbose: True prints the table of the memory, and how many executables were in the compile
            cache; None is the same as `progress`.
        phase: Is called with each of `PHASES` when it begins.
        revise_sizes: Is called with the specification before anything is loaded, and returns
            settings with which the engine is planned again.
        first: Chooses the shapes of steps that are compiled in the background, in this order, while
            the others are compiled when a step asks for them. None compiles all before the engine
            is ready.
        before_steps: Is called with the specification before any step runs; the first steps are
            those that are measured for speculation.
        parts: Parts that replace the engine's own, for instance in a replay.
    """

    progress: bool = False
    verbose: bool | None = None
    phase: Callable[[str], None] = lambda name: None
    revise_sizes: Callable[[EngineSpec], Mapping[str, int]] | None = None
    first: Callable[[BucketMenu], Sequence[Bucket]] | None = None
    before_steps: Callable[[EngineSpec], None] | None = None
    parts: EngineParts = field(default_factory=EngineParts)

    def show(self, lines: Iterable[str]) -> None:
        """Prints lines of a table on standard error, as the progress bars are, unless it is off."""
        if self.progress if self.verbose is None else self.verbose:
            for line in lines:
                print(f"  {line}", file=sys.stderr)
