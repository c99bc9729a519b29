"""One operation, two backends: `api` checks and chooses, `xla` defines, `triton` writes keys, values and scales in one launch."""

from pallas_kernels.kv_write.api import write_kv

__all__ = ["write_kv"]
