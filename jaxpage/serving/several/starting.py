"""Starts a server of several models, of which none is loaded yet."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Sequence

from jaxpage.device.hardware import available_bytes, choose_backend, make_mesh, open_devices
from jaxpage.serving.app import guard
from jaxpage.serving.http.listening import address_of
from jaxpage.serving.metrics import logs
from jaxpage.serving.metrics.tracing import open_tracing
from jaxpage.serving.requests.stored_responses import open_store
from jaxpage.serving.server import run_app
from jaxpage.serving.settings.key_sources import API_KEY_VARIABLE, read_api_keys
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.several.all_models import Models
from jaxpage.serving.several.models_file import ModelEntry, check_sizes, mib
from jaxpage.serving.several.served_model import Opener, ServedModel
from jaxpage.serving.several.switchboard import Switchboard
from jaxpage.serving.several.table import ModelTable, Slot
from jaxpage.serving.startup import StartUp, handle_as, place_of

logger = logging.getLogger(__name__)
# The share of a GPU that the models have together, where the file does not say.
UTILIZATION = 0.9


def start_several(
    entries: Sequence[ModelEntry],
    memory_bytes: int | None,
    server: ServerConfig,
    listener: socket.socket,
) -> int:
    """Serves models until a signal comes, and returns the exit status.

    Args:
        entries: The models.
        memory_bytes: The bytes of a device that they may take together; None takes what is free.
        server: The settings of the server.
        listener: The server's socket, which is bound but does not listen.

    Raises:
        ConfigError: Models do not fit, or the API keys cannot be read.
    """
    logs.configure(server)
    start_up = StartUp(as_records=server.log_json)
    api_keys = read_api_keys(server)
    tracing = open_tracing(server)
    for entry in entries:
        if entry.is_missing:
            logger.warning(
                "there is no model %r for %s; requests that name it get an error until it is there",
                entry.engine.model,
                entry.name,
            )
    board, table, opener = open_table(entries, memory_bytes, server)
    app = guard(board, board.routes, server, api_keys, tracing)
    address = address_of(listener)
    names = ", ".join(f"{name} ({mib(slot.size)})" for name, slot in table.slots.items())
    text = "\n".join(
        [
            f"The server is at {place_of(address, '/v1')}. Ctrl-C ends it.",
            *([f"The page is at {place_of(address, '/ui/')}"] if server.ui else []),
            f"Models are loaded when they are asked for, within {mib(table.memory_bytes)}: {names}",
            *([f"A key is needed: {API_KEY_VARIABLE}."] if api_keys else []),
        ]
    )
    with handle_as(signal.SIGHUP, signal.SIG_IGN):  # the server outlives its terminal
        if not api_keys and not server.is_local:
            logger.warning("no API key: anyone who can reach %s can send requests", server.host)
        try:
            return run_app(
                app,
                Models(table),
                server,
                listener,
                announce=lambda: start_up.ready(text, address),
                is_loading=lambda: opener.is_busy,
            )
        finally:
            opener.close()


def open_table(
    entries: Sequence[ModelEntry], memory_bytes: int | None, server: ServerConfig
) -> tuple[Switchboard, ModelTable[ServedModel], Opener]:
    """Returns the table of models and what answers their requests; nothing is loaded.

    Raises:
        ConfigError: Models do not fit; see `check_sizes`.
        UnsupportedError: A model's kernel set does not run on this device.
    """
    open_devices(UTILIZATION)
    device = make_mesh().first
    for entry in entries:
        # Kernels for CPUs are compiled here, so that no request waits for that.
        choose_backend(entry.engine.attention_backend, device, entry.engine.kv_cache_dtype)
    text = "the memory of the file"
    if memory_bytes is None:
        memory_bytes = available_bytes(device, UTILIZATION)
        text = "the free memory"
    sizes = check_sizes(entries, memory_bytes, text)
    by_name = {entry.name: entry for entry in entries}
    responses = open_store(server)
    opener = Opener(by_name, sizes, responses)
    table = ModelTable(
        {
            entry.name: Slot(
                entry.name,
                sizes[entry.name],
                entry.keep_alive_seconds,
                stays=entry.stays,
            )
            for entry in entries
        },
        memory_bytes,
        check=opener.check,
        load=opener.open,
        max_waiting=server.max_queued_requests,
    )
    has_own_memory = device.platform != "cpu"
    board = Switchboard(table, by_name, server, responses, has_own_memory=has_own_memory)
    return board, table, opener
