"""Has XLA keep what its autotuning chooses, and says what it chose for an executable.

On a GPU XLA measures which kernel computes a product, and with which tiles. The choice changes
bits, and a second measurement may choose otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from jaxpage.device.compile_cache import own_cache_directory
from jaxpage.device.hardware.gpu_versions import gpu_versions, knows_options

DIRECTORY_OPTION = "xla_gpu_per_fusion_autotune_cache_dir"
MODE_OPTION = "xla_gpu_experimental_autotune_cache_mode"
TUNED_PLATFORMS = ("gpu",)
_CONFIG = 'backend_config={"'  # of XLA's own instructions; those of our kernels are no JSON
# Fields of a config that choose no kernel: order, streams, estimates, and counts of loops.
_NO_CHOICE = frozenset(
    [
        "device_type",
        "dynamic_variables",
        "force_earliest_schedule",
        "known_induction_variable",
        "known_init_step",
        "known_trip_count",
        "operation_queue_id",
        "reification_cost",
        "wait_on_operation_queues",
    ]
)
_DEFAULT_EMITTER = {"type": "NATIVE_EMITTER_TYPE_INVALID", "unroll_factor": 0}


def autotuning_options(device: Any) -> dict[str, str]:
    """Returns the XLA options with which choices are read from files, and new ones written there.

    Another card, driver or library has another directory: XLA's own names of these files lack the
    version of cuBLAS. It is empty where nothing is tuned, and where the user has chosen the
    directory of the compile cache: JAX gives XLA one below that.

    Args:
        device: The `jax.Device`, or one that is only described.
    """
    is_there = isinstance(device, jax.Device) and device.platform in TUNED_PLATFORMS
    directory = own_cache_directory()
    if not is_there or directory is None or DIRECTORY_OPTION in os.environ.get("XLA_FLAGS", ""):
        return {}
    return _options(directory, device)


@functools.cache
def _options(cache: Path, device: jax.Device) -> dict[str, str]:
    if not knows_options(DIRECTORY_OPTION, MODE_OPTION):
        return {}  # an option that XLA does not know would be an error
    versions = "\n".join(gpu_versions([device]))
    directory = cache / "autotuning" / hashlib.sha256(versions.encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # XLA makes no parents
    except OSError:
        return {}
    # XLA fails to compile where it cannot write.
    mode = "UPDATE" if os.access(directory, os.W_OK) else "READ"
    return {DIRECTORY_OPTION: str(directory), MODE_OPTION: f"AUTOTUNE_CACHE_MODE_{mode}"}


def choices_of(executable: Any) -> str:
    """Returns what XLA chose for an executable: a line for each kind of instruction.

    A line has the number of such instructions, their result, and their config: tiles, warps and
    stages of a kernel, or the number of an algorithm of a library.
    """
    choices: Counter[str] = Counter()
    for line in executable.as_text().splitlines():
        before, mark, config = line.partition(_CONFIG)
        if mark and (chosen := _choices_in('{"' + config)):
            instruction = before.partition(" = ")[2].partition("(%")[0]
            choices[f"{instruction} {chosen}"] += 1
    return "".join(f"{number} {choice}\n" for choice, number in sorted(choices.items()))


def _choices_in(text: str) -> str:
    """Returns the choices in the config at the beginning of a text; "" if there are none."""
    config = json.JSONDecoder().raw_decode(text)[0]
    chosen = {
        name: value
        for name, value in config.items()
        if name not in _NO_CHOICE and value != _DEFAULT_EMITTER
    }
    return json.dumps(chosen, sort_keys=True) if chosen else ""


def hash_choices(choices: dict[str, str]) -> str:
    """Returns the hash of what was chosen for executables, by their names."""
    text = json.dumps(choices, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
