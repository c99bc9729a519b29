"""One operation, several backends: `api` chooses, `reference` defines, the others are faster."""

from pallas_kernels.paged_attention.api import (
    BACKENDS,
    INTERPRETABLE_BACKENDS,
    XLA_BACKENDS,
    paged_attention,
    pages_from_PSKH,
)
from pallas_kernels.paged_attention.tiles import Tiles

__all__ = ["BACKENDS", "INTERPRETABLE_BACKENDS", "XLA_BACKENDS", "Tiles", "paged_attention", "pages_from_PSKH"]
