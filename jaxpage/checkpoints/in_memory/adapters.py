"""Holds LoRA adapters whose matrices are arrays in memory, and fits them to a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.checkpoints.in_memory.parameters import PLACE, array_headers, find_flaw
from jaxpage.checkpoints.lora_files import (
    DTYPES,
    Adapter,
    AdapterModule,
    check_config,
    fit_adapter,
    join_matrices,
    make_adapter,
    open_adapter,
    scale_matrices,
    write_adapter,
)
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES, map_array
from jaxpage.models.parameters import LoRASpec
from jaxpage.models.parameters import Path as LayerPath

_DTYPES = [NUMPY_DTYPES[code] for code in DTYPES]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """Holds a LoRA adapter as a pytree: a trainer differentiates with respect to it.

    Attributes:
        tensors: The matrices A [rank, in] and B [out, rank] by their names in peft's files, such as
            `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`. They are float32,
            bfloat16 or float16.
        config_json: The text of adapter_config.json. It is no part of what is trained.
    """

    tensors: dict[str, jax.Array]
    config_json: str = field(metadata={"static": True})

    @property
    def config(self) -> dict[str, Any]:
        """Returns the content of adapter_config.json: rank, alpha and modules."""
        config: dict[str, Any] = json.loads(self.config_json)
        return config

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes a directory that peft, and `LoRARequest`, load; old files are replaced."""
        tensors = {name: np.asarray(array) for name, array in self.tensors.items()}
        write_adapter(Path(directory), self.config, tensors)


def read_lora_weights(directory: Path, spec: LoRASpec) -> LoRAWeights:
    """Reads an adapter in PEFT's layout, in the types of its tensors.

    Raises:
        CheckpointError: The adapter does not fit the model; the message lists all problems.
    """
    problems = Problems(directory, "adapter")
    config, headers = open_adapter(directory, problems)
    make_adapter(fit_adapter(config, headers, spec, problems), map_array, spec, problems)
    tensors = {name: jnp.asarray(map_array(info)) for name, info in headers.items()}
    return LoRAWeights(tensors, json.dumps(config))


def make_adapter_from(
    config: Mapping[str, Any], tensors: Mapping[str, Any], spec: LoRASpec
) -> Adapter:
    """Returns an adapter for an engine; the arrays are copied.

    Args:
        config: The content of adapter_config.json.
        tensors: Arrays of numpy or JAX by their names in peft's files.
        spec: The layers that take adapters.

    Raises:
        CheckpointError: The adapter does not fit the model; the message lists all problems.
        TypeError: The config or the tensors are no dict.
    """
    modules, problems = _fit(config, tensors, spec)
    return make_adapter(modules, lambda info: np.asarray(tensors[info.name]), spec, problems)


def layers_of_weights(
    weights: LoRAWeights, spec: LoRASpec, dtype: str
) -> dict[LayerPath, tuple[jax.Array, jax.Array]]:
    """Returns A and B of linear layers as an engine has them in a slot; it may be traced.

    Args:
        weights: The adapter.
        spec: The layers that take adapters.
        dtype: The type of the model's parameters.

    Raises:
        CheckpointError: The adapter does not fit the model; the message lists all problems.
        TypeError: The weights are no `LoRAWeights`.
    """
    if not isinstance(weights, LoRAWeights):
        raise TypeError(f"adapter must be LoRAWeights or None, not {type(weights).__name__}")
    modules, problems = _fit(weights.config, weights.tensors, spec)
    problems.raise_if_any()
    matrices = [
        scale_matrices(module, weights.tensors[module.a.name], weights.tensors[module.b.name])
        for module in modules
    ]
    layers = join_matrices(modules, matrices, spec.rank, jnp)
    return {path: (a.astype(dtype), b.astype(dtype)) for path, (a, b) in layers.items()}


def _fit(
    config: Mapping[str, Any], tensors: Mapping[str, Any], spec: LoRASpec
) -> tuple[list[AdapterModule], Problems]:
    for name, value in (("config", config), ("tensors", tensors)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} of an adapter must be a dict, got {value!r:.80}")
    problems = Problems(PLACE, "adapter")
    check_config(config, problems)
    fitting = {}
    for name, array in tensors.items():
        if flaw := find_flaw(array, _DTYPES):
            problems.add(f"tensor {quote(name)} {flaw}")
        else:
            fitting[name] = array
    return fit_adapter(config, array_headers(fitting), spec, problems), problems
