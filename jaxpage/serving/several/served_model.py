"""Opens a model of the table, with a driver and a server of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.routing import BaseRoute, Router

from jaxpage.assembly import Built, Hooks, weights_for_waking
from jaxpage.assembly.planning import EngineSpec
from jaxpage.checkpoints import open_model
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.driver import AsyncDriver
from jaxpage.errors import CapacityError
from jaxpage.replay import open_engine
from jaxpage.serving.app import Server
from jaxpage.serving.inspector.routes import state_routes
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.model.capabilities import capabilities
from jaxpage.serving.model.lora_modules import check_lora_modules
from jaxpage.serving.requests.response_store import ResponseStore
from jaxpage.serving.several.models_file import ModelEntry, mib
from jaxpage.serving.startup import model_context

logger = logging.getLogger(__name__)
MIN_BLOCKS = 3  # the null block, and two for a sequence


class ServedModel:
    """Serves one model of the table while it is loaded.

    Attributes:
        entry: The model in the file.
        driver: The driver of its engine.
        context: The facts about the model that the wire format needs.
        router: Answers the paths of a server of this model alone, and the page's snapshots of it.
        metrics: The counters of its requests.
        capabilities: The object of `/v1/capabilities`.
    """

    def __init__(self, entry: ModelEntry, built: Built, responses: ResponseStore) -> None:
        """Opens the model.

        Args:
            entry: The model in the file.
            built: Its engine.
            responses: The responses that the server keeps, of all models.
        """
        self.entry = entry
        self._built = built
        self.context = model_context(built, entry.engine, entry.server)
        self.metrics = ServerMetrics(entry.name, built.block_size)
        self.driver = AsyncDriver(
            built,
            max_queued_requests=entry.server.max_queued_requests,
            request_timeout_seconds=entry.server.request_timeout_seconds,
        )
        self.capabilities: Mapping[str, Any] = capabilities(
            built, entry.engine, entry.server, self.context.limits
        )
        self._server = Server(
            self.driver, self.context, entry.server, self.metrics, self.capabilities, responses
        )
        watched: list[BaseRoute] = []
        if entry.server.ui:
            watched = state_routes(
                self.driver,
                show_prompts=entry.server.ui_show_prompts,
                can_be_slow=entry.server.is_local,
            )
        self.router = Router(routes=[*watched, *self._server.routes], redirect_slashes=False)
        self.driver.start()

    @property
    def is_over(self) -> bool:
        """Returns whether the engine has ended by itself."""
        return self.driver.has_ended()

    async def sleep(self, level: int) -> None:
        """Frees the device's memory; see `Engine.sleep`."""
        with self.driver.falling_asleep(level) as asleep:
            await asyncio.wrap_future(asleep)

    async def wake(self) -> None:
        """Takes the weights back, and compiles nothing."""
        built = self._built
        runner = built.engine.runner
        weights = await asyncio.to_thread(weights_for_waking, built.model, built.spec, runner)
        await asyncio.wrap_future(self.driver.wake(weights))

    async def close(self) -> None:
        """Ends the engine and frees its memory."""
        await asyncio.to_thread(self.stop, None)

    def stop(self, seconds: float | None) -> bool:
        """Ends the engine; returns False if it is still in a step after `seconds`."""
        self._server.preparing.close()
        return self.driver.stop(seconds)


class Opener:
    """Opens models on a thread of its own, one at a time.

    Attributes:
        is_busy: True while a model is opened.
    """

    def __init__(
        self,
        entries: Mapping[str, ModelEntry],
        sizes: Mapping[str, int],
        responses: ResponseStore,
    ) -> None:
        self._entries = entries
        self._responses = responses
        self._sizes = sizes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxpage-models")
        self.is_busy = False

    async def check(self, name: str) -> None:
        """Raises an error if a model's files, or its adapters, certainly cannot be loaded."""
        await asyncio.wrap_future(self._thread.submit(self._check, name))

    async def open(self, name: str) -> ServedModel:
        """Loads and compiles a model."""
        return await asyncio.wrap_future(self._thread.submit(self._open, name))

    def close(self) -> None:
        """Takes no more models, without waiting for one that is being opened."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, name: str) -> None:
        entry = self._entries[name]
        config = entry.engine
        open_model(resolve_model(config.model, config.revision), config.quantization)
        check_lora_modules(config, entry.server, (name,))

    def _open(self, name: str) -> ServedModel:
        entry = self._entries[name]
        self.is_busy = True
        try:
            built = open_engine(entry.engine, _hooks(name, self._sizes[name]))
            return ServedModel(entry, built, self._responses)
        finally:
            self.is_busy = False


def _hooks(name: str, num_bytes: int) -> Hooks:
    """Returns hooks with which an engine takes so many bytes of a device and no more.

    Each phase of its start is a line of the log.
    """

    def plan(spec: EngineSpec) -> Mapping[str, int]:
        memory = spec.memory
        room = num_bytes - memory.weights_bytes - memory.workspace_bytes
        if memory.pool_bytes <= room:
            return {}
        maximum = memory.max_blocks(max(room, 0))
        config = spec.config
        sizes = ("num_blocks", "kv_cache_memory_bytes")
        explicit = [name for name in sizes if getattr(config, name) is not None]
        # A size that the user has set is refused, and never made smaller in silence.
        if maximum < MIN_BLOCKS or explicit:
            description = (
                f"the pool of {explicit[0]} takes {mib(memory.pool_bytes)}"
                if explicit
                else (f"{MIN_BLOCKS} KV blocks take {mib(memory.bytes_of(MIN_BLOCKS))}")
            )
            raise CapacityError(
                f"memory is {mib(num_bytes)}; the weights take {mib(memory.weights_bytes)}, the "
                f"workspace {mib(memory.workspace_bytes)}, and {description}"
            )
        return {"num_blocks": maximum}

    return Hooks(revise_sizes=plan, phase=lambda phase: logger.info("%s: %s", name, phase))
