"""Counts how a setting walks from `LLM(...)` to the table of executables.

    python tools/setting_walk.py                       # a table of a few settings
    python tools/setting_walk.py max_num_seqs=8 --list # every stay of one walk

The value of the setting is replaced by a marked one when `EngineConfig` is made, and an engine of
the packaged model is started until its executables are about to be compiled. A function of jaxpage
takes the setting if one of its arguments is the marked value, or a record or container that holds
it. `self` does not count: a record that reads itself hands nothing on.

    stays      how often the walk enters such a function, or comes back to it from another one
    functions  how many different functions these are, in how many modules
    returns    stays in a function where the setting has been before
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxpage
from jaxpage import EngineConfig

PACKAGE = Path(jaxpage.__file__).parent
SETTINGS = ("block_size=8", "max_num_seqs=6", "attention_backend=scan", "kv_cache_dtype=int8")
DEEPEST = 4  # levels of records within records
END = "Executables.__init__"


class MarkedInt(int):
    """A number that can be recognised wherever it is handed on unchanged."""


class MarkedText(str):
    """A text that can be recognised wherever it is handed on unchanged."""


class Arrived(BaseException):
    """Says that the executables are about to be compiled."""


def carries(value: Any, depth: int = DEEPEST) -> bool:
    """Returns whether the value is the marked one, or a record or a container that holds it."""
    if isinstance(value, MarkedInt | MarkedText):
        return True
    return depth > 0 and any(carries(part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, EngineConfig):
        return vars(value).values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name, None) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (*value.args, *value.keywords.values())
    return ()


def arguments_of(frame: FrameType) -> Iterator[Any]:
    """Yields the arguments of a function that has just been called."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *arguments and **keywords
    names = (name for name in code.co_varnames[:count] if name not in ("self", "cls"))
    yield from (frame.f_locals[name] for name in names if name in frame.f_locals)


def walk(name: str, value: Any) -> list[tuple[str, str]]:
    """Returns the module and the name of the function of each stay, in order."""
    stays: list[tuple[str, str]] = []
    under_way: dict[FrameType, tuple[str, str]] = {}  # calls that took the setting

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and _is_ours(code):
            if code.co_qualname == END:
                raise Arrived
            if any(map(carries, arguments_of(frame))):
                under_way[frame] = (
                    str(Path(code.co_filename).relative_to(PACKAGE)),
                    code.co_qualname,
                )
                stays.append(under_way[frame])
        elif event == "return" and frame in under_way:
            del under_way[frame]
            if before := _caller(frame, under_way):
                stays.append(before)

    with _always_marked(name):
        sys.setprofile(note)
        try:
            jaxpage.LLM("demo", use_tqdm=False, **{name: _as_marked(value)})
        except Arrived:
            return [stay for stay, _ in itertools.groupby(stays)]
        finally:
            sys.setprofile(None)
    raise AssertionError("an engine was made without executables")


def _caller(
    frame: FrameType, under_way: dict[FrameType, tuple[str, str]]
) -> tuple[str, str] | None:
    """Returns the nearest function that took the setting and is still under way."""
    outer = frame.f_back
    while outer is not None and outer not in under_way:
        outer = outer.f_back
    return None if outer is None else under_way[outer]


@functools.cache
def _is_ours(code: CodeType) -> bool:
    # Code whose name begins with "<" is a part of a function, such as a comprehension.
    is_part = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return code.co_filename.startswith(f"{PACKAGE}/") and not is_part


@contextlib.contextmanager
def _always_marked(name: str) -> Iterator[None]:
    """Gives each `EngineConfig` that is made a marked value of one setting."""
    real = EngineConfig.__init__

    def make(config: EngineConfig, /, **settings: Any) -> None:
        real(config, **settings)
        vars(config)[name] = _as_marked(getattr(config, name))

    EngineConfig.__init__ = make  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        EngineConfig.__init__ = real  # type: ignore[method-assign]


def _as_marked(value: Any) -> Any:
    return MarkedText(value) if isinstance(value, str) else MarkedInt(value)


def counts(stays: list[tuple[str, str]]) -> dict[str, int]:
    """Returns the numbers of a walk by name."""
    num_functions, num_modules = len(set(stays)), len({module for module, _ in stays})
    return {
        "stays": len(stays),
        "functions": num_functions,
        "returns": len(stays) - num_functions,
        "modules": num_modules,
    }


def main() -> None:
    """Prints the walk of each setting, or of those that are given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", default=SETTINGS, metavar="NAME=VALUE")
    parser.add_argument("--list", action="store_true", help="every stay, in order")
    arguments = parser.parse_args()
    print(f"{'setting':<28}" + "".join(f"{name:>11}" for name in counts([])))
    for setting in arguments.settings:
        name, _, value = setting.partition("=")
        steps = walk(name, int(value) if value.isdigit() else value)
        print(f"{setting:<28}" + "".join(f"{number:>11}" for number in counts(steps).values()))
        if arguments.list:
            print("\n".join(f"    {module:<32} {function}" for module, function in steps))


if __name__ == "__main__":
    main()
