"""Tells which parameters work with which features.

The tests make the table, which is docs/reference/support-matrix.md.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files


@functools.cache
def support_matrix() -> dict[str, dict[str, str]]:
    """Returns the support of each parameter by feature.

    It is "yes", "refused" (an UnsupportedError names both), or "no such field".
    """
    matrix: dict[str, dict[str, str]] = json.loads(
        files("jaxpage").joinpath("support_matrix.json").read_text("utf-8")
    )
    return matrix
