"""Finds the user's directory for files that can be made again.

These are executables, measurements, and fetched models.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns $JAXPAGE_CACHE_DIR, or else `jaxpage` in $XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("JAXPAGE_CACHE_DIR") or base / "jaxpage")
