"""Shows what the compiler makes of kernels and of whole steps, without a GPU.

It finds registers, spills, shared memory, instructions and copies.
"""

from tools.lab.kernel_lab.inspection.deviceless import (
    GPUS,
    compile_for,
    compile_with_thunks,
    unavailable,
)
from tools.lab.kernel_lab.inspection.executable_findings import Findings, inspect

__all__ = ["GPUS", "Findings", "compile_for", "compile_with_thunks", "inspect", "unavailable"]
