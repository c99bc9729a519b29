"""Starts a server from its settings, and reports the phases of the start on standard error."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from starlette.applications import Starlette

from jaxpage import __version__
from jaxpage.assembly import PHASES, Built, Hooks, open_pictures
from jaxpage.assembly.planning import find_vision
from jaxpage.chat_forms import TOOL_FORMS, ChatFormat
from jaxpage.checkpoints import describe_model
from jaxpage.checkpoints.finding import resolve_model_config, resolve_tokenizer
from jaxpage.checkpoints.tokenizers import load_tokenizer, whole_tokenizer
from jaxpage.driver import AsyncDriver
from jaxpage.engine.texts import (
    ByPairs,
    reranker_of,
)
from jaxpage.errors import ConfigError
from jaxpage.replay import open_engine
from jaxpage.serving.app import build_app
from jaxpage.serving.cache_events.kv_events import KVEvents
from jaxpage.serving.hosts.channel import Channel
from jaxpage.serving.hosts.follower import Follower
from jaxpage.serving.hosts.joining import agree, join, min_sizes
from jaxpage.serving.hosts.leader import Leader
from jaxpage.serving.hosts.processes import end_processes
from jaxpage.serving.hosts.weight_loading import WeightsOfFollower
from jaxpage.serving.http.listening import address_of
from jaxpage.serving.metrics import logs
from jaxpage.serving.metrics.incident_files import open_incidents
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.metrics.tracing import SpanWriter, open_tracing
from jaxpage.serving.model.capabilities import capabilities
from jaxpage.serving.model.lora_modules import check_lora_modules, open_lora_modules
from jaxpage.serving.model.model_cards import card_of, card_of_settings
from jaxpage.serving.server import run_app
from jaxpage.serving.settings.key_sources import API_KEY_VARIABLE, read_api_keys
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.context import ModelContext, RequestLimits
from jaxpage.serving.wire.derived_forms import choose_form, derive_form
from jaxpage.settings.engine_config import EngineConfig

logger = logging.getLogger(__name__)
# Python's own thresholds for garbage collections. Cycles of requests are found soon with them.
_PYTHON_THRESHOLDS = (700, 10, 10)


class StartUp:
    """Reports each phase of a start and how long the one before took.

    It prints lines for people, or writes records to the log for programs.
    """

    def __init__(self, *, as_records: bool):
        self._as_records = as_records
        self._began = self._phase_began = time.monotonic()
        self._phase: str | None = None

    def phase(self, name: str) -> None:
        """Reports that a phase begins, which is one of `PHASES`."""
        self._end_phase()
        self._phase = name
        self._phase_began = time.monotonic()
        if not self._as_records:
            print(
                f"[{PHASES.index(name) + 1}/{len(PHASES)}] {name.capitalize()}",
                file=sys.stderr,
                flush=True,
            )

    def ready(self, text: str, address: str) -> None:
        """Reports that the server answers.

        From here on Python's garbage collector leaves out what the start has made, which stays
        anyway: to look through it would stop all streams for half a second, time and again.

        Args:
            text: Instructions for people.
            address: The URL of the server, for programs.
        """
        gc.freeze()
        gc.set_threshold(*_PYTHON_THRESHOLDS)  # commands of jaxpage begin with higher ones
        self._end_phase()
        seconds = time.monotonic() - self._began
        if self._as_records:
            logger.info("ready", extra={"address": address, "seconds": round(seconds, 3)})
        else:
            print(f"\nReady after {seconds:.1f} s.\n\n{text}\n", file=sys.stderr, flush=True)

    def _end_phase(self) -> None:
        seconds = time.monotonic() - self._phase_began
        if self._phase and self._as_records:
            logger.info(self._phase, extra={"seconds": round(seconds, 3)})
        elif self._phase:
            print(f"      {seconds:.1f} s", file=sys.stderr, flush=True)
        self._phase = None


def model_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """Returns the names of the model for clients, the first of which is in the answers.

    They are `served_model_name`, or else the engine's name of the model. For a directory or a file
    this is the last part of its path, so that clients see no path of this machine.
    """
    if server.served_model_name:
        return server.served_model_name
    path = Path(engine.model)
    return (path.resolve().name if path.exists() else engine.model,)


def model_context(built: Built, engine: EngineConfig, server: ServerConfig) -> ModelContext:
    """Returns the facts about the model that the wire format needs; check the adapters first."""
    names = model_names(engine, server)
    maximum = engine.limit_images
    # Now, so that no request waits until transformers is imported.
    tokenizer = whole_tokenizer(built.tokenizer)
    form, no_form = _chat_format(tokenizer, server)
    described = json.dumps([__version__, jax.__version__, engine.model_dump()], sort_keys=True)
    return ModelContext(
        model_names=names,
        adapters=open_lora_modules(built.engine, server),
        max_model_len=built.max_model_len,
        vocab_size=built.engine.vocab_size,
        hidden_size=built.spec.described.model.hidden_size,
        tokenizer=tokenizer,
        sampling_defaults=built.sampling_defaults,
        system_fingerprint=f"fp_{hashlib.blake2s(described.encode(), digest_size=6).hexdigest()}",
        card=card_of(built.model, engine.quantization),
        chat_format=form,
        no_form=no_form,
        strict_requests=server.strict_requests,
        limits=RequestLimits() if maximum is None else RequestLimits(max_pictures=maximum),
        reranker=reranker_of(built.embedding, server.rerank_method),
        generates=built.generates,
        embedding=built.embedding,
        pictures=built.pictures,
    )


def describe_context(engine: EngineConfig, server: ServerConfig) -> ModelContext:
    """Returns what a model's config and tokenizer say of it, for which no weights are read.

    The length is that of the settings or of the config; an engine may have less memory than that.

    Raises:
        JaxpageError: There is no such model, or its files are wrong.
    """
    directory = resolve_model_config(engine.model, engine.revision)
    described = describe_model(directory, engine.quantization)
    tokenizer = load_tokenizer(resolve_tokenizer(engine.tokenizer or engine.model))
    derived, _ = derive_form(tokenizer)
    vision = find_vision(engine, described.family, described.config)
    sees = tokenizer is not None and vision is not None
    return ModelContext(
        model_names=model_names(engine, server),
        max_model_len=engine.max_model_len or described.spec.max_position_embeddings,
        vocab_size=described.spec.vocab_size,
        tokenizer=tokenizer,
        card=card_of_settings(engine),
        chat_format=choose_form(derived, server.tool_parser, server.reasoning_parser),
        pictures=open_pictures(directory, described.config, tokenizer) if sees else None,
    )


def _chat_format(tokenizer: Any | None, server: ServerConfig) -> tuple[ChatFormat, str | None]:
    """Returns the form of answers that the settings choose, and why it has no tool calls, or None.

    It logs in one line if the chat template's calls have no form, or another than the chosen one.
    """
    derived, problem = derive_form(tokenizer)
    form = choose_form(derived, server.tool_parser, server.reasoning_parser)
    if derived.has_tools and form.tool_form is None and server.tool_parser != "none":
        no_form = (
            f"no form of tool calls is derived from the model's chat template ({problem}): "
            f"give --tool-parser {' or '.join(TOOL_FORMS)} if the model writes one of these"
        )
        logger.warning("%s", no_form)
        return form, no_form
    theirs = None if form.tools is None else derived.tools
    if theirs is not None and form.tools is not None and form.tools.trigger != theirs.trigger:
        logger.warning(
            "tool_parser=%s does not fit the model's chat template, which writes calls as %s: "
            "use --tool-parser auto",
            server.tool_parser,
            theirs.name,
        )
    return form, None


def how_to_ask(address: str, context: ModelContext, *, has_keys: bool, has_page: bool) -> str:
    """Returns instructions for people: a curl line and a program, to be copied as they are."""
    path, call, answer, fields = _example(context)
    requested = {"model": context.model_names[0], **fields}
    arguments = ", ".join(f"{name}={value!r}" for name, value in requested.items())
    url = address
    curl = "curl"
    client = ""
    begin = "import os; " if has_keys else ""
    if address.startswith("unix:"):
        path_of_socket = address.removeprefix("unix:")
        # curl and httpx want a host in the address, also where they connect to a socket.
        url = "http://localhost"
        curl = f"curl --unix-socket {shlex.quote(path_of_socket)}"
        begin += "import httpx; "
        transport = f"httpx.HTTPTransport(uds={path_of_socket!r})"
        client = f", http_client=httpx.Client(transport={transport})"
    header = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_keys else ""
    # OpenAI's client refuses to be made without a key, so it gets a word that the server ignores.
    api_key = f'os.environ["{API_KEY_VARIABLE}"]' if has_keys else '"none"'
    lines = [
        f"The server is at {place_of(address, '/v1')}, the model is called {context.model_names[0]}. Ctrl-C ends it.",
        *([f"A key is needed; below it comes from {API_KEY_VARIABLE}."] if has_keys else []),
        *([f"The page is at {place_of(address, '/ui/')}"] if has_page else []),
        "",
        f'  {curl} {url}/v1/{path} -H "Content-Type: application/json"{header} -d {shlex.quote(json.dumps(requested))}',
    ]
    if call:
        lines += [
            "",
            f"  {begin}from openai import OpenAI",
            f'  client = OpenAI(base_url="{url}/v1", api_key={api_key}{client})',
            f"  print(client.{call}.create({arguments}).{answer})",
        ]
    return "\n".join(lines)


def _example(context: ModelContext) -> tuple[str, str, str, dict[str, Any]]:
    """Returns a request that the model answers.

    Returns:
        Its path, the method of OpenAI's client (empty where that has none), the part of the
        response to show, and the fields besides the model.
    """
    text: Any = [1, 2, 3] if context.tokenizer is None else "Once upon a time"
    if isinstance(context.reranker, ByPairs):
        return "rerank", "", "", {"query": text, "documents": ["There was a king", "2 + 2 = 4"]}
    if not context.generates:
        return "embeddings", "embeddings", "data[0].embedding", {"input": text}
    if getattr(context.tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        fields = {"max_tokens": 32, "messages": messages}
        return "chat/completions", "chat.completions", "choices[0].message.content", fields
    return "completions", "completions", "choices[0].text", {"max_tokens": 32, "prompt": text}


def place_of(address: str, path: str) -> str:
    """Returns where a path of the server is, for people; a Unix socket has no URL."""
    return f"{path} of {address}" if address.startswith("unix:") else f"{address}{path}"


def publish_kv_events(built: Built, server: ServerConfig) -> None:
    """Publishes the KV events of an engine that has not begun, if `kv_events` asks for them.

    Raises:
        ConfigError: A package is missing, or an endpoint cannot be bound.
    """
    if server.kv_events is None:
        return
    try:
        from jaxpage.serving.cache_events.kv_publisher import KVPublisher
    except ImportError as error:
        raise ConfigError(
            f"kv_events: {error.name} is missing: pip install 'jaxpage[kv-events]'"
        ) from None
    publisher = KVPublisher(
        server.kv_events, replay_endpoint=server.kv_events_replay, topic=server.kv_events_topic
    )
    events = KVEvents(built.block_size, publisher.send, publisher.close)
    assert built.engine.prefix_cache is not None  # `resolve_both` refuses to do without it
    events.watch(built.engine.prefix_cache)
    built.engine.listen(events)


def open_app(
    built: Built,
    engine: EngineConfig,
    server: ServerConfig,
    *,
    api_keys: tuple[str, ...],
    tracing: SpanWriter | None,
    hosts: Leader | None = None,
) -> tuple[Starlette, AsyncDriver, ModelContext]:
    """Returns the application of an engine, its driver, which has not begun, and its context.

    Args:
        built: The engine, which has not begun.
        engine: The settings of the engine.
        server: The settings of the server.
        api_keys: The keys that let a request in; see `build_app`.
        tracing: The writer of spans; None where there are none.
        hosts: The leader of the other hosts; None where this is the only one.

    Raises:
        ConfigError: See `publish_kv_events`.
    """
    publish_kv_events(built, server)
    incidents = open_incidents(built, engine, server)
    if hosts is not None:
        # The leader listens last: it raises in a step in which a host is lost.
        built.engine.listen(hosts)
    context = model_context(built, engine, server)
    driver = AsyncDriver(
        built,
        max_queued_requests=server.max_queued_requests,
        request_timeout_seconds=server.request_timeout_seconds,
    )
    app = build_app(
        driver,
        context,
        server,
        ServerMetrics(context.model_names[0], built.block_size),
        capabilities=capabilities(built, engine, server, context.limits),
        api_keys=api_keys,
        incidents=incidents,
        hosts=hosts,
        tracing=tracing,
    )
    return app, driver, context


@contextlib.contextmanager
def handle_as(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    """Handles a signal otherwise while the context lasts."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def start(engine: EngineConfig, server: ServerConfig, listener: socket.socket) -> int:
    """Builds the engine, serves until a signal comes, and returns the exit status.

    Args:
        engine: The settings of the engine.
        server: The settings of the server.
        listener: The server's socket, which is bound but does not listen, so that no client can
            connect before the engine is ready.

    Raises:
        JaxpageError: The settings, the model or the memory do not allow it. Where possible this is
            raised before the model is loaded.
    """
    logs.configure(server)
    start_up = StartUp(as_records=server.log_json)
    api_keys = read_api_keys(server)
    tracing = open_tracing(server)
    with handle_as(signal.SIGHUP, signal.SIG_IGN):  # the server outlives its terminal
        if not api_keys and not server.is_local:
            logger.warning(
                "no API key: anyone who can reach %s can send requests; set --api-key-file or %s",
                server.host,
                API_KEY_VARIABLE,
            )
        # Ctrl-C ends the process at once while a model is loaded and compiled: there is nothing to
        # tidy up, and Python's own handler would wait for the compiling threads.
        with handle_as(signal.SIGINT, signal.SIG_DFL):
            built, channels = _open(engine, server, start_up)
        hosts = Leader(channels, server.host_timeout_seconds) if channels else None
        app, driver, context = open_app(
            built, engine, server, api_keys=api_keys, tracing=tracing, hosts=hosts
        )
        address = address_of(listener)
        text = how_to_ask(address, context, has_keys=bool(api_keys), has_page=server.ui)
        if hosts is not None:
            hosts.start(driver.fail)
        announce = functools.partial(start_up.ready, text, address)
        status = run_app(app, driver, server, listener, announce=announce)
        if hosts is not None and hosts.has_lost:
            os._exit(status)  # otherwise JAX waits at its exit for the host that is gone
        end_processes()
        return status


def follow(engine: EngineConfig, server: ServerConfig) -> int:
    """Builds the engine of a rank above 0, which follows that of rank 0 and answers no requests.

    Args:
        engine: The settings of the engine.
        server: The settings of the server.

    Returns:
        The exit status, once rank 0 has ended.

    Raises:
        JaxpageError: The settings, the model or the memory do not allow it; see `start`.
    """
    logs.configure(server)
    start_up = StartUp(as_records=server.log_json)
    built, channels = _open(engine, server, start_up)
    adapters = open_lora_modules(built.engine, server)
    start_up.ready(
        f"Rank {server.host_rank} of {server.num_hosts} follows rank 0.", server.coordinator or ""
    )
    weights = None
    if server.weights_directory is not None:
        weights = WeightsOfFollower(built, Path(server.weights_directory))
    seconds = server.host_timeout_seconds
    status = Follower(built.engine, channels[0], seconds, adapters, weights).run()
    if status:
        os._exit(status)  # otherwise JAX waits at its exit for the other hosts
    end_processes()
    return status


def _open(
    engine: EngineConfig, server: ServerConfig, start_up: StartUp
) -> tuple[Built, dict[int, Channel]]:
    """Opens the engine, and returns it with the channels to the other hosts."""
    check_lora_modules(engine, server, model_names(engine, server))
    channels = join(engine, server) if server.num_hosts > 1 else {}
    sized = functools.partial(min_sizes, channels=channels, host_rank=server.host_rank)
    together = functools.partial(agree, channels=channels, host_rank=server.host_rank)
    hooks = Hooks(
        progress=not server.log_json,
        phase=start_up.phase,
        revise_sizes=sized,
        before_steps=together,
    )
    return open_engine(engine, hooks), channels
