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
from typing import Any

from jaxpage.serving.dialects.messages_fields import (
    AssistantTurn,
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
            self._add_text("system", self._texts_of(system, "system"), "system")
        for index, turn in enumerate(turns):
            path = f"messages[{index}]"
            if isinstance(turn, AssistantTurn):
                self._add_answer(turn, path)
            elif isinstance(turn, UserTurn):
                self._add_results(turn, path)
                self._add_text("user", self._texts_of(turn.content, f"{path}.content"), path)
            else:
                self._add_instructions(turn, path)

    @property
    def is_to_be_continued(self) -> bool:
        """Returns whether the answer continues the last message."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and "tool_calls" not in last

    def _texts_of(self, content: str | Sequence[Any], path: str) -> list[str]:
        if isinstance(content, str):
            return [content]
        texts = []
        for index, block in enumerate(content):
            if isinstance(block, TextBlock) and not block.text.startswith(_BILLING):
                texts.append(block.text)
            elif isinstance(block, TextBlock | ServerBlock):
                self.ignored.append(f"{path}[{index}]")
        return texts

    def _add(self, message: dict[str, Any], path: str) -> str:
        """Adds a message, and returns its path in the chat."""
        place = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.names[place] = path
        return place

    def _add_text(self, role: str, texts: list[str], path: str) -> None:
        """Adds texts of a role to its last message, or as a new message."""
        if not texts:
            return
        if not self.messages or self.messages[-1]["role"] != role:
            self._add({"role": role, "content": []}, path)
        self.messages[-1]["content"] += [{"type": "text", "text": text} for text in texts]

    def _add_instructions(self, turn: SystemTurn, path: str) -> None:
        """Adds the instructions of a turn.

        Many templates take a message of the system at the beginning only.
        """
        texts = self._texts_of(turn.content, f"{path}.content")
        if all(message["role"] == "system" for message in self.messages):
            self._add_text("system", texts, path)
        else:
            self._add_text("user", [_as_reminder(text) for text in texts], path)

    def _add_results(self, turn: UserTurn, path: str) -> None:
        for index, block in enumerate(turn.content):
            if isinstance(block, ToolResultBlock):
                block_path = f"{path}.content[{index}]"
                result = {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _result_of(block),
                }
                place = self._add(result, block_path)
                self.names[f"{place}.tool_call_id"] = f"{block_path}.tool_use_id"

    def _add_answer(self, turn: AssistantTurn, path: str) -> None:
        blocks = [] if isinstance(turn.content, str) else turn.content
        texts = self._texts_of(turn.content, f"{path}.content")
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        uses = [
            (f"{path}.content[{index}]", block)
            for index, block in enumerate(blocks)
            if isinstance(block, ToolUseBlock)
        ]
        if not texts and not thoughts and not uses:
            return  # it is empty, or all of it was passed over
        if not self.is_to_be_continued:
            self._add({"role": "assistant", "content": []}, path)
        place = f"messages[{len(self.messages) - 1}]"
        message = self.messages[-1]
        message["content"] += [{"type": "text", "text": text} for text in texts]
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


def _result_of(block: ToolResultBlock) -> list[dict[str, str]]:
    texts = list(_parts_of(block))
    if block.is_error and not "".join(texts).startswith("Error"):
        # A chat has no field for it.
        texts[:1] = ["Error" if not texts else f"Error: {texts[0]}"]
    return [{"type": "text", "text": text} for text in texts]


def _parts_of(block: ToolResultBlock) -> Iterator[str]:
    if isinstance(block.content, str):
        yield block.content
    for part in block.content or ():
        if isinstance(part, TextBlock):
            yield part.text
        elif isinstance(part, ToolReference):
            yield part.tool_name


def _call_of(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}
