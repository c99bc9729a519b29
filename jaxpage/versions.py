"""Gives the versions of packages."""

from __future__ import annotations

import importlib.metadata


def package_version(package: str) -> str:
    """Returns the version of a package, or "not installed" where the code is a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
