"""Reads requests to POST /v1/completions and makes their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.outputs import RequestOutput
from jaxpage.serving.wire.answering import Answer, prompt_logprobs_body
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.logprobs import Entries, TextOffsets, completion_logprobs
from jaxpage.serving.wire.prompt_request import PromptRequest, prompts_of
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import CompletionRequest
from jaxpage.serving.wire.sampling_request import (
    beam_params,
    sampling_params,
)
from jaxpage.serving.wire.thinking import completion_budget
from jaxpage.serving.wire.vectors import read_vectors
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

DEFAULT_MAX_TOKENS = 16


def open_completion(body: dict[str, Any], context: ModelContext) -> CompletionAnswer:
    """Returns the exchange of a request to POST /v1/completions.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, CompletionRequest, context)
    vectors = _vectors(request)
    prompts = [()] * len(vectors) if vectors else _prompts(request, context)
    _check_number(request, context, len(prompts))
    _check_tokens(request, context)
    values, idle = completion_budget(request, context)
    params = _params(request, context, len(prompts), **values)
    add_special_tokens = request.add_special_tokens is not False
    lora = context.adapter(request.model)
    ignored += idle
    prompt_requests = [
        PromptRequest(
            prompt,
            params,
            add_special_tokens,
            lora,
            vectors=array,
            receipt=bool(request.receipt),
        )
        for prompt, array in zip(prompts, vectors or [None] * len(prompts), strict=True)
    ]
    return CompletionAnswer(request, context, prompt_requests, ignored)


def _vectors(request: CompletionRequest) -> list[Any]:
    """Returns the arrays of `prompt_embeds`; an empty list if the request has prompts.

    Raises:
        ApiError: The request has both or neither, or an array cannot be read.
    """
    if request.prompt_embeds is None:
        if "prompt" not in request.model_fields_set:
            raise ApiError(400, "prompt is required", param="prompt")
        return []
    param = "prompt_embeds"
    if request.prompt:
        raise ApiError(400, f"{param} and prompt exclude each other; give one of them", param=param)
    if request.echo:
        raise ApiError(400, f"echo needs text, which {param} is not", param="echo")
    if isinstance(request.prompt_embeds, str):
        return [read_vectors(request.prompt_embeds, param)]
    if not request.prompt_embeds:
        raise ApiError(400, f"{param} must have at least one array", param=param)
    return [
        read_vectors(text, f"{param}[{index}]") for index, text in enumerate(request.prompt_embeds)
    ]


def _prompts(request: CompletionRequest, context: ModelContext) -> list[str | tuple[int, ...]]:
    prompts = prompts_of(request.prompt)
    # First their number, because each may be long.
    _check_number(request, context, len(prompts))
    return [context.check_prompt(prompt, "prompt") for prompt in prompts]


def _check_number(request: CompletionRequest, context: ModelContext, num_prompts: int) -> None:
    num_sequences = num_prompts * max(request.n or 1, request.best_of or 1)
    limits = context.limits
    param = "prompt" if request.prompt_embeds is None else "prompt_embeds"
    if not 0 < num_prompts <= limits.max_prompts:
        raise ApiError(
            400,
            f"{param} must be 1 to {limits.max_prompts} prompts, not {num_prompts}",
            param=param,
        )
    if request.receipt and num_prompts > 1:
        raise ApiError(400, f"receipt is for one prompt, not {num_prompts}", param="receipt")
    if num_sequences > limits.max_sequences:
        message = (
            f"n={request.n or 1} for {num_prompts} prompts is more than {limits.max_sequences} "
            "sequences at once"
        )
        raise ApiError(400, message, param="n")


def _check_tokens(request: CompletionRequest, context: ModelContext) -> None:
    if request.max_tokens == 0:
        if request.receipt:
            raise ApiError(400, "receipt is not supported with max_tokens=0", param="receipt")
        if not request.echo:
            raise ApiError(
                400, "max_tokens must be at least 1 without echo, got 0", param="max_tokens"
            )
        if request.use_beam_search or request.best_of is not None:
            raise ApiError(400, "best_of is not supported with max_tokens=0", param="max_tokens")
    if request.echo and context.tokenizer is None:
        raise ApiError(400, "echo needs text, but the model has no tokenizer", param="echo")
    if (request.best_of or 0) > (request.n or 1) and request.stream:
        raise ApiError(
            400,
            "best_of is not supported with stream: the best is known only at the end",
            param="best_of",
        )


def _params(
    request: CompletionRequest, context: ModelContext, num_prompts: int, **values: Any
) -> SamplingParams | BeamSearchParams:
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    if request.use_beam_search:
        return beam_params(request, width=request.best_of or request.n or 1, max_tokens=max_tokens)
    fields: dict[str, Any] = {"max_tokens": max_tokens, **values}
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return sampling_params(request, context, num_prompts=num_prompts, **fields)


class CompletionAnswer(Answer):
    """Answers one or several prompts with `n` texts for each."""

    _prefix = "cmpl"
    _object = "text_completion"
    _chunk_object = "text_completion"
    _request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        context: ModelContext,
        prompts: list[PromptRequest],
        ignored: tuple[str, ...],
    ):
        super().__init__(request, context, prompts, ignored)
        self._texts = context.token_texts
        self._begun: set[int] = set()  # the choices of a stream that have had a chunk
        self._prompt_logprobs: dict[int, Entries] = {}  # by prompt; a stream brings them once
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    @property
    def _parameter_names(self) -> Mapping[str, str]:
        return {
            "prompt_token_ids": "prompt",
            "beam_width": "n",
            # The engine counts the sequences that it runs: `best_of`, where that is given.
            "n": "n" if self._request.best_of is None else "best_of",
            "structured_outputs": self._request.format_parameter,
        }

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        return super().chunks(job_index, self._cut(delta))

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        return super().whole([self._cut(output) for output in outputs])

    def _cut(self, output: RequestOutput) -> RequestOutput:
        """Returns the output without its tokens if max_tokens is 0.

        The engine draws one token even then.
        """
        if self._request.max_tokens != 0:
            return output
        return replace(
            output,
            outputs=[
                replace(
                    completion,
                    text="",
                    token_ids=[],
                    logprobs=None if completion.logprobs is None else [],
                    finish_reason="length"
                    if completion.finish_reason in ("stop", "length")
                    else completion.finish_reason,
                    stop_reason=None
                    if completion.finish_reason in ("stop", "length")
                    else completion.stop_reason,
                )
                for completion in output.outputs
            ],
        )

    def _stream_choices(
        self, index: int, job_index: int, delta: RequestOutput, position: int
    ) -> list[dict[str, Any]]:
        output = delta.outputs[position]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[job_index] = delta.prompt_logprobs
        is_news = output.text or output.finish_reason is not None
        has_tokens = output.token_ids and (
            self._request.logprobs is not None or self._request.return_token_ids
        )
        if not is_news and not has_tokens:
            return []
        is_first = index not in self._begun
        self._begun.add(index)
        whole = replace(delta, prompt_logprobs=self._prompt_logprobs.get(job_index))
        choice = self._make_chunk(
            index, whole, position, echo=bool(self._request.echo) and is_first
        )
        if self._request.return_token_ids and is_first:
            choice["prompt_token_ids"] = delta.prompt_token_ids
        return [choice]

    def _choice(self, index: int, output: RequestOutput, position: int) -> dict[str, Any]:
        choice = self._make_chunk(index, output, position, echo=bool(self._request.echo))
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(
                output.prompt_logprobs, self._request.prompt_logprobs
            )
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _make_chunk(
        self, index: int, output: RequestOutput, position: int, *, echo: bool
    ) -> dict[str, Any]:
        completion = output.outputs[position]
        shown = output.echoed(position, prompt=self._prompt_text(output)) if echo else completion
        logprobs = None
        if self._request.logprobs is not None and shown.logprobs is not None:
            if (offsets := self._offsets.get(index)) is None:
                offsets = self._offsets[index] = self._new_offsets(output)
            logprobs = completion_logprobs(
                shown.token_ids, shown.logprobs, self._request.logprobs, offsets, self._texts
            )
        return {
            "index": index,
            "text": shown.text,
            "logprobs": logprobs,
            **self._end(completion, completion.finish_reason),
        }

    def _new_offsets(self, output: RequestOutput) -> TextOffsets:
        echo = self._request.echo
        return TextOffsets(
            self._context.tokenizer,
            skips_special=self._request.skip_special_tokens is not False,
            prompt=self._prompt_text(output) if echo else None,
            prompt_token_ids=() if echo else output.prompt_token_ids,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._context.tokenizer is None:
            return output.prompt or ""
        return str(
            self._context.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        )
