"""Builds the kernels for CPUs into a wheel.

`pip install .` builds those of this machine, where there is a C++ compiler. Where it cannot, the
wheel is pure Python, a warning says why (pip shows it with -v), and the kernels are compiled at the
first use. JAXPAGE_BUILD_KERNELS=1, for wheels that are published, builds those of every instruction
set of this kind of machine, and makes an error of what prevents it. JAXPAGE_BUILD_KERNELS=0 builds
a wheel of pure Python, which needs no JAX to build.
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

CHOICE = os.environ.get("JAXPAGE_BUILD_KERNELS", "")
if CHOICE not in ("", "0", "1"):
    raise ValueError(f"JAXPAGE_BUILD_KERNELS={CHOICE!r}: it may be 0 or 1, or not set")


class Kernels(BuildHookInterface):
    def dependencies(self) -> list[str]:
        """Returns what the build needs: the oldest JAX that jaxpage allows, whose headers of XLA newer ones accept."""
        if CHOICE == "0" or (CHOICE == "" and not self._has_compiler()):
            return []
        return ["jax>=0.10,<0.11"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if CHOICE == "0" or version == "editable":
            return
        self._directory = tempfile.TemporaryDirectory()
        try:
            libraries = self._build(Path(self._directory.name))
        except Exception as error:
            self._directory.cleanup()
            if CHOICE == "1":
                raise
            self.app.display_warning(
                f"The kernels for CPUs are not in the wheel, but compiled at the first use: {error}"
            )
            return
        for path in libraries:
            build_data["force_include"][str(path)] = f"pallas_kernels/cpu/prebuilt/{path.name}"
        build_data["pure_python"] = False
        # A Python for both kinds of Macs says universal2; the kernels are those of this machine alone.
        system = sysconfig.get_platform().replace("universal2", platform.machine())
        build_data["tag"] = f"py3-none-{system.replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_directory"):
            self._directory.cleanup()

    def _how(self) -> dict[str, Any]:
        """Returns the names of the module that compiles the kernels, which needs no JAX."""
        return runpy.run_path(str(Path(self.root) / "pallas_kernels" / "cpu" / "build.py"))

    def _has_compiler(self) -> bool:
        try:
            self._how()["compiler"]()
        except RuntimeError:
            return False
        return True

    def _build(self, directory: Path) -> list[Path]:
        """Compiles the kernels into a directory, and returns the libraries.

        Raises:
            RuntimeError: There is no compiler, or it failed, or no kernel is for this machine.
            ImportError: There is no JAX.
        """
        how = self._how()
        how["compiler"]()  # where there is none, there may be no JAX either
        import jax  # there only when it is needed

        if CHOICE == "1":
            sets = [(name, flags) for name, (_, flags) in how["instruction_sets"]().items()]
        elif (best := how["instruction_set"]()) is not None:
            sets = [best]
        else:
            raise RuntimeError("this processor has neither AVX2 nor NEON")
        libraries = []
        for name, flags in sets:
            path = directory / f"{name}.so"
            how["build"](path, how["SOURCES"], how["options"](name, flags, jax.ffi.include_dir()))
            libraries.append(path)
        return libraries
