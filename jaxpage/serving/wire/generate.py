"""Reads requests to POST /v1/generate and makes their answers: token ids in, ids and arrays out.

Trainers use it. An array travels as base64 of its numbers, little-endian and row by row:

    {"dtype": "float32", "shape": [12], "data": "AACAv..."}
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field

from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpage.serving.wire.answering import Answer
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import (
    Items,
    ModelName,
    Name,
    RequestObject,
    TokenId,
    by_name,
    with_parameters,
)
from jaxpage.serving.wire.fields import OF_CHATS, OF_GENERATION, OF_ROLLOUTS, REFUSED
from jaxpage.serving.wire.openapi_parts import INTEGER, STRING, USAGE, list_of, object_of
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import GenerationRequest
from jaxpage.serving.wire.sampling_request import sampling_params
from jaxpage.serving.wire.thinking import Wish, budget_values
from jaxpage.settings import field_table as table
from jaxpage.settings.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
Entry = dict[int, Logprob]
NO_TOKEN = -1  # pads the ids of the most likely tokens


class RolloutRequest(RequestObject):
    """Holds the fields that are no parameters of the engine."""

    known = by_name(*table.PARAMETERS, *OF_GENERATION, *OF_CHATS, *OF_ROLLOUTS, *REFUSED)

    model: ModelName
    prompt_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None

    request_id: Name | None = None
    continue_from: Name | None = None
    receipt: bool | None = None

    # What all requests that generate have.
    stream: ClassVar[bool] = False
    stream_options: ClassVar[None] = None
    response_format: ClassVar[None] = None
    return_token_ids: ClassVar[bool] = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns a parameter."""

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        super().check()
        if self.continue_from is None:
            if self.prompt_token_ids is None:
                raise ApiError(400, "prompt_token_ids is required", param="prompt_token_ids")
            return
        allowed = {"model", "continue_from", "user"}
        for name in sorted(self.model_fields_set - allowed):
            if getattr(self, name) is not None:
                raise ApiError(
                    400,
                    f"{name} cannot be given with continue_from: the request goes on with the "
                    "prompt, the parameters and the id that it had",
                    param=name,
                )


class GenerateRequest(with_parameters("rollouts", RolloutRequest)):  # type: ignore[misc]
    """A request to POST /v1/generate."""

    lengths = ("max_tokens",)

    @property
    def num_logprobs(self) -> int | None:
        """Returns the number of most likely tokens whose log probabilities are asked for."""
        return self.logprobs  # type: ignore[no-any-return]


def open_generate(body: dict[str, Any], context: ModelContext) -> GenerateAnswer:
    """Returns the exchange of a request to POST /v1/generate.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, GenerateRequest, context)
    if request.continue_from is not None:
        goes_on = PromptRequest(
            (),
            SamplingParams(),
            False,
            context.adapter(request.model),
            request_id=request.continue_from,
            continues=True,
        )
        return GenerateAnswer(cast(GenerationRequest, request), context, [goes_on], ignored)
    num_samples = max(request.n or 1, request.best_of or 1)
    if num_samples > (maximum := context.limits.max_sequences):
        raise ApiError(400, f"n={num_samples} is more than {maximum} sequences at once", param="n")
    budget = Wish(request.thinking_token_budget, "thinking_token_budget")
    can_reason = request.structured_outputs is None
    values, idle = budget_values(budget, context, can_reason=can_reason)
    params = sampling_params(
        cast(GenerationRequest, request),
        context,
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        **values,
    )
    _check_sizes(request, context, num_samples * min(params.max_tokens or 0, context.max_model_len))
    prompt = PromptRequest(
        tuple(request.prompt_token_ids),
        params,
        False,
        context.adapter(request.model),
        receipt=bool(request.receipt),
        request_id=request.request_id,
    )
    return GenerateAnswer(cast(GenerationRequest, request), context, [prompt], ignored + idle)


def _check_sizes(request: GenerateRequest, context: ModelContext, num_tokens: int) -> None:
    """Raises ApiError if an answer of so many tokens could have too large arrays."""
    limits = context.limits
    for name, per_token, items, maximum in (
        ("return_sampling_mask", request.top_k or 0, "token ids", limits.max_output_logprobs),
        ("return_hidden_states", context.hidden_size, "numbers", limits.max_output_hidden),
    ):
        if getattr(request, name) and (number := num_tokens * per_token) > maximum:
            message = (
                f"{name}: the response could have {number} {items} (n times max_tokens, "
                f"{num_tokens}, times {per_token}); at most {maximum} are allowed"
            )
            raise ApiError(400, message, param=name)


class GenerateAnswer(Answer):
    """Answers a prompt with `n` samples."""

    _prefix = "gen"
    _object = "rollout"

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response; see `Exchange`."""
        (output,) = outputs
        body = super().whole(outputs)
        if (request_id := self.prompts[0].request_id) is not None:
            body["request_id"] = request_id
        body["weights_version"] = output.weights_version
        if output.adapter_digest is not None:
            body["adapter_digest"] = output.adapter_digest
        if output.prompt_logprobs is not None:
            entries = cast(list[Entry], output.prompt_logprobs[1:])
            arrays = _logprob_arrays(entries, output.prompt_token_ids[1:], self._num_top_of_prompt)
            body |= {f"prompt_{name}": array for name, array in arrays.items()}
        return body

    def _check_finished(self, output: CompletionOutput) -> None:
        if output.finish_reason != "abort":
            super()._check_finished(output)

    @property
    def _params(self) -> SamplingParams:
        """Returns the parameters, which a request that is continued had before."""
        return cast(SamplingParams, self.prompts[0].params)

    @property
    def _num_top_of_prompt(self) -> int:
        return self._params.prompt_logprobs or 0

    def _choice(self, index: int, output: RequestOutput, position: int) -> dict[str, Any]:
        completion = output.outputs[position]
        choice = {
            "index": index,
            **self._end(completion, completion.finish_reason),
            "cumulative_logprob": completion.cumulative_logprob,
        }
        if completion.logprobs is not None:
            entries = cast(list[Entry], completion.logprobs)
            num_top = self._params.logprobs or 0
            choice |= _logprob_arrays(entries, completion.token_ids, num_top)
        if completion.num_kept is not None:
            choice["num_kept"] = array_body(np.array(completion.num_kept, np.int32))
        if (mask := completion.sampling_mask) is not None:
            choice["sampling_mask"] = {
                "num_kept": array_body(mask.num_kept),
                "kept_token_ids": array_body(mask.kept_token_ids),
            }
        if completion.routed_experts is not None:
            choice["routed_experts"] = array_body(completion.routed_experts)
        if completion.hidden_states is not None:
            choice["hidden_states"] = array_body(completion.hidden_states)
        return choice


def _logprob_arrays(entries: list[Entry], token_ids: list[int], num_top: int) -> dict[str, Any]:
    """Returns the log probabilities [T] of tokens, and the most likely tokens [T, N] with theirs.

    Where fewer than N tokens could be drawn, ids are padded with -1 and log probabilities with
    minus infinity.
    """
    logprobs = [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)]
    arrays = {"logprobs": array_body(np.array(logprobs, np.float32))}
    if not num_top:
        return arrays
    top_ids = np.full((len(entries), num_top), NO_TOKEN, np.int32)
    top = np.full((len(entries), num_top), -np.inf, np.float32)
    for index, entry in enumerate(entries):
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        top_ids[index, : len(ranked)] = [token_id for token_id, _ in ranked]
        top[index, : len(ranked)] = [logprob.logprob for _, logprob in ranked]
    return {**arrays, "top_token_ids": array_body(top_ids), "top_logprobs": array_body(top)}


def array_body(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Returns an array as it is in an answer."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


_ARRAY = object_of(dtype=STRING, shape=list_of(INTEGER), data=STRING)
_CHOICE = object_of(
    index=INTEGER,
    token_ids=list_of(INTEGER),
    finish_reason={"enum": ["stop", "length", "abort"]},
    cumulative_logprob={"type": ["number", "null"]},
)
_CHOICE["properties"] |= {
    **dict.fromkeys(
        (
            *("logprobs", "top_token_ids", "top_logprobs"),
            *("num_kept", "routed_experts", "hidden_states"),
        ),
        _ARRAY,
    ),
    "sampling_mask": object_of(num_kept=_ARRAY, kept_token_ids=_ARRAY),
}
ROLLOUT = object_of(
    id=STRING,
    object={"const": "rollout"},
    created=INTEGER,
    model=STRING,
    weights_version=INTEGER,
    choices=list_of(_CHOICE),
    usage=USAGE,
)
ROLLOUT["properties"] |= dict.fromkeys(
    ("prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs"), _ARRAY
)
ROLLOUT["properties"] |= {"request_id": STRING, "adapter_digest": STRING}
