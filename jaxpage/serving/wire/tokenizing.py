"""Answers POST /tokenize and POST /detokenize in vLLM's format."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.serving.wire.context import ModelContext, valid_text
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.pictures import RequestedPictures
from jaxpage.serving.wire.prompt_request import PromptRequest
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.request_fields import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from jaxpage.serving.wire.templates import render
from jaxpage.serving.wire.tool_choice import functions_of, name_passed_over


class Transformed(NamedTuple):
    """Holds the answer to a text or to tokens.

    Attributes:
        body: The response.
        ignored_fields: The paths of ignored fields, as in `Exchange`.
    """

    body: dict[str, Any]
    ignored_fields: tuple[str, ...]


def tokenize(body: dict[str, Any], context: ModelContext) -> Transformed:
    """Returns the tokens of a text or of a conversation.

    This may take a while, so it belongs on a worker thread.

    Raises:
        ApiError: The request is refused.
    """
    tokenizer = _tokenizer(context)
    param = "prompt" if body.get("messages") is None else "messages"
    text, request, ignored, pictures = (
        _conversation(body, context) if param == "messages" else _text(body, context)
    )
    if len(text) > (max_length := context.limits.max_tokenize_characters):
        raise ApiError(
            400,
            f"{param} has {len(text)} characters; at most {max_length} are allowed",
            param=param,
        )
    context.check_length(text, param)
    text = valid_text(text, param)
    token_ids = _encode(context, text, pictures, adds=request.add_special_tokens)
    answer = {
        "count": len(token_ids),
        "max_model_len": context.max_model_len,
        "tokens": token_ids,
        "token_strs": tokenizer.convert_ids_to_tokens(token_ids)
        if request.return_token_strs
        else None,
    }
    return Transformed(answer, ignored)


def _text(
    body: dict[str, Any], context: ModelContext
) -> tuple[str, TokenizeRequest, tuple[str, ...], None]:
    request, ignored = read(body, TokenizeRequest, context)
    return request.prompt, request, ignored, None


def _conversation(
    body: dict[str, Any], context: ModelContext
) -> tuple[str, TokenizeChatRequest, tuple[str, ...], RequestedPictures | None]:
    if body.get("prompt") is not None:
        raise ApiError(400, "prompt and messages cannot be used together", param="messages")
    request, ignored = read(body, TokenizeChatRequest, context)
    tools = request.tools or []
    rendered = render(request, context, list(functions_of(tools).values()))
    ignored = (*ignored, *name_passed_over(tools), *rendered.ignored_fields)
    return rendered.text, request, ignored, rendered.pictures


def count_prompt(request: PromptRequest, context: ModelContext) -> int:
    """Returns the number of tokens of a prompt, its pictures included.

    This may take a while, so it belongs on a worker thread.

    Raises:
        ApiError: A picture is refused.
    """
    prompt = request.prompt
    if request.pictures is None and not isinstance(prompt, str):
        return len(prompt)
    return len(_encode(context, prompt, request.pictures, adds=request.add_special_tokens))


def _encode(
    context: ModelContext, text: Any, pictures: RequestedPictures | None, *, adds: bool
) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        context: The served model.
        text: The text.
        pictures: Its pictures, if it has any.
        adds: True if the tokenizer adds its special tokens.
    """
    if pictures is None:
        token_ids: list[int] = _tokenizer(context)(text, add_special_tokens=adds)["input_ids"]
        return token_ids
    token_ids, _ = pictures.expand(text, pictures.process(), add_special_tokens=adds)
    return token_ids


def detokenize(body: dict[str, Any], context: ModelContext) -> Transformed:
    """Returns the text of tokens, special tokens included.

    This may take a while, so it belongs on a worker thread.

    Raises:
        ApiError: The request is refused.
    """
    tokenizer = _tokenizer(context)
    tokens = body.get("tokens")
    maximum = context.limits.max_detokenize_tokens
    if isinstance(tokens, list) and len(tokens) > maximum:
        raise ApiError(
            400, f"tokens has {len(tokens)} items; at most {maximum} are allowed", param="tokens"
        )
    request, ignored = read(body, DetokenizeRequest, context)
    if (largest := max(request.tokens, default=0)) >= context.vocab_size:
        message = (
            f"tokens has {largest}, but the model's token ids are 0 to {context.vocab_size - 1}"
        )
        raise ApiError(400, message, param="tokens")
    return Transformed(
        {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}, ignored
    )


def _tokenizer(context: ModelContext) -> Any:
    if context.tokenizer is None:
        raise ApiError(400, "The model has no tokenizer")
    return context.tokenizer
