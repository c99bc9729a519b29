"""Builds the HTTP application, which says what each path does.

A request passes the middlewares of `serving/http` before it reaches a route:

    Connection ─▶ PlainPaths ─▶ (Traced) ─▶ (CORS) ─▶ Envelope ─▶ HostGuard ─▶ ApiKeys ─▶ Limits
    deadlines     one form      spans                 ids, errors (local only)              │
                                                                       route: Server, page ◀┘

With `root_path`, `BelowRootPath` comes before `PlainPaths`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage import __version__
from jaxpage.driver import AsyncDriver
from jaxpage.errors import JaxpageError
from jaxpage.replay import Incidents
from jaxpage.serving.batches.jobs import Batches, open_batches
from jaxpage.serving.batches.routes import BatchRoutes, upload_limits
from jaxpage.serving.dialects.dialect import (
    ConversationPath,
    Dialect,
    GenerationPath,
    ListedModel,
    ModelList,
    TransformPath,
    VectorsPath,
    VersionPath,
)
from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.hosts.leader import Leader
from jaxpage.serving.http.allowed_origins import for_pages_of
from jaxpage.serving.http.answer_stream import stream_of
from jaxpage.serving.http.answers import (
    json_answer,
    make_ignored_header,
    whole_answer,
)
from jaxpage.serving.http.api_keys import OPEN_PATHS, ApiKeys, owner_of
from jaxpage.serving.http.envelope import Envelope
from jaxpage.serving.http.host_guard import HostGuard
from jaxpage.serving.http.missing_paths import answer_missing
from jaxpage.serving.http.plain_paths import PlainPaths
from jaxpage.serving.http.posting import json_body, post_route
from jaxpage.serving.http.request_limits import Limits
from jaxpage.serving.http.root_path import BelowRootPath
from jaxpage.serving.inspector import routes as inspector
from jaxpage.serving.metrics.incident_files import incident_routes
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.metrics.profiling import profiler_routes
from jaxpage.serving.metrics.tracing import SpanWriter, Traced
from jaxpage.serving.model.lora_modules import lora_routes
from jaxpage.serving.model.weight_updates import weights_routes
from jaxpage.serving.requests.embedding_requests import EmbeddingRequests
from jaxpage.serving.requests.embedding_requests import Open as OpenVectors
from jaxpage.serving.requests.generating import Generating, while_connected
from jaxpage.serving.requests.in_flight import InFlightRequests
from jaxpage.serving.requests.preparing import Preparing
from jaxpage.serving.requests.rerank_requests import Reranking, Scoring
from jaxpage.serving.requests.response_store import OwnerResponses, ResponseStore
from jaxpage.serving.requests.shared_answers import OpenApiDocument, Shared
from jaxpage.serving.requests.stored_responses import StoredResponses, open_store
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.context import ModelContext, unknown_model
from jaxpage.serving.wire.embeddings import open_embeddings
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.exchange import (
    LOAD_SECONDS,
    Exchange,
    detokenize,
    open_score,
    tokenize,
)
from jaxpage.serving.wire.pair_scores import SCORE_PATHS
from jaxpage.serving.wire.rendering import RENDERERS
from jaxpage.serving.wire.rerank import RERANK_PATHS, open_rerank
from jaxpage.serving.wire.tokenizing import Transformed

logger = logging.getLogger(__name__)
Open = Callable[[dict[str, Any], ModelContext], Exchange]
OpenConversation = Callable[[dict[str, Any], ModelContext, OwnerResponses], Exchange]
Transform = Callable[[dict[str, Any], ModelContext], Transformed]
# A step may take longer than this; then `/metrics` leaves out the facts of the engine.
STATS_SECONDS = 5.0
METRICS_SECONDS = 0.05  # the least time between two answers of /metrics that are made


class Server:
    """Answers the requests of the API's paths, on one event loop.

    Attributes:
        visitors: The requests that are being answered, for which a shutdown waits.
        preparing: The threads that read requests and prepare them for the engine.
        metrics: The counters of the server.
        routes: The routes of all paths that a `Server` answers.
        batches: The runner of batches, or None; whoever runs the event loop starts and stops it.
        responses: The responses that are kept; whoever runs the event loop closes it.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        context: ModelContext,
        config: ServerConfig,
        metrics: ServerMetrics,
        capabilities: Mapping[str, Any],
        responses: ResponseStore | None = None,
    ) -> None:
        self.responses = responses or open_store(config)
        self.visitors = InFlightRequests()
        self.batches: Batches | None = None
        assert driver.num_places is not None, "a server has a number of places"
        self.preparing = Preparing(driver.engine, driver.num_places)
        if getattr(context.tokenizer, "chat_template", None):
            RENDERERS.warm()
        self._driver = driver
        self._context = context
        self.metrics = metrics
        self._capabilities = capabilities
        self._generating = Generating(driver, self.preparing, metrics)
        built = driver.built
        answered_by = (driver, self.preparing, context, built.new_embedder())
        reranking = Reranking(*answered_by)
        self._scoring = Scoring(self._generating, reranking, self.preparing, config.num_hosts)
        embed = partial(self._compute, EmbeddingRequests(*answered_by))
        self._num_hosts = config.num_hosts
        self._logs_requests = config.log_requests
        self._created = int(time.time())
        self._document = OpenApiDocument(context)
        self._shared_exposition = Shared(self._make_exposition, METRICS_SECONDS)
        self.routes: list[BaseRoute] = [
            *(route for dialect in DIALECTS for route in self._routes_of(dialect, embed)),
            post_route("/v1/embeddings", partial(embed, open_embeddings)),
            *(post_route(path, partial(self._exchange, open_score)) for path in SCORE_PATHS),
            *(
                post_route(path, partial(self._compute, reranking, open_rerank))
                for path in RERANK_PATHS
            ),
            post_route("/tokenize", partial(self._transform, tokenize)),
            post_route("/detokenize", partial(self._transform, detokenize)),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/capabilities", self._capable),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._exposition),
            version_route("/version", __version__),
            Route("/openapi.json", self._openapi),
            Route("/", self._index),
        ]

    def _routes_of(
        self, dialect: Dialect, embed: Callable[..., Awaitable[None]]
    ) -> Iterator[BaseRoute]:
        """Yields the routes of a dialect; `embed` answers requests for embeddings."""
        for path, entry in dialect.paths.items():
            match entry:
                case GenerationPath():
                    yield post_route(path, partial(self._exchange, entry.open))
                case ConversationPath():
                    yield post_route(path, partial(self._converse, entry.open))
                    yield from StoredResponses(path, self.responses).routes
                case TransformPath():
                    yield post_route(path, partial(self._transform, entry.answer))
                case VectorsPath():
                    yield post_route(path, partial(embed, entry.open))
                case ModelList():
                    yield Route(path, partial(self._list, entry))
                case VersionPath(version):
                    yield version_route(path, version)

    async def _exchange(self, opened: Open, scope: Scope, receive: Receive, send: Send) -> None:
        with self.visitors.inside():
            arrived = time.monotonic()
            raw = await json_body(scope, receive)
            read = partial(self._open, opened, raw, scope)
            if opened is open_score:
                await self._scoring.answer(read, raw, arrived, scope, receive, send)
                return
            await self._generating.answer(
                partial(self.preparing.run, read, len(raw)), arrived, scope, receive, send
            )

    async def _converse(
        self, opened: OpenConversation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        responses = self.responses.of_owner(owner_of(scope))
        await self._exchange(
            lambda body, context: opened(body, context, responses), scope, receive, send
        )

    async def _compute(
        self, by: EmbeddingRequests, opened: OpenVectors, scope: Scope, receive: Receive, send: Send
    ) -> None:
        by.check_hosts(self._num_hosts)
        with self.visitors.inside():
            arrived = time.monotonic()
            body = await json_body(scope, receive)
            await while_connected(receive, by.answer(opened, body, arrived, scope, receive, send))

    def _open(self, opened: Open, raw: bytes, scope: Scope) -> Exchange:
        body = parse_object(raw)
        stream = stream_of(scope)
        stream.is_requested = stream.dialect.is_for_stream(scope["path"], body)
        exchange = quotes(opened)(body, self._context)
        exchange.load_seconds = scope["state"].get(LOAD_SECONDS, 0.0)
        if self._logs_requests:
            logger.info("request", extra={"id": exchange.id, "body": body})
        return exchange

    async def _transform(
        self, transform: Transform, scope: Scope, receive: Receive, send: Send
    ) -> None:
        arrived = time.monotonic()
        raw = await json_body(scope, receive)

        def transform_body() -> ASGIApp:
            result = quotes(transform)(parse_object(raw), self._context)
            return whole_answer(result.body, make_ignored_header(result.ignored_fields))

        async def answer_request() -> None:
            async with self._driver.in_time(arrived):
                answer = await self.preparing.aside(transform_body)
            await answer(scope, receive, send)

        await while_connected(receive, answer_request())

    async def _models(self, request: Request) -> Response:
        return json_answer({"object": "list", "data": [self._card(name) for name in self._names]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self._names:
            raise unknown_model(name, self._names)
        return json_answer(self._card(name))

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._context.model_names, *self._context.adapters)

    def _card(self, name: str) -> dict[str, Any]:
        max_len = self._context.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxpage",
            "max_model_len": max_len,
            "capabilities": {"vision": self._context.takes_pictures},
            **({"parent": self._context.model_names[0]} if name in self._context.adapters else {}),
        }

    async def _list(self, model_list: ModelList, request: Request) -> Response:
        """Answers a list of models in a dialect; all models of the server are loaded."""
        context = self._context
        models = [
            ListedModel(name, context.card, self._created, context.max_model_len, context=context)
            for name in self._names
        ]
        return json_answer(model_list.write(models))

    async def _capable(self, request: Request) -> Response:
        return json_answer(self._capabilities)

    async def _health(self, request: Request) -> Response:
        if not self._driver.healthy:
            raise ApiError(
                503, "The engine has stopped, or a step takes too long", code="unhealthy"
            )
        return json_answer({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.visitors.is_closed or not self._driver.ready:
            raise ApiError(
                503,
                "The server does not accept requests now: it is starting or shutting down",
                code="not_ready",
            )
        return json_answer({"status": "ready"})

    async def _exposition(self, request: Request) -> Response:
        exposition = await self._shared_exposition.answer()
        return Response(exposition, media_type=self.metrics.content_type)

    async def _make_exposition(self) -> bytes:
        stats: Mapping[str, Any] = {}
        # Without facts of the engine the answer still has what the server counts itself.
        with contextlib.suppress(TimeoutError, JaxpageError):
            stats = await asyncio.wait_for(self._driver.stats(), STATS_SECONDS)
        return await asyncio.to_thread(self.metrics.exposition, stats)

    async def _openapi(self, request: Request) -> Response:
        return Response(await self._document.body(), media_type="application/json")

    async def _index(self, request: Request) -> Response:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        paths = list(dict.fromkeys(paths))  # a path has a route for each of its methods
        return json_answer(
            {
                "name": "jaxpage",
                "version": __version__,
                "models": self._context.model_names,
                "paths": paths,
            }
        )


def version_route(path: str, version: str) -> Route:
    """Returns a route that tells a version."""

    async def print_version(request: Request) -> Response:
        return json_answer({"version": version})

    return Route(path, print_version)


def build_app(
    driver: AsyncDriver,
    context: ModelContext,
    config: ServerConfig,
    metrics: ServerMetrics,
    *,
    capabilities: Mapping[str, Any] | None = None,
    api_keys: Sequence[str] = (),
    incidents: Incidents | None = None,
    hosts: Leader | None = None,
    tracing: SpanWriter | None = None,
) -> Starlette:
    """Builds the application with its middlewares; `app.state.server` is its `Server`.

    Args:
        driver: The driver of the engine.
        context: The facts about the model that the wire format needs.
        config: The settings of the server.
        metrics: The counters of the server.
        capabilities: The object that `/v1/capabilities` answers.
        api_keys: The keys, one of which is needed for every path but the open ones. Without keys
            every path is open; if `config.host` is then an address of this machine alone,
            requests under another host name or from a page of another origin are refused.
        incidents: The records of the last steps; None where they are not kept.
        hosts: The leader of the other hosts; None where this is the only one.
        tracing: The writer of spans; None where there are none.
    """
    server = Server(driver, context, config, metrics, capabilities or {})
    server.batches = open_batches(
        config,
        server.visitors,
        server.routes,
        metrics,
        num_at_once=driver.max_num_seqs,
        is_dead=driver.has_ended,
    )
    pages = []
    if config.ui:
        pages = inspector.routes(
            driver, show_prompts=config.ui_show_prompts, can_be_slow=config.is_local
        )
    lora = lora_routes(config, driver.engine, server.preparing, context)
    weights = weights_routes(config, driver, server.visitors, hosts)
    debug = [*incident_routes(driver, incidents), *profiler_routes(config)]
    # The page comes first, so that its route for / wins over the index of the server.
    routes = [*pages, *server.routes, *lora, *weights, *debug]
    return guard(server, routes, config, api_keys, tracing)


def guard(
    server: Any,
    routes: Sequence[BaseRoute],
    config: ServerConfig,
    api_keys: Sequence[str],
    tracing: SpanWriter | None = None,
) -> Starlette:
    """Returns an application of these routes and those of batches, with its middlewares.

    Args:
        server: The object that `app.state.server` is, with the counters of the server.
        routes: The routes.
        config: The settings of the server.
        api_keys: The keys; see `build_app`.
        tracing: The writer of spans; None where there are none.
    """
    batches: Batches | None = server.batches
    prefix = config.root_path
    middleware = [
        *([Middleware(BelowRootPath, prefix=prefix)] if prefix else []),
        Middleware(PlainPaths),
        *([Middleware(Traced, spans=tracing)] if tracing is not None else []),
        *for_pages_of(config.allowed_origins or ()),
        Middleware(Envelope, metrics=server.metrics, silent_seconds=config.sse_keep_alive_seconds),
        # No page of a browser reaches a Unix socket, and proxies name their hosts as they like.
        *([Middleware(HostGuard)] if config.is_local and not config.uds and not api_keys else []),
        Middleware(
            ApiKeys,
            keys=api_keys,
            open_paths=OPEN_PATHS | inspector.PAGE_PATHS if config.ui else OPEN_PATHS,
        ),
        Middleware(
            Limits,
            max_body_bytes=config.max_body_bytes,
            body_timeout_seconds=config.body_timeout_seconds,
            larger=upload_limits(config.batch_directory_bytes) if batches else None,
        ),
    ]
    files = BatchRoutes(batches).routes if batches else []
    handlers = {HTTPException: answer_missing}
    app = Starlette(routes=[*routes, *files], middleware=middleware, exception_handlers=handlers)
    app.state.server = server
    app.state.tracing = tracing
    # `PlainPaths` has taken the slashes away for which Starlette would redirect.
    app.router.redirect_slashes = False
    return app
