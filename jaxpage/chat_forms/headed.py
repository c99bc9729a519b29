"""Reads answers that are messages with headers, in whatever order the parts of a header stand.

A template writes one order of the parts. A model may write another, may leave out the type of the
arguments, and may have messages that no template renders, such as a word to the user before a call:

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary<|message|> content <|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxpage.chat_forms.answer import MOST_IN_VAIN, held_from
from jaxpage.chat_forms.calls import CallReader, Tools
from jaxpage.chat_forms.forms import HeaderForm, ToolForm, first_chunk
from jaxpage.chat_forms.growing import EndedError, Growing, MismatchError, Wait, attempt, fits
from jaxpage.chat_forms.pieces import Piece

_MAX_HEADER = 512  # characters


@dataclass(frozen=True)
class _Message:
    """Holds what the header of a message says.

    Attributes:
        head: The header as it is written, without what the prompt has of it.
        is_reasoning: True if it has the channel of reasoning.
        recipient: The recipient, or None.
    """

    head: str = ""
    is_reasoning: bool = False
    recipient: str | None = None


class HeadedReader:
    """Reads the text of one answer.

    A message for a tool is a call, one in the channel of reasoning is reasoning, and one in another
    channel is content. What cannot be read so, such as a message for a tool that the request does
    not have, is content with its header. A line break is put between two messages of one kind.
    """

    def __init__(
        self,
        form: HeaderForm,
        calls: ToolForm | None,
        tools: Tools | None,
        *,
        reads_reasoning: bool,
        prompt: str,
    ) -> None:
        """Makes the reader of an answer.

        Args:
            form: The form of headers.
            calls: The form of calls; None if calls are content.
            tools: The tools that may be called; None for any.
            reads_reasoning: False if reasoning is content.
            prompt: The text that the answer continues, which may have begun a message.
        """
        self._form = form
        self._text = Growing()
        self._tools = tools or Tools()
        self._calls = None if calls is None else CallReader(calls, self._tools, self._text)
        self._reads_reasoning = reads_reasoning
        self._channel = re.compile(re.escape(form.channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"(?<![\w.])" + re.escape(form.key) + r"([^\s<]+)")
        self._marks = {first_chunk(mark) for mark in (form.start, *form.ends)}
        self._pieces: list[Piece] = []
        self._said: set[str] = set()  # kinds of text that were given out
        self._is_new = True  # if no text of this message was given out
        self._in_vain = 0
        self._begun = form.begun(prompt)
        self._text.push(self._begun)
        self._parser = self._answer()

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        self._text.push(text)
        yield from self._taken()

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        self._text.has_ended = True
        yield from self._taken()

    def _taken(self) -> list[Piece]:
        next(self._parser, None)
        taken, self._pieces = self._pieces, []
        return taken

    def _answer(self) -> Wait[None]:
        message = yield from attempt(self._text, self._begin(""))
        while True:
            self._is_new = True
            message = message or _Message()
            if (yield from self._is_call(message)):
                message = yield from attempt(self._text, self._next())
            else:
                message = yield from self._body(message)
            if message is None and (yield from self._text.next_character()) == "":
                return

    def _header(self) -> Wait[_Message]:
        """Reads the header of a message after the mark that begins one.

        Raises:
            MismatchError: There is no header.
        """
        text, form = self._text, self._form
        yield from text.skip_space()
        begin = text.place
        if not (yield from text.comes(form.channel)) and not (yield from text.comes(form.key)):
            raise MismatchError
        place, _ = yield from text.find((form.body,), _MAX_HEADER)
        header = text.text[begin:place]
        if any(mark in header for mark in self._marks):
            raise MismatchError
        text.place = place + len(form.body)
        channel, recipient = self._channel.search(header), self._recipient.search(header)
        head = (header + form.body).removeprefix(self._begun.lstrip())
        self._begun = ""
        return _Message(
            head,
            channel is not None and channel[1] == form.reasoning,
            None if recipient is None else form.key + recipient[1],
        )

    def _is_call(self, message: _Message) -> Wait[bool]:
        """Reads a call with the mark after it, if the message is one."""
        text, begin = self._text, self._text.place
        if self._calls is None or message.recipient is None or self._in_vain > MOST_IN_VAIN:
            return False
        name = message.recipient.removeprefix(self._form.recipient)
        if name == message.recipient:
            return False
        if (piece := (yield from attempt(text, self._call(self._calls, name)))) is None:
            self._in_vain += text.reached - begin
            return False
        self._pieces.append(piece)
        return True

    def _call(self, calls: CallReader, name: str) -> Wait[Piece]:
        self._tools.check(name)
        piece = yield from calls.json_call(name)
        yield from self._text.skip_space()
        is_last = (yield from self._text.next_character()) == ""
        has_ended = (yield from self._end()) or is_last
        if not has_ended and not (yield from self._text.comes(self._form.start)):
            raise MismatchError
        return piece

    def _end(self) -> Wait[bool]:
        """Reads the mark after a message, if it comes."""
        for end in self._form.ends:
            if (yield from fits(self._text, self._text.literal(end))):
                return True
        return False

    def _next(self) -> Wait[_Message | None]:
        """Reads up to the text of the next message, and returns None if there is none.

        Raises:
            MismatchError: The answer goes on with something else.
        """
        yield from self._end()
        yield from self._text.skip_space()
        if (yield from self._text.next_character()) == "":
            return None
        return (yield from self._begin(self._form.start))

    def _begin(self, start: str) -> Wait[_Message | None]:
        """Reads the mark that begins a message, and its header.

        A header that is cut off is content if it is a call's, and says nothing otherwise.

        Raises:
            MismatchError: There is no header.
        """
        text, begin = self._text, self._text.place
        try:
            yield from text.literal(start)
            return (yield from self._header())
        except EndedError:
            rest = text.text[begin:]
            if not rest.startswith(first_chunk(start or self._form.channel)):
                raise
            text.place = len(text.text)
            return _Message(rest, recipient="") if self._form.key in rest else None

    def _body(self, message: _Message) -> Wait[_Message | None]:
        """Says the text of a message, and returns the next message, or None at the end."""
        text = self._text
        is_thought = message.is_reasoning and message.recipient is None
        is_odd = message.recipient is not None or (is_thought and not self._reads_reasoning)
        kind: Literal["content", "reasoning"] = "content"
        if is_odd:
            self._say(kind, message.head)
        elif is_thought:
            kind = "reasoning"
        pattern = re.compile("|".join(map(re.escape, self._marks)))
        while True:
            found = pattern.search(text.text, text.place)
            if found is None:
                end = len(text.text)
                if not text.has_ended:
                    end = held_from(text.text, text.place, self._marks)
                self._say(kind, text.text[text.place : end])
                text.place = end
                if text.has_ended:
                    return None
                text.forget()
                yield
                continue
            begin = found.start()
            found = None  # see `Growing.push`
            self._say(kind, text.text[text.place : begin])
            text.place = begin
            follows = yield from attempt(text, self._next())
            if follows is not None or text.place == len(text.text):
                return follows
            self._say(kind, text.text[begin])
            text.place = begin + 1

    def _say(self, kind: Literal["content", "reasoning"], said: str) -> None:
        if not said:
            return
        if self._is_new and kind in self._said:
            said = "\n" + said
        self._is_new = False
        self._said.add(kind)
        self._pieces.append(Piece(kind, said))
