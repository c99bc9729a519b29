"""Translates the requests of Ollama's API.

/api/chat and /api/generate become chats or completions, and /api/embed and /api/embeddings become
requests for embeddings; /api/show describes the model.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.dialects.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
    OllamaShowRequest,
    OllamaVectorsRequest,
)
from jaxpage.serving.dialects.translating import Open, Translated, pieces
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.completions import open_completion
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.efforts import SWITCHES
from jaxpage.serving.wire.embeddings import EmbeddingAnswer, open_embeddings
from jaxpage.serving.wire.errors import ApiError, as_api_error, quotes
from jaxpage.serving.wire.field_types import is_neutral
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.template_source import variables_of
from jaxpage.serving.wire.templates import template_of
from jaxpage.serving.wire.tokenizing import Transformed
from jaxpage.settings.field_table import forms_in

# Ollama's names of options, by their names in chats and completions.
_OPTIONS = {field.name: name for field, name, _ in forms_in("ollama")}
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")


@quotes
def open_ollama_chat(body: dict[str, Any], context: ModelContext) -> OllamaAnswer | OllamaLoaded:
    """Returns the exchange of a request to POST /api/chat.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaChatRequest, context)
    common = _common(request, context)
    if not request.messages:
        return OllamaLoaded(request, ignored)
    messages = [
        {"role": message.role, "content": message.content}
        | (
            {"reasoning_content": message.thinking}
            if message.thinking and message.role == "assistant"
            else {}
        )
        for message in request.messages
    ]
    asked = {"messages": messages, **common, **_thinking(request, context)}
    return OllamaAnswer(open_chat, asked, context, request, ignored)


@quotes
def open_ollama_generate(
    body: dict[str, Any], context: ModelContext
) -> OllamaAnswer | OllamaLoaded:
    """Returns the exchange of a request to POST /api/generate.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaGenerateRequest, context)
    common = _common(request, context)
    if request.raw:
        for name in ("system", "think"):
            if getattr(request, name):
                raise ApiError(400, f"{name} is not supported with raw=true", param=name)
    if not request.prompt:
        return OllamaLoaded(request, ignored)
    if request.raw:
        asked = {"max_tokens": context.max_model_len, **common, "prompt": request.prompt}
        return OllamaAnswer(open_completion, asked, context, request, ignored)
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = [*system, {"role": "user", "content": request.prompt}]
    asked = {"messages": messages, **common, **_thinking(request, context)}
    return OllamaAnswer(open_chat, asked, context, request, ignored)


@quotes
def open_ollama_embed(body: dict[str, Any], context: ModelContext) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request to POST /api/embed.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaEmbedRequest, context)
    return _embedding(
        request, ignored, context, _Vectors, input=request.input, dimensions=request.dimensions
    )


@quotes
def open_ollama_embeddings(body: dict[str, Any], context: ModelContext) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request to POST /api/embeddings.

    This is the older path: it has one text, and its vector is not normalised.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(_with_served_name(body, context), OllamaEmbeddingsRequest, context)
    return _embedding(request, ignored, context, _Vector, input=request.prompt, normalize=False)


def _embedding(
    request: OllamaVectorsRequest,
    ignored: tuple[str, ...],
    context: ModelContext,
    kind: type[EmbeddingAnswer],
    **asked: Any,
) -> EmbeddingAnswer:
    """Returns the `EmbeddingAnswer` of a request for embeddings.

    Args:
        request: The request.
        ignored: The paths of ignored fields.
        context: The served model and the server's settings.
        kind: The class that makes the answer.
        asked: Fields of /v1/embeddings.
    """
    _check_options(request.options or OllamaOptions(), context)
    answer = open_embeddings({"model": request.model, **asked}, context, kind)
    answer.ignored_fields = ignored
    return answer


@quotes
def show_ollama(
    body: dict[str, Any], context: ModelContext, about: Mapping[str, Any] | None = None
) -> Transformed:
    """Returns what clients ask about a model: its length, and what it can do.

    Args:
        body: The request.
        context: The served model and the server's settings.
        about: What `about_ollama` says of the model, if it is known already.

    Raises:
        ApiError: The request is refused.
    """
    _, ignored = read(_with_served_name(body, context), OllamaShowRequest, context)
    return Transformed(about_ollama(context) if about is None else dict(about), ignored)


def about_ollama(context: ModelContext) -> dict[str, Any]:
    """Returns what /api/show says about a model."""
    thinks = context.chat_format.reasoning is not None and bool(_thinking_variables(context))
    kind = context.card.family
    return {
        "details": context.card.details(),
        "model_info": {
            "general.architecture": kind,
            f"{kind}.context_length": context.max_model_len,
        },
        "capabilities": ["completion", *(["thinking"] if thinks else [])],
    }


def _with_served_name(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """Returns the request with the name by which the model is served.

    Ollama's clients add a tag to the name, which is "latest" if the user gave none.
    """
    name = body.get("model")
    if isinstance(name, str) and name not in (*context.model_names, *context.adapters):
        return {**body, "model": name.removesuffix(":latest")}
    return body


def _common(request: OllamaRequest, context: ModelContext) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    _check_options(options, context)
    asked = {
        ours: value
        for ours, theirs in _OPTIONS.items()
        if (value := getattr(options, theirs)) is not None
        and not (options.repeat_last_n == 0 and theirs in _PENALTIES)
    }
    if options.num_predict is not None and options.num_predict >= 0:
        asked["max_tokens"] = options.num_predict
    if request.format == "json":
        asked["response_format"] = {"type": "json_object"}
    elif request.format is not None:  # {} is a schema as well
        asked["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": request.format},
        }
    return {**asked, "stream": request.stream is not False}


def _check_options(options: OllamaOptions, context: ModelContext) -> None:
    for name, value in (options.model_extra or {}).items():
        if name in OllamaOptions.known and not is_neutral(OllamaOptions, name, value):
            raise ApiError(400, f"options.{name} is not supported", param=f"options.{name}")
    if (options.num_ctx or 0) > context.max_model_len:
        message = f"options.num_ctx is {options.num_ctx}, and the server has max_model_len={context.max_model_len}"
        raise ApiError(400, message, param="options.num_ctx")


def _thinking(request: OllamaRequest, context: ModelContext) -> dict[str, Any]:
    """Returns the fields of a chat for `think`.

    A template that does not read the variable is not told to stop thinking.
    """
    if isinstance(request.think, str):
        return {"reasoning_effort": request.think}
    known = _thinking_variables(context)
    switches = [name for name in SWITCHES if name in known]
    if request.think is None or (not switches and (known or not request.think)):
        return {}
    return {"chat_template_kwargs": dict.fromkeys(switches or SWITCHES[:1], request.think)}


def _thinking_variables(context: ModelContext) -> frozenset[str]:
    """Returns the variables of the chat template that say how much is thought."""
    if not getattr(context.tokenizer, "chat_template", None):
        return frozenset()
    return variables_of(template_of(context, [])) & {*SWITCHES, "reasoning_effort"}


def _without_effect(options: OllamaOptions) -> tuple[str, ...]:
    """Returns the names of the options that change nothing and would change something in Ollama."""
    penalises = options.presence_penalty or options.frequency_penalty
    penalises = penalises or options.repeat_penalty not in (None, 1)
    return ("options.repeat_last_n",) if options.repeat_last_n == 64 and penalises else ()


class OllamaAnswer(Translated):
    """Answers both paths; a stream has a line for each piece of text, and one for the end."""

    _prefix = "ollama"

    def __init__(
        self,
        opens: Open,
        asked: dict[str, Any],
        context: ModelContext,
        request: OllamaRequest,
        ignored: tuple[str, ...],
    ) -> None:
        self._is_chat = isinstance(request, OllamaChatRequest)
        self._names = {
            **dict.fromkeys(("messages", "prompt"), "messages" if self._is_chat else "prompt"),
            **{ours: f"options.{theirs}" for ours, theirs in _OPTIONS.items()},
            "max_tokens": "options.num_predict",
            "response_format": "format",
            "response_format.json_schema.schema": "format",
            "chat_template_kwargs": "think",
            "reasoning_effort": "think",
        }
        ignored += _without_effect(request.options or OllamaOptions())
        super().__init__(opens, asked, context, request.model, ignored)
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
                    {**self._make_line({kind: text}), "done": False}
                    for kind, text in pieces(choice)
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
        return {**self._make_line(dict(pieces(choice))), **self._end()}

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


class _Vectors(EmbeddingAnswer):
    def whole(self, vectors: Sequence[npt.NDArray[np.float32]], num_tokens: int) -> dict[str, Any]:
        """Returns the response of /api/embed."""
        body = super().whole(vectors, num_tokens)
        written = [row["embedding"] for row in body["data"]]
        total = time.monotonic() - self.arrived + self.load_seconds
        taken = _nanoseconds(total_duration=total, load_duration=self.load_seconds)
        about = {"model": body["model"], "embeddings": written, **taken}
        return {**about, "prompt_eval_count": num_tokens}


class _Vector(EmbeddingAnswer):
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
