"""Reads requests to POST /v1/score for the scores of pairs of texts, in the form of vLLM.

The pairs are in `text_1` and `text_2`, in `queries` and `documents`, or in `data_1` and `data_2`. A
request with `prompt` and `continuation` asks for log probabilities; see score.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.engine.texts import pair_up
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.prompt_request import prompts_of
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import PairScoreRequest
from jaxpage.serving.wire.rerank import PairAnswer

SCORE_PATHS = ("/v1/score", "/score")
_FORMS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


def asks_for_pairs(body: Mapping[str, Any]) -> bool:
    """Returns whether a request to POST /v1/score has pairs of texts."""
    has_pairs = any(body.get(name) is not None for form in _FORMS for name in form)
    return has_pairs and body.get("prompt") is None and body.get("continuation") is None


class PairScoreAnswer(PairAnswer):
    """A request for the scores of pairs, and its answer."""

    kind = "score"

    def whole(self, scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
        """Returns the scores in the order of the pairs; see `PairAnswer.whole`."""
        return {
            "id": self.id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def open_pair_scores(body: dict[str, Any], context: ModelContext) -> PairScoreAnswer:
    """Returns the `PairScoreAnswer` of a request to POST /v1/score.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, PairScoreRequest, context)
    if context.adapter(request.model) is not None:
        raise ApiError(400, "A LoRA adapter cannot score; name the model itself", param="model")
    stated = [form for form in _FORMS if any(getattr(request, name) is not None for name in form)]
    if len(stated) > 1:
        message = f"{stated[1][0]} and {stated[0][0]} cannot be used together"
        raise ApiError(400, message, param=stated[1][0])
    [names] = stated
    first, second = (_texts(request, name, context) for name in names)
    try:
        pairs = pair_up(first, second)
    except ValueError as error:
        raise ApiError(400, f"{names[0]}: {error}", param=names[0]) from None
    return PairScoreAnswer(request, context, pairs, names, ignored)


def _texts(request: PairScoreRequest, name: str, context: ModelContext) -> list[str]:
    """Returns the texts of a field.

    Raises:
        ApiError: The field is not there, or has too many texts.
    """
    if (value := getattr(request, name)) is None:
        raise ApiError(400, f"{name} is required", param=name)
    texts = prompts_of(value)
    if not 0 < len(texts) <= (maximum := context.limits.max_prompts):
        raise ApiError(400, f"{name} must be 1 to {maximum} texts, not {len(texts)}", param=name)
    return texts
