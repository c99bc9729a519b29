"""The user's own directory for what can be made again: executables, measurements, models that were fetched."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """$JAXPAGE_CACHE_DIR, else `jaxpage` below $XDG_CACHE_HOME or ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("JAXPAGE_CACHE_DIR") or base / "jaxpage")
