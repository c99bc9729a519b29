"""Resolves the settings of the server together with those of the engine, from all sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.errors import ConfigError, JaxpageError, UnsupportedError
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sources import Resolved, read_file, resolve_settings


def resolve_both(
    path: str | os.PathLike[str] | None,
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    overrides_origin: str = "argument",
) -> tuple[Resolved[EngineConfig], Resolved[ServerConfig]]:
    """Resolves both configurations from one file, the environment, and explicit settings.

    Args:
        path: The YAML file, or None.
        engine: Explicit settings of the engine, which win over the file and the environment.
        server: Explicit settings of the server, which win likewise.
        environment: The environment variables; None for those of the process.
        overrides_origin: The words that name the origin of explicit settings.

    Raises:
        ConfigError: A setting is unknown, wrong or below the wrong heading. The message has the
            problems of both configurations.
        UnsupportedError: Every problem is a setting that this version does not support.
    """
    file = read_file(path)
    below = file.pop("server").value if "server" in file else {}
    problems: list[str] = []
    for settings, names, other, location in (
        (file, EngineConfig, ServerConfig, "the server's: write it below 'server:'"),
        (below, ServerConfig, EngineConfig, "the engine's: write it at the top level"),
    ):
        for name in [
            name
            for name in settings
            if name in other.model_fields and name not in names.model_fields
        ]:
            # It is taken out, or `resolve_settings` would report it again, as unknown.
            problems.append(f"{settings.pop(name).place}: {name}: this setting is {location}")
    errors: list[JaxpageError] = [ConfigError("\n".join(problems))] if problems else []
    resolved: list[Any] = []
    for kind, values, by_hand in ((EngineConfig, file, engine), (ServerConfig, below, server)):
        try:
            resolved.append(resolve_settings(kind, values, by_hand, environment, overrides_origin))
        except (ConfigError, UnsupportedError) as error:
            errors.append(error)
    # Both configurations must be whole for a comparison.
    if not errors:
        errors += _contradictions(resolved[0].config, resolved[1].config)
    if errors:
        refusal = (
            UnsupportedError
            if all(isinstance(error, UnsupportedError) for error in errors)
            else ConfigError
        )
        raise refusal("\n".join(map(str, errors)))
    return resolved[0], resolved[1]


def _contradictions(engine: EngineConfig, server: ServerConfig) -> list[JaxpageError]:
    explicit = [
        name for name in ("lora_modules", "lora_directory") if getattr(server, name) is not None
    ]
    errors: list[JaxpageError] = [
        ConfigError(f"{name}: needs enable_lora") for name in explicit if not engine.enable_lora
    ]
    if server.kv_events is not None and not engine.enable_prefix_caching:
        errors.append(ConfigError("kv_events: needs enable_prefix_caching"))
    if server.weights_directory is not None and not Path(server.weights_directory).is_dir():
        errors.append(
            ConfigError(f"weights_directory: {server.weights_directory!r} is not a directory")
        )
    return errors + (of_several_hosts(engine, server) if server.num_hosts > 1 else [])


def of_several_hosts(engine: EngineConfig, server: ServerConfig) -> list[JaxpageError]:
    """Returns an error for each setting that cannot be used with several hosts."""
    num_hosts = server.num_hosts
    size = engine.tensor_parallel_size
    errors: list[JaxpageError] = []
    if size % num_hosts:
        errors.append(
            ConfigError(
                f"num_hosts: {num_hosts} hosts need a tensor_parallel_size that they can share, "
                f"not {size}"
            )
        )
    explicit: dict[str, Any] = {
        "prefix_cache_directory": engine.prefix_cache_directory,
        "lora_directory": server.lora_directory,
        "event_log with weights_directory": engine.event_log and server.weights_directory,
        # False is its default.
        "enable_prompt_embeds": engine.enable_prompt_embeds or None,
    }
    errors += [
        UnsupportedError(f"{name} is not supported with num_hosts = {num_hosts}")
        for name, value in explicit.items()
        if value is not None
    ]
    of_leader = {"event_log": engine.event_log, "incident_steps": server.incident_steps}
    errors += [
        UnsupportedError(
            f"{name} is not supported with host_rank = {server.host_rank}: rank 0 writes it, give "
            "it there"
        )
        for name, value in of_leader.items()
        if value is not None and server.host_rank
    ]
    return errors
