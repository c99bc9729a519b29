"""Reads the fields of an object of config.json so that one reading finds everything that is wrong.

A wrong field is noted, and from then on a value that it could have is read in its place, so that
the fields after it are read too:

    with Fields(config, "llama") as fields:     hidden_size = "48"    noted, read as 64 from now on
        ...                                     hidden_act = "wavy"   noted, read as "silu"
                                                the end of the block raises both
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from jaxpage.errors import CheckpointError, UnsupportedError

Reader = TypeVar("Reader", bound="ConfigFields")


class FieldError(Exception):
    """Reports an error in one or more fields.

    Attributes:
        fields: The names of all fields that take part in it.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self, text: str) -> None:
        """Takes the text of the error, without the name of the file."""
        super().__init__(f"config.json: {text}")


class WrongField(FieldError, CheckpointError):
    """A field is missing, or has a value that no model can have."""


class RefusedField(FieldError, UnsupportedError):
    """A field asks for something that is not supported."""


class ConfigFields:
    """Holds the fields of an object of config.json.

    Errors are raised at the end of a `with` block: one error as it is, several as an
    ExceptionGroup. Outside of a block each error is raised at once, so that a reader without a
    block refuses a wrong field too.
    """

    def __init__(self, config: Mapping[str, Any], parent: ConfigFields | None = None) -> None:
        """Takes the object, and for an object within another one the fields of that one.

        Args:
            config: The object; it is copied, because values are put in the place of wrong ones.
            parent: The fields that this object is a part of; errors are noted there.
        """
        self.config = dict(config)
        self._top: ConfigFields = self if parent is None else parent._top
        self._errors: dict[str, Exception] = {}
        self._wrong: set[str] = set()
        self._collects = False

    def __enter__(self: Reader) -> Reader:
        self._top._collects = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        errors = self._top._errors
        if error is not None:
            raised = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            known = [
                each for each in raised if isinstance(each, CheckpointError | UnsupportedError)
            ]
            if len(known) == len(raised):
                errors.update({str(each): each for each in known})
            elif not isinstance(error, Exception) or not errors:
                return  # Neither about wrong fields nor caused by what was read in their place.
        self._raise_noted()

    def note(self, *errors: FieldError, **instead: Any) -> None:
        """Notes errors of fields, and puts values in the place of the fields'.

        An error is passed over if one of its fields is noted already: the value that was put in its
        place may have caused the error.

        Args:
            errors: The errors of these fields.
            instead: The fields by name, each with a value with which the others can be read.
        """
        if self._wrong.isdisjoint(instead):
            for error in errors:
                error.fields = frozenset(instead)
                self._top._errors.setdefault(str(error), error)
        self._wrong |= instead.keys()
        self.config |= instead
        self._raise_outside()

    def note_wrong(self, text: str, /, **instead: Any) -> None:
        """Notes that fields are missing, or have values that no model can have; see `note`."""
        self.note(WrongField(text), **instead)

    def note_unsupported(self, text: str, /, **instead: Any) -> None:
        """Notes that fields ask for something that is not supported; see `note`."""
        self.note(RefusedField(text), **instead)

    def _raise_outside(self) -> None:
        """Raises noted errors where no block will raise them."""
        if not self._top._collects:
            self._raise_noted()

    def _raise_noted(self) -> None:
        noted = list(self._top._errors.values())
        if len(noted) == 1:
            raise noted[0] from None
        if noted:
            raise ExceptionGroup("config.json", noted) from None
