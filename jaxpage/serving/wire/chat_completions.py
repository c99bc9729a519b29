"""Reads requests to POST /v1/chat/completions and makes their answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpage.chat_forms import AnswerPiece, PieceParser
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.serving.wire.answering import Answer, prompt_logprobs_body
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.logprobs import TextOffsets, chat_logprobs
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.reasoning_tokens import ReasoningTokens
from jaxpage.serving.wire.request_fields import ChatCompletionRequest
from jaxpage.serving.wire.sampling_request import (
    beam_params,
    sampling_params,
)
from jaxpage.serving.wire.templates import render
from jaxpage.serving.wire.thinking import budget_of
from jaxpage.serving.wire.tool_choice import ToolUse, tool_use
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams


def open_chat(body: dict[str, Any], context: ModelContext) -> ChatAnswer:
    """Returns the exchange of a request to POST /v1/chat/completions.

    It renders the chat template, which may take a while.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, ChatCompletionRequest, context)
    tools = tool_use(request, context)
    rendered = render(request, context, tools.shown)
    num_pictures = len(rendered.pictures.pictures) if rendered.pictures else 0
    prompt = context.check_prompt(rendered.text, "messages", num_pictures)
    params, idle = _params(request, context, tools, str(prompt))
    prompt_request = PromptRequest(
        prompt,
        params,
        bool(request.add_special_tokens),
        context.adapter(request.model),
        pictures=rendered.pictures,
        receipt=bool(request.receipt),
    )
    ignored += tools.ignored + rendered.ignored_fields + idle
    if request.store:
        ignored += ("store",)
    return ChatAnswer(request, context, prompt_request, ignored, tools)


def _params(
    request: ChatCompletionRequest, context: ModelContext, tools: ToolUse, prompt: str
) -> tuple[SamplingParams | BeamSearchParams, tuple[str, ...]]:
    """Returns the engine's parameters, and the path of a field that has no effect."""
    max_tokens = request.max_completion_tokens or request.max_tokens
    if not request.use_beam_search:
        changes, idle = tools.changes(request, context, prompt)
        return sampling_params(request, context, max_tokens=max_tokens, **changes), idle
    # The client knows the budget by the field that it sent, which may be one of three.
    budget = budget_of(request)
    if budget.value is not None:
        message = f"{budget.path} is not supported with use_beam_search"
        raise ApiError(400, message, param=budget.path)
    return beam_params(request, width=request.n or 1, max_tokens=max_tokens), ()


class ChatAnswer(Answer):
    """Answers one conversation with `n` messages that continue it."""

    _prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"
    _request: ChatCompletionRequest

    def __init__(
        self,
        request: ChatCompletionRequest,
        context: ModelContext,
        prompt_request: PromptRequest,
        ignored_fields: tuple[str, ...],
        tools: ToolUse,
    ) -> None:
        super().__init__(request, context, [prompt_request], ignored_fields)
        self._format_of_tools = tools.parameter
        self._is_named = tools.name is not None
        self._new_reader = self._readers(prompt_request, context, tools)
        self._texts = context.token_texts
        self._usage.num_reasoning = {}
        self._readers_by_choice: dict[int, _Reader] = {}  # used by streams only
        self._num_computed = 0  # the tokens of the prompt, as far as a stream has said

    @property
    def _parameter_names(self) -> Mapping[str, str]:
        budget = budget_of(self._request).path
        return {
            **dict.fromkeys(("prompt", "prompt_token_ids"), "messages"),
            "beam_width": "n",
            **dict.fromkeys(("thinking_token_budget", "thinking_markers"), budget),
            "structured_outputs": self._format_of_tools or self._request.format_parameter,
        }

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        is_first = not self._readers_by_choice
        chunks = super().chunks(job_index, delta)
        if self._request.return_token_ids and is_first and chunks:
            chunks[0]["prompt_token_ids"] = delta.prompt_token_ids
        return chunks

    @property
    def reports_progress(self) -> bool:
        """Returns whether the stream says how much of the prompt is computed."""
        return self.stream and bool(self._request.return_progress)

    def progress_chunks(
        self, num_tokens: int, num_computed: int, metrics: RequestMetrics | None
    ) -> list[dict[str, Any]]:
        """Returns the chunk that says how much of the prompt is computed, in llama.cpp's form.

        Args:
            num_tokens: The number of tokens of the prompt.
            num_computed: How many of them are computed, or were in the prefix cache.
            metrics: The times of the request; None until the engine has it.

        Returns:
            An empty list if no more is computed than the last chunk has said.
        """
        if metrics is None or metrics.first_scheduled_time is None:
            return []
        if num_computed <= self._num_computed:
            return []
        self._num_computed = num_computed
        now = metrics.first_token_time or time.monotonic()
        delta = {"role": "assistant", "content": None}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        progress = {
            "total": num_tokens,
            "cache": metrics.num_cached_tokens,
            "processed": num_computed,
            "time_ms": round((now - metrics.first_scheduled_time) * 1000),
        }
        return [{**self._envelope(self._chunk_object, [choice]), "prompt_progress": progress}]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        response = super().whole(outputs)
        if self._request.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs_body(
                outputs[0].prompt_logprobs, self._request.prompt_logprobs
            )
        if self._request.return_token_ids:
            response["prompt_token_ids"] = outputs[0].prompt_token_ids
        return response

    def _readers(
        self, prompt_request: PromptRequest, context: ModelContext, tools: ToolUse
    ) -> Callable[[Sequence[int]], _Reader]:
        several = self._request.parallel_tool_calls is not False
        has_grammar = getattr(prompt_request.params, "structured_outputs", None) is not None
        is_held = has_grammar and not tools.holds_answer
        prompt = str(prompt_request.prompt)
        reasoning = self._request.reasoning
        skips_special = bool(getattr(prompt_request.params, "skip_special_tokens", True))

        def make(prompt_token_ids: Sequence[int]) -> _Reader:
            return _Reader(
                tools.parser(context, prompt, is_held=is_held),
                TextOffsets(
                    context.tokenizer,
                    skips_special=skips_special,
                    prompt_token_ids=prompt_token_ids,
                ),
                several=several,
                custom=tools.custom,
                excludes=reasoning is not None and bool(reasoning.exclude),
            )

        return make

    def _stream_choices(
        self, index: int, job_index: int, delta: RequestOutput, position: int
    ) -> list[dict[str, Any]]:
        completion = delta.outputs[position]
        choices: list[dict[str, Any]] = []
        if (reader := self._readers_by_choice.get(index)) is None:
            reader = self._new_reader(delta.prompt_token_ids)
            self._readers_by_choice[index] = reader
            begun = {"role": "assistant", "content": ""}
            choices.append(
                {"index": index, "delta": begun, "logprobs": None, "finish_reason": None}
            )
        parts = reader.read(completion.text, is_last=completion.finish_reason is not None)
        self._count_reasoning(index, reader, completion.token_ids)
        logprobs = self._logprobs(delta, position)
        has_tokens = completion.token_ids and (
            logprobs is not None or self._request.return_token_ids
        )
        if not parts and has_tokens:
            parts = [{}]
        for number, part in enumerate(parts):
            # Which part a token belongs to is not known; the first has them all.
            tokens = [] if number else completion.token_ids
            more = self._end(replace(completion, stop_reason=None, token_ids=tokens), None)
            choices.append(
                {"index": index, "delta": part, "logprobs": None if number else logprobs, **more}
            )
        if completion.finish_reason is not None:
            # The end has a chunk of its own, as in OpenAI's streams: OpenAI's client takes a call
            # for finished when a chunk has nothing more of it.
            end = self._end(
                replace(completion, token_ids=[]),
                self._finish_reason(completion.finish_reason, reader),
            )
            choices.append({"index": index, "delta": {}, "logprobs": None, **end})
        return choices

    def _choice(self, index: int, output: RequestOutput, position: int) -> dict[str, Any]:
        completion = output.outputs[position]
        reader = self._new_reader(output.prompt_token_ids)
        answer = _merge(reader.read(completion.text, is_last=True))
        self._count_reasoning(index, reader, completion.token_ids)
        message = {
            "role": "assistant",
            "refusal": None,
            "content": None if "tool_calls" in answer else "",
            **answer,
        }
        for call in message.get("tool_calls", []):
            del call["index"]
        end = self._end(completion, self._finish_reason(completion.finish_reason, reader))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output, position),
            **end,
        }

    def _count_reasoning(self, index: int, reader: _Reader, token_ids: Sequence[int]) -> None:
        assert self._usage.num_reasoning is not None
        reader.reasoning_tokens.add(token_ids)
        self._usage.num_reasoning[index] = reader.reasoning_tokens.number

    def _logprobs(self, output: RequestOutput, position: int) -> dict[str, Any] | None:
        completion = output.outputs[position]
        if not self._request.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.token_ids, completion.logprobs, self._request.top_logprobs or 0, self._texts
        )

    def _finish_reason(self, reason: str | None, reader: _Reader) -> str | None:
        """Returns the finish reason as OpenAI writes it.

        A call of the tool that the request itself named keeps the reason "stop".
        """
        return (
            "tool_calls" if reason == "stop" and reader.num_calls and not self._is_named else reason
        )


_FIELDS = {"content": "content", "reasoning": "reasoning_content"}  # of text, by its kind


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a message, for its parts in order."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).extend(value if name == "tool_calls" else [value])
    return {
        name: value if name == "tool_calls" else "".join(value) for name, value in values.items()
    }


class _Reader:
    """Turns the text of one answer into the fields of deltas.

    The fields are content, reasoning_content and tool_calls.

    Attributes:
        num_calls: The number of calls so far.
        reasoning_tokens: Counts the tokens of the reasoning.
    """

    def __init__(
        self,
        parser: PieceParser,
        offsets: TextOffsets,
        *,
        several: bool,
        custom: Collection[str],
        excludes: bool,
    ) -> None:
        """Makes a reader for one answer.

        Args:
            parser: The parser of the answer's text.
            offsets: Finds where the answer's tokens begin in its text.
            several: True if more than one call may be returned.
            custom: The names of the tools whose calls have an input in place of arguments.
            excludes: True if reasoning is left out.
        """
        self.num_calls = 0
        self.reasoning_tokens = ReasoningTokens(parser.reasoning, offsets)
        self._parser = parser
        self._several = several
        self._custom = custom
        self._excludes = excludes
        self._is_custom = False  # the last call

    def read(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Returns the parts that are certain with this text, in order, each with one field."""
        parts: list[tuple[str, list[Any]]] = []
        self._add(parts, self._parser.push(text))
        if is_last:
            self._add(parts, self._parser.finish())
        return [
            {name: values if name == "tool_calls" else "".join(values)} for name, values in parts
        ]

    def _add(self, parts: list[tuple[str, list[Any]]], pieces: Iterable[AnswerPiece]) -> None:
        for piece in pieces:
            if piece.kind == "reasoning" and self._excludes:
                continue
            is_text = piece.kind in ("content", "reasoning")
            if not (is_text or self._several or not self.num_calls or piece.kind == "arguments"):
                continue
            name = _FIELDS.get(piece.kind, "tool_calls")
            # Clients such as LlamaIndex read one call of a chunk, as OpenAI sends them.
            if not parts or parts[-1][0] != name or piece.kind == "call":
                parts.append((name, []))
            if is_text:
                parts[-1][1].append(piece.text)
            else:
                self._call(parts[-1][1], piece)

    def _call(self, calls: list[dict[str, Any]], piece: AnswerPiece) -> None:
        if piece.kind == "call":
            self._is_custom = piece.name in self._custom
        kind, text_field = ("custom", "input") if self._is_custom else ("function", "arguments")
        if piece.kind == "arguments":
            calls.append({"index": self.num_calls - 1, kind: {text_field: piece.text}})
            return
        called = {"name": piece.name, text_field: piece.text}
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        calls.append({"index": self.num_calls, "id": call_id, "type": kind, kind: called})
        self.num_calls += 1
