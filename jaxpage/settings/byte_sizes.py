"""Reads amounts of memory: 24GiB (powers of 1024), 40GB (powers of 1000), or a number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

# A smaller number of bytes without a unit is refused: the unit was probably forgotten.
MINIMUM = 1000
_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that a text such as "24GiB" means.

    Raises:
        ValueError: The text is no amount, it is 0, or it is a small number without a unit.
    """
    # ASCII alone: `\d` would take the digits of other scripts, too.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    unit = _UNITS.get(match[2] or "b") if match else None
    if match is None or unit is None:
        raise ValueError(f"not an amount of memory such as 24GiB, 40GB or bytes: {text[:80]!r}")
    # Exact, where a product of floats may be a byte off.
    num_bytes = int(Decimal(match[1]) * unit)
    if num_bytes < 1:
        raise ValueError(f"must be more than 0, got {text[:80]!r}")
    if num_bytes < MINIMUM and not match[2]:
        raise ValueError(
            f"{match[1]} without a unit is {num_bytes} bytes; write {match[1]}GiB or {match[1]}MiB"
        )
    return num_bytes
