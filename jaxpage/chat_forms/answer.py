"""Divides the text of an answer, as it comes, into reasoning, content and tool calls."""

from __future__ import annotations

import functools

from jaxpage.chat_forms.calls import CallReader, Tools
from jaxpage.chat_forms.forms import ContentForm, ReasoningForm, ToolForm
from jaxpage.chat_forms.markers import first_chunk, leading_space
from jaxpage.chat_forms.pieces import AnswerPiece, TextKind
from jaxpage.chat_forms.text_buffer import BufferedReader, MismatchError, Parser, attempt, fits

_SEPARATORS = (";", ",")  # models write them between calls in JSON, whatever the template has


class AnswerReader(BufferedReader):
    """Reads the text of one answer.

    What does not fit the form of a call is content; it is given out late, and never lost. A call
    is given out when its closing marker has come. White space next to a call is not content.
    """

    def __init__(
        self,
        tool_form: ToolForm | None,
        tools: Tools | None,
        reasoning: ReasoningForm | None,
        content: ContentForm,
        *,
        is_open: bool,
        space: str,
    ) -> None:
        """Makes the reader of an answer.

        Args:
            tool_form: The form of calls; None if there are none.
            tools: The tools that may be called; None for any.
            reasoning: The form of reasoning; None if it is content.
            content: The markers around the content.
            is_open: True if the prompt ends within the reasoning.
            space: White space that an answer begins with and that is no content.
        """
        super().__init__()
        self._form = tool_form
        self._reasoning = reasoning
        self._content = content
        self._is_open = is_open
        self._first_space = space
        self._calls = (
            None if tool_form is None else CallReader(tool_form, tools or Tools(), self._buffer)
        )
        self._bare = None if tool_form is None else tool_form.bare
        # White space at the end of a text; it is given out only if more text follows.
        self._space: list[str] = []
        self._has_called = False

    def _answer(self) -> Parser[None]:
        buffer, form, content = self._buffer, self._form, self._content
        yield from buffer.skip_trailing_space(self._first_space)
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        for opened in content.opens:
            if (yield from fits(buffer, buffer.literal(opened, before_value=True))):
                break
        if form is not None and (not form.trigger or form.first is not None):
            # There is no marker to look for: the prompt ends with it, or the form has none.
            yield from self._read_calls(form, form.first_opening)
        bare = "" if self._bare is None else self._bare.open
        begins = ("" if form is None else form.trigger, bare)
        ends = (*content.closes, *content.tails, *content.responses)
        markers = tuple({*map(first_chunk, (*begins, *ends))} - {""})
        emit = functools.partial(self._emit, "content")
        while (marker := (yield from buffer.next_marker(markers, emit))) is not None:
            yield from self._at_marker(marker)
        if not self._has_called:
            # White space before the last marker belongs to the marker, which may be an end token.
            self._emit_space("content", max(map(leading_space, content.tails), key=len, default=""))

    def _read_reasoning(self, form: ReasoningForm) -> Parser[None]:
        buffer = self._buffer
        if self._is_open:
            yield from buffer.skip_trailing_space(form.open)
        elif not (yield from fits(buffer, buffer.literal(form.open, before_value=True))):
            return
        emit = functools.partial(self._emit, "reasoning")
        trigger = "" if self._form is None else self._form.trigger
        markers = tuple({first_chunk(form.close), trigger} - {""})
        space = ""
        while marker := (yield from buffer.next_marker(markers, emit)):
            if (yield from fits(buffer, buffer.literal(form.close, before_value=True))):
                space = leading_space(form.close)
                break
            begin = buffer.position
            calls = None
            if trigger.startswith(marker):
                calls = yield from self._attempt_call(self._last_calls(form.close))
            if calls:
                self._add(*calls)
                return
            if calls is None:
                self._emit_character("reasoning", marker)
            else:
                self._emit("reasoning", buffer.text[begin : buffer.position])
        self._emit_space("reasoning", space)

    def _last_calls(self, close: str) -> Parser[list[AnswerPiece]]:
        """Reads calls in the reasoning, which a model forgot to end, and returns those that are.

        They are calls if the answer ends with them. Otherwise the model thinks of calling, and none
        is returned.

        Args:
            close: The marker after the reasoning, which may come after them.

        Raises:
            MismatchError: There is no call.
        """
        assert self._form is not None and self._calls is not None
        buffer = self._buffer
        calls = [(yield from self._calls.call(self._form.opening))]
        while (call := (yield from self._next_call(self._form))) is not None:
            calls.append(call)
        end = buffer.position
        for marker in (self._form.end, close, *self._content.tails, *self._content.responses):
            if marker.strip():
                yield from attempt(buffer, buffer.last_literal(marker))
        yield from buffer.skip_space()
        if (yield from buffer.next_character()):
            buffer.position = end
            return []
        return calls

    def _at_marker(self, marker: str) -> Parser[None]:
        """Reads what a marker begins; if that is nothing of the form, the marker is content."""
        form, content = self._form, self._content
        is_call = form is not None and form.trigger.startswith(marker)
        if form is not None and is_call and (yield from self._read_calls(form, form.opening)):
            return
        bare = None if self._bare is None else first_chunk(self._bare.open)
        if form is not None and bare is not None and bare.startswith(marker):
            call = yield from self._attempt_call(self._bare_call(form, after_call=False))
            if call is not None:
                self._add(call)
                yield from self._read_more_calls(form)
                return
        for close in content.closes:
            if first_chunk(close).startswith(marker) and (yield from self._read_close(close)):
                return
        for tail in content.tails:
            if first_chunk(tail).startswith(marker) and (yield from self._read_tail(tail)):
                return
        for response in content.responses:
            if (yield from self._read_response(response)):
                return
        self._emit_character("content", marker)

    def _read_close(self, close: str) -> Parser[bool]:
        """Reads the marker after the content, if what follows it is no more content."""
        buffer, begin = self._buffer, self._buffer.position
        if not (yield from fits(buffer, buffer.literal(close))):
            return False
        yield from buffer.skip_space()
        if (yield from buffer.next_character()) == "":
            return True
        opened = "" if self._form is None else self._form.opening
        for marker in (opened, *self._content.tails):
            if marker.strip() and (yield from buffer.comes(marker)):
                return True
        buffer.position = begin
        return False

    def _read_tail(self, tail: str) -> Parser[bool]:
        """Reads the marker after the answer, which is one only if nothing follows."""
        buffer = self._buffer

        def read() -> Parser[None]:
            yield from buffer.last_literal(tail)
            yield from buffer.skip_space()
            if (yield from buffer.next_character()):
                raise MismatchError

        return (yield from fits(buffer, read()))

    def _read_response(self, marker: str) -> Parser[bool]:
        """Reads a marker of a tool's response, which a model writes at the end or goes on after.

        What follows it is content. Before any call such a marker is quoted, unless the answer ends.
        """
        if self._has_called:
            return (yield from fits(self._buffer, self._buffer.literal(marker)))
        return (yield from self._read_tail(marker))

    def _read_calls(self, form: ToolForm, opened: str) -> Parser[bool]:
        """Reads calls as long as there are any, and returns whether there was one.

        Args:
            form: The form of calls.
            opened: The marker before the first call.
        """
        assert self._calls is not None
        call = yield from self._attempt_call(self._calls.call(opened))
        if call is None:
            return False
        self._add(call)
        yield from self._read_more_calls(form)
        return True

    def _read_more_calls(self, form: ToolForm) -> Parser[None]:
        """Reads the calls that follow a call, and the marker after them."""
        while (call := (yield from self._next_call(form))) is not None:
            self._add(call)
        if form.end.strip():
            yield from attempt(self._buffer, self._buffer.last_literal(form.end))
        self._buffer.forget()

    def _next_call(self, form: ToolForm) -> Parser[AnswerPiece | None]:
        """Returns the call that follows another, or None."""
        assert self._calls is not None
        betweens = [form.between]
        if form.between.strip():
            betweens.append("")
        if form.payload != "items":
            betweens += [mark for mark in _SEPARATORS if mark != form.between.strip()]
        for between in betweens:
            call = yield from self._attempt_call(self._calls.call(between + form.open))
            if call is not None:
                return call
        if self._bare is None:
            return None
        return (yield from self._attempt_call(self._bare_call(form, after_call=True)))

    def _bare_call(self, form: ToolForm, *, after_call: bool) -> Parser[AnswerPiece]:
        """Reads a call whose outer tag is missing.

        Its closing tag follows, or the call stands on a line of its own or after another one, and
        nothing but calls follows it: a text that quotes a call goes on.

        Args:
            form: The form of calls.
            after_call: True if another call comes before it.

        Raises:
            MismatchError: There is no such call.
        """
        assert self._calls is not None and self._bare is not None
        buffer, bare = self._buffer, self._bare
        yield from buffer.skip_space()
        is_alone = after_call or buffer.is_at_line()
        call = yield from self._calls.call(bare.open, bare.close)
        yield from buffer.skip_space()
        if is_alone and (yield from buffer.next_character()) == "":
            return call
        if bare.orphan and (yield from fits(buffer, buffer.literal(bare.orphan))):
            return call
        for marker in (form.opening, bare.open, *self._content.tails, *self._content.responses):
            if is_alone and marker.strip() and (yield from buffer.comes(marker)):
                return call
        raise MismatchError

    def _add(self, *calls: AnswerPiece) -> None:
        """Gives out calls. White space before them is no text."""
        self._space.clear()
        self._has_called = True
        self._pieces += calls

    def _emit_character(self, kind: TextKind, marker: str) -> None:
        """Gives out the first character of a marker that is none.

        It is one character only, so that it makes no difference which of two markers was found.
        """
        self._buffer.position += 1
        self._emit(kind, marker[0])

    def _emit(self, kind: TextKind, text: str) -> None:
        """Gives out text, and keeps the white space at its end until more text follows."""
        stripped = text.rstrip()
        if stripped:
            self._pieces.append(AnswerPiece(kind, "".join(self._space) + stripped))
            self._space.clear()
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def _emit_space(self, kind: TextKind, of_marker: str) -> None:
        """Gives out the white space that was kept, without that of the marker after it."""
        if space := "".join(self._space).removesuffix(of_marker):
            self._pieces.append(AnswerPiece(kind, space))
        self._space.clear()
