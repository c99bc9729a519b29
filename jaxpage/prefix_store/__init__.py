"""Keeps full KV blocks as files, so that prefixes survive a restart.

The store is told what an engine does, and never imports one. Other rooms take:

    PrefixTier   listens to an engine, writes full blocks and finds them again
    BlockAccess  reads and writes blocks of an engine for it
    PrefixFiles  keeps the files, within a number of bytes
    StoredBlock, Contents, FileCounts  a block in a file, its numbers, and how many there are
"""

from jaxpage.prefix_store.prefix_files import Contents, FileCounts, PrefixFiles, StoredBlock
from jaxpage.prefix_store.prefix_tier import BlockAccess, PrefixTier

__all__ = ["BlockAccess", "Contents", "FileCounts", "PrefixFiles", "PrefixTier", "StoredBlock"]
