"""What the answers of both endpoints have in common: ids, usage, and the errors for the engine's failures."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import INTERNAL, RETRY_AFTER, ApiError, as_api_error
from jaxpage.serving.wire.fields import GenerationRequest
from jaxpage.serving.wire.logprobs import Entries, bounded, likeliest
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.step.strategy import NO_TOKEN_LEFT


class Answer:
    """The parts of an exchange that are the same for completions and chat."""

    _prefix: str  # of the id
    _object: str
    _chunk_object: str
    _parameter_names: Mapping[str, str]  # of the engine's, in the client's terms

    def __init__(
        self,
        request: GenerationRequest,
        context: ModelContext,
        prompts: list[PromptRequest],
        ignored_fields: tuple[str, ...],
    ) -> None:
        self.id = f"{self._prefix}-{uuid.uuid4().hex}"
        self.stream = bool(request.stream)
        self.prompts = prompts
        self.ignored_fields = ignored_fields
        self._request = request
        self._context = context
        self._num_choices = request.n or 1  # of each prompt
        self._created = int(time.time())
        self._usage = Usage()
        self._weights_version = 0  # the prompts of a request have the same weights
        self._ended: set[int] = set()  # choices of a stream

    def refusal(self, error: Exception) -> ApiError:
        return as_api_error(error, names=self._parameter_names).quoting(self._request)

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        self._usage.add(job_index, delta)
        self._weights_version = delta.weights_version
        options = self._request.stream_options
        chunks = []
        for position, output in enumerate(delta.outputs):
            check_finished(output, self._request, self._parameter_names)
            index = job_index * self._num_choices + output.index
            if index in self._ended:
                continue
            if output.finish_reason is not None:
                self._ended.add(index)
            for choice in self._stream_choices(index, job_index, delta, position):
                chunk = self._envelope(self._chunk_object, [choice])
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self._usage.body()
                elif options is not None and options.include_usage:
                    chunk["usage"] = None
                chunks.append(chunk)
        return chunks

    def last_chunks(self) -> list[dict[str, Any]]:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self._envelope(self._chunk_object, []), "usage": self._usage.body()}]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for job_index, output in enumerate(outputs):
            self._usage.add(job_index, output)
            self._weights_version = output.weights_version
            for position, one in enumerate(output.outputs):
                check_finished(one, self._request, self._parameter_names)
                choices.append(
                    self._choice(job_index * self._num_choices + one.index, output, position)
                )
        return {**self._envelope(self._object, choices), "usage": self._usage.body()}

    def _stream_choices(
        self, index: int, job_index: int, delta: RequestOutput, position: int
    ) -> list[dict[str, Any]]:
        """What is new of `delta.outputs[position]`; nothing where there is nothing to say."""
        raise NotImplementedError

    def _choice(self, index: int, output: RequestOutput, position: int) -> dict[str, Any]:
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": self._context.fingerprint(self._weights_version),
            "choices": choices,
        }

    def _end(self, output: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        """The fields of a choice that say how it ended, and its token ids where they were asked for."""
        end: dict[str, Any] = {"finish_reason": finish_reason, "stop_reason": output.stop_reason}
        return {**end, "token_ids": output.token_ids} if self._request.return_token_ids else end


class Usage:
    """Tokens of all prompts so far."""

    def __init__(self) -> None:
        # by prompt: tokens, and how many of them the prefix cache had
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_generated = 0

    def add(self, job_index: int, output: RequestOutput) -> None:
        num_cached = output.metrics.num_cached_tokens if output.metrics else 0
        self._prompts[job_index] = (len(output.prompt_token_ids), num_cached)
        self._num_generated += sum(len(one.token_ids) for one in output.outputs)

    def body(self) -> dict[str, Any]:
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }


def check_finished(
    output: CompletionOutput, request: Any, names: Mapping[str, str] | None = None
) -> None:
    """Raises ApiError for a sequence that the engine gave up: 400 where the request left it no way to go on.

    names: of the engine's parameters, in the client's terms.
    """
    reason = str(output.stop_reason or "")
    if output.finish_reason == "abort":
        raise ApiError(503, "The request was aborted before it finished", headers=RETRY_AFTER)
    if output.finish_reason == "error":
        field, colon, why = reason.partition(": ")
        if field == "structured_outputs" and colon:
            reason = f"{(names or {}).get(field, field)}: {why}"
        if reason == NO_TOKEN_LEFT or (field == "structured_outputs" and colon):
            raise ApiError(400, f"Generation failed: {reason}").quoting(request)
        raise ApiError(500, INTERNAL)


def prompt_logprobs_body(entries: Entries | None, wanted: int) -> list[Any] | None:
    """vLLM's form: by token id, the `wanted` likeliest and the token itself."""
    if entries is None:
        return None
    return [
        entry
        and {
            str(token_id): {
                "logprob": bounded(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in likeliest(entry, wanted).items()
        }
        for entry in entries
    ]
