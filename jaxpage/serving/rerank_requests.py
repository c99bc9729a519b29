"""Answers requests that rank documents, such as POST /v1/rerank."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from jaxpage.async_driver import AsyncDriver
from jaxpage.driver import normalized
from jaxpage.engine import ByVectors, PreparedRequest, YesNo
from jaxpage.outputs import RequestOutput
from jaxpage.serving.embedding_requests import Embedding
from jaxpage.serving.http.answers import ignored_header, json_answer, refusal_of, to_api_error
from jaxpage.serving.preparing import Preparing
from jaxpage.serving.tracing import record_of
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.rerank import RerankAnswer, open_rerank


class Reranking:
    """Scores documents in the way of the model: by two tokens, or by vectors."""

    def __init__(
        self, driver: AsyncDriver, preparing: Preparing, context: ModelContext, embedding: Embedding
    ) -> None:
        self._driver = driver
        self._preparing = preparing
        self._context = context
        self._embedding = embedding

    async def answer(
        self, raw: bytes, arrived: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Reads a request, scores its documents, and sends the answer.

        Args:
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
            asked = await self._preparing.run(lambda: open_rerank(parse_object(raw), self._context))
            record_of(scope).opened(asked)
            requests = await self._embedding.requests(asked)
            if isinstance(asked.reranker, ByVectors):
                vectors = await self._embedding.vectors(requests, asked)
                scores = asked.reranker.scores(normalized(np.stack(vectors)))
            else:
                scores = await self._by_tokens(asked, asked.reranker, requests, arrived)
        num_tokens = sum(len(request.token_ids) for request in requests)
        record_of(scope).read(num_tokens)
        headers = ignored_header(asked.ignored_fields)
        await json_answer(asked.whole(scores, num_tokens), headers=headers)(scope, receive, send)

    async def _by_tokens(
        self,
        asked: RerankAnswer,
        reranker: YesNo,
        requests: list[PreparedRequest],
        arrived: float,
    ) -> list[float]:
        outputs = await self._outputs(asked, requests, arrived)
        others: dict[int, RequestOutput] = {}
        missing = reranker.missing(outputs)
        for token in sorted(set(missing.values())):
            indices = [index for index, lacking in missing.items() if lacking == token]
            again = await self._preparing.requests(asked.prompts_drawing(indices, token))
            found = await self._outputs(asked, again, arrived)
            others |= zip(indices, found, strict=True)
        return reranker.scores(outputs, others)

    async def _outputs(
        self, asked: RerankAnswer, requests: list[PreparedRequest], arrived: float
    ) -> list[Any]:
        try:
            handles = await self._driver.submit(
                requests, stream=False, name=asked.id, arrived=arrived
            )
        except Exception as error:
            refusal = refusal_of(error) or asked.refusal(error)
            raise (to_api_error(error) if refusal.status == 500 else refusal) from error
        try:
            outputs = await asyncio.gather(*(handle.whole() for handle in handles))
        finally:
            self._driver.end(handles)
        return [asked.check(output) for output in outputs]
