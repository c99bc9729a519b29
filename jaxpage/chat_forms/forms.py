"""Describes how a model writes its tool calls and its reasoning.

The parts of an answer, and the fields that hold the marks between them:

    reasoning.open ... reasoning.close  content.opens ... content.closes  calls  tail

    calls:      begin  CALL  between  CALL  ...  end
    CALL:       open  {JSON with name and arguments}  close         payload "object"
                open  NAME  mid  {JSON arguments}     close         payload "json"
                open  NAME  arguments                 close         payload "items"
    arguments:  begin  ITEM  between  ITEM  ...
    ITEM:       open  KEY  value.open  VALUE  value.close

White space in a mark is optional when it is read, except next to a value that stands bare.
A mark may contain holes for what differs from call to call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Characters of a mark that stand for other text. They are from the private area of Unicode.
ANY_ID = "\ue000"
SAME_NAME = "\ue001"
INDEX = "\ue002"
SAME_KEY = "\ue003"
ARGUMENTS = "\ue004"
HOLES = ANY_ID + SAME_NAME + INDEX + SAME_KEY + ARGUMENTS

JSON_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})


@dataclass(frozen=True)
class ValueForm:
    """Describes how values of some types are written.

    Attributes:
        types: The JSON types.
        open: The mark between the key and the value.
        close: The mark after the value.
        encoding: "raw" for a text as it is, "xml" for one with entities; "json" and "python" for
            literals; "list" for the forms `ToolForm.array` and `ToolForm.object`.
    """

    types: frozenset[str]
    open: str
    close: str
    encoding: Literal["raw", "xml", "json", "python", "list"]


@dataclass(frozen=True)
class ListForm:
    """Describes arguments, an object or an array that is not written as JSON.

    Attributes:
        begin: The mark before the first item.
        open: The mark before each item.
        between: The mark between two items.
        end: The mark after the last item. That of the arguments belongs to the call's `close`.
        values: The forms of the values.
        has_keys: False for an array.
    """

    begin: str
    open: str
    between: str
    end: str
    values: tuple[ValueForm, ...]
    has_keys: bool = True


@dataclass(frozen=True)
class ToolForm:
    """Describes tool calls; the module's docstring has the picture.

    Attributes:
        name: A short name for people.
        payload: The kind of a call.
        begin: The mark before the first call.
        open: The mark before each call.
        mid: The mark between the name and JSON arguments.
        close: The mark after each call.
        between: The mark between two calls.
        end: The mark after the last call.
        name_path: The keys that lead to the name in a JSON object; empty if the name is the key.
        arguments_path: The keys that lead to the arguments.
        shape: The JSON text of a call with holes, in which the arguments are a hole too.
        other_keys: What a model may write in place of the last of `arguments_path`.
        arguments_as_text: True if the arguments are JSON text within the JSON object.
        arguments: The form of arguments that are not JSON.
        array: The form of arrays in them, if it is not JSON.
        object: The form of objects in them, if it is not JSON.
        first: The mark before the first call of an answer, if the prompt ends with the rest of it.
        is_code: True if the literals are Python's.
    """

    name: str
    payload: Literal["object", "json", "items"]
    begin: str = ""
    open: str = ""
    mid: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    name_path: tuple[str, ...] = ("name",)
    arguments_path: tuple[str, ...] = ("arguments",)
    shape: str = ""
    other_keys: tuple[str, ...] = ()
    arguments_as_text: bool = False
    arguments: ListForm | None = None
    array: ListForm | None = None
    object: ListForm | None = None
    first: str | None = None
    is_code: bool = False

    @property
    def trigger(self) -> str:
        """Returns the text without white space and holes that calls begin with; may be empty."""
        return first_chunk(self.begin + self.open)

    @property
    def example(self) -> str:
        """Returns one call as the form writes it, with words in capitals for what differs."""
        body = self.shape
        if self.payload == "json":
            body = SAME_NAME + self.mid + ARGUMENTS
        elif self.arguments is not None:
            value = self.arguments.values[0]
            item = self.arguments.open + SAME_KEY + value.open + "VALUE" + value.close
            body = SAME_NAME + self.arguments.begin + item
        words = {ANY_ID: "ID", SAME_NAME: "NAME", INDEX: "1", SAME_KEY: "KEY", ARGUMENTS: "{...}"}
        text = self.begin + self.open + body + self.close + self.end
        return text.translate({ord(hole): word for hole, word in words.items()})

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns every mark of the form that has text."""
        lists = [one for one in (self.arguments, self.array, self.object) if one is not None]
        found = [self.begin, self.open, self.mid, self.close, self.between, self.end]
        for one in lists:
            found += [one.begin, one.open, one.between, one.end]
            for value in one.values:
                found += [value.open, value.close]
        return tuple(mark for mark in found if mark.strip())


@dataclass(frozen=True)
class ReasoningForm:
    """Describes reasoning, which comes first in an answer.

    Attributes:
        open: The mark before it, which the prompt may have already.
        close: The mark after it.
        header: What a prompt has before an answer; empty if that is unknown.
    """

    open: str
    close: str
    header: str = ""

    @property
    def name(self) -> str:
        """Returns a short name for people: the words of the opening mark."""
        words = "".join(
            character if character.isalnum() or character in ":_" else " "
            for character in self.open
        )
        return "-".join(words.split()[:3]) or "marks"


@dataclass(frozen=True)
class ContentForm:
    """Describes what stands around the content and after an answer.

    Attributes:
        opens: The marks before the content, of which an answer has one or none.
        closes: The marks between the content and calls.
        tails: The marks after the whole answer.
        responses: The marks around a tool's response, where it follows a call in the same answer.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeaderForm:
    """Describes answers that are messages, each with a header of several parts.

    start channel WORD recipient NAME ... body  TEXT  end

    The parts of a header come in any order, and not all of them.

    Attributes:
        start: The mark before each message but the first, which the prompt has.
        channel: The mark before the word that names the channel.
        body: The mark between a header and the text.
        ends: The marks after a text.
        recipient: The mark before the name of the tool that a message calls.
        reasoning: The channel of reasoning.
        commentary: The channel of calls.
    """

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    recipient: str
    reasoning: str
    commentary: str

    @property
    def key(self) -> str:
        """Returns what every recipient begins with, also one that is no tool of a request."""
        word, is_key, _ = self.recipient.partition("=")
        return word + is_key

    def begun(self, prompt: str) -> str:
        """Returns what a prompt has of the answer's header, without any text after it."""
        _, is_there, rest = prompt.rpartition(self.start)
        if not is_there or any(end in rest for end in self.ends):
            return ""
        header, mark, _ = rest.partition(self.body)
        return header + mark


NO_MARKS = ContentForm()


# A tag, or a run of other characters. White space may come between two of them.
_CHUNK = re.compile(r"<[^<>\s]*>|\[/?[A-Za-z_]+\]|(?:(?!<[^<>\s]*>|\[/?[A-Za-z_]+\])\S)+")


def chunks(mark: str) -> list[str]:
    """Returns the parts of a mark that white space may come between."""
    return _CHUNK.findall(mark)


def before_hole(mark: str) -> str:
    """Returns the beginning of a mark up to its first hole."""
    for place, character in enumerate(mark):
        if character in HOLES:
            return mark[:place]
    return mark


def first_chunk(mark: str) -> str:
    """Returns the first part of a mark, as far as it has no hole; empty if there is none."""
    found = chunks(before_hole(mark))
    return found[0] if found else ""


HERMES = ToolForm(
    "hermes",
    "object",
    open="<tool_call>\n",
    close="\n</tool_call>",
    between="\n",
    shape=f'{{"name": "{SAME_NAME}", "arguments": {ARGUMENTS}}}',
    other_keys=("parameters",),
)
LLAMA3_JSON = ToolForm(
    "llama3_json",
    "object",
    begin="<|python_tag|>",
    between=";",
    shape=f'{{"name": "{SAME_NAME}", "parameters": {ARGUMENTS}}}',
    arguments_path=("parameters",),
    other_keys=("arguments",),
    first="",
)
THINK = ReasoningForm("<think>", "</think>")
TOOL_FORMS = {form.name: form for form in (HERMES, LLAMA3_JSON)}
REASONING_FORMS = {"think": THINK}
