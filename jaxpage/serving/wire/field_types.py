"""Reads the objects of requests: types of their fields, and models from lines of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    create_model,
)

from jaxpage.settings import field_table as table
from jaxpage.settings.argument_checks import INT32_MAX
from jaxpage.shapes import MAX_BIASES

MAX_MESSAGES = 4096
MAX_TOOLS = 512

Item = TypeVar("Item")
# Validation stops at the first error: a body has room for a million wrong items.
Items = Annotated[list[Item], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Number = Annotated[int, Field(ge=0, le=INT32_MAX)]


def one_of(expected: str, kinds: tuple[str, ...] = ()) -> WrapValidator:
    """Makes a union report one message instead of one for each of its members.

    Args:
        expected: The words that follow "must be" in the message.
        kinds: Where a list of parts is wanted, their types; the message names another type.
    """

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {expected}{_describe_refused(value, kinds)}") from None

    return WrapValidator(validate)


def _describe_refused(value: Any, kinds: tuple[str, ...]) -> str:
    """Returns the end of a message that says which type of part is not supported."""
    parts = value if kinds and isinstance(value, list) else ()
    types = (part.get("type") for part in parts if isinstance(part, dict))
    return next(
        (f", not {kind[:40]!r}" for kind in types if isinstance(kind, str) and kind not in kinds),
        "",
    )


class RequestObject(BaseModel):
    """A JSON object of a request, read strictly: the text "1" is not a number.

    Unknown fields are kept, so that they can be reported.

    Attributes:
        known: The lines of the fields that are known, by name; the object refuses one of them that
            it does not have.
        added: Fields that clients add to an answer before they send it back; they ask for nothing.
        lengths: The fields that ask for a number of tokens. One that asks for more than the model
            has room for is accepted, the output ends where the room ends, and the client is told
            the name.
        is_passed_over: True if the client is told the name of the whole object, so that none of its
            fields is unknown.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    known: ClassVar[Mapping[str, table.Field]] = {}
    added: ClassVar[frozenset[str]] = frozenset()
    lengths: ClassVar[tuple[str, ...]] = ()
    is_passed_over: ClassVar[bool] = False

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""


def by_name(*fields: table.Field) -> dict[str, table.Field]:
    """Returns lines of the table by the names of their fields."""
    return {field.name: field for field in fields}


_OWN_TYPES: dict[str, Any] = {
    "logit_bias": Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ],
        Field(max_length=MAX_BIASES),
    ],
    "structured_outputs": dict[str, Any],
    "early_stopping": Annotated[bool | Literal["never"], one_of("true, false or 'never'")],
}


def with_parameters(request: str, base: type[RequestObject]) -> Any:
    """Returns a model with the parameters that a kind of request has, all of which may be null.

    Args:
        request: The kind of request, as the table names it.
        base: The model with its other fields.
    """
    fields: dict[str, Any] = {}
    for _, name, kind in table.forms_in(request):
        value_type = _OWN_TYPES[name] if kind is None else _type_of(kind)
        fields[name] = (value_type | None, None)
    return create_model(f"{base.__name__}With{request.title()}", __base__=base, **fields)


def _type_of(kind: table.Kind) -> Any:
    """Returns the type that pydantic checks for a kind of the table."""
    match kind:
        case table.Float():
            bounds: dict[str, Any] = {}
            if kind.low > -math.inf:
                bounds["gt" if kind.above_low else "ge"] = kind.low
            if kind.high < math.inf:
                bounds["le"] = kind.high
            return Annotated[float, Field(**bounds)]
        case table.Int():
            return Annotated[int, Field(ge=kind.low, le=kind.high)]
        case table.Bool():
            return bool
        case table.Choice():
            return Literal[kind.values]
        case table.Text():
            return Annotated[
                str,
                Field(min_length=kind.min_characters or None, max_length=kind.max_characters),
            ]
        case table.TokenIdList():
            return Annotated[Items[TokenId], Field(min_length=kind.min_items or None)]
    text = Annotated[str, Field(min_length=1, max_length=kind.max_characters)]
    texts = Annotated[Items[text], Field(max_length=kind.max_items)]
    if not kind.or_one:
        return texts
    expected = (
        f"a string of 1 to {kind.max_characters} characters, or a list of at most "
        f"{kind.max_items} of them"
    )
    return Annotated[text | texts, one_of(expected)]
