"""Defines settings as immutable classes that check themselves as a whole.

`Settings` is the base of `EngineConfig` and of the server's `ServerConfig`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.settings.argument_checks import close_names, show
from jaxpage.settings.byte_sizes import MINIMUM, parse_bytes

Problem = tuple[str, str]  # (name of the setting, text that says what is wrong)


def _as_bytes(value: Any) -> Any:
    """Returns an amount as its number of bytes.

    A small number is refused, because its unit was probably left out.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            # Digits in quotes are refused like any number that is written as a text.
            if not value.strip().isdigit():
                return parse_bytes(value)
        raise ValueError("must be a number of bytes or an amount such as 24GiB")
    if isinstance(value, int) and not isinstance(value, bool) and value < MINIMUM:
        raise ValueError(
            f"must be at least {MINIMUM} bytes, or an amount with a unit such as 24GiB"
        )
    return value


ByteSize = Annotated[int, BeforeValidator(_as_bytes)]


def setting(
    default: Any,
    help: str,
    *,
    shown: str | None = None,
    metavar: str | None = None,
    alias: str | None = None,
    type_text: str | None = None,
) -> Any:
    """Declares a setting: a field whose annotation has its type, choices and bounds.

    Its flag, its typed keyword of `LLM` and its row in the reference are written from this by
    `pytest tests/test_reference.py --write-reference`.

    Args:
        default: The value of a setting that is not given.
        help: The text of --help and of the reference, without the default.
        shown: The text for the default, if it is not the value itself.
        metavar: The name of the value in --help, if the type does not give one.
        alias: Another flag for the same setting, such as that of vLLM.
        type_text: The type that a type checker allows, if it is wider than the annotation.
    """
    extras = {"shown": shown, "metavar": metavar, "alias": alias, "given": type_text}
    return Field(
        default,
        description=help,
        json_schema_extra={name: text for name, text in extras.items() if text},
    )


class InvalidSettings(ConfigError):
    """Says that one or more settings are wrong.

    Attributes:
        problems: The problems one by one, so that a caller can add the source of each setting.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Keeps the problems, and joins them into the message."""
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(f"{name}: {text}" if name else text for name, text in self.problems)
        )


class UnsupportedSettings(UnsupportedError):
    """Says that one or more settings are valid, but not supported by this version.

    Attributes:
        problems: The problems one by one.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{name}: {text}" for name, text in self.problems))


class Settings(BaseModel):
    """Holds a group of settings, checked when it is made.

    Nothing is converted silently: `"8"` is no integer, and `True` is not 1.

    Raises:
        ConfigError: There are unknown settings (the message has the nearest name), wrong types,
            values out of range or contradictions. All of them are reported at once.
        UnsupportedError: There are settings that this version understands but cannot honour.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    # The classes of the settings that have settings of their own.
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {}
    # Settings whose text is not parsed as YAML: a revision may look like a number.
    plain_text: ClassVar[frozenset[str]] = frozenset()

    # Type checkers see the fields as keyword arguments.
    if not TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise InvalidSettings(
                    self._all_problems(settings, list(self._explain(error)))
                ) from None
            refused = list(self.find_refused())
            if contradictions := list(self.contradictions()):
                raise InvalidSettings(contradictions + refused)
            if refused:
                raise UnsupportedSettings(refused)

    def contradictions(self) -> Iterable[Problem]:
        """Yields the problems of settings that contradict each other."""
        return ()

    def find_refused(self) -> Iterable[Problem]:
        """Yields the settings that this version cannot honour."""
        return ()

    def replace(self, **settings: Any) -> Self:
        """Returns a copy with the given settings changed, checked again as a whole."""
        return type(self)(**{**self.explicit_settings(), **settings})

    def explicit_settings(self) -> dict[str, Any]:
        """Returns the settings that were set explicitly; all others have their defaults."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def unknown(cls, name: str) -> Problem:
        """Returns the problem with a name that no setting has; it suggests the nearest name.

        A dot leads into a setting that has settings of its own.
        """
        group, _, last = name.rpartition(".")
        names = cls.nested.get(group, cls).model_fields
        nearest = nearest_name(last, names)
        hint = f"did you mean {nearest!r}?" if nearest else f"settings are {', '.join(names)}"
        return name, f"unknown setting; {hint}"

    @classmethod
    def _all_problems(cls, settings: Mapping[str, Any], problems: list[Problem]) -> list[Problem]:
        """Adds the problems of the other settings, so that all can be corrected at once."""
        wrong = {name.partition(".")[0] for name, _ in problems}
        if wrong.isdisjoint(settings):
            return problems  # a required setting is missing, and would be missing again
        try:
            cls(**{name: value for name, value in settings.items() if name not in wrong})
        except (InvalidSettings, UnsupportedSettings) as error:
            # Here a wrong setting has its default. Errors that mention it are not reported.
            mentioned = re.compile(rf"\b({'|'.join(map(re.escape, wrong))})\b")
            return problems + [
                (name, text)
                for name, text in error.problems
                if name.partition(".")[0] not in wrong and not mentioned.search(text)
            ]
        return problems

    @classmethod
    def _explain(cls, error: ValidationError) -> Iterable[Problem]:
        # A setting that takes several kinds of values has one error for each kind; join them.
        problems: dict[str, list[str]] = {}
        for item in error.errors(include_url=False, include_context=False):
            # The second part may be a setting of a group or a place in a list; else, like the rest,
            # it says only which kind was tried.
            first, *deeper = item["loc"]
            is_path = first in cls.nested or (deeper and isinstance(deeper[0], int))
            name = ".".join(map(str, item["loc"][: 2 if is_path else 1]))
            message = item["msg"].replace("Input should", "must").replace("String should", "must")
            message = message.removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                problems[name] = [cls.unknown(name)[1]]
            elif item["type"] == "missing":
                problems[name] = ["is required"]
            elif name in problems:
                # The last part is what was given.
                problems[name].insert(-1, f" or {message.removeprefix('must be ')}")
            else:
                problems[name] = [message, f", got {show(item['input'])}"]
        return ((name, "".join(parts)) for name, parts in problems.items())


def nearest_name(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known name that was probably meant, or None.

    Args:
        name: The name that is not known. Case does not matter, and `-` is the same as `_`.
        names: The known names.
        cutoff: How similar the names must be, 0 to 1.
    """
    close = close_names(name.lower().replace("-", "_"), names, cutoff=cutoff)
    return close[0] if close else None
