"""Checks the origins of the setting `allowed_origins`, without loading the server."""

from __future__ import annotations

import re

_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = (("http://", ":80"), ("https://", ":443"))


def check_origin(value: str) -> str:
    """Returns an origin of the setting `allowed_origins`.

    Raises:
        ValueError: It is a pattern, or no origin as browsers send it.
    """
    if "*" in value:
        raise ValueError("must be exact origins, such as http://localhost:3000, and no pattern")
    if not _ORIGIN.fullmatch(value) or any(
        value.startswith(scheme) and value.endswith(port) for scheme, port in _DEFAULT_PORTS
    ):
        raise ValueError(
            "must be origins as browsers send them, such as http://localhost:3000: in lower case, "
            "without a path, and without the port that the scheme has anyway"
        )
    return value
