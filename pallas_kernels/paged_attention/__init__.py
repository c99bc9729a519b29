"""One operation, several backends: `api` chooses, `reference` defines, the others are faster."""

from pallas_kernels.paged_attention.api import BACKENDS, INTERPRETABLE_BACKENDS, paged_attention, pages_from_PSKH

__all__ = ["BACKENDS", "INTERPRETABLE_BACKENDS", "paged_attention", "pages_from_PSKH"]
