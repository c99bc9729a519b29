"""Describes an engine for receipts: what its bits depend on, and the hashes of its weights."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpage.assembly.compiling import shards_of_weights
from jaxpage.assembly.planning.engine_spec import EngineSpec
from jaxpage.checkpoints import ModelFiles, insert
from jaxpage.checkpoints.in_memory import name_parameters
from jaxpage.checkpoints.tokenizers import ends_of_text
from jaxpage.device import Packings, unpack_weight
from jaxpage.device.hardware import cpu_instructions, hash_traced_code, processor, xla_flags
from jaxpage.errors import UnsupportedError
from jaxpage.models.sharding import entry_at, join_weights
from jaxpage.receipts import (
    EngineFacts,
    WeightFacts,
    hash_tensors,
    hash_text,
    hash_tokenizer,
    hash_weights,
)
from jaxpage.versions import package_version

_LARGE_BYTES = 2**28  # hashing fewer bytes shows no bar


def describe_engine(files: ModelFiles, spec: EngineSpec, tokenizer: Any | None) -> EngineFacts:
    """Returns what the bits of an engine's answers depend on, besides its weights.

    Args:
        files: The model's files.
        spec: The engine's specification.
        tokenizer: The tokenizer; None if the model has none.

    Raises:
        UnsupportedError: Drafts may change the answers of the engine.
    """
    config = spec.config
    if config.acceptance.name != "coupled":
        raise UnsupportedError(
            f"receipt is not supported with acceptance {config.acceptance.name!r} of drafts, which "
            'may change a text: use "coupled"'
        )
    described = spec.described
    kernels = described.kernels
    return EngineFacts(
        jaxpage=package_version("jaxpage"),
        code=hash_traced_code(),
        jax=package_version("jax"),
        jaxlib=package_version("jaxlib"),
        # Only a request with a grammar depends on it: see `receipts.making`.
        llguidance=None,
        flags=xla_flags(),
        device=described.device.name,
        architecture=platform.machine(),
        instructions="" if kernels is None else cpu_instructions(kernels, spec.layout.dtype),
        processor=processor(),
        attention_backend=config.attention_backend,
        attention=", ".join(
            sorted({name.partition(":")[0] for name in spec.attention.split("; ")})
        ),
        batch_invariant=kernels is not None and kernels.batch_invariant,
        dtype=spec.layout.dtype,
        kv_cache_dtype=spec.layout.kv_cache_dtype,
        quantization=config.quantization,
        reduction=spec.reduction,
        config=hash_text(repr(described.model)),
        tokenizer=hash_tokenizer(tokenizer),
        eos_token_ids=sorted(ends_of_text(files, tokenizer)),
    )


def hash_model(
    files: ModelFiles,
    spec: EngineSpec,
    packed: Packings,
    parameters: Mapping[str, Any],
    *,
    progress: bool,
) -> WeightFacts:
    """Returns the hashes of a model's weights, however they are divided and packed.

    Those of a drafter and of an encoder of pictures are not among them.

    Args:
        files: The model's files.
        spec: The engine's specification.
        packed: Which of the weights are in panels.
        parameters: The parameters of the steps.
        progress: True shows a bar if there is much to hash.

    Raises:
        UnsupportedError: This process does not have all weights.
    """
    leaves = jax.tree.leaves(parameters["target"])
    if not all(leaf.is_fully_addressable for leaf in leaves):
        raise UnsupportedError("receipt is not supported on several hosts: each has a part alone")
    if files.quantization is not None and spec.sharding.is_divided:
        raise UnsupportedError(
            f"receipt is not supported for quantised weights ({files.quantization.described}) on "
            f"{spec.layout.tensor_parallel_size} devices"
        )
    num_bytes = files.plan.num_bytes(spec.layout.dtype)
    tensors = hash_tensors(
        _tensors(files, spec, packed, parameters["target"]),
        num_bytes,
        progress=progress and num_bytes >= _LARGE_BYTES,
    )
    return WeightFacts(hash=hash_weights(tensors), tensors=tensors)


def _tensors(
    files: ModelFiles, spec: EngineSpec, packed: Packings, target: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the tensors by their names in the checkpoint, each made when it is asked for.

    Quantised weights have other tensors than their checkpoint, and the names of parameters.
    """
    divided = {}
    if spec.sharding.is_divided:
        divided = {sharded.weight.path: sharded for sharded in shards_of_weights(files, spec)}
    for filled in files.plan.parameters:
        path = filled.weight.path
        places = [place.path for place in divided[path].places] if divided else [path]
        tree: dict[Any, Any] = {}
        for place in places:
            array = entry_at(target, place)
            how = packed.get(("target", *place))
            insert(tree, place, array if how is None else unpack_weight(array, how))
        if divided:
            tree = join_weights([divided[path]], tree)
        whole = np.asarray(entry_at(tree, path))
        if files.quantization is not None:
            yield ".".join(map(str, path)), whole
            continue
        insert(tree, path, whole)  # JAX would compile its slices
        yield from name_parameters(replace(files.plan, parameters=(filled,)), tree).items()
