"""Runs `jaxpage chat`, a conversation at a terminal or over a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxpage.cli.conversation import Conversation, Message, find_picture, is_open, unquote
from jaxpage.cli.generate import print_stream
from jaxpage.cli.resolving import Say, engine_for_one, read_sampling, reporter, say
from jaxpage.errors import JaxpageError, UsageError
from jaxpage.settings.argument_checks import count

if TYPE_CHECKING:
    from jaxpage.llm import LLM

_WELCOME = (
    "Ctrl-D or /exit ends the conversation, Ctrl-C stops an answer, /help lists what else there is."
)


class Reader(Protocol):
    """A source of questions and commands.

    Attributes:
        is_terminal: True at a terminal, where Ctrl-C ends the answer and not the program.
    """

    is_terminal: bool

    def read(self) -> str | None:
        """Returns the next text, which may have several lines; None at the end."""


def chat(arguments: argparse.Namespace) -> int:
    """Runs `jaxpage chat [MODEL]` until /exit or the end of the input.

    Args:
        arguments: The command line.

    Returns:
        The exit status: 1 if a question from a pipe was not answered.
    """
    sampling = read_sampling(arguments)
    report = reporter(arguments)
    pictures = [_find_picture(path) for path in arguments.image or ()]
    with engine_for_one(arguments, chats=True) as llm:
        conversation = Conversation(
            sampling, defaults=_defaults(llm, sampling, report), system=arguments.system
        )
        if pictures:
            conversation.pictures += pictures
            report(f"The first question has {count(len(pictures), 'picture')}")
        if not _has_terminal():
            return 1 if converse(llm, conversation, Lines(), report) else 0
        from jaxpage.cli.line_editor import LineEditor

        with LineEditor() as editor:
            report(_WELCOME)
            converse(llm, conversation, editor, report)
        return 0


def _defaults(llm: LLM, sampling: dict[str, object], report: Say) -> dict[str, object]:
    """Returns the sampling defaults of the model, and those of a chat where the model has none.

    It tells which of them take effect.
    """
    from jaxpage.assembly import chat_defaults  # late, because this imports jax

    origins = {
        "generation_config.json": llm.sampling_defaults,
        "chat's default": chat_defaults(llm.sampling_defaults),
    }
    defaults = [
        (name, value, origin)
        for origin, values in origins.items()
        for name, value in values.items()
    ]
    if taken := [
        f"{name}={value} ({origin})" for name, value, origin in defaults if name not in sampling
    ]:
        report(f"Sampling: {', '.join(taken)}")
    return {name: value for name, value, _ in defaults}


def _find_picture(path: Path) -> Path:
    """Returns a picture of the command line."""
    try:
        return find_picture(path)
    except ValueError as error:
        raise UsageError(f"--image: {error}") from None


def _has_terminal() -> bool:
    """Returns whether input and output are a terminal's; for output one of two streams suffices."""
    return sys.stdin.isatty() and (sys.stderr.isatty() or sys.stdout.isatty())


class Lines:
    """Reads lines of a pipe or a file.

    Empty lines are skipped; a text in triple quotes may have several lines.
    """

    is_terminal = False

    def read(self) -> str | None:
        """Returns the next line or text in triple quotes; None at the end."""
        while line := sys.stdin.readline():
            while is_open(line) and (more := sys.stdin.readline()):
                line += more
            if line.strip():
                return line
        return None


def converse(llm: LLM, conversation: Conversation, reader: Reader, report: Say) -> int:
    """Answers the questions of a reader, and runs its commands, until the conversation ends.

    An error in a question is printed, and the conversation goes on.

    Args:
        llm: The engine.
        conversation: The turns so far.
        reader: The source of questions and commands.
        report: Prints a line about each answer.

    Returns:
        The number of questions that were not answered.
    """
    num_failed = 0
    while not conversation.has_ended:
        try:
            if (text := reader.read()) is None:
                break
            # The first line keeps its indentation, which matters in code.
            text = text.lstrip("\n").rstrip()
            if text.lstrip().startswith("/"):
                if reply := conversation.command(text):
                    say(reply)
            elif question := unquote(text):
                num_failed += not _is_answered(llm, conversation, question, report)
        except KeyboardInterrupt:
            if not reader.is_terminal:
                raise
    return num_failed


def _is_answered(llm: LLM, conversation: Conversation, question: str, report: Say) -> bool:
    """Runs one turn, or prints why there is none, and returns whether the question was answered."""
    try:
        return _turn(llm, conversation, question, report)
    except (ValueError, TypeError, JaxpageError) as error:
        say(f"Not answered: {error}")
        # A picture that is refused would be in the way of each later question, too.
        conversation.pictures.clear()
        return False


def _turn(llm: LLM, conversation: Conversation, question: str, report: Say) -> bool:
    """Runs one turn; returns False if the answer ended with an error, which is printed.

    Ctrl-C stops the answer; its text so far stays in the conversation.
    """

    def length_of(messages: list[Message]) -> int:
        return len(llm.chat_prompt(messages)["prompt_token_ids"])

    max_length = llm.max_model_len
    if num_dropped := conversation.num_to_drop(question, length_of, max_length):
        turns = "oldest turn is" if num_dropped == 1 else f"{num_dropped} oldest turns are"
        say(f"The context of {max_length} tokens is full: the {turns} forgotten")
        del conversation.turns[:num_dropped]
    texts: list[str] = []
    try:
        prompt = llm.chat_prompt(conversation.messages(question))
        # Closing the stream ends its request, also after Ctrl-C.
        with contextlib.closing(llm.stream(prompt, conversation.params)) as chunks:
            return print_stream(chunks, report, texts).outputs[0].finish_reason != "error"
    finally:
        if any(texts):
            conversation.add_turn(question, "".join(texts))
