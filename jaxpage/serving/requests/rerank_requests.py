"""Answers requests that rank documents or score pairs, such as POST /v1/rerank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from jaxpage.engine import PreparedRequest
from jaxpage.engine.texts import YesNo
from jaxpage.outputs import RequestOutput
from jaxpage.serving.http.answers import make_refusal
from jaxpage.serving.requests.embedding_requests import EmbeddingRequests
from jaxpage.serving.requests.generating import Generating, while_connected
from jaxpage.serving.requests.preparing import Preparing
from jaxpage.serving.wire.body import parse_object
from jaxpage.serving.wire.exchange import Exchange
from jaxpage.serving.wire.pair_scores import asks_for_pairs, open_pair_scores
from jaxpage.serving.wire.rerank import PairAnswer


class Reranking(EmbeddingRequests):
    """Scores pairs of texts in the way of the model: by two tokens, by vectors, or by its head."""

    refused_on_hosts = "reranking is"

    async def _values(
        self, requested: PairAnswer, requests: list[PreparedRequest], arrived: float
    ) -> list[float]:
        if not isinstance(requested.reranker, YesNo):
            return requested.scores(await super()._values(requested, requests, arrived))
        return await self._by_tokens(requested, requested.reranker, requests, arrived)

    async def _by_tokens(
        self,
        requested: PairAnswer,
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
        self, requested: PairAnswer, requests: list[PreparedRequest], arrived: float
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


class Scoring:
    """Answers with the scores of pairs of texts, or with log probabilities of continuations."""

    def __init__(
        self, generating: Generating, reranking: Reranking, preparing: Preparing, num_hosts: int
    ) -> None:
        """Takes what answers either of them."""
        self._generating = generating
        self._reranking = reranking
        self._preparing = preparing
        self._num_hosts = num_hosts

    async def answer(
        self,
        read: Callable[[], Exchange],
        raw: bytes,
        arrived: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answers a request to POST /v1/score; see `EmbeddingRequests.answer`.

        Args:
            read: Reads a request for log probabilities.
            raw: The body of the request.
            arrived: The time at which the request came in, by `time.monotonic`.
            scope: The request, as ASGI describes it.
            receive: Gives the messages of the client.
            send: Takes the messages of the answer.
        """
        body = await self._preparing.run(lambda: parse_object(raw), len(raw))
        about = arrived, scope, receive, send
        if asks_for_pairs(body):
            self._reranking.check_hosts(self._num_hosts)
            work = self._reranking.answer(open_pair_scores, raw, *about)
            await while_connected(receive, work)
        else:
            # A prompt is encoded with each of its continuations, which may take long.
            await self._generating.answer(lambda: self._preparing.aside(read), *about)
