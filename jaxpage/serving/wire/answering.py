"""Makes what the answers of completions and chats share: ids, usage, and errors of the engine."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import INTERNAL, RETRY_AFTER, ApiError, as_api_error
from jaxpage.serving.wire.logprobs import Entries, limit_logprob, top_logprobs
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.request_fields import GenerationRequest
from jaxpage.step.strategy import NO_TOKEN_LEFT


class Answer:
    """Makes the parts of an exchange that are the same for completions and chats."""

    load_seconds = 0.0
    _prefix: str  # begins the id
    _object: str
    _chunk_object: str

    def __init__(
        self,
        request: GenerationRequest,
        context: ModelContext,
        prompts: list[PromptRequest],
        ignored_fields: tuple[str, ...],
    ) -> None:
        self.id = f"{self._prefix}-{uuid.uuid4().hex}"
        self.model = request.model
        self.stream = bool(request.stream)
        self.prompts = prompts
        self.ignored_fields = ignored_fields
        self._request = request
        self._context = context
        self._num_choices = request.n or 1  # for each prompt
        self._created = int(time.time())
        self._usage = Usage()
        self._weights_version = 0  # the latest that any prompt was computed with
        self._ended: set[int] = set()  # the choices of a stream that have ended
        self._receipt: dict[str, Any] | None = None  # of a stream that has ended

    @property
    def _parameter_names(self) -> Mapping[str, str]:
        """Returns the client's names by the engine's names, where they differ."""
        return {}

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a prompt that the engine refuses; see `Exchange`."""
        return as_api_error(error, names=self._parameter_names).quoting(self._request)

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        self._usage.add(job_index, delta)
        self._weights_version = max(self._weights_version, delta.weights_version)
        self._receipt = delta.receipt
        options = self._request.stream_options
        chunks = []
        for position, output in enumerate(delta.outputs):
            self._check_finished(output)
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
        """Returns the chunks that end a stream; see `Exchange`."""
        options = self._request.stream_options
        last: dict[str, Any] = {}
        if options is not None and options.include_usage:
            last["usage"] = self._usage.body()
        if self._request.receipt:
            last["receipt"] = self._receipt
        return [{**self._envelope(self._chunk_object, []), **last}] if last else []

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        choices = []
        for job_index, output in enumerate(outputs):
            self._usage.add(job_index, output)
            self._weights_version = max(self._weights_version, output.weights_version)
            for position, completion in enumerate(output.outputs):
                self._check_finished(completion)
                choices.append(
                    self._choice(job_index * self._num_choices + completion.index, output, position)
                )
        response = {**self._envelope(self._object, choices), "usage": self._usage.body()}
        if self._request.receipt:
            response["receipt"] = outputs[0].receipt
        return response

    def _check_finished(self, output: CompletionOutput) -> None:
        """Raises the client's error for a sequence that the engine gave up."""
        check_finished(output, self._request, self._parameter_names)

    def _stream_choices(
        self, index: int, job_index: int, delta: RequestOutput, position: int
    ) -> list[dict[str, Any]]:
        """Returns what is new in `delta.outputs[position]`; an empty list if nothing is."""
        raise NotImplementedError

    def _choice(self, index: int, output: RequestOutput, position: int) -> dict[str, Any]:
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self._context.fingerprint(self._weights_version),
            "choices": choices,
        }

    def _end(self, output: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        """Returns the fields of a choice that say how it ended, and its token ids if asked for."""
        end: dict[str, Any] = {"finish_reason": finish_reason, "stop_reason": output.stop_reason}
        if not self._request.return_token_ids:
            return end
        versions = version_runs(output.weights_versions[: len(output.token_ids)])
        return {**end, "token_ids": output.token_ids, "weights_versions": versions}


def version_runs(versions: Iterable[int]) -> list[list[int]]:
    """Returns the versions of the weights that drew tokens as [version, number of tokens] pairs."""
    return [[version, len(list(run))] for version, run in itertools.groupby(versions)]


class Usage:
    """Counts the tokens of all prompts of a request so far.

    Attributes:
        num_reasoning: The tokens of reasoning by choice; None if they are not counted.
    """

    def __init__(self) -> None:
        self.num_reasoning: dict[int, int] | None = None
        # For each prompt: its tokens, and how many of them were in the prefix cache.
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_generated = 0

    def add(self, job_index: int, output: RequestOutput) -> None:
        """Adds the tokens of an output."""
        num_cached = output.metrics.num_cached_tokens if output.metrics else 0
        self._prompts[job_index] = (len(output.prompt_token_ids), num_cached)
        self._num_generated += sum(len(completion.token_ids) for completion in output.outputs)

    def body(self) -> dict[str, Any]:
        """Returns the usage as OpenAI writes it."""
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        details = {}
        if self.num_reasoning is not None:
            num_reasoning = sum(self.num_reasoning.values())
            details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
            **details,
        }


def check_finished(
    output: CompletionOutput, request: Any, names: Mapping[str, str] | None = None
) -> None:
    """Raises the client's error for a sequence that the engine gave up.

    Args:
        output: The sequence.
        request: The request; the error may quote it.
        names: The client's names of parameters, by the engine's names.

    Raises:
        ApiError: The status is 400 where the request left the engine no token to sample or its
            grammar failed, 503 where the sequence was aborted, and 500 for any other failure.
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


def prompt_logprobs_body(entries: Entries | None, num_logprobs: int) -> list[Any] | None:
    """Returns the log probabilities of a prompt as vLLM writes them, by token id.

    Args:
        entries: The candidates of each position, or None.
        num_logprobs: The number of most likely candidates; the token itself is always included.
    """
    if entries is None:
        return None
    return [
        entry
        and {
            str(token_id): {
                "logprob": limit_logprob(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in top_logprobs(entry, num_logprobs).items()
        }
        for entry in entries
    ]
