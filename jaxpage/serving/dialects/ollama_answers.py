"""Writes the answers of Ollama's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.dialects.dialect import ListedModel
from jaxpage.serving.dialects.ollama_fields import OllamaChatRequest, OllamaOptions, OllamaRequest
from jaxpage.serving.dialects.translating import Open, Translated, pieces
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.embeddings import EmbeddingAnswer
from jaxpage.serving.wire.errors import ApiError, as_api_error
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.settings.field_table import names_in


class OllamaAnswer(Translated):
    """Answers both paths; a stream has a line for each piece of text, and one for the end."""

    _prefix = "ollama"

    def __init__(
        self,
        opens: Open,
        requested: dict[str, Any],
        context: ModelContext,
        request: OllamaRequest,
        ignored: tuple[str, ...],
    ) -> None:
        self._is_chat = isinstance(request, OllamaChatRequest)
        self._names = {
            **dict.fromkeys(("messages", "prompt"), "messages" if self._is_chat else "prompt"),
            **{name: f"options.{theirs}" for name, theirs in names_in("ollama").items()},
            "max_tokens": "options.num_predict",
            "response_format": "format",
            "response_format.json_schema.schema": "format",
            "chat_template_kwargs": "think",
            "reasoning_effort": "think",
        }
        ignored += _without_effect(request.options or OllamaOptions())
        super().__init__(opens, requested, context, request.model, ignored)
        self._usage: dict[str, Any] = {}
        self._reason: str | None = None
        self._metrics: RequestMetrics | None = None

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        self._metrics = delta.metrics
        lines = []
        for chunk in self._inner.chunks(job_index, delta):
            self._usage = chunk["usage"]
            for choice in chunk["choices"]:
                self._reason = choice["finish_reason"] or self._reason
                lines += [
                    {**self._make_line({piece.kind: piece.text}), "done": False}
                    for piece in pieces(choice)
                ]
        return lines

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream; see `Exchange`."""
        self._inner.last_chunks()
        return [{**self._make_line({}), **self._end()}]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        self._metrics = outputs[0].metrics
        response = self._inner.whole(outputs)
        self._usage = response["usage"]
        (choice,) = response["choices"]
        self._reason = choice["finish_reason"]
        return {
            **self._make_line({piece.kind: piece.text for piece in pieces(choice)}),
            **self._end(),
        }

    def _make_line(self, said: dict[str, str]) -> dict[str, Any]:
        return _line(self.model, said, is_chat=self._is_chat)

    def _end(self) -> dict[str, Any]:
        """Returns how the answer ended, its tokens, and times in nanoseconds."""
        return {
            "done": True,
            "done_reason": self._reason,
            "prompt_eval_count": self._usage["prompt_tokens"],
            "eval_count": self._usage["completion_tokens"],
            **_durations(self._metrics, self.load_seconds),
        }


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
        said = _line(self.model, {}, is_chat=isinstance(self._request, OllamaChatRequest))
        taken = _nanoseconds(total_duration=self.load_seconds, load_duration=self.load_seconds)
        return {**said, "done": True, "done_reason": "load", **taken}


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
    most = 253_402_300_799.0  # the last second of the year 9999
    return (
        (datetime.fromtimestamp(0, UTC) + timedelta(seconds=min(seconds, most)))
        .isoformat()
        .replace("+00:00", "Z")
    )


def _line(model: str, said: dict[str, str], *, is_chat: bool) -> dict[str, Any]:
    content = said.get("content", "")
    reasoning = said.get("reasoning")
    thinking = {} if reasoning is None else {"thinking": reasoning}
    now = ollama_time(time.time())
    if is_chat:
        return {
            "model": model,
            "created_at": now,
            "message": {"role": "assistant", "content": content, **thinking},
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


def write_tags(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Returns the list of models, without paths: clients see none of this machine."""
    return {
        "models": [{**_card(model), "modified_at": ollama_time(model.created)} for model in models]
    }


def write_loaded(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Returns the list of the models in memory, with the times at which they go."""
    return {"models": [_loaded(model) for model in models]}


def _loaded(model: ListedModel) -> dict[str, Any]:
    entry = {**_card(model), "context_length": model.context_length}
    if model.num_bytes is None:
        return entry
    return {
        **entry,
        "size": model.num_bytes,
        "size_vram": model.device_bytes,
        "expires_at": ollama_time(model.until),
    }


def _card(model: ListedModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": model.name,
        "model": model.name,
        "size": card.num_bytes,
        "digest": card.digest,
        "details": details_of(card),
    }


def details_of(card: ModelCard) -> dict[str, Any]:
    """Returns the field `details` of an answer about a model."""
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


def _without_effect(options: OllamaOptions) -> tuple[str, ...]:
    """Returns the names of the options that change nothing and would change something in Ollama."""
    penalises = options.presence_penalty or options.frequency_penalty
    penalises = penalises or options.repeat_penalty not in (None, 1)
    return ("options.repeat_last_n",) if options.repeat_last_n == 64 and penalises else ()
