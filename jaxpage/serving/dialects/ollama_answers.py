"""Writes the answers of Ollama's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.dialects.ollama_fields import OllamaChatRequest, OllamaOptions, OllamaRequest
from jaxpage.serving.dialects.translating import AnswerBlock, InBlocks, Open
from jaxpage.serving.wire.body import JsonReader
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import EmbeddingAnswer
from jaxpage.serving.wire.encoding import encode
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.settings.field_table import names_in


class OllamaAnswer(InBlocks):
    """Answers both paths.

    A stream has a line for each piece of text, one for each call when it is complete, and one for
    the end. A call that was cut, so that its arguments are no object, is content.
    """

    _prefix = "ollama"

    def __init__(
        self,
        opens: Open,
        requested: dict[str, Any],
        context: ModelContext,
        request: OllamaRequest,
        ignored: tuple[str, ...],
        names: Mapping[str, str] = {},  # nothing changes it
    ) -> None:
        """Opens the chat or the completion.

        Args:
            opens: The function that opens it.
            requested: Its body.
            context: The served model and the server's settings.
            request: The request.
            ignored: The paths of ignored fields.
            names: The client's paths of pictures, by those of the chat.

        Raises:
            ApiError: The request is refused.
        """
        self._is_chat = isinstance(request, OllamaChatRequest)
        self._names = {
            **dict.fromkeys(("messages", "prompt"), "messages" if self._is_chat else "prompt"),
            **{name: f"options.{theirs}" for name, theirs in names_in("ollama").items()},
            "max_tokens": "options.num_predict",
            "response_format": "format",
            "response_format.json_schema.schema": "format",
            "reasoning_effort": "think",
            "thinking.type": "think",
            **names,
        }
        ignored += _without_effect(request.options or OllamaOptions())
        super().__init__(opens, requested, context, request.model, ignored)
        self._metrics: RequestMetrics | None = None
        self._num_calls = 0

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        self._metrics = delta.metrics
        return super().chunks(job_index, delta)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        self._metrics = outputs[0].metrics
        return super().whole(outputs)

    def _begin(self) -> list[dict[str, Any]]:
        return []

    def _open_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        return []

    def _add_to_block(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        return [] if block.is_call else [self._part({block.kind: text})]

    def _close_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        message = self._call_of(block) if block.is_call else {}
        return [self._part(message)] if message else []

    def _end(self) -> list[dict[str, Any]]:
        return [{**self._line({}), **self._ending_fields()}]

    def _answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {}
        for block in self._blocks:
            for name, value in self._write_block(block).items():
                message[name] = message[name] + value if name in message else value
        return {**self._line(message), **self._ending_fields()}

    def _write_block(self, block: AnswerBlock) -> dict[str, Any]:
        return self._call_of(block) if block.is_call else {block.kind: block.text}

    def _call_of(self, block: AnswerBlock) -> dict[str, Any]:
        """Returns the fields of a message for a call; the text of one that was cut is content."""
        arguments = {"input": block.text} if block.kind == "custom" else _object_of(block.text)
        if arguments is None:
            return {"content": block.text}
        index = self._num_calls
        self._num_calls += 1
        called = {"index": index, "name": block.name, "arguments": arguments}
        # LiteLLM joins the calls of a stream unless it finds the index here.
        return {"tool_calls": [{"id": block.call_id, "index": index, "function": called}]}

    def _part(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**self._line(message), "done": False}

    def _line(self, message: dict[str, Any]) -> dict[str, Any]:
        return _line(self.model, message, is_chat=self._is_chat)

    def _ending_fields(self) -> dict[str, Any]:
        """Returns how the answer ended, its tokens, and times in nanoseconds."""
        reason = self._ending["finish_reason"]
        return {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "prompt_eval_count": self._usage["prompt_tokens"],
            "eval_count": self._usage["completion_tokens"],
            **_durations(self._metrics, self.load_seconds),
            **self._receipt,
        }


def _object_of(text: str) -> dict[str, Any] | None:
    """Returns the object whose JSON a text is, or None if it is none that an answer can have."""
    try:
        value = JsonReader().read(text.strip() or "{}")
        encode(value)
    except (ApiError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


class OllamaLoaded:
    """Answers a request without a prompt, which asks that the model be loaded, as it is."""

    stream = False
    load_seconds = 0.0

    def __init__(self, request: OllamaRequest, ignored_fields: tuple[str, ...]) -> None:
        self.id = f"ollama_{uuid.uuid4().hex}"
        self.model = request.model
        self.prompts: list[PromptRequest] = []
        self.ignored_fields = ignored_fields
        self._request = request

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a prompt that the engine refuses; see `Exchange`."""
        return as_api_error(error)

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        return []

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream; see `Exchange`."""
        return []

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        line = _line(self.model, {}, is_chat=isinstance(self._request, OllamaChatRequest))
        taken = _nanoseconds(total_duration=self.load_seconds, load_duration=self.load_seconds)
        return {**line, "done": True, "done_reason": "load", **taken}


class OllamaVectors(EmbeddingAnswer):
    """Answers /api/embed."""

    def whole(self, vectors: Sequence[npt.NDArray[np.float32]], num_tokens: int) -> dict[str, Any]:
        """Returns the response of /api/embed."""
        body = super().whole(vectors, num_tokens)
        written = [row["embedding"] for row in body["data"]]
        total = time.monotonic() - self.arrived + self.load_seconds
        taken = _nanoseconds(total_duration=total, load_duration=self.load_seconds)
        about = {"model": body["model"], "embeddings": written, **taken}
        return {**about, "prompt_eval_count": num_tokens}


class OllamaVector(EmbeddingAnswer):
    """Answers /api/embeddings."""

    def whole(self, vectors: Sequence[npt.NDArray[np.float32]], num_tokens: int) -> dict[str, Any]:
        """Returns the response of /api/embeddings."""
        return {"embedding": super().whole(vectors, num_tokens)["data"][0]["embedding"]}


def ollama_time(seconds: float) -> str:
    """Returns a time as Ollama writes it; one beyond the calendar as the last that it has."""
    maximum = 253_402_300_799.0  # the last second of the year 9999
    return (
        (datetime.fromtimestamp(0, UTC) + timedelta(seconds=min(seconds, maximum)))
        .isoformat()
        .replace("+00:00", "Z")
    )


def _line(model: str, message: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    content = message.get("content", "")
    thinking = {"thinking": message["reasoning"]} if "reasoning" in message else {}
    calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
    now = ollama_time(time.time())
    if is_chat:
        return {
            "model": model,
            "created_at": now,
            "message": {"role": "assistant", "content": content, **thinking, **calls},
        }
    return {"model": model, "created_at": now, "response": content, **thinking}


def _durations(times: RequestMetrics | None, load_seconds: float) -> dict[str, int]:
    if times is None or times.first_scheduled_time is None or times.first_token_time is None:
        return {}
    end = times.last_token_time or times.first_token_time
    return _nanoseconds(
        total_duration=load_seconds + end - times.arrival_time,
        load_duration=load_seconds,
        prompt_eval_duration=times.first_token_time - times.first_scheduled_time,
        eval_duration=end - times.first_token_time,
    )


def _nanoseconds(**seconds: float) -> dict[str, int]:
    return {name: int(value * 1e9) for name, value in seconds.items()}


def write_unloaded(name: str, *, is_chat: bool) -> dict[str, Any]:
    """Returns the answer to a request that unloads a model."""
    return {**_line(name, {}, is_chat=is_chat), "done": True, "done_reason": "unload"}


def _without_effect(options: OllamaOptions) -> tuple[str, ...]:
    """Returns the names of the options that change nothing and would change something in Ollama."""
    penalises = options.presence_penalty or options.frequency_penalty
    penalises = penalises or options.repeat_penalty not in (None, 1)
    return ("options.repeat_last_n",) if options.repeat_last_n == 64 and penalises else ()
