"""Reads what a request says of its model: its name, how long it stays, whether it is unloaded."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Message, Receive

from jaxpage.serving.dialects.ollama import ollama_time
from jaxpage.serving.several.keep_alive import keep_alive_seconds
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show

# Ollama's clients ask for a model to be unloaded with a request to these paths that has no prompt.
UNLOADING = {"/api/chat": "messages", "/api/generate": "prompt"}


class ModelRequest:
    """Holds which model a request names, and for how long it is to stay.

    Attributes:
        model: The model of the table.
        keep_alive: The seconds of the request; None if it gives none.
        unloads: True if the request asks for nothing but that the model be unloaded.
    """

    def __init__(
        self, model: str, name: str, keep_alive: float | None, unloading: str | None
    ) -> None:
        self.model = model
        self.keep_alive = keep_alive
        self.unloads = unloading is not None
        self._name = name
        self._unloading = unloading

    def answer_unload(self) -> dict[str, Any]:
        """Returns Ollama's answer to a request that unloads."""
        is_chat = self._unloading == "messages"
        said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        about = {"model": self._name, "created_at": ollama_time(time.time())}
        return {**about, **said, "done": True, "done_reason": "unload"}


def receive_again(raw: bytes, receive: Receive) -> Receive:
    """Returns a function that gives the messages of a request whose body was read already."""
    is_first = True

    async def receive_next() -> Message:
        nonlocal is_first
        if is_first:
            is_first = False
            return {"type": "http.request", "body": raw, "more_body": False}
        return await receive()

    return receive_next


def read_keep_alive(value: Any) -> float:
    """Returns the seconds of a `keep_alive`, or raises ApiError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ApiError(400, f"keep_alive must be a time, got {show(value)}", param="keep_alive")
    try:
        return keep_alive_seconds(value)
    except ValueError as error:
        text = f"keep_alive {error}, got {show(value)}"
        raise ApiError(400, text, param="keep_alive") from None
