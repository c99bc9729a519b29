"""Reads strict YAML for configuration files: a value is what it looks like to a reader.

Anything odd is refused with file and line. Unlike PyYAML by default:
  * duplicate keys, anchors, aliases and tags are errors;
  * only `true` and `false` are booleans, not `yes` or `on`;
  * `1e-6` is a number;
  * `0123`, `12:30` and dates have no second meaning.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxpage.errors import ConfigError

MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True)
class Located:
    """Holds a value of the file's top-level mapping, with the place of its key as `file:line`."""

    value: Any
    place: str


class _StrictLoader(yaml.SafeLoader):
    # PyYAML's own attribute, which is read from the class.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(
                problem="tags are not allowed", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        check_keys(node)
        return super().construct_mapping(node, deep=deep)


def check_keys(node: yaml.MappingNode) -> None:
    """Raises MarkedYAMLError if a key of a mapping is no text, or is given twice."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise yaml.MarkedYAMLError(
                problem="a key must be plain text", problem_mark=key.start_mark
            )
        if key.value in seen:
            problem = f"{key.value!r} is given twice, first in line {seen[key.value]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        seen[key.value] = line


def _define(tag: str, pattern: str, first_characters: str, convert: Any) -> None:
    tag = f"tag:yaml.org,2002:{tag}"
    _StrictLoader.add_implicit_resolver(
        # PyYAML finds patterns by the first character of a text; "" is that of an empty one.
        tag,
        re.compile(rf"^(?:{pattern})$"),
        [*first_characters, ""],
    )
    _StrictLoader.add_constructor(tag, lambda _, node: convert(node.value))


_define("null", "~|null|Null|NULL|", "~nN", lambda text: None)
_define("bool", "true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true")
# Python reads no integer of more than 4,300 digits.
_define("int", "[-+]?[0-9]{1,4000}", "-+0123456789", int)
_define(
    "float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789", float
)


def parse_scalar(text: str) -> Any:
    """Returns the value that `text` would have in a file; environment variables are read like this.

    Raises:
        ConfigError: The text is not YAML.
    """
    try:
        return _StrictLoader(text).get_single_data()
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"cannot be read as a value: {text[:80]!r}") from None


def load_mapping(path: Path, sections: Collection[str] = ()) -> dict[str, Located]:
    """Returns the top-level mapping of a YAML file, every value with its place.

    Args:
        path: The file.
        sections: The keys whose values are such mappings too.

    Raises:
        ConfigError: The file cannot be read, is not strict YAML, or holds no mapping.
    """
    text = _read(path)
    try:
        return _construct(path, _StrictLoader(text), sections)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{path} is not a text file: {error.reason} at character {error.position}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def _construct(path: Path, loader: _StrictLoader, sections: Collection[str]) -> dict[str, Located]:
    node = loader.get_single_node()
    if node is None:
        raise ConfigError(f"{path} is empty: a configuration is a mapping such as 'model: demo'")
    mapping = {}
    for key, value in _entries(path, node, "the top level"):
        if key.value in sections:
            inner = [
                (name.value, _locate(path, loader, name, item))
                for name, item in _entries(path, value, key.value)
            ]
            mapping[key.value] = Located(dict(inner), _place(path, key))
        else:
            mapping[key.value] = _locate(path, loader, key, value)
    return mapping


def _entries(path: Path, node: yaml.Node, label: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{_place(path, node)}: {label} must be a mapping, not {kind}")
    check_keys(node)
    entries: list[tuple[yaml.ScalarNode, yaml.Node]] = node.value
    return entries


def _locate(path: Path, loader: _StrictLoader, key: yaml.Node, value: yaml.Node) -> Located:
    return Located(loader.construct_object(value, deep=True), _place(path, key))


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _read(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, not a configuration file")
    if not path.exists():
        raise ConfigError(f"there is no configuration file {path}")
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} has {path.stat().st_size} bytes; a configuration has at most {MAX_FILE_BYTES}"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file (UTF-8)") from None
    if "\0" in text:
        raise ConfigError(f"{path} is not a text file (it contains NUL)")
    return text
