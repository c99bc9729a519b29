"""Answers requests for embeddings, such as POST /v1/embeddings.

The inputs of a request are computed one at a time on the engine's thread, between two of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from jaxpage.device import AnyEmbedder
from jaxpage.driver import AsyncDriver
from jaxpage.engine import PreparedRequest
from jaxpage.serving.http.answers import make_ignored_header, make_refusal, whole_answer
from jaxpage.serving.metrics.tracing import record_of
from jaxpage.serving.requests.preparing import Preparing
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import EmbeddingAnswer
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.exchange import LOAD_SECONDS
from jaxpage.serving.wire.rerank import PairAnswer

Vectors = EmbeddingAnswer | PairAnswer
Open = Callable[[dict[str, Any], ModelContext], Vectors]


class EmbeddingRequests:
    """Computes the vectors of texts.

    An executable for a new length is compiled on another thread, so that generation goes on
    meanwhile.
    """

    refused_on_hosts = "embeddings are"

    def __init__(
        self,
        driver: AsyncDriver,
        preparing: Preparing,
        context: ModelContext,
        embedder: AnyEmbedder,
    ):
        self._driver = driver
        self._preparing = preparing
        self._context = context
        self._embedder = embedder

    def check_hosts(self, num_hosts: int) -> None:
        """Raises ApiError if the server is on several hosts, of which this takes one alone."""
        if num_hosts > 1:
            message = f"{self.refused_on_hosts} not supported by a server on {num_hosts} hosts"
            raise ApiError(400, message)

    async def answer(
        self, opened: Open, raw: bytes, arrived: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Reads a request, computes what it asks for, and sends the answer.

        Args:
            opened: Reads the request.
            raw: The body of the request.
            arrived: The time at which the request came in, by `time.monotonic`.
            scope: The request, as ASGI describes it.
            receive: Gives the messages of the client.
            send: Takes the messages of the answer.

        Raises:
            ApiError: The request cannot be answered.
            JaxpageError: The driver refuses it: the queue is full, its time is over, or the engine
                has ended.
        """
        async with self._driver.in_time(arrived):
            requested = await self._preparing.run(
                lambda: quotes(opened)(parse_object(raw), self._context), len(raw)
            )
            record_of(scope).opened(requested)
            if isinstance(requested, EmbeddingAnswer):
                requested.arrived = arrived
                requested.load_seconds = scope["state"].get(LOAD_SECONDS, 0.0)
            requests = await self._requests(requested)
            values = await self._values(requested, requests, arrived)
        num_tokens = sum(len(request.token_ids) for request in requests)
        record_of(scope).read(num_tokens)
        headers = make_ignored_header(requested.ignored_fields)
        answer = await self._preparing.answer(
            lambda: whole_answer(requested.whole(values, num_tokens), headers),
            sum(map(np.size, values)),
        )
        await answer(scope, receive, send)

    async def _requests(self, requested: Vectors) -> list[PreparedRequest]:
        try:
            return await self._preparing.requests(requested.prompts)
        except Exception as error:
            raise await make_refusal(error, requested.refusal) from error

    async def _values(
        self, requested: Any, requests: list[PreparedRequest], arrived: float
    ) -> list[Any]:
        """Returns what the answer is made of, here the pooled vectors."""
        max_length = max(len(request.token_ids) for request in requests)
        if not self._embedder.is_compiled(max_length):
            await self._preparing.aside(lambda: self._embedder.compile(max_length))
        values = []
        async with aclosing(
            self._driver.vectors(requests, self._embedder, requested.poolings)
        ) as vectors:
            async for vector in vectors:
                values.append(vector)
                requested.check_width(values[0].size)
        return values
