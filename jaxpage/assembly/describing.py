"""Describes the model and the devices: the first call of a start. It reads headers only."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.assembly.planning.described import Described, ModelLayout
from jaxpage.assembly.planning.drafting import open_drafting
from jaxpage.assembly.planning.encoders import check_settings, is_encoder
from jaxpage.assembly.planning.vectors import VisionPart, vector_input
from jaxpage.assembly.sampling_defaults import read_sampling_defaults
from jaxpage.checkpoints import (
    ModelFiles,
    aliased_bytes,
    list_names,
    open_model,
    read_embedding_files,
)
from jaxpage.checkpoints.finding import resolve_model, resolve_tokenizer
from jaxpage.checkpoints.quantization import Scheme
from jaxpage.checkpoints.tokenizers import open_tokenizer
from jaxpage.device import compile_cache_directory, use_compile_cache
from jaxpage.device.hardware import DeviceMesh, DeviceSpec, make_mesh, open_devices
from jaxpage.errors import CheckpointError, ConfigError, UnsupportedError
from jaxpage.models import Family, ModelSpec
from jaxpage.models.parameters import LoRASpec, lora_targets
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """Holds a model's files and the devices that it is for; no weight is loaded.

    Attributes:
        described: The description.
        files: The model's files.
        tokenizer: The tokenizer; None if the model has none.
        sampling_defaults: The values of `SamplingParams` in the model's generation_config.json.
        mesh: The devices.
    """

    described: Described
    files: ModelFiles
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]
    mesh: DeviceMesh


def describe(
    config: EngineConfig, hooks: Hooks, files: ModelFiles | None, tokenizer: Any | None
) -> Opened:
    """Finds the model and the devices; see `build_engine` for arguments and errors."""
    open_devices(config.gpu_memory_utilization)  # before JAX opens them for anything else
    hooks.phase(PHASES[0])
    _use_compile_cache()
    files = open_files(config) if files is None else files
    if is_encoder(files.spec):
        check_settings(config, config.tensor_parallel_size)
    tokenizer = _tokenizer(config.tokenizer, files) if tokenizer is None else tokenizer
    sampling_defaults = read_sampling_defaults(files.directory)
    lora = lora_spec(config, files.family, files.spec)
    hooks.phase(PHASES[1])
    mesh = make_mesh(config.tensor_parallel_size)
    if not mesh.is_one_process:  # the other hosts do not hear what pictures there are
        files = replace(files, vision=None)
    vision = None
    if files.vision is not None:
        vision = VisionPart(files.vision.family, files.vision.spec)
    cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, files.spec, files.quantization)
    device = DeviceSpec.of(mesh.first, config.gpu_memory_utilization, mesh.size)
    kernels = device.choose_kernels(
        config.attention_backend, cache_dtype, batch_invariant=config.batch_invariant
    )
    drafting = open_drafting(config.speculative_config, files)
    stored = files.plan.most_common_dtype()
    dtype = choose_dtype(config.dtype, device, stored, files.family)
    counted_bytes = 0  # of weights that are on the device already, and counted among both
    if not device.is_cpu and mesh.size == 1:
        counted_bytes = aliased_bytes(files.plan, dtype, mesh.first)
    described = Described(
        config,
        files.spec,
        replace(device, available_bytes=device.available_bytes + counted_bytes),
        ModelLayout(dtype, cache_dtype, config.tensor_parallel_size),
        files.plan.num_bytes(dtype),
        drafting,
        lora,
        kernels,
        _dtype_reason(config.dtype, device, stored),
        read_embedding_files(files.directory).max_tokens,
        vector_input(config, files.family, files.spec, vision),
    )
    return Opened(described, files, tokenizer, sampling_defaults, mesh)


def open_files(config: EngineConfig) -> ModelFiles:
    """Returns the model's files, after refusing what can be refused without reading weights.

    Raises:
        ModelNotFoundError: There is no such model.
        CheckpointError: The model's files cannot be used.
        ConfigError: The checkpoint has another format than `load_format`.
    """
    directory = resolve_model(config.model, config.revision)
    files = open_model(directory, config.quantization, vision=config.limit_images != 0)
    if config.load_format not in ("auto", files.plan.layout):
        raise ConfigError(
            f"load_format is {config.load_format!r}, but {files.directory} holds "
            f"{files.plan.layout}"
        )
    if kinds := files.rounded_before:
        text = (
            "quantization=%r rounds weights a second time that the file has in %s; "
            "quantization='gguf' keeps them as they are"
        )
        logger.warning(text, config.quantization, ", ".join(kinds))
    return files


def choose_dtype(requested: str, device: DeviceSpec, stored: str, family: Family) -> str:
    """Returns the dtype of a model.

    "auto" follows the checkpoint. On CPU it is float32 for a checkpoint in float16, and for one in
    bfloat16 without the kernels for CPUs, since XLA is slow in it. On a GPU without bfloat16 it is
    float16, with a warning. For a family whose numbers overflow float16, bfloat16 or float32 takes
    its place.

    Args:
        requested: The dtype in the settings.
        device: The device.
        stored: The dtype of the checkpoint.
        family: The model family.

    Raises:
        UnsupportedError: The settings name bfloat16 and the GPU has none, or they name float16 and
            it would overflow.
    """
    overflows = getattr(family, "OVERFLOWS_FLOAT16", False)
    instead = "float32" if overflows else "float16"
    lacking = f"{device.name} has no bfloat16, which takes a compute capability of 8.0 or more"
    if requested == "bfloat16" and not device.has_bfloat16:
        raise UnsupportedError(f"dtype 'bfloat16': {lacking}; use dtype {instead!r}")
    if requested == "float16" and overflows:
        held = "bfloat16" if device.has_bfloat16 else "float32"
        raise UnsupportedError(
            "dtype 'float16': it does not hold this model's numbers, which overflow; use "
            f"dtype {held!r}"
        )
    if requested != "auto":
        return requested
    # On a CPU it becomes float32 below.
    if stored == "float16" and overflows and not device.is_cpu:
        stored = "bfloat16"
    if stored == "bfloat16" and not device.has_bfloat16:
        logger.warning("%s: dtype 'auto' is %s", lacking, instead)
        return instead
    if device.is_cpu and not (stored == "bfloat16" and device.keeps_bfloat16):
        return "float32"
    return stored


def choose_kv_cache_dtype(requested: str, spec: ModelSpec, quantization: Scheme | None) -> str:
    """Returns the dtype of the KV cache.

    "auto" follows a quantised checkpoint, unless the model has recurrent layers, whose pages are
    never quantised.
    """
    if requested != "auto" or quantization is None or any(spec.kv.states):
        return requested
    return quantization.kv_cache_dtype


def _dtype_reason(requested: str, device: DeviceSpec, stored: str) -> str:
    """Returns the reason for the dtype that "auto" gives, if it is not the checkpoint's."""
    if requested != "auto" or not device.is_cpu or stored == "float32":
        return ""
    if stored != "bfloat16":
        return f"the checkpoint is in {stored}"
    return "" if device.keeps_bfloat16 else "without the kernels for CPUs, bfloat16 is slow"


def lora_spec(config: EngineConfig, family: Family, spec: ModelSpec) -> LoRASpec | None:
    """Returns the LoRA adapters that the settings ask for, or None if they ask for none."""
    if not config.enable_lora:
        return None
    return LoRASpec(config.max_loras, config.max_lora_rank, lora_targets(family, spec))


def _use_compile_cache() -> None:
    # A directory that the program has set stays.
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        use_compile_cache(compile_cache_directory())


def _tokenizer(requested: str | None, files: ModelFiles) -> Any | None:
    """Returns the tokenizer, or None if the model has none.

    Raises:
        ModelNotFoundError: The tokenizer that the settings name does not exist.
        CheckpointError: It has no files, or does not fit the model.
    """
    directory = resolve_tokenizer(requested) if requested else files.directory
    tokenizer = open_tokenizer(directory)
    if tokenizer is None:
        if requested:
            raise CheckpointError(
                f"tokenizer = {requested!r}: there are no tokenizer files in {directory}"
            )
        return None
    last = files.spec.vocab_size - 1
    largest = max(
        tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values(), default=0
    )
    if largest > last:
        raise CheckpointError(
            f"{directory}: the tokenizer has token id {largest}, but the model's ids end at {last}"
        )
    if added := [token for token, token_id in tokenizer.get_vocab().items() if token_id > last]:
        # Published models have such tokens: special ones that were never trained. A prompt that
        # uses one is refused.
        logger.warning(
            "the tokenizer's added tokens %s lie beyond the model's ids, which end at %d",
            list_names(added),
            last,
        )
    return tokenizer
