"""Compiles the encoder of pictures of a model, once for each number of patches."""

from __future__ import annotations

import bisect
import functools
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.executables import compile_ahead
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.hardware.mesh import DeviceMesh
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.packing import Packings
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models import abstract, make_model
from jaxpage.settings.cuda_graphs import GraphSettings


def without_vision(parameters: Any) -> Any:
    """Returns the weights of all parts of a model but the encoder of pictures."""
    if "vision" not in parameters:
        return parameters
    return {name: part for name, part in parameters.items() if name != "vision"}


def vision_key(size: int) -> str:
    """Returns the key of the executable for this number of patches."""
    return f"picture of {size} patches"


def sizes_for(spec: Any, max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of patches that pictures of so many rows, or fewer, need."""
    sizes: tuple[int, ...] = spec.sizes
    # The last size is the first that holds the largest picture.
    return sizes[: 1 + bisect.bisect_left(sizes, max_rows * spec.block**2)]


def vision_model(
    family: Any, spec: Any, dtype: DTypeLike, backend: Backend
) -> tuple[nnx.Module, Packings]:
    """Returns an encoder of pictures, and which of its weights are in panels, by their paths.

    Args:
        family: The family of the encoder.
        spec: The spec of the encoder.
        dtype: The type of its weights.
        backend: The kernels.
    """
    model = make_model(family, spec, dtype, None)
    return model, backend.pack_modules(model)


def vision_jobs(
    family: Any,
    spec: Any,
    dtype: DTypeLike,
    parameters: Any,
    backend: Backend,
    graphs: GraphSettings,
    mesh: DeviceMesh,
    *,
    max_rows: int,
) -> dict[Bucket | str, functools.partial[Any]]:
    """Returns the calls that compile an encoder of pictures, by the keys of their executables.

    Args:
        family: The family of the encoder.
        spec: The spec of the encoder.
        dtype: The type of its weights and of its rows.
        parameters: The weights of the model; its own are under "vision".
        backend: The kernels.
        graphs: The settings of CUDA graphs.
        mesh: The devices, each of which has the whole encoder.
        max_rows: The most positions that a picture fills in a prompt.
    """
    graph, _ = abstract(vision_model(family, spec, dtype, backend)[0])
    return {
        vision_key(size): functools.partial(
            compile_vision,
            parameters["vision"],
            mesh.whole(family.Model.input_shapes(spec, size)),
            graph,
            dtype,
            backend,
            graphs,
            mesh,
        )
        for size in sizes_for(spec, max_rows)
    }


def compile_vision(
    parameters: Any,
    inputs: dict[str, jax.ShapeDtypeStruct],
    graph: Any,
    dtype: DTypeLike,
    backend: Backend,
    graphs: GraphSettings,
    mesh: DeviceMesh,
) -> Any:
    """Compiles an encoder for inputs of these shapes."""
    step = functools.partial(vision_step, graph=graph, dtype=dtype, backend=backend)
    on_each = mesh.on_each(step, (parameters, dict.fromkeys(inputs)), None)
    return compile_ahead(jax.jit(on_each), parameters, inputs, graphs=graphs, backend=backend)


def vision_step(
    parameters: Any,
    inputs: dict[str, jax.Array],
    *,
    graph: Any,
    dtype: DTypeLike,
    backend: Backend,
) -> jax.Array:
    """Returns the rows [R, 1 + n, D] of a picture, or of a tile."""
    with TraceScope(make_layer_kernels(backend)).open():
        rows: jax.Array = nnx.merge(graph, parameters)(inputs)
    return rows.astype(dtype)
