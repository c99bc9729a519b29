"""Describes how a model writes its tool calls and its reasoning.

The parts of an answer, and the fields that hold the markers between them:

    reasoning.open ... reasoning.close  content.opens ... content.closes  calls  tail

    calls:      begin  CALL  between  CALL  ...  end
    CALL:       open  {JSON with name and arguments}  close         payload "object"
                open  NAME  mid  {JSON arguments}     close         payload "json"
                open  NAME  arguments                 close         payload "items"
    arguments:  begin  ITEM  between  ITEM  ...
    ITEM:       open  KEY  value.open  VALUE  value.close

White space in a marker is optional when it is read, except next to a value without quotes.
A marker may contain placeholders for what differs from call to call (`markers`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpage.chat_forms.markers import (
    ARGUMENTS,
    CALL_ID,
    CALL_INDEX,
    KEY,
    TAG,
    TOOL_NAME,
    chunks,
    first_chunk,
    is_pair,
)

Encoding = Literal["raw", "xml", "json", "python", "list"]
JSON_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
# Models write the one where their template has the other.
ARGUMENT_KEYS = ("arguments", "parameters")
# Templates and tokenizers name the reasoning of a message in these ways.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")


@dataclass(frozen=True)
class ValueForm:
    """Describes how values of some types are written.

    Attributes:
        types: The JSON types.
        open: The marker between the key and the value.
        close: The marker after the value.
        encoding: "raw" for a text as it is, "xml" for one with entities; "json" and "python" for
            literals; "list" for the forms `ToolForm.array` and `ToolForm.object`.
    """

    types: frozenset[str]
    open: str
    close: str
    encoding: Encoding

    @property
    def is_bare(self) -> bool:
        """Returns whether a string is written between the markers without quotes."""
        return self.encoding in ("raw", "xml")

    @property
    def is_literal(self) -> bool:
        """Returns whether the values are literals of JSON or Python, strings with quotes."""
        return self.encoding in ("json", "python")


@dataclass(frozen=True)
class ListForm:
    """Describes arguments, an object or an array that is not written as JSON.

    Attributes:
        begin: The marker before the first item.
        open: The marker before each item.
        between: The marker between two items.
        end: The marker after the last item. That of the arguments belongs to the call's `close`.
        values: The forms of the values.
    """

    begin: str
    open: str
    between: str
    end: str
    values: tuple[ValueForm, ...]

    def with_missing_marks(self) -> ListForm:
        """Returns the form of lists in which tags around bare values are missing or come twice."""
        values = [*self.values]
        for value in filter(lambda value: value.is_bare, self.values):
            first, *others = chunks(value.open) or [""]
            if others and TAG.fullmatch(first):
                values += [replace(value, open=first), replace(value, open=first + value.open)]
            if TAG.fullmatch(value.close.strip()):
                values.append(replace(value, close=""))
        return replace(self, values=tuple(values))


@dataclass(frozen=True)
class BareCall:
    """Describes a call whose outer tag is missing, as models write it now and then.

    Attributes:
        open: The marker before the call; it may be empty.
        close: The marker after it.
        orphans: The closing outer tag, which may still follow, with and without what else is there.
        has_tag: True if the call begins with a tag of its own, which says that it is one.
        marker: What its text begins with; empty if that is the name of a tool.
    """

    open: str
    close: str
    orphans: tuple[str, ...]
    has_tag: bool
    marker: str


@dataclass(frozen=True)
class ToolForm:
    """Describes tool calls; the module's docstring has the picture.

    Attributes:
        name: A short name for people.
        payload: The kind of a call.
        begin: The marker before the first call.
        open: The marker before each call.
        mid: The marker between the name and JSON arguments.
        close: The marker after each call.
        between: The marker between two calls.
        end: The marker after the last call.
        name_path: The keys that lead to the name in a JSON object; empty if the name is the key.
        arguments_path: The keys that lead to the arguments.
        shape: The JSON text of a call, with placeholders for the name and the arguments.
        other_keys: What a model may write in place of the last of `arguments_path`.
        arguments_as_text: True if the arguments are JSON text within the JSON object.
        arguments: The form of arguments that are not JSON.
        array: The form of arrays in them, if it is not JSON.
        object: The form of objects in them, if it is not JSON.
        first: What an answer has of the marker before its first call, if the prompt has the rest.
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
    def opening(self) -> str:
        """Returns the marker before the first call, as a template writes it."""
        return self.begin + self.open

    @property
    def first_opening(self) -> str:
        """Returns the marker before the first call, without what the prompt has of it."""
        return self.opening if self.first is None else self.first

    @property
    def trigger(self) -> str:
        """Returns the text that calls begin with, up to white space or a placeholder."""
        return first_chunk(self.opening)

    @property
    def bare(self) -> BareCall | None:
        """Returns the markers of a call whose outer tag is missing; None if it has no such tag."""
        outer = self.trigger
        inner = self.opening.lstrip()[len(outer) :].lstrip()
        has_tag = inner.startswith("<") and first_chunk(inner) != ""
        if not outer or not (has_tag or TAG.fullmatch(outer)):
            return None
        last = (chunks(self.close) or [""])[-1]
        close, orphan = self.close, ""
        if self.begin.strip():
            orphan = self.end.strip()
        elif is_pair(outer, last) and (self.arguments is None or self.close.strip() != last):
            close, orphan = self.close.rstrip().removesuffix(last), last
        orphans = dict.fromkeys(filter(None, (orphan, TAG.sub("", orphan).strip())))
        marker = first_chunk(inner) or ("{" if self.payload == "object" else "")
        return BareCall(inner, close, tuple(orphans), has_tag, marker)

    @property
    def variants(self) -> tuple[ToolForm, ...]:
        """Returns other forms in which models write calls between the same outer tags.

        These are arguments in JSON where the template writes items, a closing tag less, a name
        without what the template puts next to it, and the usual JSON of a call, alone or in a list.
        """
        outer, variants = self.trigger, []
        if self.arguments is not None:
            last, begin, close = (chunks(self.close) or [""])[-1], self.arguments.begin, self.close
            if begin == "{":
                begin, close = "", close.removeprefix("}")
            variants.append(replace(self, payload="json", mid=begin, close=close, arguments=None))
            variants += [replace(self, close=marker) for marker in dict.fromkeys((last, ""))]
            variants.append(replace(self, arguments=self.arguments.with_missing_marks()))
        elif self.payload == "json":
            opened, mid = TAG.search(self.open), TAG.search(self.mid)
            if opened is not None and mid is not None:
                variants.append(replace(self, open=opened[0], mid=self.mid[mid.start() :]))
        if TAG.fullmatch(outer):
            tags = TAG.findall(self.end if self.begin.strip() else self.close)
            close = tags[-1] if tags else ""
            call = ToolForm(self.name, "object", open=outer, close=close, other_keys=ARGUMENT_KEYS)
            if self.begin.strip() or self.payload != "object" or self.name_path != ("name",):
                variants.append(call)
            in_list = replace(call, begin=outer + "[", open="", close="")
            variants.append(replace(in_list, between=",", end="]" + close))
        return tuple(variant for variant in dict.fromkeys(variants) if variant != self)

    @property
    def example(self) -> str:
        """Returns one call as the form writes it, with words in capitals for what differs."""
        body = self.shape
        if self.payload == "json":
            body = TOOL_NAME + self.mid + ARGUMENTS
        elif self.arguments is not None:
            value = self.arguments.values[0]
            item = self.arguments.open + KEY + value.open + "VALUE" + value.close
            body = TOOL_NAME + self.arguments.begin + item
        words = {CALL_ID: "ID", TOOL_NAME: "NAME", CALL_INDEX: "1", KEY: "KEY", ARGUMENTS: "{...}"}
        text = self.opening + body + self.close + self.end
        return text.translate({ord(placeholder): word for placeholder, word in words.items()})

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns every marker of the form that has text."""
        markers = [self.begin, self.open, self.mid, self.close, self.between, self.end]
        for items in (self.arguments, self.array, self.object):
            if items is not None:
                markers += [items.begin, items.open, items.between, items.end]
                for value in items.values:
                    markers += [value.open, value.close]
        return tuple(marker for marker in markers if marker.strip())

    def list_of(self, value: ValueForm) -> ListForm:
        """Returns the form of arrays or of objects, for a value that is one of them."""
        form = self.object if value.types == {"object"} else self.array
        assert form is not None
        return form


@dataclass(frozen=True)
class ReasoningForm:
    """Describes reasoning, which comes first in an answer.

    Attributes:
        open: The marker before it, which the prompt may have already.
        close: The marker after it.
        header: What a prompt has before an answer; empty if that is unknown.
    """

    open: str
    close: str
    header: str = ""

    @property
    def name(self) -> str:
        """Returns a short name for people: the first words of the opening marker."""
        return "-".join(re.findall(r"[\w:]+", self.open)[:3]) or "markers"


@dataclass(frozen=True)
class ContentForm:
    """Describes the markers around the content and after an answer.

    Attributes:
        opens: The markers before the content, of which an answer has one or none.
        closes: The markers between the content and calls.
        tails: The markers after the whole answer.
        responses: The markers around a tool's response, if it follows a call in the same answer.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()


@dataclass(frozen=True)
class SentReasoning:
    """Describes how a template takes the reasoning of an earlier answer.

    Attributes:
        name: The field of the message; None for a part of its content with the type "thinking".
        takes_content: False if an answer with calls cannot have content next to its reasoning.
    """

    name: str | None = REASONING_FIELDS[0]
    takes_content: bool = True

    def fields(self, reasoning: str, content: str, *, has_calls: bool = False) -> dict[str, Any]:
        """Returns the fields of a message with reasoning and content.

        Content that the template would refuse or drop goes to the end of the reasoning.
        """
        if has_calls and reasoning and not self.takes_content:
            reasoning, content = f"{reasoning}\n\n{content}".rstrip(), ""
        if self.name is not None:
            return {"content": content, self.name: reasoning}
        if not reasoning:
            return {"content": content}
        parts = [{"type": "thinking", "thinking": reasoning}]
        if content:
            parts.append({"type": "text", "text": content})
        return {"content": parts}


@dataclass(frozen=True)
class HeaderForm:
    """Describes answers that are messages, each with a header of several parts.

    start channel WORD recipient NAME ... body  TEXT  end

    The parts of a header come in any order, and not all of them.

    Attributes:
        start: The marker before each message but the first, which the prompt has.
        channel: The marker before the word that names the channel.
        body: The marker between a header and the text.
        ends: The markers after a text.
        recipient: The marker before the name of the tool that a message calls.
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

    def find_begun_header(self, prompt: str) -> str:
        """Returns what a prompt has of the answer's header, without any text after it."""
        _, is_there, after_start = prompt.rpartition(self.start)
        if not is_there or any(end in after_start for end in self.ends):
            return ""
        header, marker, _ = after_start.partition(self.body)
        return header + marker


HERMES = ToolForm(
    "hermes",
    "object",
    open="<tool_call>\n",
    close="\n</tool_call>",
    between="\n",
    shape=f'{{"name": "{TOOL_NAME}", "arguments": {ARGUMENTS}}}',
    other_keys=("parameters",),
)
# Llama 3 writes <|python_tag|> or leaves it out, so that nothing of it need come (`first`).
LLAMA3_JSON = ToolForm(
    "llama3_json",
    "object",
    begin="<|python_tag|>",
    between=";",
    shape=f'{{"name": "{TOOL_NAME}", "parameters": {ARGUMENTS}}}',
    arguments_path=("parameters",),
    other_keys=("arguments",),
    first="",
)
LFM2 = ToolForm(
    "lfm2",
    "items",
    begin="<|tool_call_start|>[",
    close=")",
    between=", ",
    end="]<|tool_call_end|>",
    arguments=ListForm("(", "", ", ", "", (ValueForm(JSON_TYPES, "=", "", "python"),)),
    is_code=True,
)
GRANITE = ToolForm(
    "granite",
    "object",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
    shape=f'{{"name": "{TOOL_NAME}", "arguments": {ARGUMENTS}}}',
    other_keys=("parameters",),
)
MINICPM5 = ToolForm(
    "minicpm5",
    "items",
    open='<function name="',
    close="</function>",
    between="\n",
    arguments=ListForm(
        '">',
        '<param name="',
        "",
        "",
        (
            ValueForm(frozenset({"string"}), '"><![CDATA[', "]]></param>", "raw"),
            ValueForm(JSON_TYPES, '">', "</param>", "xml"),
        ),
    ),
)
TOOL_FORMS = {form.name: form for form in (HERMES, LLAMA3_JSON, LFM2, GRANITE, MINICPM5)}
# What a template that renders no calls has in its text, if its model writes the form.
HINTS = {"<|tool_list_start|>": LFM2, "<|tool_call|>": GRANITE, "<function name=": MINICPM5}
THINK = ReasoningForm("<think>", "</think>")
REASONING_FORMS = {"think": THINK, "granite": THINK}
CONTENT_FORMS = {"granite": ContentForm(opens=("<response>",), closes=("</response>",))}
