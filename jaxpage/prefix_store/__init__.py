"""Keeps full KV blocks as files, so that prefixes survive a restart.

The store is told what an engine does, and never imports one.
"""

from jaxpage.prefix_store.prefix_files import Contents, FileCounts, PrefixFiles, StoredBlock
from jaxpage.prefix_store.prefix_tier import BlockAccess, PrefixTier

__all__ = ["BlockAccess", "Contents", "FileCounts", "PrefixFiles", "PrefixTier", "StoredBlock"]
