"""Says from which code the steps are compiled, and what tells XLA how."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import pallas_kernels

# Steps are traced from the code in these folders. Paths are texts below, which is ten times as fast
# as objects of `Path`: every start reads some 200 files.
_TRACED = (
    "jaxpage/device",
    "jaxpage/layers",
    "jaxpage/models",
    "jaxpage/step",
    "jaxpage/settings",
    "pallas_kernels",
)
_NUM_DEVICES = "--xla_force_host_platform_device_count="  # it changes no number


@functools.cache
def hash_traced_code() -> str:
    """Returns the hash of the code that steps are traced from, in hexadecimal digits."""
    code = hashlib.sha256()
    roots = Path(__file__).parents[2], Path(str(pallas_kernels.__file__)).parent
    parents = {root.name: str(root.parent) for root in roots}
    for folder in _TRACED:
        parent = parents[folder.partition("/")[0]]
        paths = [
            os.path.join(directory, name)
            for directory, _, names in os.walk(os.path.join(parent, folder))
            for name in names
            # Tables of tiles that were measured are .json.
            if name.endswith((".py", ".cc", ".h", ".json"))
        ]
        for path in sorted(paths):
            with open(path, "rb") as file:
                contents = file.read()
            code.update(f"{path[len(parent) :]} {len(contents)}\n".encode() + contents)
    return code.hexdigest()


def xla_flags() -> str:
    """Returns what the environment tells XLA that may change numbers; empty for nothing."""
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith(_NUM_DEVICES)
    ]
    others = [
        f"{name}={os.environ[name]}"
        for name in ("JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
        if os.environ.get(name)
    ]
    return " ".join(sorted(flags) + others)
