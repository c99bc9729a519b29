"""`ServerConfig`: every setting of the server beside its engine's. In a file they stand below `server:`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from jaxpage.errors import ConfigError, JaxpageError, UnsupportedError
from jaxpage.settings.base import ByteSize, Problem, Settings
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sources import Resolved, read_file, resolve_settings

API_KEY_VARIABLE = "JAXPAGE_API_KEY"
AUTO = "auto"
MAX_KEY_FILE_BYTES = 1 << 16

_Text = Annotated[str, Field(min_length=1, max_length=4096)]
# Goes into paths (/v1/models/NAME), metric labels and every answer.
MODEL_NAME = r"[^\x00-\x20\x7f]+"
_ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=rf"^{MODEL_NAME}$")]
_LORA_MODULE = re.compile(r"[^\x00-\x20\x7f=]{1,256}=[^\x00]+")
_ADDRESS = re.compile(r"[^\x00-\x20/]+:([0-9]{1,5})")
_Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _endpoint(value: str) -> str:
    address = _ADDRESS.fullmatch(value.removeprefix("tcp://"))
    if not value.startswith("tcp://") or address is None or int(address[1]) >= 2**16:
        raise ValueError("must be tcp://HOST:PORT")
    return value


def _coordinator(value: str) -> str:
    address = _ADDRESS.fullmatch(value)
    if value != AUTO and (address is None or not 0 < int(address[1]) < 2**16 - 1):
        raise ValueError(f"must be HOST:PORT with a port from 1 to 65534 (PORT + 1 is used too), or {AUTO}")
    return value


def _lora_module(value: str) -> str:
    if not _LORA_MODULE.fullmatch(value):
        raise ValueError("must be NAME=DIRECTORY, with a name of up to 256 characters and no spaces")
    return value


_LoRAModule = Annotated[str, Field(max_length=4096), AfterValidator(_lora_module)]
_Endpoint = Annotated[str, Field(max_length=256), AfterValidator(_endpoint)]


def _as_tuple(value: Any) -> Any:
    """A single name, or a list from a file."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class ServerConfig(Settings):
    """The settings of the server."""

    plain_text: ClassVar[frozenset[str]] = frozenset(
        {"host", "api_key_file", "lora_directory", "weights_directory", "incident_directory", "profile_directory"}
        | {"coordinator", "hosts_secret_file"}
    )

    host: _Text = "127.0.0.1"  # address that it listens on; by default only this machine can connect
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000  # 0: one that is free
    # What requests call the model, the first in answers; None: the name of `model`.
    served_model_name: Annotated[tuple[_ModelName, ...], Field(max_length=64), BeforeValidator(_as_tuple)] | None = None
    # LoRA adapters that requests may name as model, each NAME=PATH; with the engine's enable_lora.
    lora_modules: Annotated[tuple[_LoRAModule, ...], Field(max_length=1024), BeforeValidator(_as_tuple)] | None = None
    # Adapters below this directory may be loaded and unloaded by requests, of anybody who may send requests; None: by nobody.
    lora_directory: _Text | None = None
    # Weights below this directory may be taken by requests for all others, of anybody who may send requests; None: by nobody.
    weights_directory: _Text | None = None
    api_key_file: _Text | None = None  # a key per line; see `read_api_keys`
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 256  # beyond those that run; more are answered 429
    request_timeout_seconds: _Seconds | None = 600.0  # from arrival to the last token; None: as long as it takes
    shutdown_timeout_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0  # for what runs to finish; 0: end it now
    max_body_bytes: Annotated[ByteSize, Field(ge=1024, le=2**30)] = 4 * 2**20
    body_timeout_seconds: _Seconds = 30.0  # from a request's headers to the end of its body
    slow_reader_seconds: _Seconds = 30.0  # that a client may leave a stream unread
    max_connections: Annotated[int, Field(ge=1, le=65_536)] = 1024
    strict_requests: bool = False  # an unknown field is an error, instead of named in a header
    tool_parser: Literal["hermes", "llama3_json"] | None = None  # the form in which the model writes its tool calls
    reasoning_parser: Literal["think"] | None = None  # the text in <think> is returned apart from the answer
    ui: bool = False  # the page: playground and inspector
    ui_show_prompts: bool = False  # with texts and token ids of everybody's requests
    log_requests: bool = False  # with their texts
    log_json: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Publishes which prefixes are cached, with their token ids, to whoever can connect: tcp://127.0.0.1:PORT; None: it does not.
    kv_events: _Endpoint | None = None
    kv_events_replay: _Endpoint | None = None  # where a subscriber asks for what it missed
    kv_events_topic: Annotated[str, Field(max_length=256)] = ""
    incident_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # kept for /debug/incident; None: none
    incident_directory: _Text = "."  # where they are written, on request and after a failed step
    incident_token_ids: bool = False  # with prompts and outputs, as token ids: only then they can be run again
    num_hosts: Annotated[int, Field(ge=1, le=1024)] = (
        1  # that share tensor_parallel_size devices, each with a process of its own
    )
    host_rank: Annotated[int, Field(ge=0, lt=1024)] = 0  # of this one; 0 is the server
    # HOST:PORT of rank 0, an address of the network between the hosts; the port behind it is used too. auto: see `hosts_of_job`.
    coordinator: Annotated[str, Field(max_length=256), AfterValidator(_coordinator)] | None = None
    hosts_secret_file: _Text | None = None  # see `read_secret`
    host_timeout_seconds: Annotated[float, Field(ge=1, le=86_400)] = (
        60.0  # that a host may be silent; a step must be shorter
    )
    profile_directory: _Text | None = None  # where traces of the JAX profiler go; None: there are none

    def contradictions(self) -> Iterable[Problem]:
        if self.served_model_name == ():  # not a field's bound: that of a tuple counts what is left without wrong names
            yield "served_model_name", "must have a name, or be left out"
        if self.served_model_name and len(set(self.served_model_name)) < len(self.served_model_name):
            yield "served_model_name", f"a name is given twice: {', '.join(self.served_model_name)}"
        if self.ui_show_prompts and not self.ui:
            yield "ui_show_prompts", "cannot be true while ui is false: prompts are shown only on the page"
        if self.log_requests and self.log_level in ("warning", "error"):
            yield "log_requests", f"cannot be true while log_level is {self.log_level!r}: requests are logged at info"

        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and self.kv_events is None:
                yield name, "needs kv_events"
        if self.coordinator == AUTO and (self.num_hosts, self.host_rank) != (1, 0):
            yield "coordinator", f"{AUTO!r} takes num_hosts and host_rank from the job: leave them out"
        if self.host_rank >= self.num_hosts:
            yield "host_rank", f"is {self.host_rank}, and num_hosts is {self.num_hosts}: ranks begin with 0"
        if self.num_hosts > 1 and self.coordinator is None:
            yield "coordinator", f"is needed with num_hosts = {self.num_hosts}: HOST:PORT of rank 0"
        if self.incident_token_ids and self.incident_steps is None:
            yield "incident_token_ids", "cannot be true without incident_steps"

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def resolve_both(
    path: str | os.PathLike[str] | None,
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    overrides_origin: str = "argument",
) -> tuple[Resolved[EngineConfig], Resolved[ServerConfig]]:
    """Both configurations from one file, the environment, and what was given by hand for each. Raises as `resolve_config` does."""
    file = read_file(path)
    below = file.pop("server").value if "server" in file else {}
    problems: list[str] = []
    for settings, own, other, there in (
        (file, EngineConfig, ServerConfig, "the server's: write it below 'server:'"),
        (below, ServerConfig, EngineConfig, "the engine's: write it at the top level"),
    ):
        for name in [name for name in settings if name in other.model_fields and name not in own.model_fields]:
            problems.append(f"{settings.pop(name).place}: {name}: this setting is {there}")
    errors: list[JaxpageError] = [ConfigError("\n".join(problems))] if problems else []
    resolved: list[Any] = []
    for kind, given, by_hand in ((EngineConfig, file, engine), (ServerConfig, below, server)):
        try:
            resolved.append(resolve_settings(kind, given, by_hand, environment, overrides_origin))
        except (ConfigError, UnsupportedError) as error:
            errors.append(error)
    if not errors:
        errors += _contradictions(resolved[0].config, resolved[1].config)
    if errors:  # all of them at once
        refusal = UnsupportedError if all(isinstance(error, UnsupportedError) for error in errors) else ConfigError
        raise refusal("\n".join(map(str, errors)))
    return resolved[0], resolved[1]


def _contradictions(engine: EngineConfig, server: ServerConfig) -> list[JaxpageError]:
    given = [name for name in ("lora_modules", "lora_directory") if getattr(server, name) is not None]
    errors: list[JaxpageError] = [ConfigError(f"{name}: needs enable_lora") for name in given if not engine.enable_lora]
    if server.kv_events is not None and not engine.enable_prefix_caching:
        errors.append(ConfigError("kv_events: needs enable_prefix_caching"))
    if server.weights_directory is not None and not Path(server.weights_directory).is_dir():
        errors.append(ConfigError(f"weights_directory: {server.weights_directory!r} is not a directory"))
    if server.weights_directory is not None and engine.event_log is not None:
        errors.append(
            UnsupportedError("weights_directory is not supported with event_log: a log has one set of weights")
        )
    return errors + (of_several_hosts(engine, server) if server.num_hosts > 1 else [])


def of_several_hosts(engine: EngineConfig, server: ServerConfig) -> list[JaxpageError]:
    """What several hosts cannot do."""
    num_hosts, size = server.num_hosts, engine.tensor_parallel_size
    errors: list[JaxpageError] = []
    if size % num_hosts:
        errors.append(
            ConfigError(f"num_hosts: {num_hosts} hosts need a tensor_parallel_size that they can share, not {size}")
        )
    given: dict[str, Any] = {
        "prefix_cache_directory": engine.prefix_cache_directory,
        "weights_directory": server.weights_directory,
        "lora_directory": server.lora_directory,
    }
    errors += [
        UnsupportedError(f"{name} is not supported with num_hosts = {num_hosts}")
        for name, value in given.items()
        if value is not None
    ]
    of_leader = {"event_log": engine.event_log, "incident_steps": server.incident_steps}
    errors += [
        UnsupportedError(
            f"{name} is not supported with host_rank = {server.host_rank}: rank 0 writes it, give it there"
        )
        for name, value in of_leader.items()
        if value is not None and server.host_rank
    ]
    return errors


def read_api_keys(config: ServerConfig, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The keys that let a request in: those of `api_key_file`, a line each, and of $JAXPAGE_API_KEY, with commas between them.

    None at all means that no key is asked for; a source that is given and has none is an error, not an open door.

    Raises:
        ConfigError: a source cannot be read, is empty, or has a key that no header can carry.
    """
    text = (os.environ if environment is None else environment).get(API_KEY_VARIABLE)
    keys = [] if text is None else _keys(API_KEY_VARIABLE, text.split(","))
    if config.api_key_file is not None:
        lines = _read_key_file(Path(config.api_key_file)).splitlines()
        keys += _keys(config.api_key_file, [line for line in lines if not line.lstrip().startswith("#")])
    return tuple(dict.fromkeys(keys))


def _keys(source: str, texts: Iterable[str]) -> list[str]:
    keys = [key for text in texts if (key := text.strip())]
    if not keys:
        raise ConfigError(f"{source} is given, but has no key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError(
            f"{source}: a key must be printable ASCII without spaces"
        )  # the error does not show which one: it is a secret
    return keys


def _read_key_file(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"api_key_file: there is no file {path}")
        if path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"api_key_file: {path} has more than {MAX_KEY_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file: {path} is not a text file (UTF-8)") from None
