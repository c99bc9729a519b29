"""Reads how long a model stays loaded, such as 5m."""

from __future__ import annotations

import math
import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_TEXT = re.compile(rf"([-+]?)((?:{_PART.pattern})+|[0-9]+(?:\.[0-9]+)?)")
MAX_CHARACTERS = 64


def keep_alive_seconds(value: str | float) -> float:
    """Returns the seconds that a model stays loaded after its last request.

    Args:
        value: A number of seconds, or a duration such as "5m" or "1h30m". 0 unloads the model at
            once; a negative value, for which infinity is returned, never does so.

    Raises:
        ValueError: The value is no duration.
    """
    if isinstance(value, str):
        match = _TEXT.fullmatch(value) if len(value) <= MAX_CHARACTERS else None
        if match is None:
            raise ValueError("must be seconds or a duration such as 5m or 1h30m")
        sign, text = match[1], match[2]
        parts = [(number, _UNITS[unit]) for number, unit in _PART.findall(text)] or [(text, 1.0)]
        seconds = sum(float(number) * unit for number, unit in parts)
        value = -seconds if sign == "-" else seconds
    return math.inf if value < 0 else float(value)
