"""Answers the requests of a server of several models: hands each to the server of its model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from jaxpage import __version__
from jaxpage.driver import SLEEP_LEVELS, AsyncDriver
from jaxpage.errors import DeadlineExceeded, JaxpageError
from jaxpage.serving.app import METRICS_SECONDS, STATS_SECONDS, version_route
from jaxpage.serving.batches.jobs import open_batches
from jaxpage.serving.dialects.dialect import (
    Body,
    ConversationPath,
    Dialect,
    ListedModel,
    ModelList,
    VersionPath,
)
from jaxpage.serving.dialects.registry import DIALECTS, dialect_of
from jaxpage.serving.http.answer_stream import stream_of
from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.posting import json_body, post_route
from jaxpage.serving.metrics.metrics import ServerMetrics, join_expositions
from jaxpage.serving.metrics.tracing import record_of
from jaxpage.serving.model.model_cards import card_of_settings
from jaxpage.serving.model.pausing import pause_routes, read_order
from jaxpage.serving.requests.generating import while_connected
from jaxpage.serving.requests.in_flight import InFlightRequests
from jaxpage.serving.requests.preparing import Readers
from jaxpage.serving.requests.response_store import ResponseStore
from jaxpage.serving.requests.shared_answers import Shared
from jaxpage.serving.requests.stored_responses import StoredResponses
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.several.model_requests import ModelRequest, paths_of_requests, receive_again
from jaxpage.serving.several.models_file import ModelEntry, models_by_name
from jaxpage.serving.several.page import routes_of_page
from jaxpage.serving.several.served_model import ServedModel
from jaxpage.serving.several.shown_models import ShownModels, not_loaded
from jaxpage.serving.several.table import InUse, LoadFailed, ModelTable, Slot
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.context import ModelContext, unknown_model
from jaxpage.serving.wire.encoding import encode
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.exchange import LOAD_SECONDS
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.serving.wire.openapi import openapi
from jaxpage.settings.argument_checks import show


class Switchboard:
    """Has the right model answer each request, on one event loop.

    Attributes:
        visitors: The requests that are being answered, for which a shutdown waits.
        preparing: The threads that read which model a request names.
        metrics: The counters of requests that no model has answered.
        routes: The routes of all paths but those of batches.
        batches: The runner of batches, or None.
        responses: The responses that are kept, of all models.
    """

    def __init__(
        self,
        table: ModelTable[ServedModel],
        entries: Mapping[str, ModelEntry],
        config: ServerConfig,
        responses: ResponseStore,
        *,
        has_own_memory: bool,
    ) -> None:
        """Makes the routes.

        Args:
            table: The table of the models.
            entries: The models of the file.
            config: The settings of the server.
            responses: The responses that are kept, of all models.
            has_own_memory: True if the device has memory of its own, as a GPU has.
        """
        self.responses = responses
        self.visitors = InFlightRequests()
        self.preparing = Readers("naming", 1, 1024 + config.max_queued_requests)
        self.metrics = ServerMetrics("")
        self._table = table
        self._entries = entries
        self._seconds = config.request_timeout_seconds or None
        self._models = models_by_name(entries)
        self._created = int(time.time())
        # The length of each model that was ever loaded.
        self._lengths: dict[str, int] = {}
        self._sees: dict[str, bool] = {}  # likewise
        self._has_own_memory = has_own_memory
        self._file_cards: dict[str, ModelCard] = {}
        document = openapi(
            ModelContext(
                model_names=tuple(self._models), max_model_len=0, vocab_size=0, tokenizer=None
            ),
            [dialect.document for dialect in DIALECTS],
        )
        self._openapi = encode(document)
        self._shared_exposition = Shared(self._make_exposition, METRICS_SECONDS)
        self.routes = self._make_routes(paths_of_requests(document), has_page=config.ui)
        # A line of a batch takes a lease as any request does, so its model is neither unloaded nor
        # put to sleep meanwhile.
        self.batches = open_batches(
            config,
            self.visitors,
            self.routes,
            self.metrics,
            num_at_once=max(entry.engine.max_num_seqs for entry in entries.values()),
            is_dead=lambda: False,
        )

    def _make_routes(self, paths: Iterable[str], *, has_page: bool) -> list[BaseRoute]:
        """Returns the routes of all paths but those of batches.

        Args:
            paths: The paths of requests that a model answers.
            has_page: True if there is the page.
        """
        routes: list[BaseRoute] = [
            *(route for dialect in DIALECTS for route in self._routes_of(dialect)),
            *(post_route(path, self._answer) for path in paths),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            *pause_routes(self._driver_of, {"model"}),
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/v1/capabilities", self._capable),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._exposition),
            version_route("/version", __version__),
            Route("/openapi.json", self._document),
            Route("/", self._index),
        ]
        if has_page:
            # The page comes first, so that its route for / wins over the index.
            routes[:0] = routes_of_page(
                lambda query: self._table.slots[self._find_model(self._name_in(query))]
            )
        return routes

    def _routes_of(self, dialect: Dialect) -> Iterator[BaseRoute]:
        """Yields the routes of a dialect for which no model needs to be loaded."""
        for path, description in dialect.descriptions.items():
            shown = ShownModels(self._table, self._entries, description)
            yield post_route(path, partial(self._describe, shown))
        for path, entry in dialect.paths.items():
            match entry:
                case ModelList():
                    yield Route(path, partial(self._list_of, entry))
                case ConversationPath():
                    yield from StoredResponses(path, self.responses).routes
                case VersionPath(version):
                    yield version_route(path, version)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the model of a request, and has its server answer."""
        with self.visitors.inside():
            raw = await json_body(scope, receive)
            requested = await self.preparing.run(
                lambda: self._parse_request(raw, scope["path"]), len(raw)
            )
            if (unload := requested.stay.unload) is not None:
                self._table.expire(requested.model)
                await json_answer(unload(requested.name))(scope, receive, send)
                return
            stream_of(scope).is_requested = requested.is_for_stream
            async with contextlib.AsyncExitStack() as leases:
                model: ServedModel | None = None

                async def lease() -> None:
                    nonlocal model
                    model = await self._lease(requested.model, leases, requested.stay.seconds)

                requested_at = time.monotonic()
                await while_connected(receive, lease())
                assert model is not None
                record_of(scope).loaded(requested_at)
                scope["state"][LOAD_SECONDS] = time.monotonic() - requested_at
                await model.router(scope, receive_again(raw, receive), send)

    async def _describe(
        self, shown: ShownModels, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Says what a model is, for which it need not be loaded."""
        with self.visitors.inside():
            raw = await json_body(scope, receive)
            requested = await self.preparing.run(
                lambda: self._parse_request(raw, scope["path"]), len(raw)
            )
            answer = await shown.answer(requested)
            await answer(scope, receive, send)

    async def _lease(
        self, name: str, leases: contextlib.AsyncExitStack, keep_alive: float | None = None
    ) -> ServedModel:
        """Returns a model, of which `leases` gets a lease.

        Raises:
            ApiError: The model cannot be loaded.
            DeadlineExceeded: It was not there in the time of a request.
        """
        try:
            async with asyncio.timeout(self._seconds):
                model = await leases.enter_async_context(self._table.lease(name, keep_alive))
        except TimeoutError:
            raise DeadlineExceeded(
                f"The model {name!r} was not loaded within {self._seconds:g} s"
            ) from None
        except LoadFailed as error:
            raise not_loaded(name, error) from error
        self._lengths[name] = model.context.max_model_len
        self._sees[name] = model.context.pictures is not None
        return model

    def _parse_request(self, raw: bytes, path: str) -> ModelRequest:
        return quotes(self._read_request)(parse_object(raw), path)

    def _read_request(self, body: Body, path: str) -> ModelRequest:
        name = self._name_in(body)
        dialect = dialect_of(path)
        if name not in self._models:
            name = dialect.habits.plain_name(name)
        return ModelRequest(
            self._find_model(name),
            name,
            dialect.habits.read_stay(path, body),
            dialect.is_for_stream(path, body),
            body,
        )

    def _name_in(self, body: Mapping[str, Any]) -> str:
        """Returns the name in a request, which may be missing if there is one model."""
        name = body.get("model")
        if name is None and len(self._entries) == 1:
            name = next(iter(self._entries))
        if name is None:
            names = ", ".join(self._entries)
            raise ApiError(400, f"model is required: this server has {show(names)}", param="model")
        if not isinstance(name, str):
            raise ApiError(
                400, f"model must be the name of a model, got {show(name)}", param="model"
            )
        return name

    def _find_model(self, name: str) -> str:
        """Returns the model that a request names, by its name or that of an adapter of it."""
        if name not in self._models:
            raise unknown_model(name, self._models)
        return self._models[name]

    # Routes for administrators.

    async def _sleep(self, request: Request) -> Response:
        requested = await read_order(request, {"model", "level"})
        # Values in a query are texts.
        if request.query_params.get("level") in ("1", "2"):
            requested["level"] = int(requested["level"])
        # `True` is among the levels, because it equals 1.
        if (level := requested.get("level", 1)) not in SLEEP_LEVELS or isinstance(level, bool):
            raise ApiError(400, f"level must be 1 or 2, got {show(level)}", param="level")
        name = self._find_model(self._name_in(requested))
        try:
            await self._table.sleep(name, level)
        except InUse as error:
            raise ApiError(409, str(error), code="conflict") from error
        return json_answer({"model": name, "state": self._table.slots[name].state})

    async def _wake_up(self, request: Request) -> Response:
        name = self._find_model(self._name_in(await read_order(request, {"model"})))
        async with contextlib.AsyncExitStack() as leases:
            await self._lease(name, leases)
        return json_answer({"model": name, "state": self._table.slots[name].state})

    async def _is_sleeping(self, request: Request) -> Response:
        name = self._find_model(self._name_in(request.query_params))
        return json_answer({"is_sleeping": self._table.slots[name].is_asleep})

    def _driver_of(self, order: Mapping[str, Any]) -> AsyncDriver:
        """Returns the driver of the model that an order names, which is in memory."""
        name = self._find_model(self._name_in(order))
        model = self._table.slots[name].model
        if model is None:
            raise ApiError(409, f"The model {show(name)} is not loaded", code="conflict")
        return model.driver

    # What the server has.

    def _in_memory(self) -> Iterator[tuple[Slot[ServedModel], ServedModel]]:
        for slot in self._table.slots.values():
            if slot.model is not None:
                yield slot, slot.model

    def _card(self, name: str) -> dict[str, Any]:
        model = self._models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxpage",
            "state": self._table.slots[model].state,
            "max_model_len": self._lengths.get(model),
            # Only a model that was loaded is known so well.
            "capabilities": {"vision": self._sees.get(model)},
            **({"parent": model} if name != model else {}),
        }

    async def _list(self, request: Request) -> Response:
        return json_answer({"object": "list", "data": [self._card(name) for name in self._models]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._find_model(name)
        return json_answer(self._card(name))

    async def _list_of(self, model_list: ModelList, request: Request) -> Response:
        """Answers a list of models in a dialect."""
        if model_list.is_of_loaded:
            return json_answer(model_list.write(list(self._list_loaded())))
        cards = {name: await self._file_card(name) for name in self._entries}
        contexts = {slot.name: model.context for slot, model in self._in_memory()}
        models = [
            ListedModel(name, cards[model], self._created, context=contexts.get(model))
            for name, model in self._models.items()
        ]
        return json_answer(model_list.write(models))

    async def _file_card(self, name: str) -> ModelCard:
        """Returns the description of a model's files, which is read once."""
        if name not in self._file_cards:
            engine = self._entries[name].engine
            self._file_cards[name] = await asyncio.to_thread(card_of_settings, engine)
        return self._file_cards[name]

    def _list_loaded(self) -> Iterator[ListedModel]:
        """Yields the models in memory, with the times at which they go."""
        for slot, model in self._in_memory():
            if slot.is_asleep:
                continue
            last_used = time.monotonic() if slot.num_leases else slot.last_used
            yield ListedModel(
                slot.name,
                model.context.card,
                self._created,
                model.context.max_model_len,
                num_bytes=slot.size,
                device_bytes=slot.size if self._has_own_memory else 0,
                until=time.time() + last_used + slot.keep_alive - time.monotonic(),
                context=model.context,
            )

    async def _capable(self, request: Request) -> Response:
        loaded = {slot.name: model.capabilities for slot, model in self._in_memory()}
        return json_answer({"version": __version__, "models": loaded})

    async def _health(self, request: Request) -> Response:
        sick = [slot.name for slot, model in self._in_memory() if not model.driver.healthy]
        if sick:
            raise ApiError(
                503,
                f"The engine of {', '.join(sick)} has stopped, or a step takes too long",
                code="unhealthy",
            )
        return json_answer({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.visitors.is_closed:
            raise ApiError(503, "The server is shutting down", code="not_ready")
        return json_answer({"status": "ready"})

    async def _exposition(self, request: Request) -> Response:
        exposition = await self._shared_exposition.answer()
        return Response(exposition, media_type=self.metrics.content_type)

    async def _make_exposition(self) -> bytes:
        sources: list[tuple[ServerMetrics, Mapping[str, Any]]] = [(self.metrics, {})]
        for _, model in self._in_memory():
            stats: Mapping[str, Any] = {}
            with contextlib.suppress(TimeoutError, JaxpageError):
                stats = await asyncio.wait_for(model.driver.stats(), STATS_SECONDS)
            sources.append((model.metrics, stats))
        return await asyncio.to_thread(join_expositions, sources)

    async def _document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _index(self, request: Request) -> Response:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        about = {"name": "jaxpage", "version": __version__, "models": list(self._entries)}
        return json_answer(about | {"paths": paths})
