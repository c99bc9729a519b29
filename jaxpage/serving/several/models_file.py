"""Reads the file of `serve --models`: the models, and the memory that they share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxpage.errors import ConfigError, JaxpageError
from jaxpage.serving.settings.server_config import MODEL_NAME, ServerConfig
from jaxpage.serving.wire.keep_alive import keep_alive_seconds
from jaxpage.settings.checked_settings import (
    ByteSize,
    InvalidSettings,
    Settings,
    UnsupportedSettings,
    setting,
)
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.yaml_file import Located, load_mapping

# The settings of the server that a model of the file may have.
OF_A_MODEL = ("lora_modules", "tool_parser", "reasoning_parser", "rerank_method")
DEFAULT_KEEP_ALIVE = "5m"


def _duration(value: str | float) -> str | float:
    keep_alive_seconds(value)
    return value


_KeepAlive = Annotated[str | float, AfterValidator(_duration)]
_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class FileFields(Settings):
    """Holds the fields at the top of the file."""

    models: Annotated[list[Any], Field(min_length=1, max_length=256)]
    memory: ByteSize | None = setting(None, "bytes of a device for all models together")
    keep_alive: _KeepAlive = setting(DEFAULT_KEEP_ALIVE, "keep_alive of models without their own")


class ModelFields(Settings):
    """Holds the fields of a model in the file."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=rf"^{MODEL_NAME}$")]
    model: _Text
    memory: ByteSize | None = setting(None, "bytes of a device for this model")
    keep_alive: _KeepAlive | None = setting(None, "time without requests until it is unloaded")
    settings: dict[str, Any] = setting({}, "settings of the engine, and of OF_A_MODEL")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Holds a model that can be loaded.

    Attributes:
        name: The name in requests.
        engine: The settings of its engine.
        server: The settings of the server, with those of the model.
        memory_bytes: The bytes that it takes of a device; None takes those of all models.
        keep_alive_seconds: The time without requests until it is unloaded. If it is infinite, the
            model is never unloaded, not even to make room.
    """

    name: str
    engine: EngineConfig
    server: ServerConfig
    memory_bytes: int | None
    keep_alive_seconds: float

    @property
    def stays(self) -> bool:
        """Returns whether the model, once it is loaded, is never unloaded."""
        return math.isinf(self.keep_alive_seconds)

    @property
    def is_missing(self) -> bool:
        """Returns whether the model is a path, and nothing is there."""
        path = Path(self.engine.model).expanduser()
        # Without such a beginning it may also be the name of a model on the hub.
        is_path = path.is_absolute() or self.engine.model.startswith((".", "~"))
        return is_path and not path.exists()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Returns the names of the LoRA adapters, which requests may name instead of the model."""
        return tuple(module.partition("=")[0] for module in self.server.lora_modules or ())


def read_models_file(path: Path, server: ServerConfig) -> tuple[tuple[ModelEntry, ...], int | None]:
    """Returns the models of a file, and the bytes that they may take together, if it says so.

    Args:
        path: The file.
        server: The settings of the server, which all models have.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; the message has all
            problems, each in a line.
    """
    file = load_mapping(path)
    fields = _fields(FileFields, {name: item.value for name, item in file.items()}, path, file)
    entries: list[ModelEntry] = []
    problems: list[str] = []
    for number, value in enumerate(fields.models, start=1):
        place = f"{file['models'].place}: model {number}"
        try:
            entries.append(_entry(value, place, fields.keep_alive, server))
        except JaxpageError as error:
            problems.append(str(error))
    names = Counter(name for entry in entries for name in (entry.name, *entry.adapters))
    problems += [
        f"{file['models'].place}: the name {name!r} is given {count} times"
        for name, count in names.items()
        if count > 1
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(entries), fields.memory


def models_by_name(entries: Mapping[str, ModelEntry]) -> dict[str, str]:
    """Returns the names of models by the names that requests call them, those of adapters too."""
    adapters = {adapter: name for name, entry in entries.items() for adapter in entry.adapters}
    return {**adapters, **{name: name for name in entries}}


def _entry(value: Any, place: str, keep_alive: str | float, server: ServerConfig) -> ModelEntry:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: must be a mapping with name and model")
    fields = _fields(ModelFields, value, place)
    place = f"{place} ({fields.name})"
    engine_settings = dict(fields.settings)
    if "model" in engine_settings:
        raise ConfigError(f"{place}: model: belongs next to name, not into settings")
    of_server = {name: engine_settings.pop(name) for name in OF_A_MODEL if name in engine_settings}
    engine = _fields(EngineConfig, {"model": fields.model, **engine_settings}, place)
    shared = {
        name: setting
        for name, setting in server.explicit_settings().items()
        if name != "models_file"
    }
    server_settings = _fields(
        ServerConfig, {**shared, "served_model_name": (fields.name,), **of_server}, place
    )
    if server_settings.lora_modules and not engine.enable_lora:
        raise ConfigError(f"{place}: lora_modules: needs enable_lora")
    seconds = keep_alive_seconds(keep_alive if fields.keep_alive is None else fields.keep_alive)
    return ModelEntry(
        name=fields.name,
        engine=engine,
        server=server_settings,
        memory_bytes=fields.memory,
        keep_alive_seconds=seconds,
    )


def _fields(
    kind: type[Any], values: dict[str, Any], place: Any, file: dict[str, Located] | None = None
) -> Any:
    """Returns settings of a kind; in an error each problem has its place."""
    try:
        return kind(**values)
    except (InvalidSettings, UnsupportedSettings) as error:
        places = {name: item.place for name, item in (file or {}).items()}
        raise ConfigError(
            "\n".join(
                f"{places.get(name.partition('.')[0], place)}: {name}: {text}"
                for name, text in error.problems
            )
        ) from None


def check_sizes(entries: Sequence[ModelEntry], memory_bytes: int, text: str) -> dict[str, int]:
    """Returns the bytes of each model by its name.

    Args:
        entries: The models.
        memory_bytes: The bytes that they may take together.
        text: The origin of that number, for messages.

    Raises:
        ConfigError: A model does not fit, or those that are never unloaded leave too little for
            another one.
    """
    problems = list(_misfits(entries, memory_bytes, text))
    if problems:
        raise ConfigError("\n".join(problems))
    return {entry.name: _size(entry, memory_bytes) for entry in entries}


def _misfits(entries: Sequence[ModelEntry], memory_bytes: int, text: str) -> Iterable[str]:
    staying = [entry for entry in entries if entry.stays]
    for entry in entries:
        others = [other for other in staying if other is not entry]
        taken = sum(_size(other, memory_bytes) for other in others)
        needed = _size(entry, memory_bytes)
        if needed > memory_bytes:
            yield f"model {entry.name!r} takes {mib(needed)}, and {text} is {mib(memory_bytes)}"
        elif needed + taken > memory_bytes:
            names = ", ".join(
                f"{neighbour.name!r} ({mib(_size(neighbour, memory_bytes))})"
                for neighbour in others
            )
            yield (
                f"model {entry.name!r} ({mib(needed)}) does not fit next to {names}, never "
                "unloaded "
                f"because of keep_alive: -1: {text} is {mib(memory_bytes)}"
            )


def _size(entry: ModelEntry, memory_bytes: int) -> int:
    return memory_bytes if entry.memory_bytes is None else entry.memory_bytes


def mib(num_bytes: int) -> str:
    """Returns an amount of memory as text."""
    return f"{num_bytes / 2**20:,.0f} MiB"
