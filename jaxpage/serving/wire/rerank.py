"""Reads requests to POST /v1/rerank, in the form of Jina and Cohere, and makes their answers."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.engine.texts import (
    ByPairs,
    ByVectors,
    Pair,
    YesNo,
    check_truncatable,
    rank,
)
from jaxpage.outputs import RequestOutput, TokenPooling
from jaxpage.serving.wire.answering import check_finished
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import check_embeds
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import PairScoreRequest, RerankRequest

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class PairAnswer:
    """A request for the scores of pairs of texts, of which an answer is made.

    Attributes:
        id: The id of the answer.
        model: The name of the model in the request.
        prompts: The texts that the model reads.
        ignored_fields: The paths of ignored fields.
        reranker: The way in which the model scores.
        poolings: The way in which the tokens of each text become one vector; empty for YesNo.
    """

    kind = "rerank"

    def __init__(
        self,
        request: RerankRequest | PairScoreRequest,
        context: ModelContext,
        pairs: list[Pair],
        names: tuple[str, str],
        ignored_fields: tuple[str, ...],
    ) -> None:
        """Encodes the pairs, where they are encoded together.

        Args:
            request: The request.
            context: The served model and the server's settings.
            pairs: The pairs.
            names: The fields that they come from.
            ignored_fields: The paths of ignored fields.

        Raises:
            ApiError: A text is too long, or the model does not score in this way.
        """
        self.id = f"{self.kind}-{uuid.uuid4().hex}"
        self.model = request.model
        self.ignored_fields = ignored_fields
        self.reranker = context.reranker
        self.poolings: list[TokenPooling] = []
        self._request = request
        self._pairs = pairs
        self._name = names[1]
        truncation = request.truncation_in(context)
        check_pairs_fit(pairs, context, names, request)
        if isinstance(self.reranker, YesNo):
            params = self.reranker.first
            inputs: list[Any] = list(self.reranker.texts(pairs, request.instruction))
        else:
            params = context.embedding.params
            try:
                about = pairs, request.instruction, truncation
                inputs, self.poolings = self.reranker.inputs(*about)
            except ValueError as error:  # the special tokens leave no room
                raise as_api_error(error, names={"prompt": self._name}) from None
        self.prompts = [
            PromptRequest(
                context.check_prompt(
                    text if isinstance(text, str) else text["prompt_token_ids"],
                    self._name,
                    is_cut=truncation is not None,
                ),
                params,
                isinstance(self.reranker, ByVectors),
                truncation=truncation,
            )
            for text in inputs
        ]

    def scores(self, pooled: Sequence[npt.NDArray[np.float32]]) -> list[float]:
        """Returns the score of each pair, given the vectors of the prompts."""
        assert not isinstance(self.reranker, YesNo)
        return self.reranker.scores(self._pairs, pooled)

    def prompts_drawing(self, indices: Sequence[int], token: int) -> list[PromptRequest]:
        """Returns some of the prompts, each to draw the one token."""
        assert isinstance(self.reranker, YesNo)
        params = self.reranker.drawing(token)
        return [self.prompts[index]._replace(params=params) for index in indices]

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a text that the engine refuses."""
        names = {"prompt": self._name, "prompt_token_ids": self._name}
        return as_api_error(error, names=names).quoting(self._request)

    def check_width(self, width: int) -> None:
        """Accepts vectors of any width."""

    def check(self, output: RequestOutput) -> RequestOutput:
        """Returns an output, or raises ApiError if the engine gave it up."""
        check_finished(output.outputs[0], self._request)
        return output

    @abstractmethod
    def whole(self, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        """Returns the response.

        Args:
            scores: The score of each pair.
            num_tokens: The tokens of all prompts.
        """


class RerankAnswer(PairAnswer):
    """A request that ranks documents, and the answer that is made of their scores."""

    _request: RerankRequest

    def whole(self, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        """Returns the documents with the highest scores first; see `PairAnswer.whole`."""
        results = []
        documents = [document for _, document in self._pairs]
        for ranked_document in rank(scores, documents, self._request.top_n):
            result: dict[str, Any] = {
                "index": ranked_document.index,
                "relevance_score": ranked_document.relevance_score,
            }
            if self._request.return_documents is not False:
                result["document"] = {"text": ranked_document.document}
            results.append(result)
        return {
            "id": self.id,
            "object": "list",
            "model": self.model,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def open_rerank(body: dict[str, Any], context: ModelContext) -> RerankAnswer:
    """Returns the `RerankAnswer` of a request to POST /v1/rerank.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, RerankRequest, context)
    if context.adapter(request.model) is not None:
        raise ApiError(400, "A LoRA adapter cannot rerank; name the model itself", param="model")
    maximum = context.limits.max_prompts
    if not 0 < len(request.documents) <= maximum:
        raise ApiError(
            400,
            f"documents must be 1 to {maximum} of them, not {len(request.documents)}",
            param="documents",
        )
    documents = [
        document if isinstance(document, str) else document.text for document in request.documents
    ]
    pairs = [(request.query, document) for document in documents]
    return RerankAnswer(request, context, pairs, ("query", "documents"), ignored)


def check_pairs_fit(
    pairs: Sequence[Pair],
    context: ModelContext,
    names: tuple[str, str],
    request: RerankRequest | PairScoreRequest,
) -> None:
    """Checks what can be said of pairs before they are encoded.

    Args:
        pairs: The pairs.
        context: The served model and the server's settings.
        names: The fields that they come from.
        request: The request.

    Raises:
        ApiError: There is too much text, or the model does not score in this way.
    """
    is_cut = request.truncation_in(context) is not None
    for name, texts in zip(names, zip(*pairs, strict=True), strict=True):
        for text in dict.fromkeys(texts):
            context.check_prompt(text, name, is_cut=is_cut)
    if not isinstance(context.reranker, ByVectors):  # it reads the query with each document
        number = sum(len(query) + len(document) for query, document in pairs)
        if number > (max_length := context.limits.max_score_characters):
            first, second = names
            raise ApiError(
                400,
                f"{second} have {number} characters, where the {first} counts once for each; "
                f"at most {max_length} are allowed",
                param=second,
            )
    if isinstance(context.reranker, ByVectors):
        check_embeds(context.reranker.embedding)
    if isinstance(context.reranker, ByPairs) and request.instruction is not None:
        message = "instruction is not supported: the model is a cross-encoder, which takes none"
        raise ApiError(400, message, param="instruction")
    try:
        check_truncatable(context.reranker, request.truncation_in(context))
    except ValueError as error:
        raise ApiError(400, str(error), param="truncate_prompt_tokens") from None
