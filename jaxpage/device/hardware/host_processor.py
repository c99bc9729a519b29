"""Says which processor this machine has."""

from __future__ import annotations

from pathlib import Path


def processor_lines() -> list[str]:
    """Returns the processor's name and its features, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def processor() -> str:
    """Returns the processor's name; "" where Linux has none."""
    return next(
        (
            line.partition(":")[2].strip()
            for line in processor_lines()
            if line.startswith("model name")
        ),
        "",
    )
