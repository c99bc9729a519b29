"""Describes the machine and the versions that the numbers were measured with."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

_FIELDS = "name,memory.total,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
_ROOT = Path(__file__).parents[3]
_BUSY_S = 10.0  # the longest wait for processes that were killed to leave the GPU


def describe() -> dict[str, str]:
    """Returns names and values as texts; asking JAX for its device starts JAX."""
    device = jax.devices()[0]
    facts = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "runtime": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    for name in (
        "torch",
        "triton",
        "flashinfer-python",
        "vllm",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
    ):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not there"
    return facts | _nvidia_smi()


def commit() -> str:
    """Returns the commit of the working tree, or JAXPAGE_COMMIT where there is no git."""
    answer = _output(["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    return answer or os.environ.get("JAXPAGE_COMMIT", "") or "unknown (no git here)"


def _nvidia_smi() -> dict[str, str]:
    values = _output(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"]).splitlines()
    processors = (
        dict(
            zip(_FIELDS.split(","), (value.strip() for value in values[0].split(",")), strict=False)
        )
        if values
        else {}
    )
    if cuda := re.search(r"CUDA Version:\s*([\d.]+)", _output(["nvidia-smi"])):
        processors["driver's CUDA"] = cuda[1]
    return {
        f"nvidia-smi {name}" if name == "name" else name: value
        for name, value in processors.items()
    }


def wait_for_gpu(limit_s: float = _BUSY_S) -> bool:
    """Waits until no process uses the GPU, and returns whether that is so.

    A process that was killed may keep its memory for a moment. It asks nvidia-smi, and returns True
    at once where that is not there.
    """
    end = time.monotonic() + limit_s
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    while is_busy := bool(_output(command)):
        if time.monotonic() >= end:
            break
        time.sleep(0.5)
    return not is_busy


def _output(command: list[str]) -> str:
    """Returns what a program prints; "" where it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
