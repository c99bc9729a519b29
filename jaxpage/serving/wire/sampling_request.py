"""Turns the fields of a request into the engine's parameters, for sampling or for beam search."""

from __future__ import annotations

from typing import Any

from jaxpage.serving.wire.body import JsonReader
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.field_types import RequestObject
from jaxpage.serving.wire.request_fields import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from jaxpage.serving.wire.schemas import check_schema
from jaxpage.serving.wire.tool_fields import TextFormat
from jaxpage.settings.field_table import PARAMETERS
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

# These fields of vLLM's StructuredOutputsParams are false by default.
_VLLM_DEFAULTS = {
    *("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
    "_backend_was_auto",
}


def engine_values(request: RequestObject) -> dict[str, Any]:
    """Returns the parameters that go to the engine as they are, or converted.

    Raises:
        ValueError: A value cannot be converted.
    """
    return {
        field.name: field.engine(value)
        for field in PARAMETERS
        if field.engine
        and field.name in type(request).model_fields
        and (value := getattr(request, field.name)) is not None
    }


def sampling_params(
    request: GenerationRequest, context: ModelContext, *, num_prompts: int = 1, **changes: Any
) -> SamplingParams:
    """Returns the sampling parameters of a request.

    The request's fields replace the model's defaults, and the endpoint's own values replace both.

    Args:
        request: The request.
        context: The served model and the server's settings.
        num_prompts: The number of prompts that share the parameters.
        **changes: The endpoint's own values, by the engine's names.

    Raises:
        ApiError: A value is refused.
    """
    num_logprobs = request.num_logprobs
    try:
        values = {
            **context.sampling_defaults,
            **engine_values(request),
            "logprobs": 0 if request.receipt and num_logprobs is None else num_logprobs,
            "structured_outputs": read_structured_outputs(
                request.response_format, request.structured_outputs
            ),
            **changes,
        }
        params = SamplingParams(**values)
        max_length = _max_tokens_with_logprobs(params, request, context, num_prompts)
        if max_length is not None and params.max_tokens is None:
            params = SamplingParams(**{**values, "max_tokens": max_length})
    except ValueError as error:
        raise as_api_error(error) from None
    return params


def _max_tokens_with_logprobs(
    params: SamplingParams, request: GenerationRequest, context: ModelContext, num_prompts: int
) -> int | None:
    """Returns the most tokens of a sequence whose log probabilities fit into an answer.

    None if there is room for as many as the model can generate. A request that says no length gets
    what there is room for, as it does from the length of the model.

    Raises:
        ApiError: The request asks for more tokens.
    """
    if params.logprobs is None:
        return None
    num_sequences = num_prompts * (params.best_of or params.n)
    max_tokens = min(params.max_tokens or context.max_model_len, context.max_model_len)
    per_token = 1 + params.logprobs
    number = num_sequences * max_tokens * per_token
    maximum = context.limits.max_output_logprobs
    if number <= maximum:
        return None
    max_length = maximum // (num_sequences * per_token)
    if params.max_tokens is None and max_length:
        return max_length
    advice = f"max_tokens of at most {max_length}" if max_length else "fewer sequences"
    name = "top_logprobs" if getattr(request, "top_logprobs", None) else "logprobs"
    raise ApiError(
        400,
        f"{name}: the response could have {number} log probabilities ({num_sequences} "
        f"sequences times {max_tokens} tokens "
        f"times 1 + {params.logprobs}); at most {maximum} are allowed: ask for {advice}",
        param=name,
    )


def beam_params(
    request: GenerationRequest, *, width: int, max_tokens: int | None
) -> BeamSearchParams:
    """Returns the parameters of a beam search.

    Args:
        request: The request; it gets `n` hypotheses.
        width: The number of beams.
        max_tokens: The most tokens of a hypothesis; None for as many as there is room for.

    Raises:
        ApiError: A field is set that a beam search cannot honour, or a value is refused.
    """
    for name, field in request.known.items():
        if field.beams is None:
            continue
        value = getattr(request, name, None)
        if value is not None and value not in field.beams:
            raise ApiError(400, f"{name} is not supported with use_beam_search", param=name)
    if read_structured_outputs(request.response_format, None) is not None:
        raise ApiError(
            400, "response_format is not supported with use_beam_search", param="response_format"
        )
    if request.stream:
        raise ApiError(
            400,
            "stream is not supported with use_beam_search: the best is known only at the end",
            param="stream",
        )
    try:
        return BeamSearchParams(
            width,
            max_tokens=max_tokens,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            early_stopping=request.early_stopping or False,
            n=request.n or 1,
            ignore_eos=request.ignore_eos or False,
            stop_token_ids=request.stop_token_ids,
        )
    except ValueError as error:
        raise as_api_error(error) from None


def read_structured_outputs(
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
    structured_outputs: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Returns the grammar that the output must keep to, in the engine's terms; None without one.

    Raises:
        ApiError: The request asks for a grammar in two ways, or the schema is refused.
    """
    if response_format is None or isinstance(response_format, TextFormat):
        return _without_defaults(structured_outputs)
    if structured_outputs is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs cannot be used together",
            param="structured_outputs",
        )
    if isinstance(response_format, JsonObjectFormat):
        return {"json_object": True}
    check_schema(response_format.json_schema.schema_, "response_format.json_schema.schema")
    return {"json": response_format.json_schema.schema_}


def _without_defaults(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns structured outputs without the fields that vLLM's client adds with their defaults.

    A schema that is given as a text is read here, with the limits of a body.
    """
    if values is None:
        return None
    if isinstance(schema := values.get("json"), str):
        values = {**values, "json": JsonReader().read(schema, "structured_outputs")}
    return {
        name: value
        for name, value in values.items()
        if not (value is False and name in _VLLM_DEFAULTS)
    }
