"""Reads requests to POST /v1/score, which ask for log probabilities of given continuations."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpage.engine.calls import (
    SCORING,
    continuation_logprobs,
)
from jaxpage.outputs import RequestOutput
from jaxpage.serving.wire.answering import check_finished
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.logprobs import limit_logprob
from jaxpage.serving.wire.prompt_request import PromptRequest, prompts_of
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import ScoreRequest
from jaxpage.serving.wire.sampling_request import engine_values


def open_score(body: dict[str, Any], context: ModelContext) -> ScoreAnswer:
    """Returns the exchange of a request to POST /v1/score.

    It encodes each pair of texts, and each prompt once, which may take a while.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, ScoreRequest, context)
    encoder = _Encoder(request, context)
    pairs = [encoder.encode(*pair) for pair in _pairs(request, context)]
    try:
        params = replace(SCORING, **engine_values(request))
    except ValueError as error:
        raise as_api_error(error) from None
    lora = context.adapter(request.model)
    prompts = [PromptRequest(token_ids, params, False, lora) for token_ids, _ in pairs]
    return ScoreAnswer(
        request, context, prompts, [num_prompt_tokens for _, num_prompt_tokens in pairs], ignored
    )


class ScoreAnswer:
    """Answers with the log probabilities of the continuation of each prompt."""

    stream = False
    load_seconds = 0.0

    def __init__(
        self,
        request: ScoreRequest,
        context: ModelContext,
        prompts: list[PromptRequest],
        num_prompt_tokens: Sequence[int],
        ignored_fields: tuple[str, ...],
    ) -> None:
        """Makes the exchange.

        Args:
            request: The request.
            context: The served model and the server's settings.
            prompts: The prompts, each followed by its continuation.
            num_prompt_tokens: The number of tokens before the continuation, for each prompt.
            ignored_fields: The paths of ignored fields.
        """
        self.id = f"score-{uuid.uuid4().hex}"
        self.model = request.model
        self.prompts = prompts
        self.ignored_fields = ignored_fields
        self._request = request
        self._context = context
        self._num_prompt_tokens = num_prompt_tokens
        self._created = int(time.time())

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a prompt that the engine refuses; see `Exchange`."""
        return as_api_error(error, names={"prompt_token_ids": "prompt"}).quoting(self._request)

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Raises NotImplementedError: scores are not streamed."""
        raise NotImplementedError("scores are not streamed")

    def last_chunks(self) -> list[dict[str, Any]]:
        """Raises NotImplementedError: scores are not streamed."""
        raise NotImplementedError("scores are not streamed")

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        data = []
        for index, (output, num_prompt_tokens) in enumerate(
            zip(outputs, self._num_prompt_tokens, strict=True)
        ):
            check_finished(output.outputs[0], self._request)
            entries = continuation_logprobs(output, num_prompt_tokens)
            logprobs = [limit_logprob(entry.logprob) for entry in entries]
            data.append(
                {
                    "object": "score",
                    "index": index,
                    "score": sum(logprobs),
                    "token_ids": output.prompt_token_ids[num_prompt_tokens:],
                    "token_logprobs": logprobs,
                    "is_greedy": all(entry.rank == 1 for entry in entries),
                }
            )
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {
            "id": self.id,
            "object": "list",
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self._context.fingerprint(outputs[0].weights_version),
            "data": data,
            "usage": usage,
        }


def _pairs(request: ScoreRequest, context: ModelContext) -> list[tuple[Any, Any]]:
    """Returns each prompt with its continuation; a single prompt goes with all of them.

    Raises:
        ApiError: There are too many prompts or continuations, or their numbers differ.
    """
    prompts = prompts_of(request.prompt)
    continuations = prompts_of(request.continuation)
    maximum = context.limits.max_prompts
    for name, items in (("prompt", prompts), ("continuation", continuations)):
        if not 0 < len(items) <= maximum:
            raise ApiError(
                400, f"{name} must be 1 to {maximum} of them, not {len(items)}", param=name
            )
    for prompt in prompts:
        context.check_prompt(prompt, "prompt")
    if len(prompts) == 1:
        prompts *= len(continuations)
    if len(prompts) != len(continuations):
        message = (
            f"continuation must be one for each prompt: there are {len(prompts)} prompts and "
            f"{len(continuations)}"
        )
        raise ApiError(400, message, param="continuation")
    number = sum(len(text) for text in prompts if isinstance(text, str))
    if number > (max_characters := context.limits.max_score_characters):
        raise ApiError(
            400,
            f"prompt has {number} characters, counted once for each continuation; at most "
            f"{max_characters} are allowed",
            param="prompt",
        )
    return list(zip(prompts, continuations, strict=True))


class _Encoder:
    """Encodes the prompts of a request, each with its continuation.

    Texts are encoded together, because the token of a word includes the space before it. The
    tokens of the prompt alone are then cut off. Spaces at the prompt's end go with the continuation
    for the same reason. lm-eval does both.
    """

    def __init__(self, request: ScoreRequest, context: ModelContext) -> None:
        self._context = context
        self._special = request.add_special_tokens is not False
        self._lengths: dict[str, int] = {}  # the tokens of each prompt alone

    def encode(self, prompt: Any, continuation: Any) -> tuple[tuple[int, ...], int]:
        """Returns the tokens of a pair, and how many of them are the prompt's.

        Raises:
            ApiError: One of the two is empty, they are too long together, or only one of them is
                text.
        """
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise ApiError(
                400,
                "prompt and continuation must both be text, or both be token ids",
                param="continuation",
            )
        self._context.check_prompt(continuation, "continuation")
        if isinstance(prompt, str):
            self._context.check_length(prompt + continuation, "prompt")
            token_ids = self._tokens(prompt + continuation)
        else:
            token_ids = (*prompt, *continuation)
        # A prompt that is too long is refused before it is encoded with other continuations.
        if len(token_ids) > (max_length := self._context.max_model_len):
            message = (
                f"The prompt has {len(token_ids)} tokens with its continuation, and "
                f"max_model_len is {max_length}"
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        num_prompt_tokens = self._num_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if not num_prompt_tokens:
            raise ApiError(400, "prompt must have at least one token", param="prompt")
        if num_prompt_tokens >= len(token_ids):
            raise ApiError(400, "continuation must have at least one token", param="continuation")
        return token_ids, num_prompt_tokens

    def _num_tokens(self, prompt: str) -> int:
        if (number := self._lengths.get(prompt)) is None:
            number = self._lengths[prompt] = len(self._tokens(prompt.rstrip()))
        return number

    def _tokens(self, text: str) -> tuple[int, ...]:
        tokenizer = self._context.tokenizer
        assert tokenizer is not None
        return tuple(tokenizer(text, add_special_tokens=self._special)["input_ids"])
