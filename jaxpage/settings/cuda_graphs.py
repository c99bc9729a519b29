"""Holds the settings that say how XLA makes CUDA graphs of steps."""

from __future__ import annotations

from typing import NamedTuple


class GraphSettings(NamedTuple):
    """Holds the settings of an engine's CUDA graphs.

    Attributes:
        update_mode: XLA's update mode in lower case; "auto" is XLA's default.
        collectives: Says whether communication between devices is part of a graph.
    """

    update_mode: str = "auto"
    collectives: bool = False


USUAL_GRAPHS = GraphSettings()
