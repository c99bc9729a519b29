"""What the compiler makes of kernels and of whole steps, without a GPU: registers, spills, shared memory, instructions, copies."""

from pallas_kernels.inspection.deviceless import GPUS, compile_for, unavailable
from pallas_kernels.inspection.findings import Findings, inspect

__all__ = ["GPUS", "Findings", "compile_for", "inspect", "unavailable"]
