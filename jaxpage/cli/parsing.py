"""Builds the parsers of commands.

Nothing heavy is imported here, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from jaxpage.cli.flag import OneModel
from jaxpage.cli.foreign_commands import ANSWERS
from jaxpage.settings.argument_checks import close_names
from jaxpage.settings.from_vllm import answer_for_flag

COMMAND = "COMMAND"  # stands for the commands of jaxpage itself, and for no actions of one
# Arguments with these metavars may be paths.
_PATHS = {"MODEL", "FILE", "LOG", "SRC", "DST"}
MAX_USAGE_LINES = 6  # with an error


class Parser(argparse.ArgumentParser):
    """Parses like argparse, and proposes the nearest name for an unknown command or flag."""

    _first_word = ""  # of those that are parsed

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Parses one command, and refuses unknown words.

        By itself argparse leaves them to the parser above it, which does not know the flags of the
        command.
        """
        self._first_word = next(iter(arguments[0] or ()), "") if arguments else ""
        namespace, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(self._of_unknown(unknown[0].split("=")[0]))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Ends with a message, after the usage if that is no longer than a few lines."""
        word = self._first_word.split("=")[0]
        is_flag = word.startswith("--") and word not in self._option_string_actions
        if is_flag and "are required" in message:
            # argparse looks for missing words first, and would not name a flag that is wrong.
            message = self._of_unknown(word)
        usage = self.format_usage()
        if usage.count("\n") > MAX_USAGE_LINES:
            usage = f"usage: {self.prog} --help lists the flags\n"
        self.exit(2, f"{usage}{self.prog}: error: {message}\n")

    def _of_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; {self._of_words()}"
        if answer := answer_for_flag(word):
            return f"unknown argument {word!r}; {answer}"
        # argparse has no public list of the flags of a parser.
        options = [option for action in self._actions for option in action.option_strings]
        close = close_names(
            word, [option for option in options if _negates(option) == _negates(word)], cutoff=0.7
        )
        return f"unknown argument {word!r}" + (f"; did you mean {close[0]!r}?" if close else "")

    def _of_words(self) -> str:
        """Returns a hint at the words that the command takes."""
        words = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
        if "PROMPT" in words:
            return "a text of several words needs quotes"
        return f"{self.prog} takes {' and '.join(words) or 'no words'}, and flags"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            close = close_names(str(value), action.choices)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"there are {', '.join(action.choices)}"
            )
            if action.metavar == COMMAND:
                hint = ANSWERS.get(str(value), hint)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")
        super()._check_value(action, value)


def _negates(option: str) -> bool:
    """Returns whether a flag turns something off, so that its opposite is never proposed."""
    return option.startswith(("--no-", "--disable-"))


class PrintCompletion(argparse.Action):
    """Prints a shell's completion script for the whole command."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        """Prints the script, and exits."""
        shtab = import_module("shtab")
        _complete_files(parser, shtab.FILE)
        print(shtab.complete(parser, shell=arguments[1]))
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Lets the shell complete arguments that may be a path with the names of files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif str(action.metavar) in _PATHS:
            action.complete = files  # type: ignore[attr-defined]  # shtab looks for it here


# argparse has no public name for this class.
Commands = argparse._SubParsersAction


def add_command(commands: Commands[Parser], name: str, purpose: str) -> Parser:
    """Adds a command without flags, and returns its parser."""
    return commands.add_parser(
        name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False
    )


def lazily(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
    """Returns a function that imports a module when it runs, and calls a function of it.

    So parsing and `--help` do not wait for jax.

    Args:
        module: The name of the module within `jaxpage.cli`.
        function: The name of its function.
    """

    def run(arguments: argparse.Namespace) -> int | None:
        command: Callable[[argparse.Namespace], int | None] = getattr(
            import_module(f"jaxpage.cli.{module}"), function
        )
        return command(arguments)

    return run


def add_model(
    parser: argparse.ArgumentParser,
    help: str = '"demo" (packaged), a directory, a GGUF file, or a hub id',
) -> None:
    """Adds MODEL by position; the flag --model is among those of the engine."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", action=OneModel, default=argparse.SUPPRESS, help=help
    )


def add_verbosity(parser: argparse.ArgumentParser, verbose: str | None = None) -> None:
    """Adds -q, and -v if `verbose` says what else can be printed."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-q", "--quiet", action="store_true", help="print only warnings and errors")
    if verbose:
        group.add_argument("-v", "--verbose", action="store_true", help=f"also print {verbose}")
