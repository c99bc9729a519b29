"""Reads requests to POST /v1/rerank, in the form of Jina and Cohere, and makes their answers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from jaxpage.engine.calls import ByPairs, ByVectors, YesNo, rank
from jaxpage.outputs import RequestOutput, TokenPooling
from jaxpage.serving.wire.answering import check_finished
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import check_embeds
from jaxpage.serving.wire.errors import ApiError, as_api_error, quotes
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import RerankRequest

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class RerankAnswer:
    """A request that ranks documents, and the answer that is made of their scores.

    Attributes:
        id: The id of the answer.
        model: The name of the model in the request.
        prompts: The texts that the model reads.
        ignored_fields: The paths of ignored fields.
        reranker: The way in which the model ranks.
        poolings: The way in which the tokens of each text become one vector; empty for YesNo.
    """

    def __init__(
        self,
        request: RerankRequest,
        context: ModelContext,
        documents: list[str],
        ignored_fields: tuple[str, ...],
    ) -> None:
        self.id = f"rerank-{uuid.uuid4().hex}"
        self.model = request.model
        self.ignored_fields = ignored_fields
        self.reranker = context.reranker
        self.poolings: list[TokenPooling] = []
        self._request = request
        self._documents = documents
        about = request.query, documents, request.instruction
        if isinstance(self.reranker, YesNo):
            params = self.reranker.first
            inputs: list[Any] = list(self.reranker.texts(*about))
        else:
            params = context.embedding.params
            inputs, self.poolings = self.reranker.inputs(*about)
        self.prompts = [
            PromptRequest(
                context.check_prompt(
                    text if isinstance(text, str) else text["prompt_token_ids"], "documents"
                ),
                params,
                isinstance(self.reranker, ByVectors),
            )
            for text in inputs
        ]

    def prompts_drawing(self, indices: Sequence[int], token: int) -> list[PromptRequest]:
        """Returns some of the prompts, each to draw the one token."""
        assert isinstance(self.reranker, YesNo)
        params = self.reranker.drawing(token)
        return [self.prompts[index]._replace(params=params) for index in indices]

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a text that the engine refuses."""
        names = {"prompt": "documents", "prompt_token_ids": "documents"}
        return as_api_error(error, names=names).quoting(self._request)

    def check_width(self, width: int) -> None:
        """Accepts vectors of any width."""

    def check(self, output: RequestOutput) -> RequestOutput:
        """Returns an output, or raises ApiError if the engine gave it up."""
        check_finished(output.outputs[0], self._request)
        return output

    def whole(self, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        """Returns the response.

        Args:
            scores: The score of each document.
            num_tokens: The tokens of all prompts.
        """
        results = []
        for ranked_document in rank(scores, self._documents, self._request.top_n):
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


@quotes
def open_rerank(body: dict[str, Any], context: ModelContext) -> RerankAnswer:
    """Returns the `RerankAnswer` of a request to POST /v1/rerank.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, RerankRequest, context)
    if context.adapter(request.model) is not None:
        raise ApiError(400, "A LoRA adapter cannot rerank; name the model itself", param="model")
    most = context.limits.max_prompts
    if not 0 < len(request.documents) <= most:
        raise ApiError(
            400,
            f"documents must be 1 to {most} of them, not {len(request.documents)}",
            param="documents",
        )
    documents = [
        document if isinstance(document, str) else document.text for document in request.documents
    ]
    context.check_prompt(request.query, "query")
    if not isinstance(context.reranker, ByVectors):  # it reads the query with each document
        number = len(request.query) * len(documents) + sum(map(len, documents))
        if number > (longest := context.limits.max_score_characters):
            raise ApiError(
                400,
                f"documents have {number} characters, where the query counts once for each; at most {longest} are allowed",
                param="documents",
            )
    if isinstance(context.reranker, ByVectors):
        check_embeds(context.reranker.embedding)
    if isinstance(context.reranker, ByPairs) and request.instruction is not None:
        message = "instruction is not supported: the model is a cross-encoder, which takes none"
        raise ApiError(400, message, param="instruction")
    return RerankAnswer(request, context, documents, ignored)
