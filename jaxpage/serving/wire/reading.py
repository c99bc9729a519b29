"""Turns a JSON object into the fields of a request, or into the error that names a field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import RequestObject
from jaxpage.serving.wire.fields import LABELS, PROMPTS, TRUNCATING
from jaxpage.serving.wire.relaxing import name_paths, relax_schema
from jaxpage.serving.wire.request_fields import ChatCompletionRequest, CompletionRequest
from jaxpage.settings.argument_checks import close_names, show
from jaxpage.settings.field_table import TOKEN_ID_LISTS
from jaxpage.settings.from_vllm import answers

Request = TypeVar("Request", bound=RequestObject)
_HONOURED_SOMEWHERE = (
    CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
)
# A message follows the name of the field; these replace messages of pydantic that cannot.
_MESSAGES = {
    "extra_forbidden": "is not a known field",
}
# The fields that have a JSON schema, and the parts that lead to it.
_SCHEMAS = {"response_format": ("json_schema", "schema"), "structured_outputs": ("json",)}
_MAX_IGNORED = 16  # the names go into a header, whose length is limited
_IGNORED_NAME = re.compile(r"[\w.\[\]-]{1,80}", re.ASCII)


def read(
    body: dict[str, Any], model: type[Request], context: ModelContext
) -> tuple[Request, tuple[str, ...]]:
    """Returns the request, and the paths of what is ignored in it.

    Unknown fields are ignored unless the server refuses them, and so is what no grammar can enforce
    in schemas; see relaxing.py.
    At most 16 unknown fields are named.

    Args:
        body: The JSON object.
        model: The fields to read.
        context: The served model and the server's settings.

    Raises:
        ApiError: The status is 400 and `param` names the field; 404 if the model is not served.
    """
    # Clients send their defaults along, and these must not fail a field that is not honoured.
    body = {name: value for name, value in body.items() if _is_requested(model, name, value)}
    for name in body:
        _check_supported(name, model)
    max_length = context.max_model_len
    if body.keys() & TRUNCATING:
        max_length = max(max_length, context.limits.max_detokenize_tokens)
    for name, value in body.items():
        _check_length(name, value, context, max_length)
    removed: tuple[str, ...] = ()
    for name, keys in _SCHEMAS.items():
        # Where requests are strict the compiler of grammars refuses the schema.
        if name in body and not context.strict_requests:
            body[name], paths = _relax(body[name], name, keys)
            removed += paths
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        # pydantic's error names models of ours; the client gets the path of its own field.
        raise _invalid(error, body) from None
    except RecursionError:
        raise ApiError(400, "Request body is nested too deeply") from None
    context.adapter(getattr(request, "model", None))
    unknown = [path for path in _unknown_fields(request) if path not in LABELS]
    if unknown and context.strict_requests:
        near = close_names(unknown[0], model.model_fields)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ApiError(
            400, f"Unknown parameter: {show(unknown[0])}{hint}", param=_printable(unknown[0])
        )
    request.check()
    ignored = [*map(_printable, unknown[:_MAX_IGNORED])]
    if removed:
        ignored += name_paths(removed)
    # The prompt is not counted.
    ignored += [
        name for name in model.lengths if (getattr(request, name) or 0) > context.max_model_len
    ]
    return request, tuple(ignored)


def _unknown_fields(request: RequestObject, prefix: str = "") -> Iterator[str]:
    """Yields the paths of the fields that no model knows and that ask for something.

    Args:
        request: The request, or a part of one.
        prefix: What the paths begin with.
    """
    model = type(request)
    if model.is_passed_over:
        return
    for name, item in (request.model_extra or {}).items():
        if not is_neutral(model, name, item) and name not in model.added:
            yield prefix + name
    for name in request.model_fields_set & model.model_fields.keys():
        value = getattr(request, name)
        if isinstance(value, RequestObject):
            yield from _unknown_fields(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], RequestObject):
            for index, item in enumerate(value):
                yield from _unknown_fields(item, f"{prefix}{name}[{index}].")


def is_neutral(model: type[RequestObject], name: str, value: Any) -> bool:
    """Returns whether a field of a request, or of a part of one, asks for nothing.

    A number is not a truth value here: 0 is not false.

    Args:
        model: The model that reads the request or the part.
        name: The name of the field.
        value: The value that the client sent.
    """
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in neutral_values(model, name)
    )


def neutral_values(model: type[RequestObject], name: str) -> tuple[Any, ...]:
    """Returns the values with which a field of a request asks for nothing, besides null."""
    if (field := model.known.get(name)) is None:
        return ()
    return field.neutral if name in model.model_fields else field.neutral + field.elsewhere


def _relax(value: Any, path: str, keys: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Returns a value without what no grammar can enforce in its schema, and the paths of that.

    Schemas of tools are relaxed later, and only if they are enforced.

    Args:
        value: The schema, or an object that has it in its parts.
        path: The path of the value.
        keys: The names of the parts that lead to the schema.
    """
    if not isinstance(value, dict):
        return value, ()
    if not keys:
        return relax_schema(value, path)
    part, removed = _relax(value.get(keys[0]), f"{path}.{keys[0]}", keys[1:])
    return ({**value, keys[0]: part} if removed else value), removed


def _is_requested(model: type[RequestObject], name: str, value: Any) -> bool:
    """Returns whether a field must be read.

    A required field is always read, so that its error names it.
    """
    field = model.model_fields.get(name)
    return (field is not None and field.is_required()) or not is_neutral(model, name, value)


def _check_supported(name: str, model: type[RequestObject]) -> None:
    if name in model.known and name not in model.model_fields:
        others = " by this endpoint" if name in _HONOURED_SOMEWHERE else ""
        raise ApiError(400, f"{name} is not supported{others}{_hint(name)}", param=name)


def _hint(name: str) -> str:
    answer = answers("fields").get(name)
    return f"; {answer.text}" if answer and answer.kind != "same" else ""


def _check_length(name: str, value: Any, context: ModelContext, max_length: int) -> None:
    """Raises ApiError for a list that is too long, whatever it contains.

    This comes first because validation would look at each of a million items.

    Args:
        name: The name of the field.
        value: Its value.
        context: The served model and the server's settings.
        max_length: The token ids of the longest prompt.
    """
    if not isinstance(value, list):
        return
    if name in TOKEN_ID_LISTS and len(value) > context.vocab_size:
        message = f"{name} has {len(value)} entries; the model has {context.vocab_size} token ids"
        raise ApiError(400, message, param=name)
    if name not in PROMPTS:
        return
    for prompt in (value, *value[: context.limits.max_prompts]):
        if (
            isinstance(prompt, list)
            and prompt
            and isinstance(prompt[0], int)
            and len(prompt) > max_length
        ):
            limit = "max_model_len is" if max_length == context.max_model_len else "at most are cut"
            message = f"The {name} has {len(prompt)} tokens, and {limit} {max_length}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")


def _invalid(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """Returns the client's error for the first of pydantic's errors, with the path of its field."""
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"], body, is_missing=first["type"] == "missing")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        # The field at fault is the one that selects a member of the union.
        field = first["ctx"]["discriminator"].strip("'")
        kinds = first["ctx"].get("expected_tags")
        if kinds is None:
            return ApiError(400, f"{path}.{field} is required", param=f"{path}.{field}")
        message = f"{path}.{field} must be one of {kinds}, got {show(first['input'].get(field))}"
        return ApiError(400, message, param=f"{path}.{field}")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is required", param=path)
    message = _MESSAGES.get(first["type"], first["msg"]).removeprefix("Value error, ")
    message = re.sub(r"^\w+ should ", "must ", message)
    return ApiError(400, f"{path} {message}, got {show(first['input'])}", param=path)


def _path(location: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """Returns the path of a field as JavaScript writes it, such as `messages[0].content`.

    A location of pydantic also names members of unions; they are not in the body and are left out.

    Args:
        location: The location of the field.
        body: The request.
        is_missing: True if the last part is a field that the body lacks.
    """
    path = ""
    for depth, part in enumerate(location):
        is_lacking = is_missing and depth == len(location) - 1
        if isinstance(body, dict) and isinstance(part, str) and (part in body or is_lacking):
            path += f".{part}" if path else part
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            path += f"[{part}]"
            body = body[part] if part < len(body) else None
    return _printable(path)


def _printable(path: str) -> str:
    return path if _IGNORED_NAME.fullmatch(path) else "(a name that cannot be shown)"
