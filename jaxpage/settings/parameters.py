"""Declares the parameters of a request's record: type, default, sentence and check in one place.

A parameter that names no check of its own has that of its line in the table (field_table.py).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from jaxpage.settings.argument_checks import names_checked
from jaxpage.settings.field_table import PARAMETERS, check

Check = Callable[[Any], Any]
Bounded = Callable[[Any, Any], Any]

_Accepted = TypeVar("_Accepted", contravariant=True)
_Stored = TypeVar("_Stored", covariant=True)
_Record = TypeVar("_Record", bound="CheckedParameters")


class Converted(Generic[_Accepted, _Stored]):
    """Annotates a parameter: `Converted[what a caller may write, what the record has]`.

    It is never made. Type checkers take a field whose type has `__set__` for a converted one.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: Any = None) -> _Stored:
            """Returns the checked value."""

        def __set__(self, instance: object, value: _Accepted) -> None:
            """Takes what a caller wrote."""


class CheckedParameters:
    """A frozen dataclass of parameters, which are checked when it is made.

    Attributes:
        checks: For each parameter its name, its default, that in the form of the record, and its
            check.
    """

    checks: ClassVar[tuple[tuple[str, Any, Any, Bounded], ...]]

    def __post_init__(self) -> None:
        """Checks each parameter and stores it in the form that the record has."""
        for name, default, checked, run in self.checks:
            value = getattr(self, name)
            value = checked if value is default else run(self, value)
            object.__setattr__(self, name, value)


def parameter(
    default: Any, help: str, check: Check | None = None, *, bounded: Bounded | None = None
) -> Any:
    """Declares a parameter.

    Args:
        default: Its default; MISSING if callers have to write it.
        help: A phrase for the page of the parameters.
        check: Returns a value in the form that the record has, or raises ValueError.
        bounded: The same for a parameter that another one bounds; it gets the record, in which the
            parameters before it are checked, and the value.
    """
    return field(default=default, metadata={"help": help, "check": check, "bounded": bounded})


def checks_parameters(record: type[_Record]) -> type[_Record]:
    """Makes a dataclass of parameters check them, and suggest a name for an unknown keyword.

    Raises:
        TypeError: A parameter has no check.
    """
    checks = []
    for declared in fields(record):  # type: ignore[arg-type]
        name, default = declared.name, declared.default
        bounded = declared.metadata["bounded"]
        run = bounded or _find_check(record, name, declared.metadata["check"], default)
        # Most parameters have their default, whose checked form is found once. A default that
        # another parameter bounds goes with every value of it.
        checked = default if bounded or default is MISSING else run(None, default)
        checks.append((name, default, checked, run))

    # A dataclass writes it from the annotations, the converted ones included.
    init = record.__init__
    for name, annotation in init.__annotations__.items():
        if str(annotation).startswith("Converted["):
            # Readers of the signature see what they may write.
            accepted, _ = ast.parse(annotation, mode="eval").body.slice.elts
            init.__annotations__[name] = ast.unparse(accepted)
    record.checks = tuple(checks)
    record.__init__ = names_checked(init)  # type: ignore[method-assign]
    return record


def _find_check(record: type, name: str, declared: Check | None, default: Any) -> Bounded:
    if declared is not None:
        return lambda _, value: declared(value)
    if name not in {line.name for line in PARAMETERS}:
        raise TypeError(
            f"{record.__name__}.{name} has no check: give `parameter` one, or PARAMETERS of "
            "settings/field_table.py a line"
        )
    return lambda _, value: None if value is default is None else check(name, value)


def require_fields(record: type) -> None:
    """Checks that a record has each parameter that requests give to it.

    Raises:
        TypeError: A line of the table has no field.
    """
    names = {declared.name for declared in fields(record)}
    for line in PARAMETERS:
        if line.engine is not None and line.name not in names:
            raise TypeError(
                f"PARAMETERS of settings/field_table.py has {line.name}, which is no field of "
                f"{record.__name__}: declare it there with `parameter`, or say with engine=None "
                "that the endpoint alone reads it"
            )
