"""What the compiler makes of kernels and of whole steps, without a GPU: registers, spills, shared memory, instructions, copies."""

from pallas_kernels.inspection.deviceless import GPUS, compile_for, unavailable
from pallas_kernels.inspection.executable import Kernel, kernels
from pallas_kernels.inspection.hlo import Made, kernel_calls, made

__all__ = ["GPUS", "Kernel", "Made", "compile_for", "kernel_calls", "kernels", "made", "unavailable"]
