"""Answers requests that rank documents, such as POST /v1/rerank."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxpage.engine import PreparedRequest
from jaxpage.engine.calls import YesNo
from jaxpage.outputs import RequestOutput
from jaxpage.serving.http.answers import make_refusal
from jaxpage.serving.requests.embedding_requests import EmbeddingRequests
from jaxpage.serving.wire.rerank import RerankAnswer


class Reranking(EmbeddingRequests):
    """Scores documents in the way of the model: by two tokens, by vectors, or by its head."""

    async def _values(
        self, requested: RerankAnswer, requests: list[PreparedRequest], arrived: float
    ) -> list[float]:
        if not isinstance(requested.reranker, YesNo):
            vectors = await super()._values(requested, requests, arrived)
            return requested.reranker.scores(vectors)
        return await self._by_tokens(requested, requested.reranker, requests, arrived)

    async def _by_tokens(
        self,
        requested: RerankAnswer,
        reranker: YesNo,
        requests: list[PreparedRequest],
        arrived: float,
    ) -> list[float]:
        outputs = await self._outputs(requested, requests, arrived)
        others: dict[int, RequestOutput] = {}
        missing = reranker.missing(outputs)
        for token in sorted(set(missing.values())):
            indices = [index for index, lacking in missing.items() if lacking == token]
            again = await self._preparing.requests(requested.prompts_drawing(indices, token))
            more_outputs = await self._outputs(requested, again, arrived)
            others |= zip(indices, more_outputs, strict=True)
        return reranker.scores(outputs, others)

    async def _outputs(
        self, requested: RerankAnswer, requests: list[PreparedRequest], arrived: float
    ) -> list[Any]:
        try:
            handles = await self._driver.submit(
                requests, stream=False, name=requested.id, arrived=arrived
            )
        except Exception as error:
            raise await make_refusal(error, requested.refusal) from error
        try:
            outputs = await asyncio.gather(*(handle.whole() for handle in handles))
        finally:
            self._driver.end(handles)
        return [requested.check(output) for output in outputs]
