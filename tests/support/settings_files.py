"""Says what is written from the declarations of settings: the flags of the command line, and the
typed keywords of `LLM`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.checked_settings import ByteSize, Settings
from jaxpage.settings.engine_config import EngineConfig

WIDTH = 100
BYTE_SIZE = get_args(ByteSize)[1]  # what marks a number as an amount of memory
BEGIN, END = "# What follows is generated.", "# The end of what is generated."
HEADER = '''"""Declares the flags of settings, without what reads settings: `--help` must not wait for pydantic.

This module is generated from `EngineConfig` and `ServerConfig`, by
`pytest tests/test_reference.py --write-reference`. Do not edit it.
"""

from __future__ import annotations

from jaxpage.cli.flag import (
    Flag,
    OneModel,
    byte_size,
    int_or_auto,
    json_object_or_auto,
    seconds_or_none,
)
'''


def reported(field: FieldInfo, name: str) -> str | None:
    """Returns what the declaration of a setting says apart from its help: see `setting`."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "declared with `setting`"
    return extra.get(name)  # type: ignore[return-value]


def flags_module() -> str:
    """Returns the source of jaxpage/cli/setting_flags.py."""
    lines = [HEADER]
    for name, config in (("ENGINE_FLAGS", EngineConfig), ("SERVER_FLAGS", ServerConfig)):
        lines += [f"{name} = (", *_flags(config), ")", ""]
    return "\n".join(lines)


def _flags(config: type[Settings]) -> Iterator[str]:
    hints = get_type_hints(config, include_extras=True)
    for name, field in config.model_fields.items():
        leaves = list(_leaves(hints[name]))
        kind, metavar = _kind(leaves, NoneType in get_args(hints[name]))
        more = {"metavar": reported(field, "metavar") or metavar, "alias": reported(field, "alias")}
        yield "    Flag("
        yield f'        "{name}",'
        yield f"        {kind},"
        yield from (f"        {piece}" for piece in _strings(_help(field)))
        yield from (f'        {key}="{text}",' for key, text in more.items() if text)
        if get_origin(leaves[0][0]) is tuple:
            yield "        several=True,"
        if name == "model":
            yield "        action=OneModel,"
        yield "    ),"


def _help(field: FieldInfo) -> str:
    """Returns what --help says: what the setting is, and its default where there is one."""
    default = reported(field, "shown")
    if default is None and field.default is not None:
        default = (
            {True: "yes", False: "no"}[field.default]
            if isinstance(field.default, bool)
            else str(field.default)
        )
    return f"{field.description}; default: {default}" if default else str(field.description)


def _leaves(hint: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yields each alternative of a type, without None, with what is annotated to it."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        yield from _leaves(inner, (*marks, *more))
    elif get_origin(hint) in (None, Literal, tuple):
        if hint is not NoneType:
            yield hint, marks
    else:
        for each in get_args(hint):
            yield from _leaves(each, marks)


def _kind(leaves: list[tuple[Any, tuple[Any, ...]]], takes_none: bool) -> tuple[str, str | None]:
    """Returns how a flag's value is read, as source, and the metavar that goes with it."""
    (leaf, marks), *others = leaves
    if leaf is int and others:
        return "int_or_auto", "N"
    if BYTE_SIZE in marks:
        return "byte_size", "SIZE"
    if isinstance(leaf, type) and issubclass(leaf, BaseModel):
        return "json_object_or_auto", "JSON"
    if leaf is float and takes_none:
        return "seconds_or_none", "X"
    return {bool: "None", int: "int", float: "float"}.get(leaf, "str"), None


def _strings(text: str) -> list[str]:
    """Returns a text as the lines of a call's argument, in the style of the formatter."""
    quote = "'" if '"' in text and "'" not in text else '"'
    pieces = [text]
    if len(text) + 11 > WIDTH:
        pieces = textwrap.wrap(text, WIDTH - 12, drop_whitespace=False, break_on_hyphens=False)
    quoted = [
        quote + piece.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote for piece in pieces
    ]
    return [*quoted[:-1], quoted[-1] + ","]


def keywords(text: str) -> str:
    """Returns the source of jaxpage/settings/engine_settings.py with the keywords that there are."""
    before, _, after_begin = text.partition(f"    {BEGIN}\n")
    _, _, after = after_begin.partition(f"    {END}\n")
    return "".join([before, f"    {BEGIN}\n", *_keywords(), f"    {END}\n", after])


def _keywords() -> Iterator[str]:
    hints = get_type_hints(EngineConfig, include_extras=True)
    for name, field in EngineConfig.model_fields.items():
        if name in ("model", "tokenizer"):  # parameters of their own
            continue
        typed = reported(field, "given") or _typed(hints[name])
        line = f"    {name}: {typed}\n"
        yield line if len(line) <= WIDTH + 1 else f"    {name}: (\n        {typed}\n    )\n"


def _typed(hint: Any) -> str:
    """Returns a type as source, without bounds and validators."""
    if get_origin(hint) is Annotated:
        return "int | str" if BYTE_SIZE in get_args(hint) else _typed(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "Literal[" + ", ".join(f'"{choice}"' for choice in get_args(hint)) + "]"
    if get_args(hint):
        return " | ".join(map(_typed, get_args(hint)))
    return "None" if hint is NoneType else hint.__name__
