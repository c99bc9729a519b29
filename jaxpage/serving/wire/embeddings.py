"""Reads requests to POST /v1/embeddings and makes their answers.

The format is OpenAI's, with the pooling and the normalisation of `LLM.embed`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.engine.texts import TextEmbedding
from jaxpage.errors import CheckpointError
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.prompt_request import PromptRequest, prompts_of
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import EmbeddingRequest

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingAnswer:
    """A request for embeddings, and the answer that is made of the vectors.

    Attributes:
        model: The name of the model in the request.
        prompts: The inputs.
        ignored_fields: The paths of ignored fields.
        poolings: The way in which the tokens of each input become one vector.
        arrived: The time at which the request came in, by `time.monotonic`.
        load_seconds: The time for which the request waited for its model to be loaded.
    """

    arrived = 0.0
    load_seconds = 0.0

    def __init__(
        self,
        request: EmbeddingRequest,
        context: ModelContext,
        prompts: list[PromptRequest],
        ignored_fields: tuple[str, ...],
    ):
        self.model = request.model
        self.ignored_fields = ignored_fields
        self._request = request
        self._files = context.embedding.files
        texts = [
            each.prompt if isinstance(each.prompt, str) else list(each.prompt) for each in prompts
        ]
        with_prompts, self.poolings = context.embedding.add_prompts(texts, request.pooling)
        self.prompts = [
            each._replace(prompt=text["prompt"]) if "prompt" in text else each
            for each, text in zip(prompts, with_prompts, strict=True)
        ]

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for an input that the engine refuses."""
        names = {"prompt": "input", "prompt_token_ids": "input"}
        return as_api_error(error, names=names).quoting(self._request)

    def check_width(self, width: int) -> None:
        """Raises ApiError if the request asks for another width than the vectors have.

        Args:
            width: The width of a pooled vector.
        """
        try:
            width = self._files.width(width)
        except CheckpointError as error:
            raise ApiError(400, str(error), param="model") from None
        if (requested := self._request.dimensions) not in (None, width):
            message = (
                f"dimensions={requested} is not supported: the vectors of this model have {width}"
            )
            raise ApiError(400, message, param="dimensions")

    def whole(self, vectors: Sequence[npt.NDArray[np.float32]], num_tokens: int) -> dict[str, Any]:
        """Returns the response.

        Args:
            vectors: The pooled vectors, one for each input.
            num_tokens: The number of tokens of all inputs.
        """
        data = [
            {"object": "embedding", "index": index, "embedding": self._write(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _write(self, vector: npt.NDArray[np.float32]) -> str | list[float]:
        numbers = self._files.finish(vector, self._request.normalize)
        if self._request.encoding_format == "base64":
            return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
        written: list[float] = numbers.tolist()
        return written


def open_embeddings(
    body: dict[str, Any], context: ModelContext, kind: type[EmbeddingAnswer] = EmbeddingAnswer
) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request to POST /v1/embeddings.

    Args:
        body: The JSON object.
        context: The served model and the server's settings.
        kind: The class that makes the answer.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, EmbeddingRequest, context)
    if context.adapter(request.model) is not None:
        raise ApiError(
            400,
            "Embeddings of a LoRA adapter are not supported; name the model itself",
            param="model",
        )
    inputs = prompts_of(request.input)
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise ApiError(
            400, f"input must be 1 to {MAX_INPUTS} inputs, not {len(inputs)}", param="input"
        )
    params = context.embedding.params
    add_special_tokens = request.add_special_tokens is not False
    truncation = request.truncation_in(context)
    checked = [
        context.check_prompt(prompt, "input", is_cut=truncation is not None) for prompt in inputs
    ]
    check_embeds(context.embedding)
    prompts = [
        PromptRequest(prompt, params, add_special_tokens, truncation=truncation)
        for prompt in checked
    ]
    return kind(request, context, prompts, ignored)


def check_embeds(embedding: TextEmbedding) -> None:
    """Raises ApiError if the model's files ask for something that is not supported."""
    try:
        embedding.files.check()
    except CheckpointError as error:
        message = f"this model's files for embeddings are not supported: {error}"
        raise ApiError(400, message, param="model") from None
