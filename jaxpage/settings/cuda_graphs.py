"""How XLA makes CUDA graphs of steps: what the settings of an engine say of it."""

from __future__ import annotations

from typing import NamedTuple


class GraphSettings(NamedTuple):
    """update_mode: of XLA, in small letters; "auto": its default. collectives: whether what devices exchange is part of a graph."""

    update_mode: str = "auto"
    collectives: bool = False


USUAL_GRAPHS = GraphSettings()
