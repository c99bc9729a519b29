"""Keeps full KV blocks as files, so that prefixes survive a restart.

The store is told what an engine does, and never imports one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.prefix_store.prefix_files import (
        Contents,  # are the numbers of a block
        FileCounts,  # says how many blocks the files have
        PrefixFiles,  # keeps files of blocks, within a number of bytes
        StoredBlock,  # is a block in a file
    )
    from jaxpage.prefix_store.prefix_tier import (
        BlockAccess,  # reads and writes blocks of an engine for a `PrefixTier`
        PrefixTier,  # listens to an engine, writes full blocks and finds them again
    )

__getattr__, __dir__ = open_door(__name__)
