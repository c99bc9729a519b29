"""Tensor parallelism.

A process has as many devices as it began with, so what needs four runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpage import LLM
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.models.sharding import dividing

FILES = [
    Path(__file__).parent / name for name in ("on_four_devices.py", "on_four_devices_logits.py")
]


def test_on_four_devices(pytestconfig):
    """The files say what is tested."""
    flags = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
    shapes = ["--check-shapes"] * pytestconfig.getoption("--check-shapes")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *shapes, *map(str, FILES)]
    done = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=FILES[0].parents[1],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_too_few_devices_say_how_a_cpu_has_more():
    with pytest.raises(
        ConfigError, match="tensor_parallel_size is 3, but JAX has 1 cpu .*device_count=3"
    ):
        LLM("demo", tensor_parallel_size=3, use_tqdm=False)


def test_layers_that_are_not_divided_are_refused(monkeypatch):
    """A family in a package of its own may have such layers."""
    monkeypatch.setattr(dividing, "find_sharded_kind", lambda module, num_devices: None)
    with pytest.raises(
        UnsupportedError, match=r"^tensor_parallel_size: .* this version does not divide"
    ):
        LLM("demo", tensor_parallel_reduction="invariant", max_model_len=64, use_tqdm=False)
