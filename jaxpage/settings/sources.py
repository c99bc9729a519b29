"""Reads settings from the command line, the environment (`JAXPAGE_*`) and YAML files.

The command line wins over the environment, which wins over the file. Every value keeps its origin.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.settings.checked_settings import (
    InvalidSettings,
    Problem,
    Settings,
    UnsupportedSettings,
    nearest_name,
)
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.settings.yaml_file import Located, load_mapping, parse_scalar

PREFIX = "JAXPAGE_"
OTHER_VARIABLES = frozenset(  # no settings: other modules read them
    {"JAXPAGE_DEBUG", "JAXPAGE_CACHE_DIR", "JAXPAGE_API_KEY", "JAXPAGE_HOSTS_SECRET"}
)
SECTIONS = ("server",)  # keys of a file whose values are the settings of something else
BUILT_IN = "built-in"
_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://")

Kind = TypeVar("Kind", bound=Settings)


@dataclass(frozen=True)
class Resolved(Generic[Kind]):
    """Holds a checked configuration with the origin of every setting."""

    config: Kind
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """Returns the effective settings as YAML, each with its origin as a comment."""
        values = {
            name: _as_yaml(getattr(self.config, name)) for name in type(self.config).model_fields
        }
        width = min(60, max(len(f"{name}: {value}") for name, value in values.items()))
        return [
            f"{f'{name}: {value}':<{width}}  # {self.origins[name]}"
            for name, value in values.items()
        ]


ResolvedConfig = Resolved[EngineConfig]


def resolve_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides_origin: str = "argument",
) -> ResolvedConfig:
    """Returns the engine's configuration from all sources.

    The file's other sections, such as `server`, are not read here.

    Args:
        path: A YAML file with the fields of `EngineConfig`, or None.
        overrides: The settings given by hand, on the command line or as arguments of a call. They
            win over all others.
        environment: The variables; those of the process by default.
        overrides_origin: The name for the origin of `overrides`.

    Raises:
        ConfigError: A source cannot be read or a setting is wrong; the message has the origin of
            each.
        UnsupportedError: This version understands a setting but cannot honour it.
    """
    values = {name: item for name, item in read_file(path).items() if name not in SECTIONS}
    return resolve_settings(EngineConfig, values, overrides, environment, overrides_origin)


def read_file(path: str | os.PathLike[str] | None) -> dict[str, Located]:
    """Returns the values in a configuration file, each with its place in the file.

    The value of a section is such a mapping too. The mapping is empty if the path is None.
    """
    return {} if path is None else load_mapping(Path(path), SECTIONS)


def resolve_settings(
    kind: type[Kind],
    file: Mapping[str, Located],
    overrides: Mapping[str, Any] | None,
    environment: Mapping[str, str] | None,
    overrides_origin: str,
) -> Resolved[Kind]:
    """Returns one configuration from a file's settings, the environment and `overrides`.

    Raises:
        ConfigError: A variable cannot be read, or a setting is wrong.
        UnsupportedError: This version understands a setting but cannot honour it.
    """
    from_environment, wrong = _from_environment(
        kind, os.environ if environment is None else environment
    )
    merged = {
        **{name: (item.value, item.place) for name, item in file.items()},
        **from_environment,
        **{name: (value, overrides_origin) for name, value in (overrides or {}).items()},
    }
    origins = {name: origin for name, (_, origin) in merged.items()}
    try:
        config = kind(**{name: value for name, (value, _) in merged.items()})
    except InvalidSettings as error:
        raise ConfigError("\n".join([*wrong, *_locate(error.problems, origins)])) from None
    except UnsupportedSettings as error:
        # The message also has the variables that could not be read, and these are no unsupported
        # settings.
        refusal = ConfigError if wrong else UnsupportedError
        raise refusal("\n".join([*wrong, *_locate(error.problems, origins)])) from None
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Resolved(config, {name: origins.get(name, BUILT_IN) for name in kind.model_fields})


def _from_environment(
    kind: type[Settings], environment: Mapping[str, str]
) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Returns the settings in the environment with their origins, and the problems with variables.

    Other variables with our prefix are ignored, unless one is almost a setting's name. Kubernetes
    makes variables such as `JAXPAGE_SERVICE_HOST` and `JAXPAGE_PORT=tcp://...` for a service called
    jaxpage.
    """
    settings: dict[str, tuple[Any, str]] = {}
    wrong = []
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        text = environment[variable]
        if _OF_A_SERVICE.match(text):
            continue
        if name in kind.model_fields:
            try:
                settings[name] = (text if name in kind.plain_text else parse_scalar(text), variable)
            except ConfigError as error:
                wrong.append(f"{variable}: {error}")
        elif nearest_name(name, kind.model_fields, cutoff=0.8):
            wrong.append(f"{variable}: {kind.unknown(name)[1]}")
    return settings, wrong


def _locate(problems: Iterable[Problem], origins: Mapping[str, str]) -> list[str]:
    """Returns the problems as lines, each with the origin of its setting if it was given."""
    located = ((origins.get(name.partition(".")[0]), name, text) for name, text in problems)
    return [
        f"{origin}: {name}: {text}" if origin else f"{name}: {text}"
        for origin, name, text in located
    ]


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, SpeculativeConfig):
        return json.dumps(value.model_dump())
    if isinstance(value, tuple):
        return json.dumps(value)
    text = str(value)
    plain = not isinstance(value, str) or (
        text.replace("-", "").replace("_", "").isalnum() and parse_scalar(text) == value
    )
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
