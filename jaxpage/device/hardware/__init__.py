"""Knows devices before anything is on them: their memory, kernels, and the mesh of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.device.hardware.backends import (
        Backend,  # names the kernels that steps use
        attention_sets,  # says which kernel sets compute attention
        choose_backend,  # chooses kernels by the settings and the device
        cpp_compiler,  # gives the command of the compiler that makes kernels for CPUs
        cpu_instructions,  # says which instructions of a CPU multiply
        cpu_kernels,  # says which kernels for CPUs there are
    )
    from jaxpage.device.hardware.device_spec import (
        USUAL_BLOCK_SIZE,  # is the tokens of a KV block where no number was measured
        DeviceSpec,  # describes a device: its memory, its types, and its kernel sets
        available_bytes,  # counts the bytes that engines may take of a device
        available_host_bytes,  # counts the free bytes of host memory
    )
    from jaxpage.device.hardware.gpu_memory import (
        open_devices,  # has JAX open its devices, with a share of a GPU's memory
    )
    from jaxpage.device.hardware.host_processor import processor  # gives the name of the processor
    from jaxpage.device.hardware.known_devices import (
        KNOWN_DEVICES,  # has the memory of devices that are not here
    )
    from jaxpage.device.hardware.mesh import (
        DeviceMesh,  # holds the devices of an engine, and puts arrays on them
        make_mesh,  # takes the first devices that JAX has
    )
    from jaxpage.device.hardware.traced_code import (
        hash_traced_code,  # gives the hash of the code that steps are compiled from
        xla_flags,  # says what the environment tells XLA
    )

__getattr__, __dir__ = open_door(__name__)
