"""Divides the text of an answer, as it comes, into reasoning, content and tool calls."""

from __future__ import annotations

import functools
import re

from jaxpage.chat_forms.calls import CallReader
from jaxpage.chat_forms.forms import BareCall, ContentForm, ReasoningForm, ToolForm
from jaxpage.chat_forms.markers import TOOL_NAME, before_placeholder, first_chunk, leading_space
from jaxpage.chat_forms.pieces import AnswerPiece, TextKind
from jaxpage.chat_forms.text_buffer import BufferedReader, MismatchError, Parser, attempt, fits
from jaxpage.chat_forms.tools import Tools

_FENCE = re.compile("`{3,}")
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
        self._tools = tools or Tools()
        # Calls are read in the form itself, and in others where that fits nothing.
        forms = () if tool_form is None else (tool_form, *tool_form.variants)
        tails = (*content.tails, *content.responses)
        self._calls = [CallReader(form, self._tools, self._buffer, tails) for form in forms]
        self._bare = None if tool_form is None else tool_form.bare
        self._bare_marker = ""  # what a call whose outer tag is missing begins with, if it is known
        if self._bare is not None:
            self._bare_marker = self._bare.marker
        # White space at the end of a text; it is given out only if more text follows.
        self._space: list[str] = []
        self._has_called = False
        self._has_content = False
        self._num_fences = 0  # marks of blocks of code in the content
        self._ticks = ""  # with which the content ends

    def _answer(self) -> Parser[None]:
        buffer, form, content = self._buffer, self._form, self._content
        yield from buffer.skip_trailing_space(self._first_space)
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        self.reasoning.is_over = True
        for opened in content.opens:
            if (yield from fits(buffer, buffer.literal(opened, before_value=True))):
                break
        if form is not None and (not form.trigger or form.first is not None):
            # There is no marker to look for: the prompt ends with it, or the form has none.
            yield from self._read_calls(form.first_opening)
        if form is not None and self._bare is not None and not self._has_called:
            yield from self._read_bare_calls(form, self._bare)
        begins = ("" if form is None else form.trigger, self._bare_marker)
        ends = (*content.closes, *content.tails, *content.responses)
        markers = tuple({*map(first_chunk, (*begins, *ends))} - {""})
        emit = functools.partial(self._emit, "content")
        while (marker := (yield from buffer.next_marker(markers, emit))) is not None:
            yield from self._at_marker(marker)
        if not self._has_called:
            # White space before the last marker belongs to the marker, which may be an end token.
            self._emit_space("content", max(map(leading_space, content.tails), key=len, default=""))

    def _read_reasoning(self, form: ReasoningForm) -> Parser[None]:
        buffer, start = self._buffer, self._buffer.position
        if self._is_open:
            yield from buffer.skip_trailing_space(form.open)
        elif not (yield from fits(buffer, buffer.literal(form.open, before_value=True))):
            return
        opened = buffer.text[start : buffer.position]
        # White space next to the markers is no text of the reasoning, but between them.
        num_space = len(opened) - len(opened.rstrip())
        self.reasoning.begin(buffer.place - num_space)
        self.reasoning.extend(num_space)
        emit = functools.partial(self._emit, "reasoning")
        trigger = "" if self._form is None else self._form.trigger
        # Without a tag of its own a call has to be the whole answer, and reasoning comes before it.
        bare = "" if self._bare is None or not self._bare.has_tag else self._bare_marker
        markers = tuple({first_chunk(form.close), trigger, bare} - {""})
        space = ""
        while marker := (yield from buffer.next_marker(markers, emit)):
            if (yield from fits(buffer, buffer.literal(form.close, before_value=True))):
                space = leading_space(form.close)
                break
            begin = buffer.position
            calls = None
            for begins in filter(None, (trigger, bare)):
                if not calls and begins.startswith(marker):
                    is_bare = begins == bare
                    calls = yield from self._attempt_call(self._last_calls(form.close, is_bare))
            if calls:
                self._add(*calls)
                return
            if calls is None:
                self._emit_character("reasoning", marker)
            else:
                self._emit("reasoning", buffer.text[begin : buffer.position])
        self._emit_space("reasoning", space)

    def _last_calls(self, close: str, is_bare: bool) -> Parser[list[AnswerPiece]]:
        """Reads calls in the reasoning, which a model forgot to end, and returns those that are.

        They are calls if the answer ends with them. Otherwise the model thinks of calling, and none
        is returned.

        Args:
            close: The marker after the reasoning, which may come after them.
            is_bare: True if the outer tag of the first call is missing.

        Raises:
            MismatchError: There is no call.
        """
        assert self._form is not None
        buffer, reader = self._buffer, self._calls[0]
        if is_bare:
            calls = [(yield from self._bare_call(self._form, after_call=False, ends=(close,)))]
        elif (first := (yield from self._first_call(self._form.opening))) is not None:
            reader, calls = first[0], [first[1]]
        else:
            raise MismatchError
        while (call := (yield from self._next_call(reader))) is not None:
            calls.append(call)
        end = buffer.position
        for marker in (reader.form.end, close, *self._content.tails, *self._content.responses):
            if marker.strip():
                yield from attempt(buffer, buffer.last_literal(marker))
        yield from buffer.skip_space()
        if (yield from buffer.next_character()):
            buffer.position = end
            return []
        return calls

    def _at_marker(self, marker: str) -> Parser[None]:
        """Reads what a marker begins; if that is nothing of the form, the marker is content."""
        form, content, bare = self._form, self._content, self._bare
        is_call = form is not None and form.trigger.startswith(marker)
        if form is not None and is_call and (yield from self._read_calls(form.opening)):
            return
        if bare is not None and not bare.marker.startswith(marker):
            bare = None
        if form is not None and bare is not None and (yield from self._read_bare_calls(form, bare)):
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

    def _read_calls(self, opened: str) -> Parser[bool]:
        """Reads calls as long as there are any, and returns whether there was one.

        Args:
            opened: The marker before the first call.
        """
        begin = self._buffer.position
        first = yield from self._first_call(opened)
        if first is None:
            return False
        reader, call = first
        if not self._is_in_code():
            self._add(call)
            yield from self._read_more_calls(reader)
            return True
        calls = [call]
        while (further := (yield from self._next_call(reader))) is not None:
            calls.append(further)
        if reader.form.end.strip():
            yield from attempt(self._buffer, self._buffer.last_literal(reader.form.end))
        end = self._buffer.position
        yield from self._buffer.skip_space()
        # The mark that ends the code follows: the call is quoted, and text.
        if (yield from self._buffer.next_character()) == "`":
            self._buffer.position = begin
            return False
        self._buffer.position = end
        self._add(*calls)
        return True

    def _is_in_code(self) -> bool:
        """Returns whether what was given out opens a block of code or quotes what comes next."""
        return bool(self._ticks) or self._num_fences % 2 == 1

    def _first_call(self, opened: str) -> Parser[tuple[CallReader, AnswerPiece] | None]:
        """Returns a call and what read it, or None."""
        is_begun = opened != self._calls[0].form.opening  # by the prompt, in the form itself
        for reader in self._calls[: 1 if is_begun else None]:
            begin = opened if reader is self._calls[0] else reader.form.opening
            call = yield from self._attempt_call(reader.call(begin))
            if call is not None:
                return reader, call
        return None

    def _read_more_calls(self, reader: CallReader) -> Parser[None]:
        """Reads the calls that follow a call, and the marker after them."""
        while (call := (yield from self._next_call(reader))) is not None:
            self._add(call)
        if reader.form.end.strip():
            yield from attempt(self._buffer, self._buffer.last_literal(reader.form.end))
        self._buffer.forget()

    def _next_call(self, reader: CallReader) -> Parser[AnswerPiece | None]:
        """Returns the call that follows another, or None."""
        form = reader.form
        betweens = [form.between]
        # Models leave out the marker between two calls, too.
        if form.between.strip():
            betweens.append("")
        if form.payload != "items":
            betweens += [mark for mark in _SEPARATORS if mark != form.between.strip()]
        for between in betweens:
            call = yield from self._attempt_call(reader.call(between + form.open))
            if call is not None:
                return call
        if self._bare is None or self._form is None:
            return None
        return (yield from self._attempt_call(self._bare_call(self._form, after_call=True)))

    def _read_bare_calls(self, form: ToolForm, bare: BareCall) -> Parser[bool]:
        """Reads calls of which the first has no outer tag, and returns whether there was one."""
        if not bare.has_tag and not (yield from self._names_tool(form, bare)):
            return False
        call = yield from self._attempt_call(self._bare_call(form, after_call=False))
        if call is not None:
            self._add(call)
            yield from self._read_more_calls(self._calls[0])
        return call is not None

    def _names_tool(self, form: ToolForm, bare: BareCall) -> Parser[bool]:
        """Returns whether the name of a tool follows on a line of its own, where a call has it."""
        if not self._buffer.is_at_line():
            return False
        begins, names = [bare.open], tuple(self._tools.schemas or ())
        if form.payload == "object":
            before = before_placeholder(form.shape)[1:]
            begins = [f"{bare.open} {{ {text}" for text in (before, before.replace('"', "'"))]
            if names and not form.shape[1 + len(before) :].startswith(TOOL_NAME):
                names = ("",)
        for begin in begins:
            for name in names:
                if (yield from self._buffer.comes(begin + name)):
                    return True
        return False

    def _bare_call(
        self, form: ToolForm, *, after_call: bool, ends: tuple[str, ...] = ()
    ) -> Parser[AnswerPiece]:
        """Reads a call whose outer tag is missing.

        Its closing tag follows, or the call stands on a line of its own or after another one, and
        nothing but calls follows it: a text that quotes a call goes on. Without a tag of its own it
        is the whole answer.

        Args:
            form: The form of calls.
            after_call: True if another call comes before it.
            ends: Markers that the answer may end with.

        Raises:
            MismatchError: There is no such call.
        """
        if self._bare is None or (self._is_in_code() and not after_call):
            raise MismatchError
        buffer, bare = self._buffer, self._bare
        yield from buffer.skip_space()
        is_at_line = after_call or buffer.is_at_line()
        is_alone = is_at_line and (bare.has_tag or after_call or not self._has_content)
        call = yield from self._calls[0].call(bare.open, bare.close)
        yield from buffer.skip_space()
        begin = buffer.position
        for orphan in bare.orphans:
            if (yield from fits(buffer, buffer.literal(orphan))):
                is_alone = True
                break
        end = buffer.position
        yield from buffer.skip_space()
        character = yield from buffer.next_character()
        # A backquote after the tag says that the text quotes the call.
        if is_alone and (character == "" or (end > begin and is_at_line and character != "`")):
            buffer.position = end
            return call
        ends = (*ends, *self._content.tails, *self._content.responses)
        begins = (form.opening, form.between + form.open, bare.open, bare.marker)
        for marker in (*begins, *ends):
            if is_alone and marker.strip() and (yield from buffer.comes(marker)):
                buffer.position = end
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
        if kind == "reasoning":
            self.reasoning.extend(len(text))
        stripped = text.rstrip()
        if stripped and kind == "content":
            self._has_content = True
            self._count_fences(text)
        if stripped:
            self._pieces.append(AnswerPiece(kind, "".join(self._space) + stripped))
            self._space.clear()
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def _count_fences(self, text: str) -> None:
        """Counts the marks of blocks of code, the last of which may be unfinished."""
        text = self._ticks + text
        before = text.rstrip("`")
        self._ticks = text[len(before) :]
        self._num_fences += len(_FENCE.findall(before))

    def _emit_space(self, kind: TextKind, of_marker: str) -> None:
        """Gives out the white space that was kept, without that of the marker after it."""
        if space := "".join(self._space).removesuffix(of_marker):
            self._pieces.append(AnswerPiece(kind, space))
        self._space.clear()
