"""Keeps a conversation: its turns, its sampling parameters, and the commands that change them.

It knows neither a terminal nor an engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpage.cli.flag import json_object
from jaxpage.cli.flags import SAMPLING_FLAGS
from jaxpage.errors import CapacityError
from jaxpage.private_files import open_private
from jaxpage.settings.argument_checks import close_names, count
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.settings.yaml_file import parse_scalar

Message = dict[str, Any]

QUOTES = '"""'
COMMANDS = {
    "/help": ("", "this list"),
    "/system": ("[TEXT]", "set the system message; without TEXT remove it"),
    "/set": ("[NAME VALUE]", "set a sampling parameter, such as temperature 0.5; alone: show them"),
    "/save": ("FILE", "write the conversation to a file, as JSON"),
    "/load": ("FILE", "go on with a conversation that was saved"),
    "/image": ("FILE", "show a picture with the next question; the model must take pictures"),
    "/reset": ("", "begin a new conversation; the system message stays"),
    "/exit": ("", "end; so does Ctrl-D"),
}
# A conversation goes on with one answer.
PARAMETERS = tuple(flag.setting for flag in SAMPLING_FLAGS if flag.setting != "n")
MAX_FILE_BYTES = 16 * 2**20


def is_open(text: str) -> bool:
    """Returns whether a text begins with triple quotes that are not closed yet."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def find_picture(path: Path) -> Path:
    """Returns the absolute path of a picture.

    It is decoded: an error that came with the next question would lose the question.

    Raises:
        ValueError: The file is missing, or no picture that is taken.
    """
    from jaxpage.images import load_picture  # late, because this imports Pillow

    load_picture(path)
    return path.resolve()


def unquote(text: str) -> str:
    """Returns the text between triple quotes, or the text as it is if there is anything else."""
    stripped = text.strip()
    num = stripped.count(QUOTES)
    if not stripped.startswith(QUOTES) or num > 2 or (num == 2 and not stripped.endswith(QUOTES)):
        return text
    return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


class Conversation:
    """Keeps the turns so far, and the sampling parameters of the next answer.

    Args:
        sampling: The parameters that were set explicitly; they win over `defaults`.
        defaults: The defaults of the model or of a chat.
        system: The system message.

    Attributes:
        system: The system message, or None.
        turns: The questions with their answers; a question with pictures is a list of parts.
        pictures: The files of the pictures of the next question.
        has_ended: True after /exit.
    """

    def __init__(
        self,
        sampling: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        system: str | None = None,
    ) -> None:
        self.system = system or None
        self.turns: list[tuple[Any, str]] = []
        self.pictures: list[Path] = []
        self.has_ended = False
        self._defaults = dict(defaults or {})
        self._set = dict(sampling)

    @property
    def params(self) -> SamplingParams:
        """Returns the sampling parameters of the next answer."""
        return SamplingParams(**{**self._defaults, **self._set})

    def messages(self, question: str | None = None, *, num_dropped: int = 0) -> list[Message]:
        """Returns the messages so far, followed by a question.

        Args:
            question: The question, or None.
            num_dropped: The number of the oldest turns to leave out.
        """
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for content, answer in self.turns[num_dropped:]:
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer},
            ]
        if question is None:
            return messages
        return [*messages, {"role": "user", "content": self._content(question)}]

    def _content(self, question: str) -> Any:
        """Returns the next question: a text, or parts if it has pictures."""
        if not self.pictures:
            return question
        parts = [{"type": "image", "image": str(path)} for path in self.pictures]
        return [*parts, {"type": "text", "text": question}]

    def add_turn(self, question: str, answer: str) -> None:
        """Adds a question with its answer; the next question has no pictures yet."""
        self.turns.append((self._content(question), answer))
        self.pictures.clear()

    def show(self, path: Path) -> str:
        """Shows a picture with the next question, and returns what to print.

        Raises:
            ValueError: The file is missing, or no picture that is taken.
        """
        self.pictures.append(find_picture(path))
        return f"The next question has {count(len(self.pictures), 'picture')}"

    def num_to_drop(
        self, question: str, length_of: Callable[[list[Message]], int], max_model_len: int
    ) -> int:
        """Returns how many of the oldest turns must go, so that there is room for an answer.

        The room is a quarter of the context, or `max_tokens` if that is less. If the question alone
        leaves less than this, but some, all turns go.

        Args:
            question: The next question.
            length_of: Returns the number of tokens of some messages.
            max_model_len: The length of the context in tokens.

        Raises:
            CapacityError: The question alone leaves no room.
        """
        room = max(1, min(max_model_len // 4, self.params.max_tokens or max_model_len))
        length = 0
        for num_dropped in range(len(self.turns) + 1):
            length = length_of(self.messages(question, num_dropped=num_dropped))
            if length <= max_model_len - room:
                return num_dropped
        if length >= max_model_len:
            raise CapacityError(
                f"the message is too long: with the system message it has {length} tokens, and the "
                f"context has {max_model_len}, the answer "
                "included"
            )
        return len(self.turns)

    def command(self, line: str) -> str:
        """Runs a line that begins with /, and returns the text to print, which may be an error."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        try:
            match name:
                case "/help":
                    return help_text()
                case "/system":
                    self.system = argument or None
                    return "The system message is set" if argument else "There is no system message"
                case "/image":
                    return self.show(_path(argument))
                case "/set":
                    return self._set_parameter(argument) if argument else self._parameters()
                case "/save":
                    return self._save(_path(argument))
                case "/load":
                    return self._load(_path(argument))
                case "/reset":
                    self.turns.clear()
                    self.pictures.clear()
                    return "A new conversation"
                case "/exit":
                    self.has_ended = True
                    return ""
        except (ValueError, OSError) as error:
            return f"{name}: {error}"
        near = close_names(name, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else f"there are {' '.join(COMMANDS)}."
        return (
            f"There is no {name[:40]}; {hint} Nothing was sent. A text that begins with / goes "
            f"between {QUOTES}."
        )

    def _set_parameter(self, text: str) -> str:
        name, _, value = text.partition(" ")
        name = name.lower().replace("-", "_")
        if name not in PARAMETERS:
            near = close_names(name, PARAMETERS)
            raise ValueError(
                f"unknown parameter {name!r}; "
                f"{f'did you mean {near[0]}?' if near else ', '.join(PARAMETERS)}"
            )
        if not value.strip():
            raise ValueError(f"{name} takes a value, such as /set temperature 0.5")
        changed = {**self._set, name: _value(name, value.strip())}
        SamplingParams(**{**self._defaults, **changed})  # raises ValueError for a wrong value
        self._set = changed
        return f"{name} = {changed[name]}"

    def _parameters(self) -> str:
        params = self.params
        plain = SamplingParams()
        names = [
            name
            for name in PARAMETERS
            if name in self._set or getattr(params, name) != getattr(plain, name)
        ]
        return "\n".join(f"{name} = {getattr(params, name)}" for name in names) or "Nothing is set"

    def _save(self, path: Path) -> str:
        if any(not isinstance(question, str) for question, _ in self.turns):
            raise ValueError("a conversation with pictures cannot be saved")
        # A mistyped name must not overwrite a file of another kind.
        if path.exists():
            try:
                _read(path)
            except (ValueError, OSError):
                raise ValueError(
                    f"{path} exists and is not a conversation; give another name"
                ) from None
        # Encoding may fail, so it comes before the opening, which empties the file.
        data = (
            json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        ).encode()
        with open_private(path, "wb") as file:
            file.write(data)
        return f"Written to {path}"

    def _load(self, path: Path) -> str:
        self.system, self.turns = _read(path)
        return (
            f"{len(self.turns)} turns from {path}{', and a system message' if self.system else ''}"
        )


def help_text() -> str:
    """Returns the text of /help."""
    words = {name: f"{name} {argument}".strip() for name, (argument, _) in COMMANDS.items()}
    width = max(map(len, words.values()))
    return "\n".join(
        [
            *(f"{words[name]:<{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()),
            f"Several lines: Alt-Enter, a paste, or a text between {QUOTES} and {QUOTES}. Ctrl-C "
            "clears the line, or stops an answer.",
        ]
    )


def _value(name: str, text: str) -> Any:
    if text in ("null", "none"):
        return None
    # A stop string may look like a number.
    if name == "stop":
        return [text]
    if name != "structured_outputs":
        return parse_scalar(text)
    try:
        return json_object(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def _path(text: str) -> Path:
    if not text:
        raise ValueError("give the name of a file")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # the home directory of ~somebody is not known
        raise ValueError(str(error)) from None


def _read(path: Path) -> tuple[str | None, list[tuple[Any, str]]]:
    """Returns the system message and the turns of a saved conversation.

    It raises OSError if the file cannot be read, and ValueError if it is no conversation.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # raises ValueError for a lone surrogate
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    messages = _as_pairs(content.get("messages") if isinstance(content, dict) else content)
    if messages is None:
        raise ValueError(f"{path} has no messages, each with a role and a text")
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else None
    roles = [role for role, _ in messages]
    # The number of messages must be even, too: each question has its answer.
    if roles != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError(
            f"{path}: user and assistant must take turns, the user first; it has "
            f"{', '.join(roles[:6])}"
        )
    texts = [text for _, text in messages]
    return system, list(zip(texts[::2], texts[1::2], strict=True))


def _as_pairs(messages: Any) -> list[tuple[str, str]] | None:
    """Returns the role and the text of each message; None if anything is not a message."""
    if not isinstance(messages, list):
        return None
    pairs = []
    for message in messages:
        role, text = (
            (message.get("role"), message.get("content"))
            if isinstance(message, dict)
            else (None, None)
        )
        if not isinstance(role, str) or not isinstance(text, str):
            return None
        pairs.append((role, text))
    return pairs
