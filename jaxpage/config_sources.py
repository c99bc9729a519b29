"""Where settings come from: command line, then environment (`JAXPAGE_*`), then YAML, then built-in; every value knows its origin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpage.config import (
    EngineConfig,
    InvalidSettings,
    Problem,
    UnsupportedSettings,
    nearest_name,
    unknown_setting,
)
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.speculative_config import SpeculativeConfig
from jaxpage.yaml_loader import load_mapping, parse_scalar

PREFIX = "JAXPAGE_"
OTHER_VARIABLES = frozenset({"JAXPAGE_DEBUG", "JAXPAGE_CACHE_DIR"})  # read elsewhere; no settings of an engine
BUILT_IN = "built-in"
# Taken as they are: a revision may look like a number.
_TEXT_SETTINGS = frozenset({"model", "tokenizer", "revision", "event_log"})


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked configuration and, for every setting, where its value came from."""

    config: EngineConfig
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """The effective settings as YAML, each with its origin as a comment."""
        values = {name: _as_yaml(getattr(self.config, name)) for name in EngineConfig.model_fields}
        width = min(60, max(len(f"{name}: {value}") for name, value in values.items()))
        return [f"{f'{name}: {value}':<{width}}  # {self.origins[name]}" for name, value in values.items()]


def resolve_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides_origin: str = "argument",
) -> ResolvedConfig:
    """One configuration from all sources.

    Args:
        path: a YAML file with the fields of `EngineConfig`, or None.
        overrides: what was given by hand, on the command line or as arguments of a call; wins over everything.
        environment: the environment's variables; the process's own by default.
        overrides_origin: how the origin of `overrides` is called.

    Raises:
        ConfigError: a source cannot be read or a setting is wrong; the text has the origin of each.
        UnsupportedError: a setting is understood but not honoured by this version.
    """
    layers: list[Mapping[str, tuple[Any, str]]] = []
    if path is not None:
        layers.append({name: (item.value, item.place) for name, item in load_mapping(Path(path)).items()})
    layers.append(_from_environment(os.environ if environment is None else environment))
    layers.append({name: (value, overrides_origin) for name, value in (overrides or {}).items()})
    merged = {name: item for layer in layers for name, item in layer.items()}
    origins = {name: origin for name, (_, origin) in merged.items()}
    try:
        config = EngineConfig(**{name: value for name, (value, _) in merged.items()})
    except InvalidSettings as error:
        raise ConfigError(_located(error.problems, origins)) from None
    except UnsupportedSettings as error:
        raise UnsupportedError(_located(error.problems, origins)) from None
    return ResolvedConfig(config, {name: origins.get(name, BUILT_IN) for name in EngineConfig.model_fields})


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Settings among the variables. Others that begin like ours are left alone unless one is nearly a setting's name:
    orchestrators make variables such as `JAXPAGE_SERVICE_HOST` for a service called jaxpage."""
    found: dict[str, tuple[Any, str]] = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name, text = variable.removeprefix(PREFIX).lower(), environment[variable]
        if name in EngineConfig.model_fields:
            found[name] = (text if name in _TEXT_SETTINGS else _parsed(variable, text), variable)
        elif nearest_name(name, EngineConfig.model_fields, cutoff=0.8):
            raise ConfigError(f"{variable}: {unknown_setting(name)[1]}")
    return found


def _parsed(variable: str, text: str) -> Any:
    try:
        return parse_scalar(text)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


def _located(problems: Iterable[Problem], origins: Mapping[str, str]) -> str:
    """Settings of settings come from where the whole does."""
    return "\n".join(f"{origins.get(name.partition('.')[0], BUILT_IN)}: {name}: {text}" for name, text in problems)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, SpeculativeConfig):
        return json.dumps(value.model_dump())
    text = str(value)
    plain = not isinstance(value, str) or (
        text.replace("-", "").replace("_", "").isalnum() and parse_scalar(text) == value
    )
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
