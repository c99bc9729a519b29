"""Translates requests to POST /v1/messages and /v1/messages/count_tokens into chats.

The format is Anthropic's. Only text is supported.
"""

from __future__ import annotations

from typing import Any

from jaxpage.serving.dialects.dialect import Dialect
from jaxpage.serving.dialects.messages_fields import (
    DOCUMENT,
    AssistantTurn,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    UserTurn,
)
from jaxpage.serving.dialects.translating import Block, InBlocks
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import named_events
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.tokenizing import Transformed, tokenize
from jaxpage.settings.field_table import names_in

# The names of parameters in this API, by their names in chats.
_NAMES = names_in("messages")


@quotes
def open_message(body: dict[str, Any], context: ModelContext) -> MessageAnswer:
    """Returns the exchange of a request to POST /v1/messages.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, MessagesRequest, context)
    return MessageAnswer(open_chat, _chat_of(request), context, request.model, ignored)


@quotes
def count_tokens(body: dict[str, Any], context: ModelContext) -> Transformed:
    """Returns the number of tokens of the prompt that a message would have.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, CountTokensRequest, context)
    counted = tokenize({"model": request.model, **_conversation_of(request)}, context)
    return Transformed({"input_tokens": counted.body["count"]}, ignored)


def _conversation_of(request: CountTokensRequest) -> dict[str, Any]:
    system = (
        [] if request.system is None else [{"role": "system", "content": _text_of(request.system)}]
    )
    continues = isinstance(request.messages[-1], AssistantTurn)
    return {
        "messages": [*system, *map(_message, request.messages)],
        "continue_final_message": continues,
    }


def _chat_of(request: MessagesRequest) -> dict[str, Any]:
    return {
        **_conversation_of(request),
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        **{name: getattr(request, theirs) for name, theirs in _NAMES.items()},
    }


def _message(turn: UserTurn | AssistantTurn) -> dict[str, Any]:
    message = {"role": turn.role, "content": _text_of(turn.content)}
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    return {**message, "reasoning_content": "".join(thoughts)} if thoughts else message


def _text_of(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": block.text} for block in content if isinstance(block, TextBlock)
    ]


class MessageAnswer(InBlocks):
    """Answers with one message, whose blocks are content blocks."""

    _prefix = "msg"
    _names = {"prompt": "messages"} | _NAMES

    def _answer(self) -> dict[str, Any]:
        usage = self._usage
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_write_block(block) for block in self._blocks],
            **self._stop(),
            "usage": {
                "input_tokens": usage["prompt_tokens"]
                - num_cached,  # this API counts cached tokens apart
                "cache_read_input_tokens": num_cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage["completion_tokens"],
            },
        }

    def _stop(self) -> dict[str, str | None]:
        reason = self._ending.get("finish_reason")
        stop = self._ending.get("stop_reason")
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {
            "stop_reason": {"stop": "end_turn", "length": "max_tokens"}.get(reason or ""),
            "stop_sequence": None,
        }

    def _begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._answer()}]

    def _open_block(self, block: Block) -> list[dict[str, Any]]:
        return [self._of_block("start", content_block=_write_block(block))]

    def _add_to_block(self, block: Block, text: str) -> list[dict[str, Any]]:
        name = "thinking" if block.kind == "reasoning" else "text"
        return [self._of_block("delta", delta={"type": f"{name}_delta", name: text})]

    def _close_block(self, block: Block) -> list[dict[str, Any]]:
        return [self._of_block("stop")]

    def _end(self) -> list[dict[str, Any]]:
        usage = self._answer()["usage"]
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": usage},
            {"type": "message_stop"},
        ]

    def _of_block(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": len(self._blocks) - 1, **fields}


def _write_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


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
    stream_error=_write_error,
    new_frame=named_events,
    exchanges={"/v1/messages": open_message},
    transforms={"/v1/messages/count_tokens": count_tokens},
    operations={"/v1/messages": "chat"},
    document=DOCUMENT,
    key_header=b"x-api-key",
)
