"""Translates the turns of a conversation of Anthropic's Messages into the messages of a chat.

A turn is a list of blocks, of which a chat makes messages of their own:

    system, before all turns                   part of the first message
    user: results, text                        a message for each result, then the text
    assistant: thinking, text, calls           one message
    system, after a turn                       part of the user's text

Turns of one role that follow each other are one message, as Anthropic defines it; many templates
want turns to alternate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpage.serving.dialects.messages_fields import (
    AssistantTurn,
    Base64Source,
    ImageBlock,
    ServerBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)

Turn = UserTurn | AssistantTurn | SystemTurn
# Claude Code begins its system prompt with a block for Anthropic's accounts. It differs in every
# request, so no request would find the prefix of the one before it in the cache.
_BILLING = "x-anthropic-billing-header:"
_REMINDER = "system-reminder"


class _Part(NamedTuple):
    """Holds a part of a message of a chat.

    Attributes:
        body: The part.
        path: The client's path of it.
        file_path: The client's path of the file of a picture; empty for a text.
    """

    body: dict[str, Any]
    path: str
    file_path: str = ""


class TurnsOfChat:
    """Holds the messages of a chat that a conversation is.

    Attributes:
        messages: The messages.
        names: The client's paths of the messages and of their parts, by the chat's.
        ignored: The client's paths of the blocks that are passed over.
    """

    def __init__(self, system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> None:
        """Translates a conversation.

        Args:
            system: The instructions that precede the turns.
            turns: The turns.
        """
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self.ignored: list[str] = []
        if system is not None:
            self._add_parts("system", self._parts_of(system, "system"), "system")
        for index, turn in enumerate(turns):
            path = f"messages[{index}]"
            if isinstance(turn, AssistantTurn):
                self._add_answer(turn, path)
            elif isinstance(turn, UserTurn):
                self._add_results(turn, path)
                self._add_parts("user", self._parts_of(turn.content, f"{path}.content"), path)
            else:
                self._add_instructions(turn, path)

    @property
    def is_to_be_continued(self) -> bool:
        """Returns whether the answer continues the last message."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and "tool_calls" not in last

    def _parts_of(self, content: str | Sequence[Any], path: str) -> list[_Part]:
        """Returns the texts and the pictures of a content."""
        if isinstance(content, str):
            return [_text_part(content, path)]
        parts = []
        for index, block in enumerate(content):
            block_path = f"{path}[{index}]"
            if isinstance(block, TextBlock) and not block.text.startswith(_BILLING):
                parts.append(_text_part(block.text, block_path))
            elif isinstance(block, ImageBlock):
                parts.append(_picture_part(block, block_path))
            elif isinstance(block, TextBlock | ServerBlock):
                self.ignored.append(block_path)
        return parts

    def _add(self, message: dict[str, Any], path: str) -> str:
        """Adds a message, and returns its path in the chat."""
        place = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.names[place] = path
        return place

    def _add_parts(self, role: str, parts: list[_Part], path: str) -> None:
        """Adds texts and pictures of a role to its last message, or as a new message."""
        if not parts:
            return
        if not self.messages or self.messages[-1]["role"] != role:
            self._add({"role": role, "content": []}, path)
        self._fill(f"messages[{len(self.messages) - 1}]", parts)

    def _fill(self, place: str, parts: list[_Part]) -> None:
        """Adds parts to the content of the last message, with the paths of pictures."""
        content = self.messages[-1]["content"]
        for part in parts:
            if part.file_path:
                part_place = f"{place}.content[{len(content)}]"
                self.names[part_place] = part.path
                self.names[f"{part_place}.image_url.url"] = part.file_path
            content.append(part.body)

    def _add_instructions(self, turn: SystemTurn, path: str) -> None:
        """Adds the instructions of a turn.

        Many templates take a message of the system at the beginning only.
        """
        parts = self._parts_of(turn.content, f"{path}.content")
        if all(message["role"] == "system" for message in self.messages):
            self._add_parts("system", parts, path)
        else:
            texts = [_as_reminder(part.body["text"]) for part in parts]
            self._add_parts("user", [_text_part(text, path) for text in texts], path)

    def _add_results(self, turn: UserTurn, path: str) -> None:
        for index, block in enumerate(turn.content):
            if isinstance(block, ToolResultBlock):
                block_path = f"{path}.content[{index}]"
                result = {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": [],
                }
                place = self._add(result, block_path)
                self.names[f"{place}.tool_call_id"] = f"{block_path}.tool_use_id"
                self._fill(place, _result_of(block, f"{block_path}.content"))

    def _add_answer(self, turn: AssistantTurn, path: str) -> None:
        blocks = [] if isinstance(turn.content, str) else turn.content
        parts = self._parts_of(turn.content, f"{path}.content")
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        uses = [
            (f"{path}.content[{index}]", block)
            for index, block in enumerate(blocks)
            if isinstance(block, ToolUseBlock)
        ]
        if not parts and not thoughts and not uses:
            return  # it is empty, or all of it was passed over
        if not self.is_to_be_continued:
            self._add({"role": "assistant", "content": []}, path)
        place = f"messages[{len(self.messages) - 1}]"
        message = self.messages[-1]
        message["content"] += [part.body for part in parts]
        if thoughts:
            earlier = message.get("reasoning_content", "")
            message["reasoning_content"] = earlier + "".join(thoughts)
        if uses:
            message["tool_calls"] = [_call_of(block) for _, block in uses]
        for index, (block_path, _) in enumerate(uses):
            call = f"{place}.tool_calls[{index}]"
            self.names |= {
                call: block_path,
                f"{call}.function.name": f"{block_path}.name",
                f"{call}.function.arguments": f"{block_path}.input",
            }


def _as_reminder(text: str) -> str:
    """Returns instructions as they stand in a text of the user, marked as Claude Code does it."""
    if text.lstrip().startswith(f"<{_REMINDER}>"):
        return text
    return f"<{_REMINDER}>\n{text}\n</{_REMINDER}>"


def _result_of(block: ToolResultBlock, path: str) -> list[_Part]:
    """Returns the parts of a result."""
    parts = list(_parts_of_result(block, path))
    texts = [part.body["text"] for part in parts if not part.file_path]
    if block.is_error and not "".join(texts).startswith("Error"):
        # A chat has no field for it.
        if not parts or parts[0].file_path:
            parts.insert(0, _text_part("Error", path))
        else:
            parts[0] = _text_part(f"Error: {texts[0]}", path)
    return parts


def _parts_of_result(block: ToolResultBlock, path: str) -> Iterator[_Part]:
    if isinstance(block.content, str):
        yield _text_part(block.content, path)
    for index, part in enumerate(block.content or ()):
        if isinstance(part, TextBlock):
            yield _text_part(part.text, path)
        elif isinstance(part, ImageBlock):
            yield _picture_part(part, f"{path}[{index}]")
        elif isinstance(part, ToolReference):
            yield _text_part(part.tool_name, path)


def _text_part(text: str, path: str) -> _Part:
    return _Part({"type": "text", "text": text}, path)


def _picture_part(block: ImageBlock, path: str) -> _Part:
    """Returns a picture as a chat has it."""
    source = block.source
    if isinstance(source, Base64Source):
        url = f"data:{source.media_type};base64,{source.data}"
        place = "data"
    else:
        url = source.url
        place = "url"
    body = {"type": "image_url", "image_url": {"url": url}}
    return _Part(body, path, f"{path}.source.{place}")


def _call_of(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}
