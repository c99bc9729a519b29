"""What works with what, parameter by parameter: the table that the tests make (docs/reference/support-matrix.md)."""

from __future__ import annotations

import functools
import json
from importlib.resources import files


@functools.cache
def support_matrix() -> dict[str, dict[str, str]]:
    """By parameter and feature: "yes", "refused" (an UnsupportedError that names both), or "no such field"."""
    matrix: dict[str, dict[str, str]] = json.loads(
        files("jaxpage").joinpath("support_matrix.json").read_text("utf-8")
    )
    return matrix
