"""To be written."""

from __future__ import annotations

import jax

from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.tiles import Tiles


def attend(arguments: Arguments, tiles: Tiles | None, *, interpret: bool) -> jax.Array:
    raise NotImplementedError("not written yet")


INTERPRETABLE = False
