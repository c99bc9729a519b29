"""Opens an engine for the front doors, with its event log and its stored prefixes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from jaxpage.assembly import NO_HOOKS, Built, Hooks, build_engine
from jaxpage.checkpoints import ModelFiles, in_memory
from jaxpage.errors import UnsupportedError
from jaxpage.prefix_store import PrefixFiles, PrefixTier
from jaxpage.replay.event_log import EventLog, check_new
from jaxpage.replay.log_header import engine_header
from jaxpage.replay.log_weights import keep_model, log_weights, place_of_model
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.engine_settings import EngineSettings, LLMSettings, engine_config

# These settings change the numbers or the layout of a block, as the weights and the device do.
_OF_BLOCKS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "block_size",
    "attention_backend",
    "speculative_config",
)


def open_engine(
    config: EngineConfig,
    hooks: Hooks = NO_HOOKS,
    *,
    files: ModelFiles | None = None,
    tokenizer: Any | None = None,
) -> Built:
    """Builds an engine, with a log of its events and a prefix store if the settings ask for them.

    See `build_engine` for arguments and further errors.

    Raises:
        ConfigError: The file of the log exists; this is found before anything is loaded.
    """
    if config.event_log is not None:
        check_new(config.event_log)
    built = build_engine(config, hooks, files=files, tokenizer=tokenizer)
    if config.prefix_cache_directory is not None:
        built.engine.events = _prefix_tier(Path(config.prefix_cache_directory), config, built)
    if config.event_log is not None:
        logged = config
        if files is not None:
            logged = config.replace(model=str(place_of_model(built, config)))
        built.engine.events = EventLog(
            config.event_log, engine_header(logged, built.engine, built.spec, built.model)
        )
        if files is not None:
            keep_model(built, Path(logged.model))
        return log_weights(built, config)
    return built


def open_in_memory(
    model: in_memory.ModelConfig,
    parameters: in_memory.Parameters,
    tokenizer: Any | None,
    settings: EngineSettings,
    hooks: Hooks,
    *,
    may_alias: bool = False,
) -> tuple[EngineConfig, Built]:
    """Opens the engine of a model that is in memory, and returns it with its settings.

    Args:
        model: The content of the model's config.json; see `LLM.from_parameters`.
        parameters: The weights.
        tokenizer: The tokenizer or its directory, if there is one.
        settings: The settings by name.
        hooks: The hooks of the start.
        may_alias: See `LLM.from_parameters`.

    Raises:
        TypeError: The settings name a model, or the tokenizer is none.
        UnsupportedError: An event log without the weights is asked for.
        CheckpointError: The weights do not fit the model.
    """
    if "model" in settings:
        raise TypeError(
            "from_parameters takes no model: the config and the parameters are the model"
        )
    path = tokenizer if isinstance(tokenizer, str | os.PathLike) else None
    tokenizer_of_model = None if path else tokenizer
    if (
        tokenizer_of_model is not None
        and getattr(tokenizer_of_model, "backend_tokenizer", None) is None
    ):
        raise TypeError(
            "tokenizer must be a tokenizer of transformers with a backend_tokenizer, or a "
            f"directory; got {tokenizer_of_model!r:.80}"
        )
    config = engine_config("parameters", LLMSettings(**settings, tokenizer=path))
    if config.event_log is not None and not config.event_log_weights:
        raise UnsupportedError(
            "event_log needs event_log_weights=True with from_parameters: without the weights next "
            "to the log a replay could not find them"
        )
    files = in_memory.open_parameters(model, parameters, config.quantization, may_alias=may_alias)
    return config, open_engine(config, hooks, files=files, tokenizer=tokenizer_of_model)


def _prefix_tier(directory: Path, config: EngineConfig, built: Built) -> PrefixTier:
    """Returns the listener that stores prefixes in files.

    Raises:
        UnsupportedError: The model has several cache groups.
        ConfigError: The directory cannot be used.
    """
    if len(built.spec.groups) > 1:
        raise UnsupportedError(
            f"prefix_cache_directory is not supported for {len(built.spec.groups)} cache "
            "groups: their blocks are kept apart"
        )
    about = engine_header(config, built.engine, built.spec)
    names = ("versions", "device", "weights_hash")
    spec = built.spec
    layout = spec.layout, spec.groups, spec.attention, spec.sharding
    key = repr(
        [[about[name] for name in names], [about["config"][name] for name in _OF_BLOCKS], layout]
    )
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    # The file of swapped blocks is in the same directory and counts to its bytes.
    swapped_bytes = spec.memory.host_pool_bytes if spec.memory.swaps_to_file else 0
    files = PrefixFiles(directory, digest, config.prefix_cache_disk_bytes - swapped_bytes)
    engine = built.engine
    assert engine.prefix_cache is not None, "there is a prefix cache"
    engine.count_prefix_files(files.counts)
    return PrefixTier(engine.prefix_cache, engine.runner, files)
