"""Turns how a request wants the model to reason into an effort, and into a budget of tokens.

Clients have three forms for one thing: vLLM's `thinking_token_budget` with OpenAI's
`reasoning_effort`, OpenRouter's `reasoning`, and `thinking` as LiteLLM sends it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.request_fields import (
    ConversationFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from jaxpage.settings.argument_checks import show

_BUDGET = "thinking_token_budget"


class Wish(NamedTuple):
    """Holds a value and the path of the field that it came from; the value is None for no wish."""

    value: Any = None
    path: str = ""


def effort_of(request: ConversationFields) -> Wish:
    """Returns the effort that a request asks for; "none" for no reasoning.

    Raises:
        ApiError: Two fields ask for different efforts.
    """
    reasoning, thinking = request.reasoning, request.thinking
    wishes = [Wish(request.reasoning_effort, "reasoning_effort")]
    if reasoning is not None:
        wishes.append(Wish(reasoning.effort, "reasoning.effort"))
        if reasoning.enabled is False:
            wishes.append(Wish("none", "reasoning.enabled"))
    if thinking is not None and thinking.type == "disabled":
        wishes.append(Wish("none", "thinking.type"))
    return _agree(wishes)


def switch_of(request: ConversationFields) -> Wish:
    """Returns True if a request asks for reasoning without saying how much."""
    if request.reasoning is not None and request.reasoning.enabled:
        return Wish(True, "reasoning.enabled")
    if request.thinking is not None and request.thinking.type != "disabled":
        return Wish(True, "thinking.type")
    return Wish()


def budget_of(request: ConversationFields) -> Wish:
    """Returns the most tokens of reasoning that a chat asks for.

    Raises:
        ApiError: Two fields ask for different numbers.
    """
    reasoning, thinking = request.reasoning, request.thinking
    wishes = [Wish(getattr(request, _BUDGET, None), _BUDGET)]
    if reasoning is not None:
        wishes.append(Wish(reasoning.max_tokens, "reasoning.max_tokens"))
    if thinking is not None:
        wishes.append(Wish(thinking.budget_tokens, "thinking.budget_tokens"))
    return _agree(wishes)


def has_format(request: GenerationRequest) -> bool:
    """Returns whether a grammar of the request itself covers the whole output."""
    held = JsonObjectFormat | JsonSchemaFormat
    return request.structured_outputs is not None or isinstance(request.response_format, held)


def budget_values(
    budget: Wish, context: ModelContext, *, can_reason: bool, prompt: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the engine's parameters for a budget, and the path of a field without an effect.

    Args:
        budget: The budget.
        context: The served model.
        can_reason: False if the output has no room for reasoning.
        prompt: The prompt, where the form of the model's answers tells more of it than its end.
    """
    if budget.value is None:
        return {}, ()
    form = context.chat_format
    if not can_reason or form.reasoning is None or not form.reasoning.close.strip():
        return {}, (budget.path,)
    opened = form.reasoning.open
    # An answer of several messages may reason again, which the opening marker tells.
    again = form.headers is not None
    if not again and prompt and form.is_open(prompt):
        opened = ""
    markers = (opened, form.reasoning.close, again)
    return {_BUDGET: budget.value, "thinking_markers": markers}, ()


def _agree(wishes: list[Wish]) -> Wish:
    """Returns the first wish; a field may say the same as another one, and not something else."""
    first, *others = [wish for wish in wishes if wish.value is not None] or [Wish()]
    for other in others:
        if other.value != first.value:
            message = (
                f"{other.path}={show(other.value)} and {first.path}={show(first.value)} differ; "
                "give one of them"
            )
            raise ApiError(400, message, param=other.path)
    return first
