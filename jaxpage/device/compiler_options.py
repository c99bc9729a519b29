"""Gives XLA's options for executables, and refuses settings that it does not take."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from jaxpage.errors import UnsupportedError
from jaxpage.settings.cuda_graphs import USUAL_GRAPHS, GraphSettings

GRAPH_OPTION = "xla_gpu_enable_command_buffer"
UPDATE_OPTION = "xla_gpu_command_buffer_update_mode"
IN_GRAPHS = (  # XLA's default of jax 0.10 to 0.12 on one device, and WHILE
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CUSTOM_CALL",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)


def compiler_options(platform: str, graphs: GraphSettings = USUAL_GRAPHS) -> dict[str, str]:
    """Returns XLA's options for all executables.

    On a GPU a whole step is one CUDA graph. By default XLA leaves loops out of graphs, and the host
    waits in the middle of a step that has one. What XLA_FLAGS says of the contents of graphs has
    precedence.
    """
    if platform != "gpu":
        return {}
    options = {}
    if GRAPH_OPTION not in os.environ.get("XLA_FLAGS", ""):
        options[GRAPH_OPTION] = ",".join(
            (*IN_GRAPHS, "COLLECTIVES") if graphs.collectives else IN_GRAPHS
        )
    if graphs.update_mode != "auto":
        options[UPDATE_OPTION] = graphs.update_mode.upper()
    return options


def check_graphs(graphs: GraphSettings, platform: str) -> None:
    """Refuses settings of CUDA graphs that would have no effect, or that this XLA does not know.

    Args:
        graphs: The settings.
        platform: The platform of the device.

    Raises:
        UnsupportedError: A setting is refused; the text has its name.
    """
    requested = {
        f"cudagraph_update_mode {graphs.update_mode!r}": (
            graphs.update_mode != "auto",
            UPDATE_OPTION,
        ),
        "cudagraph_collectives true": (graphs.collectives, GRAPH_OPTION),
    }
    for setting, (is_requested, option) in requested.items():
        if not is_requested:
            continue
        if platform != "gpu":
            raise UnsupportedError(
                f"{setting} is for GPUs, and the device is a {platform}: leave it out"
            )
        if option in os.environ.get("XLA_FLAGS", ""):
            raise UnsupportedError(f"{setting}: XLA_FLAGS has {option} too; leave out one of them")
        # XLA refuses an unknown option only when it compiles, so it compiles the smallest program.
        nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.float32))
        try:
            nothing.compile({option: compiler_options(platform, graphs)[option]})
        except jax.errors.JaxRuntimeError as error:
            text = f"XLA of jax {jax.__version__} does not know it ({error})"
            raise UnsupportedError(f"{setting}: {text}") from None
