"""Reads answers that are messages with headers, in whatever order the parts of a header come.

A template writes one order of the parts. A model may write another, may leave out the type of the
arguments, and may have messages that no template renders, such as a word to the user before a call:

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary<|message|> content <|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from jaxpage.chat_forms.calls import CallReader
from jaxpage.chat_forms.forms import HeaderForm, ToolForm
from jaxpage.chat_forms.markers import first_chunk
from jaxpage.chat_forms.pieces import AnswerPiece, TextKind
from jaxpage.chat_forms.text_buffer import (
    BufferedReader,
    EndedError,
    MismatchError,
    Parser,
    attempt,
    fits,
)
from jaxpage.chat_forms.tools import Tools

_MAX_HEADER = 512  # characters


@dataclass(frozen=True)
class _Message:
    """Holds what the header of a message says.

    Attributes:
        header: The header as it is written, without what the prompt has of it.
        is_reasoning: True if it has the channel of reasoning.
        recipient: The recipient, or None.
    """

    header: str = ""
    is_reasoning: bool = False
    recipient: str | None = None


class HeadedReader(BufferedReader):
    """Reads the text of one answer.

    A message for a tool is a call, one in the channel of reasoning is reasoning, and one in another
    channel is content. What cannot be read so, such as a message for a tool that the request does
    not have, is content with its header. A line break is put between two messages of one kind.
    """

    def __init__(
        self,
        form: HeaderForm,
        tool_form: ToolForm | None,
        tools: Tools | None,
        *,
        reads_reasoning: bool,
        prompt: str,
    ) -> None:
        """Makes the reader of an answer.

        Args:
            form: The form of headers.
            tool_form: The form of calls; None if calls are content.
            tools: The tools that may be called; None for any.
            reads_reasoning: False if reasoning is content.
            prompt: The text that the answer continues, which may have begun a message.
        """
        super().__init__()
        self._form = form
        self._calls = (
            None if tool_form is None else CallReader(tool_form, tools or Tools(), self._buffer)
        )
        self._reads_reasoning = reads_reasoning
        self._channel = re.compile(re.escape(form.channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"(?<![\w.])" + re.escape(form.key) + r"([^\s<]+)")
        self._markers = tuple({first_chunk(marker) for marker in (form.start, *form.ends)})
        self._emitted: set[str] = set()  # kinds of text that were given out
        self._is_new = True  # if no text of this message was given out
        self._begun = form.find_begun_header(prompt)
        self._num_begun = len(self._begun)
        self.reasoning.is_over = not reads_reasoning
        self._buffer.push(self._begun)

    def _answer(self) -> Parser[None]:
        message = yield from attempt(self._buffer, self._begin(""))
        while True:
            self._is_new = True
            message = message or _Message()
            if (yield from self._read_call(message)):
                message = yield from attempt(self._buffer, self._next())
            else:
                message = yield from self._read_text(message)
            if message is None and (yield from self._buffer.next_character()) == "":
                return

    def _header(self) -> Parser[_Message]:
        """Reads the header of a message after the marker that begins one.

        Raises:
            MismatchError: There is no header.
        """
        buffer, form = self._buffer, self._form
        yield from buffer.skip_space()
        begin = buffer.position
        if not (yield from buffer.comes(form.channel)) and not (yield from buffer.comes(form.key)):
            raise MismatchError
        end, _ = yield from buffer.find((form.body,), _MAX_HEADER)
        header = buffer.text[begin:end]
        if any(marker in header for marker in self._markers):
            raise MismatchError
        buffer.position = end + len(form.body)
        channel, recipient = self._channel.search(header), self._recipient.search(header)
        written = (header + form.body).removeprefix(self._begun.lstrip())
        self._begun = ""
        return _Message(
            written,
            channel is not None and channel[1] == form.reasoning,
            None if recipient is None else form.key + recipient[1],
        )

    def _read_call(self, message: _Message) -> Parser[bool]:
        """Reads a call with the marker after it, if the message is one."""
        if self._calls is None or message.recipient is None:
            return False
        name = message.recipient.removeprefix(self._form.recipient)
        if name == message.recipient:
            return False
        piece = yield from self._attempt_call(self._call(self._calls, name))
        if piece is not None:
            self._pieces.append(piece)
        return piece is not None

    def _call(self, calls: CallReader, name: str) -> Parser[AnswerPiece]:
        piece = yield from calls.json_call(name)
        yield from self._buffer.skip_space()
        is_last = (yield from self._buffer.next_character()) == ""
        has_ended = (yield from self._end()) or is_last
        if not has_ended and not (yield from self._buffer.comes(self._form.start)):
            raise MismatchError
        return piece

    def _end(self) -> Parser[bool]:
        """Reads the marker after a message, if it comes."""
        for end in self._form.ends:
            if (yield from fits(self._buffer, self._buffer.literal(end))):
                return True
        return False

    def _next(self) -> Parser[_Message | None]:
        """Reads up to the text of the next message, and returns None if there is none.

        Raises:
            MismatchError: The answer goes on with something else.
        """
        yield from self._end()
        yield from self._buffer.skip_space()
        if (yield from self._buffer.next_character()) == "":
            return None
        return (yield from self._begin(self._form.start))

    def _begin(self, start: str) -> Parser[_Message | None]:
        """Reads the marker that begins a message, and its header.

        A header that is cut off is content if it is a call's, and says nothing otherwise.

        Raises:
            MismatchError: There is no header.
        """
        buffer, begin = self._buffer, self._buffer.position
        try:
            yield from buffer.literal(start)
            return (yield from self._header())
        except EndedError:
            header = buffer.text[begin:]
            if not header.startswith(first_chunk(start or self._form.channel)):
                raise
            buffer.position = len(buffer.text)
            return _Message(header, recipient="") if self._form.key in header else None

    def _read_text(self, message: _Message) -> Parser[_Message | None]:
        """Gives out the text of a message, and returns the next message, or None at the end."""
        buffer = self._buffer
        kind: TextKind = "content"
        if message.is_reasoning and message.recipient is None and self._reads_reasoning:
            kind = "reasoning"
            self.reasoning.begin(buffer.place - self._num_begun)
        elif message.is_reasoning or message.recipient is not None:
            self._emit(kind, message.header)
        emit = functools.partial(self._emit, kind)
        while (marker := (yield from buffer.next_marker(self._markers, emit))) is not None:
            follows = yield from attempt(buffer, self._next())
            if follows is not None or buffer.position == len(buffer.text):
                return follows
            self._emit(kind, marker[0])
            buffer.position += 1
        return None

    def _emit(self, kind: TextKind, text: str) -> None:
        if kind == "reasoning":
            self.reasoning.extend(len(text))
        if self._is_new and kind in self._emitted and text:
            text = "\n" + text
        if text:
            self._pieces.append(AnswerPiece(kind, text))
            self._emitted.add(kind)
            self._is_new = False
