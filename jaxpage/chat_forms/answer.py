"""Divides the text of an answer, as it comes, into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxpage.chat_forms.calls import CallReader, Tools
from jaxpage.chat_forms.forms import ContentForm, ReasoningForm, ToolForm, first_chunk
from jaxpage.chat_forms.growing import EndedError, Growing, MismatchError, Wait, attempt, fits
from jaxpage.chat_forms.pieces import Piece

# Characters that attempts to read calls may read in vain. Text in which more of them fail, such as
# a million opening marks without an end, has no calls from there on.
MOST_IN_VAIN = 1 << 23


class AnswerReader:
    """Reads the text of one answer.

    What does not fit the form of a call is content; it is given out late, and never lost. A call
    is given out when its closing mark has come. White space next to a call is not content.
    """

    def __init__(
        self,
        tool_form: ToolForm | None = None,
        tools: Tools | None = None,
        reasoning: ReasoningForm | None = None,
        content: ContentForm | None = None,
        *,
        is_open: bool = False,
        space: str = "",
    ) -> None:
        """Makes the reader of an answer.

        Args:
            tool_form: The form of calls; None if there are none.
            tools: The tools that may be called; None for any.
            reasoning: The form of reasoning; None if it is content.
            content: The marks around the content.
            is_open: True if the prompt ends within the reasoning.
            space: White space that an answer begins with and that is no content.
        """
        self._form = tool_form
        self._reasoning = reasoning
        self._content = content or ContentForm()
        self._is_open = is_open
        self._unread = space
        self._text = Growing()
        self._calls = (
            None if tool_form is None else CallReader(tool_form, tools or Tools(), self._text)
        )
        self._pieces: list[Piece] = []
        # White space after content; it is content only if more content follows.
        self._space: list[str] = []
        self._has_called = False
        self._in_vain = 0
        self._parser = self._answer()
        self._is_done = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        self._text.push(text)
        self._go_on()
        yield from self._taken()

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        self._text.has_ended = True
        self._go_on()
        # White space before the last mark belongs to the mark, which may be an end token.
        leads = [tail[: len(tail) - len(tail.lstrip())] for tail in self._content.tails]
        space = "".join(self._space).removesuffix(max(leads, key=len, default=""))
        if space and not self._has_called:
            self._pieces.append(Piece("content", space))
        yield from self._taken()

    def _go_on(self) -> None:
        if not self._is_done:
            self._is_done = next(self._parser, _DONE) is _DONE

    def _taken(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    def _answer(self) -> Wait[None]:
        text = self._text
        yield from text.own_space(self._unread)
        if self._reasoning is not None:
            yield from self._reason(self._reasoning)
        for opened in self._content.opens:
            if (yield from fits(text, text.literal(opened, before_value=True))):
                break
        if self._form is not None and (not self._form.trigger or self._form.first is not None):
            yield from self._calls_at_start(self._form)
        marks = self._marks()
        if not marks:
            yield from self._rest()
            return
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        while (mark := (yield from self._next_mark(pattern, marks))) is not None:
            yield from self._at_mark(mark)

    def _marks(self) -> set[str]:
        """Returns the marks that content may end with."""
        content = self._content
        ends = (*content.closes, *content.tails, *content.responses)
        marks = {first_chunk(mark) for mark in ends}
        if self._form is not None:
            marks.add(self._form.trigger)
        return marks - {""}

    def _at_mark(self, mark: str) -> Wait[None]:
        """Reads what the mark begins; if that is nothing of the form, the mark is content."""
        text, begin = self._text, self._text.place
        form = self._form if self._in_vain < MOST_IN_VAIN else None
        if form is not None and form.trigger.startswith(mark):
            if (yield from self._group(form, form.begin + form.open)):
                return
            self._in_vain += text.reached - begin
        for close in self._content.closes:
            if first_chunk(close).startswith(mark) and (yield from self._closes(close)):
                return
        for tail in self._content.tails:
            if first_chunk(tail).startswith(mark) and (yield from attempt(text, self._tail(tail))):
                return
        for response in self._content.responses:
            if (yield from self._responds(response)):
                return
        # One character only, so that it makes no difference which of two marks was found.
        text.place = begin + 1
        self._say(mark[0])

    def _closes(self, close: str) -> Wait[bool]:
        """Reads the mark after the content, if what follows it is no more content."""
        text, begin = self._text, self._text.place
        if not (yield from fits(text, text.literal(close))):
            return False
        yield from text.skip_space()
        if (yield from text.next_character()) == "":
            return True
        opened = "" if self._form is None else self._form.begin + self._form.open
        for mark in (opened, *self._content.tails):
            if mark.strip() and (yield from text.comes(mark)):
                return True
        text.place = begin
        return False

    def _tail(self, tail: str) -> Wait[bool]:
        """Reads the mark after the answer, which is one only if nothing follows."""
        text = self._text
        try:
            yield from text.literal(tail)
        except EndedError:
            text.place = len(text.text)
        yield from text.skip_space()
        if (yield from text.next_character()):
            raise MismatchError
        return True

    def _responds(self, mark: str) -> Wait[bool]:
        """Reads a mark of a tool's response, which a model writes at the end or goes on after.

        What follows it is content. Before any call such a mark is quoted, unless the answer ends.
        """
        if self._has_called:
            return (yield from fits(self._text, self._text.literal(mark)))
        return bool((yield from attempt(self._text, self._tail(mark))))

    def _group(self, form: ToolForm, opened: str) -> Wait[bool]:
        """Reads the marks of the first call, and calls as long as there are any."""
        text = self._text
        if not (yield from attempt(text, self._one_call(opened))):
            return False
        follows = form.between + form.open
        opens = list(dict.fromkeys((follows, form.open)))
        while (yield from self._any_call(opens)):
            pass
        if form.end.strip():
            begin = text.place
            try:
                yield from text.literal(form.end)
            except EndedError:
                text.place = len(text.text)
            except MismatchError:
                text.place = begin
        text.forget()
        return True

    def _any_call(self, opens: list[str]) -> Wait[bool]:
        for opened in opens:
            if (yield from attempt(self._text, self._one_call(opened))):
                return True
        return False

    def _one_call(self, opened: str) -> Wait[bool]:
        assert self._calls is not None
        yield from self._text.literal(opened)
        piece = yield from self._calls.call()
        self._space.clear()
        self._has_called = True
        self._pieces.append(piece)
        return True

    def _calls_at_start(self, form: ToolForm) -> Wait[None]:
        """Reads calls whose opening mark is in the prompt already, or that have none."""
        opened = form.begin + form.open if form.first is None else form.first
        yield from self._group(form, opened)

    def _next_mark(self, pattern: re.Pattern[str], marks: set[str]) -> Wait[str | None]:
        """Says what comes before the next mark, and returns the mark without reading it."""
        text = self._text
        while True:
            found = pattern.search(text.text, text.place)
            if found is not None:
                self._say(text.text[text.place : found.start()])
                text.place = found.start()
                return found[0]
            certain = len(text.text) if text.has_ended else held_from(text.text, text.place, marks)
            self._say(text.text[text.place : certain])
            text.place = certain
            if text.has_ended:
                return None
            text.forget()
            yield

    def _rest(self) -> Wait[None]:
        text = self._text
        while True:
            if text.place < len(text.text):
                self._pieces.append(Piece("content", text.text[text.place :]))
            text.place = len(text.text)
            text.forget()
            if text.has_ended:
                return
            yield

    def _say(self, said: str) -> None:
        content = said.rstrip()
        if content:
            self._pieces.append(Piece("content", "".join(self._space) + content))
            self._space.clear()
        if space := said[len(content) :]:
            self._space.append(space)

    def _reason(self, form: ReasoningForm) -> Wait[None]:
        text = self._text
        if not self._is_open:
            opened = text.literal(form.open, before_value=True)
            if not (yield from fits(text, opened)):
                return
        else:
            yield from text.own_space(form.open)
        chunk = first_chunk(form.close)
        space = form.close[: len(form.close) - len(form.close.lstrip())]
        held = ""
        while True:
            place = text.text.find(chunk, text.place)
            is_there = place >= 0
            if not is_there:
                place = (
                    len(text.text) if text.has_ended else held_from(text.text, text.place, {chunk})
                )
            said = held + text.text[text.place : place]
            text.place = place
            closing = text.literal(form.close, before_value=True)
            if is_there and (yield from fits(text, closing)):
                self._think(said.removesuffix(space) if space else said)
                return
            if is_there:
                said += chunk
                text.place += len(chunk)
            kept = len(said.rstrip()) if space and not text.has_ended else len(said)
            self._think(said[:kept])
            held = said[kept:]
            if is_there:
                continue
            if text.has_ended:
                return
            text.forget()
            yield

    def _think(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("reasoning", text))


_DONE = object()


def held_from(text: str, begin: int, marks: set[str]) -> int:
    """Returns the place from which on the text could be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for place in range(max(begin, len(text) - longest), len(text)):
        if any(mark.startswith(text[place:]) for mark in marks):
            return place
    return len(text)
