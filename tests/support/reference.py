"""The pages of docs/reference/ that are made of the code: settings, sampling parameters, the command line, metrics."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxpage import BeamSearchParams, EngineConfig, SamplingParams
from jaxpage.cli.flags import ENGINE_FLAGS, SERVER_FLAGS, Flag
from jaxpage.cli.parsers import make_parser
from jaxpage.serving.config import ServerConfig
from jaxpage.serving.metric_texts import HELP, LABELS
from jaxpage.serving.metrics import PREFIX

MADE = "<!-- Made by `pytest tests/test_reference.py --write-reference`. Do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    return {
        "settings.md": _page("Settings", _settings()),
        "sampling-parameters.md": _page("Sampling parameters", _sampling()),
        "command-line.md": _page("The command line", _command_line()),
        "metrics.md": _page("Metrics", _metrics()),
    }


def _page(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", MADE, "", *lines]) + "\n"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _settings() -> Iterator[str]:
    yield "A setting has one name everywhere: in Python, in YAML (those of the server below `server:`), as a flag and as a variable. From the strongest:"
    yield "flag or Python argument, `JAXPAGE_*` variable, YAML, the model's `generation_config.json`, the default. `jaxpage config show` prints the origin of each."
    yield ""
    for title, config, flags, prefix in (
        ("The engine", EngineConfig, ENGINE_FLAGS, "JAXPAGE_"),
        ("The server", ServerConfig, SERVER_FLAGS, "JAXPAGE_SERVER_"),
    ):
        yield f"## {title}"
        yield ""
        yield from _table(("setting", "default", "what it is", "variable"), _setting_rows(config, flags, prefix))


def _setting_rows(config: Any, flags: Iterable[Flag], prefix: str) -> Iterator[tuple[str, ...]]:
    for flag in flags:
        default = config.model_fields[flag.setting].default
        text, _, said = re.sub(r";? ?default: ", "\0", flag.help).partition("\0")
        shown = said if said and default is None else f"`{default}`"
        yield f"`{flag.setting}`", shown, text, f"`{prefix}{flag.setting.upper()}`"


def _sampling() -> Iterator[str]:
    yield "What the parameters of a request mean together, and in which order they act, is in [decoding](../decoding.md)."
    yield ""
    for kind in (SamplingParams, BeamSearchParams):
        yield f"## `{kind.__name__}`"
        yield ""
        comments = _comments(kind)
        signature = inspect.signature(kind).parameters
        yield from _table(
            ("parameter", "type", "default", "notes"),
            (
                (
                    f"`{name}`",
                    f"`{parameter.annotation}`",
                    "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`",
                    comments.get(name, ""),
                )
                for name, parameter in signature.items()
            ),
        )


def _comments(kind: type) -> dict[str, str]:
    """What stands beside a field in the source."""
    found = {}
    for line in inspect.getsource(kind).splitlines():
        if match := re.fullmatch(r"    (\w+): [^=#]+?(?:  # (.*))?", line):
            found.setdefault(match[1], match[2] or "")
    return found


def _command_line() -> Iterator[str]:
    yield "Flags that are settings of the engine or of the server are in [settings](settings.md): every command that makes an engine takes them."
    yield ""
    shared = {flag.setting for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)}
    for name, parser in _commands(make_parser()):
        yield f"## `{name}`"
        yield ""
        if parser.description:
            yield parser.description.rstrip(".") + "."
            yield ""
        rows = [
            _option(action) for action in _own_actions(parser) if action.dest not in shared or not action.option_strings
        ]
        if rows:
            yield from _table(("argument", "what it is"), rows)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser.prog, parser
    for action in nested:
        for one in dict.fromkeys(action.choices.values()):
            yield from _commands(one)


def _own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]


def _option(action: argparse.Action) -> tuple[str, str]:
    names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
    return names, action.help or ""


def _metrics() -> Iterator[str]:
    yield f"`llm.stats()` has these names; `/metrics` has them with the prefix `{PREFIX}`, in Prometheus' text format. A metric with a label is a dict by its label."
    yield ""
    yield from _table(
        ("metric", "label", "meaning"), ((f"`{name}`", LABELS.get(name, ""), text) for name, text in HELP.items())
    )
