"""Declares the settings of the server.

In a configuration file they are below `server:`; see resolving.py.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from jaxpage.serving.http.origins import check_origin
from jaxpage.settings.checked_settings import ByteSize, Problem, Settings, setting

AUTO = "auto"

_Text = Annotated[str, Field(min_length=1, max_length=4096)]
# The name goes into paths (/v1/models/NAME), metric labels and every answer.
MODEL_NAME = r"[^\x00-\x20\x7f]+"
_ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=rf"^{MODEL_NAME}$")]
_LORA_MODULE = re.compile(r"[^\x00-\x20\x7f=]{1,256}=[^\x00]+")
_ADDRESS = re.compile(r"[^\x00-\x20/]+:([0-9]{1,5})")
_TRACES_URL = re.compile(r"https?://[^\x00-\x20\x7f/@?#]+/[^\x00-\x20\x7f?#]+")
_ROOT_PATH = re.compile(r"(/[^\x00-\x20\x7f/?#%]+)+")
_Seconds = Annotated[float, Field(gt=0, le=86_400)]


# Settings of a server of one model.
OF_ONE_MODEL = (
    "served_model_name",
    "lora_modules",
    "lora_directory",
    "weights_directory",
    "tool_parser",
    "reasoning_parser",
    "rerank_method",
    "kv_events",
    "incident_steps",
    "num_hosts",
    "coordinator",
    "profile_directory",
)


def _endpoint(value: str) -> str:
    address = _ADDRESS.fullmatch(value.removeprefix("tcp://"))
    if not value.startswith("tcp://") or address is None or int(address[1]) >= 2**16:
        raise ValueError("must be tcp://HOST:PORT")
    return value


def _traces_url(value: str) -> str:
    if not _TRACES_URL.fullmatch(value):
        raise ValueError(
            "must be the URL of OTLP over HTTP with its path, as http://localhost:4318/v1/traces "
            "(gRPC, often at port 4317, is not supported; credentials: OTEL_EXPORTER_OTLP_HEADERS)"
        )
    return value


def _coordinator(value: str) -> str:
    address = _ADDRESS.fullmatch(value)
    if value != AUTO and (address is None or not 0 < int(address[1]) < 2**16 - 1):
        raise ValueError(
            f"must be HOST:PORT with a port from 1 to 65534 (PORT + 1 is used too), or {AUTO}"
        )
    return value


def _root_path(value: str) -> str:
    if value and not _ROOT_PATH.fullmatch(value):
        raise ValueError("must begin with / and not end with it, such as /llm")
    return value


def _lora_module(value: str) -> str:
    if not _LORA_MODULE.fullmatch(value):
        raise ValueError(
            "must be NAME=DIRECTORY, with a name of up to 256 characters and no spaces"
        )
    return value


_LoRAModule = Annotated[str, Field(max_length=4096), AfterValidator(_lora_module)]
_Origin = Annotated[str, Field(max_length=300), AfterValidator(check_origin)]
_Endpoint = Annotated[str, Field(max_length=256), AfterValidator(_endpoint)]
_TracesURL = Annotated[str, Field(max_length=4096), AfterValidator(_traces_url)]


def _as_tuple(value: Any) -> Any:
    """Returns the names as a tuple, given one name or a list from a file."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


_ModelNames = Annotated[tuple[_ModelName, ...], Field(max_length=64), BeforeValidator(_as_tuple)]
_LoRAModules = Annotated[
    tuple[_LoRAModule, ...], Field(max_length=1024), BeforeValidator(_as_tuple)
]
_Origins = Annotated[tuple[_Origin, ...], Field(max_length=256), BeforeValidator(_as_tuple)]


# One flat record of more than 20 fields, because each is also a flag, a key of YAML and a variable,
# and users know it by that name alone.
class ServerConfig(Settings):
    """Holds the settings of the server, each declared here and nowhere else; see `setting`."""

    plain_text: ClassVar[frozenset[str]] = frozenset(
        {
            "host",
            "uds",
            "root_path",
            "api_key_file",
            "lora_directory",
            "weights_directory",
            "incident_directory",
            "profile_directory",
            "models_file",
            "batch_directory",
            "response_store_directory",
        }
        | {"coordinator", "hosts_secret_file"}
    )

    host: _Text = setting(
        "127.0.0.1",
        "address to listen on",
        shown="127.0.0.1 (only this machine)",
    )
    port: Annotated[int, Field(ge=0, lt=2**16)] = setting(8000, "TCP port; 0: a free one")
    uds: _Text | None = setting(
        None,
        "Unix socket to listen on, instead of host and port",
        shown="none",
        metavar="PATH",
    )
    root_path: Annotated[str, Field(max_length=1024), AfterValidator(_root_path)] = setting(
        "",
        "prefix of all paths for clients of a proxy, such as /llm; the proxy may strip it",
        shown="none",
        metavar="PATH",
    )
    models_file: _Text | None = setting(
        None,
        "YAML file of several models, each loaded when a request names it",
        metavar="FILE",
        alias="--models",
    )
    served_model_name: _ModelNames | None = setting(
        None,
        "names of the model in requests, the first in answers",
        shown="MODEL, of a path its last part",
    )
    lora_modules: _LoRAModules | None = setting(
        None,
        "LoRA adapters that requests may name as model; with --enable-lora",
        metavar="NAME=PATH",
    )
    # With either of the next two settings everybody who may send requests can load files.
    lora_directory: _Text | None = setting(
        None,
        "LoRA adapters below it may be loaded by POST /v1/load_lora_adapter",
        shown="none",
        metavar="DIRECTORY",
    )
    weights_directory: _Text | None = setting(
        None,
        "weights below it may replace the model's by POST /v1/update_weights",
        shown="none",
        metavar="DIRECTORY",
    )
    api_key_file: _Text | None = setting(
        None,
        "file with API keys, one per line; also $JAXPAGE_API_KEY, separated by commas",
        metavar="FILE",
    )
    allowed_origins: _Origins | None = setting(
        None,
        "exact origins of other sites whose pages may use the server",
        shown="none",
        metavar="ORIGIN",
    )
    batch_directory: _Text | None = setting(
        None,
        "files and batches of /v1/files and /v1/batches are kept here",
        shown="none",
        metavar="DIRECTORY",
    )
    batch_directory_bytes: Annotated[ByteSize, Field(ge=2**20, le=2**50)] = setting(
        2**30,
        "most bytes of these files together",
        shown="1GiB",
    )
    response_store_bytes: Annotated[ByteSize, Field(ge=0, le=2**40)] = setting(
        64 * 2**20,
        "most bytes of the responses that previous_response_id may name; 0: none are kept",
        shown="64MiB",
    )
    response_store_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = setting(
        3600.0,
        "seconds for which a response is kept",
        shown="3600",
    )
    response_store_directory: _Text | None = setting(
        None,
        "these responses are also in files here, for a server that starts again",
        shown="none",
        metavar="DIRECTORY",
    )
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = setting(
        256,
        "most requests that wait, in addition to running ones; more get 429",
    )
    request_timeout_seconds: _Seconds | None = setting(
        600.0,
        "most seconds from arrival to the last token, or none",
        shown="600",
    )
    shutdown_timeout_seconds: Annotated[float, Field(ge=0, le=86_400)] = setting(
        30.0,
        "seconds for running requests to finish after SIGTERM; 0: they end at once",
        shown="30",
    )
    max_body_bytes: Annotated[ByteSize, Field(ge=1024, le=2**30)] = setting(
        4 * 2**20,
        "largest request body",
        shown="4MiB",
    )
    body_timeout_seconds: _Seconds = setting(
        30.0, "seconds for a request's body to arrive", shown="30"
    )
    slow_reader_seconds: _Seconds = setting(
        30.0, "seconds that a client may leave a stream unread", shown="30"
    )
    sse_keep_alive_seconds: Annotated[float, Field(ge=0, le=86_400)] = setting(
        5.0,
        "longest silence of a stream in seconds: then a comment is sent; 0: any",
        shown="5",
    )
    keep_alive_seconds: Annotated[int, Field(ge=1, le=86_400)] = setting(
        75, "seconds that a connection may be idle between two requests"
    )
    max_connections: Annotated[int, Field(ge=1, le=65_536)] = setting(1024, "most open connections")
    strict_requests: bool = setting(
        False, "an unknown field is an error, instead of named in a header"
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "lfm2", "granite", "minicpm5"] = (
        setting(
            "auto",
            "format of the model's tool calls: auto (derived from its chat template), hermes, "
            "llama3_json, lfm2, granite, minicpm5 or none",
            alias="--tool-call-parser",
        )
    )
    reasoning_parser: Literal["auto", "none", "think", "granite"] = setting(
        "auto",
        "format of the model's reasoning, which is returned apart from the answer: auto (from its "
        "chat template), think, granite or none",
    )
    rerank_method: Literal["auto", "yes_no", "embedding"] = setting(
        "auto",
        "how /v1/rerank scores: yes_no (the form of Qwen3-Reranker), embedding, or auto (by the "
        "model's files)",
    )
    ui: bool = setting(False, "web page at /ui/: playground and inspector")
    ui_show_prompts: bool = setting(
        False, "the inspector shows the prompts and outputs of all users"
    )
    log_requests: bool = setting(
        False, "log every request with its text", alias="--enable-log-requests"
    )
    log_json: bool = setting(False, "one JSON object per line of the log")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "debug, info, warning or error"
    )
    otlp_traces_endpoint: _TracesURL | None = setting(
        None,
        "send a span of each request to this URL, by OpenTelemetry: "
        "http://localhost:4318/v1/traces",
        metavar="URL",
    )
    kv_events: _Endpoint | None = setting(
        None,
        "publish which prefixes are cached, with their token ids, as vLLM does: "
        "tcp://127.0.0.1:PORT",
        metavar="ENDPOINT",
    )
    kv_events_replay: _Endpoint | None = setting(
        None,
        "where subscribers ask for KV events that they missed: tcp://127.0.0.1:PORT",
        metavar="ENDPOINT",
    )
    kv_events_topic: Annotated[str, Field(max_length=256)] = setting(
        "",
        "topic of the KV events",
        shown="none",
        metavar="TOPIC",
    )
    incident_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = setting(
        None,
        "keep the records of the last N steps for POST /debug/incident and failed steps",
    )
    incident_directory: _Text = setting(
        ".",
        "where incidents are written",
        shown="the working directory",
        metavar="DIRECTORY",
    )
    incident_token_ids: bool = setting(
        False,
        "incidents hold prompts and outputs as token ids, and only then can they be run again",
    )
    num_hosts: Annotated[int, Field(ge=1, le=1024)] = setting(
        1,
        "hosts that share the model, each with a process of its own",
    )
    host_rank: Annotated[int, Field(ge=0, lt=1024)] = setting(
        0,
        "rank of this host, from 0, which is the server; the others follow it",
        metavar="R",
    )
    coordinator: Annotated[str, Field(max_length=256), AfterValidator(_coordinator)] | None = (
        setting(
            None,
            "address of rank 0 between the hosts; PORT + 1 is used too; auto: of the job (Slurm, "
            "Kubernetes)",
            metavar="HOST:PORT",
        )
    )
    hosts_secret_file: _Text | None = setting(
        None,
        "file with the hosts' common secret; else $JAXPAGE_HOSTS_SECRET",
        metavar="FILE",
    )
    host_timeout_seconds: Annotated[float, Field(ge=1, le=86_400)] = setting(
        60.0,
        "seconds that a host may be silent or in a step",
        shown="60",
    )
    profile_directory: _Text | None = setting(
        None,
        "for debugging: directory for JAX traces of POST /start_profile and /stop_profile",
        metavar="DIRECTORY",
    )

    def contradictions(self) -> Iterable[Problem]:
        """Yields the settings that contradict others, with the reason for each."""
        # A bound of the field cannot refuse an empty tuple: it counts the names that are left after
        # wrong ones are taken out.
        if self.served_model_name == ():
            yield "served_model_name", "must have a name, or be left out"
        if self.served_model_name and len(set(self.served_model_name)) < len(
            self.served_model_name
        ):
            yield "served_model_name", f"a name is given twice: {', '.join(self.served_model_name)}"
        if self.ui_show_prompts and not self.ui:
            yield (
                "ui_show_prompts",
                "cannot be true while ui is false: prompts are shown only on the page",
            )
        if self.log_requests and self.log_level in ("warning", "error"):
            yield (
                "log_requests",
                f"cannot be true while log_level is {self.log_level!r}: requests are logged at "
                "info",
            )

        if self.uds is not None:
            for name in ("host", "port"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield name, "does not go with uds: the server listens on one of them"
        if self.models_file is not None:
            for name in OF_ONE_MODEL:
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield name, "is not supported with models_file"
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and self.kv_events is None:
                yield name, "needs kv_events"
        if self.coordinator == AUTO and (self.num_hosts, self.host_rank) != (1, 0):
            yield (
                "coordinator",
                f"{AUTO!r} takes num_hosts and host_rank from the job: leave them out",
            )
        if self.host_rank >= self.num_hosts:
            yield (
                "host_rank",
                f"is {self.host_rank}, and num_hosts is {self.num_hosts}: ranks begin with 0",
            )
        if self.num_hosts > 1 and self.coordinator is None:
            yield "coordinator", f"is needed with num_hosts = {self.num_hosts}: HOST:PORT of rank 0"
        if self.incident_token_ids and self.incident_steps is None:
            yield "incident_token_ids", "cannot be true without incident_steps"

    @property
    def is_local(self) -> bool:
        """Returns whether this machine alone can reach the server."""
        if self.uds is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            # Other names are not looked up: where they lead may change.
            return self.host == "localhost"
