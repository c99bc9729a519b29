"""The first call of a start: describes the model and the devices. Nothing but headers is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax

from jaxpage.assembly.capacity import choose_dtype, choose_kv_cache_dtype
from jaxpage.assembly.described import Described, ModelLayout, device_spec_of
from jaxpage.assembly.drafting import open_drafting
from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.assembly.sampling_defaults import read_sampling_defaults
from jaxpage.checkpoints import ModelFiles, open_model, resolve_model, resolve_tokenizer
from jaxpage.checkpoints.problems import listed
from jaxpage.checkpoints.tokenizer_files import load_tokenizer
from jaxpage.device.backends import choose_backend
from jaxpage.device.executables import use_compile_cache
from jaxpage.device.gpu_memory import open_devices
from jaxpage.device.mesh import DeviceMesh, make_mesh
from jaxpage.device.stored_executables import compile_cache_directory
from jaxpage.errors import CheckpointError, ConfigError
from jaxpage.models.base import Family, ModelSpec
from jaxpage.models.lora import LoRASpec, lora_targets
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """Holds a model's files and the devices that it is for. Nothing is loaded."""

    described: Described
    files: ModelFiles
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]  # of SamplingParams, from generation_config.json
    mesh: DeviceMesh


def describe(config: EngineConfig, hooks: Hooks, files: ModelFiles | None, tokenizer: Any | None) -> Opened:
    """Finds the model and the devices. Arguments and errors are those of `build_engine`."""
    open_devices(config.gpu_memory_utilization)  # before anything else asks JAX for them
    hooks.phase(PHASES[0])
    _use_compile_cache()
    files = opened_files(config) if files is None else files
    tokenizer = _tokenizer(config, files) if tokenizer is None else tokenizer
    sampling_defaults = read_sampling_defaults(files.directory)
    hooks.phase(PHASES[1])
    mesh = make_mesh(config.tensor_parallel_size)
    cache_dtype = choose_kv_cache_dtype(config, files.spec, files.quantization)
    kernels = choose_backend(config.attention_backend, mesh.first, cache_dtype)
    device = device_spec_of(mesh.first, config.gpu_memory_utilization, mesh.size)
    dtype = choose_dtype(config, device, files.plan.stored_dtype(), files.family)
    described = Described(
        config,
        files.spec,
        device,
        ModelLayout(dtype, cache_dtype, config.tensor_parallel_size),
        files.plan.num_bytes(dtype),
        open_drafting(config.speculative_config, files),
        lora_spec(config, files.family, files.spec),
        kernels,
    )
    return Opened(described, files, tokenizer, sampling_defaults, mesh)


def opened_files(config: EngineConfig) -> ModelFiles:
    """Returns the model's files, after everything that can be refused before they are read."""
    files = open_model(resolve_model(config.model, config.revision), config.quantization)
    if config.load_format not in ("auto", files.plan.layout):
        raise ConfigError(f"load_format is {config.load_format!r}, but {files.directory} holds {files.plan.layout}")
    if kinds := files.rounded_before:
        text = "quantization=%r rounds weights a second time that the file has in %s; quantization='gguf' keeps them as they are"
        logger.warning(text, config.quantization, ", ".join(kinds))
    return files


def lora_spec(config: EngineConfig, family: Family, spec: ModelSpec) -> LoRASpec | None:
    """Returns the adapters that the settings ask for, or None where the model takes none."""
    if not config.enable_lora:
        return None
    return LoRASpec(config.max_loras, config.max_lora_rank, lora_targets(family, spec))


def _use_compile_cache() -> None:
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # what a program has set stands
        use_compile_cache(compile_cache_directory())


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Any | None:
    """Returns the tokenizer, or None where the model has none.

    Raises ModelNotFoundError or CheckpointError if one was asked for and is not there, or if it does
    not fit the model.
    """
    directory = resolve_tokenizer(config.tokenizer) if config.tokenizer else files.directory
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        if config.tokenizer:
            raise CheckpointError(f"tokenizer = {config.tokenizer!r}: there are no tokenizer files in {directory}")
        return None
    last = files.spec.vocab_size - 1
    largest = max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest > last:
        raise CheckpointError(f"{directory}: the tokenizer has token id {largest}, but the model's ids end at {last}")
    if added := [token for token, token_id in tokenizer.get_vocab().items() if token_id > last]:
        # Published models have such: special tokens that were never trained. A prompt that uses one is refused.
        logger.warning(
            "the tokenizer's added tokens %s lie beyond the model's ids, which end at %d", listed(added), last
        )
    return tokenizer
