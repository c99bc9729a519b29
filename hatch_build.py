"""Builds the kernels for CPUs into a wheel, for all instruction sets of this kind of machine, where JAXPAGE_BUILD_KERNELS=1 asks for it.

Without it the wheel is pure Python and the kernels are compiled at the first use: an installation needs no compiler and no JAX to build.
"""

from __future__ import annotations

import os
import platform
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WANTED = os.environ.get("JAXPAGE_BUILD_KERNELS") == "1"


class Kernels(BuildHookInterface):
    def dependencies(self) -> list[str]:
        """Returns what the build needs: the oldest JAX that jaxpage allows, whose headers of XLA newer ones accept."""
        return ["jax>=0.10,<0.11"] if WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not WANTED or version == "editable":
            return
        import jax  # there only when it is needed

        how = runpy.run_path(str(Path(self.root) / "pallas_kernels" / "cpu" / "build.py"))
        on_arm = platform.machine() in ("aarch64", "arm64")
        sets = how["ARM"] if on_arm else {name: flags for name, (_, flags) in how["X86"].items()}
        self._directory = tempfile.TemporaryDirectory()
        for name, flags in sets.items():
            path = Path(self._directory.name) / f"{name}.so"
            how["build"](path, how["SOURCES"], how["options"](name, flags, jax.ffi.include_dir()))
            build_data["force_include"][str(path)] = f"pallas_kernels/cpu/prebuilt/{name}.so"
        build_data["pure_python"] = False
        # A Python for both kinds of Macs says universal2; the kernels are those of this machine alone.
        system = sysconfig.get_platform().replace("universal2", platform.machine())
        build_data["tag"] = f"py3-none-{system.replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_directory"):
            self._directory.cleanup()
