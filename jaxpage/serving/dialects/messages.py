"""Translates requests to POST /v1/messages and /v1/messages/count_tokens into chats.

The format is Anthropic's. Text and pictures are supported.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from jaxpage.serving.dialects.dialect import (
    ClientHabits,
    Dialect,
    GenerationPath,
    StreamForm,
    TransformPath,
)
from jaxpage.serving.dialects.messages_body import NAMES, translate
from jaxpage.serving.dialects.messages_fields import (
    DOCUMENT,
    CountTokensRequest,
    MessagesRequest,
)
from jaxpage.serving.dialects.translating import AnswerBlock, InBlocks
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import name_events
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.tokenizing import Transformed, count_prompt

# Clients refuse reasoning without a signature; a request may send any, and none is checked.
_SIGNATURE = "bm90IHNpZ25lZA=="


def open_message(body: dict[str, Any], context: ModelContext) -> MessageAnswer:
    """Returns the exchange of a request to POST /v1/messages.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, MessagesRequest, context)
    return MessageAnswer(request, context, ignored)


def count_tokens(body: dict[str, Any], context: ModelContext) -> Transformed:
    """Returns the number of tokens of the prompt that a message would have.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, CountTokensRequest, context)
    message = MessageAnswer(request, context, ignored)
    try:
        number = count_prompt(message.prompts[0], context)
    except ApiError as error:
        raise message.refusal(error) from None
    return Transformed({"input_tokens": number}, message.ignored_fields)


class MessageAnswer(InBlocks):
    """Answers with one message, whose blocks are content blocks."""

    _prefix = "msg"

    def __init__(
        self, request: CountTokensRequest, context: ModelContext, ignored_fields: tuple[str, ...]
    ) -> None:
        """Opens the chat that the answer translates.

        Args:
            request: The request; one that counts tokens has no lengths and generates nothing.
            context: The served model and the server's settings.
            ignored_fields: The paths of ignored fields of the request.

        Raises:
            ApiError: The request is refused; the error uses the client's names.
        """
        # A client may ask for its reasoning to be left out of the answer.
        self._shows_thinking = getattr(request.thinking, "display", None) != "omitted"
        translation = translate(request, context)
        body = dict(translation.body)
        if isinstance(request, MessagesRequest):
            body |= {"max_tokens": request.max_tokens, "stream": request.stream}
            body["receipt"] = request.receipt
            body |= {name: getattr(request, theirs) for name, theirs in NAMES.items()}
        self._names = translation.names
        ignored = ignored_fields + translation.ignored
        super().__init__(open_chat, body, context, request.model, ignored)

    def _answer(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self._write_block(block) for block in self._blocks],
            **self._stop(),
            "usage": self._write_usage(),
            **self._receipt,
        }

    def _write_usage(self) -> dict[str, int]:
        """Returns the counts of tokens; this API counts cached ones apart."""
        usage = self._usage
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _stop(self) -> dict[str, str | None]:
        reason = self._ending.get("finish_reason")
        stop = self._ending.get("stop_reason")
        if reason in ("stop", "tool_calls") and self._has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {
            "stop_reason": {"stop": "end_turn", "length": "max_tokens"}.get(reason or ""),
            "stop_sequence": None,
        }

    def _begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._answer()}]

    def _open_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        written = self._write_block(block)
        if block.kind == "reasoning":
            written["signature"] = ""
        return [self._of_block("start", content_block=written)]

    def _add_to_block(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        if block.is_call:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == "reasoning":
            if not self._shows_thinking:
                return []
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return [self._of_block("delta", delta=delta)]

    def _close_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        stop = self._of_block("stop")
        if block.kind != "reasoning":
            return [stop]
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        return [self._of_block("delta", delta=signature), stop]

    def _end(self) -> list[dict[str, Any]]:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self._write_usage()},
            {"type": "message_stop", **self._receipt},
        ]

    def _of_block(self, event: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{event}", "index": len(self._blocks) - 1, **fields}

    def _write_block(self, block: AnswerBlock) -> dict[str, Any]:
        if block.is_call:
            return {
                "type": "tool_use",
                "id": f"toolu_{block.call_id.removeprefix('call_')}",
                "name": block.name,
                "input": _input_of(block.text),
            }
        if block.kind == "reasoning":
            thinking = block.text if self._shows_thinking else ""
            return {"type": "thinking", "thinking": thinking, "signature": _SIGNATURE}
        return {"type": "text", "text": block.text}


def _input_of(text: str) -> dict[str, Any]:
    """Returns the input of a call, as Anthropic's client reads it.

    If the answer was cut within the call, it is the part of the object that is complete.
    """
    try:
        value = from_json(text or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _write_error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


DIALECT = Dialect(
    beginnings=("/v1/messages",),
    error=_write_error,
    stream=StreamForm(new_frame=name_events),
    paths={
        "/v1/messages": GenerationPath(open_message),
        "/v1/messages/count_tokens": TransformPath(count_tokens),
    },
    document=DOCUMENT,
    habits=ClientHabits(key_header=b"x-api-key", id_header="request-id"),
)
