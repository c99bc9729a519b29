"""The hooks of a start: what listens to it, and what takes part in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxpage.engine.engine import EngineParts

if TYPE_CHECKING:
    from jaxpage.assembly.engine_spec import EngineSpec

PHASES = (
    "finding the model",
    "loading the kernels",
    "planning the memory",
    "loading the weights",
    "compiling the steps",
)


@dataclass(frozen=True)
class Hooks:
    """The hooks of one start. Those that are left out show nothing and change nothing.

    Attributes:
        progress: Whether bars are shown on standard error.
        verbose: Whether the table of the memory is printed, and what was in the compile cache;
            None: as `progress`.
        phase: Is called with each of `PHASES` when it begins.
        planned: Is called with the specification before anything is loaded, and returns settings
            with which the engine is planned again.
        before_steps: Is called with the specification before any step runs; some are measured.
        parts: Parts that replace the engine's own, as a replay has them.
    """

    progress: bool = False
    verbose: bool | None = None
    phase: Callable[[str], None] = lambda name: None
    planned: Callable[[EngineSpec], Mapping[str, int]] | None = None
    before_steps: Callable[[EngineSpec], None] | None = None
    parts: EngineParts = field(default_factory=EngineParts)

    @property
    def prints(self) -> bool:
        """Returns whether tables are printed."""
        return self.progress if self.verbose is None else self.verbose
