"""Turns how a request wants the model to reason into variables of its template, and into a budget.

Clients have three forms for one thing: vLLM's `thinking_token_budget` with OpenAI's
`reasoning_effort`, OpenRouter's `reasoning`, and `thinking` as LiteLLM sends it.

Templates know `reasoning_effort` (a word), `enable_thinking` or `thinking` (true or false) and
`verbosity`, or none of them. What a template does not know has no effect, and is named to the
client.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from jinja2 import TemplateSyntaxError, nodes

from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.field_types import Effort
from jaxpage.serving.wire.request_fields import (
    ChatCompletionRequest,
    ConversationFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from jaxpage.serving.wire.template_source import parse_template, variables_of
from jaxpage.settings.argument_checks import show

_BUDGET = "thinking_token_budget"
EFFORTS: tuple[str, ...] = get_args(Effort)  # from the least to the most
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_VERBOSITY = "verbosity"
# What models know whose template takes any word.
_USUAL = ("low", "medium", "high")


class Wish(NamedTuple):
    """Holds a value and the path of the field that it came from; the value is None for no wish."""

    value: Any = None
    path: str = ""


def _effort_of(request: ConversationFields) -> Wish:
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


def _switch_of(request: ConversationFields) -> Wish:
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


def _has_format(request: GenerationRequest) -> bool:
    """Returns whether a grammar of the request itself covers the whole output."""
    held = JsonObjectFormat | JsonSchemaFormat
    return request.structured_outputs is not None or isinstance(request.response_format, held)


def chat_budget(
    request: ChatCompletionRequest,
    context: ModelContext,
    prompt: str,
    *,
    leaves_room: bool,
    has_own_grammar: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns what `budget_values` returns, for a chat.

    Args:
        request: The chat.
        context: The served model.
        prompt: The prompt of the answer.
        leaves_room: False if the tools leave no room for reasoning.
        has_own_grammar: True if a grammar of the tools holds the answer, which has such room, and
            not one of the request itself.
    """
    can_reason = leaves_room and (has_own_grammar or not _has_format(request))
    return budget_values(budget_of(request), context, can_reason=can_reason, prompt=prompt)


def completion_budget(
    request: GenerationRequest, context: ModelContext
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns what `budget_values` returns, for a completion."""
    budget = Wish(getattr(request, _BUDGET), _BUDGET)
    return budget_values(budget, context, can_reason=not _has_format(request))


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


class Variables(NamedTuple):
    """Holds variables of a template.

    Attributes:
        values: The variables.
        ignored: The names of the fields that have no effect, or not all of theirs.
        switch: The path of a field that asks for reasoning without saying how much; it has no
            effect on a model that cannot reason. Empty without one.
    """

    values: dict[str, Any]
    ignored: tuple[str, ...] = ()
    switch: str = ""


def variables_of_request(request: ConversationFields, template: str) -> Variables:
    """Returns the template's variables for how much a request wants reasoned and said.

    Raises:
        ApiError: Two fields ask for different efforts.
    """
    effort, switch = _effort_of(request), _switch_of(request)
    values, ignored, _ = variables_for(
        template, effort.value, request.verbosity, is_on=switch.value is not None
    )
    paths = tuple(effort.path if name == _EFFORT else name for name in ignored)
    return Variables(values, paths, switch.path if effort.value is None else "")


def variables_for(
    template: str, effort: str | None, verbosity: str | None, *, is_on: bool = False
) -> Variables:
    """Returns the template's variables for fields of a request.

    Args:
        template: The source of the template.
        effort: The field `reasoning_effort`, one of `EFFORTS`, or None.
        verbosity: The field `verbosity`, or None.
        is_on: True if the request asks for reasoning without an effort.
    """
    known = variables_of(template)
    values: dict[str, Any] = {}
    ignored = []
    if effort is not None:
        values = dict.fromkeys((name for name in _SWITCHES if name in known), effort != "none")
        is_off = bool(values) and effort == "none"
        if _EFFORT in known:
            words = _words_of(template)
            if effort in words or not is_off:
                values[_EFFORT] = _nearest(effort, words)
            is_off = is_off or values.get(_EFFORT) == "none"
        if not values or (effort == "none" and not is_off):
            ignored.append(_EFFORT)
    elif is_on:
        values = dict.fromkeys((name for name in _SWITCHES if name in known), True)
        if not values and _EFFORT in known and "none" in (words := _words_of(template)):
            values[_EFFORT] = _nearest("medium", words)
    if verbosity is not None:
        if _VERBOSITY in known:
            values[_VERBOSITY] = verbosity
        elif verbosity != "medium":  # which is OpenAI's default
            ignored.append(_VERBOSITY)
    return Variables(values, tuple(ignored))


def has_variables(template: str) -> bool:
    """Returns whether a template has a variable that says how much is reasoned."""
    return not variables_of(template).isdisjoint({*_SWITCHES, _EFFORT})


def _nearest(effort: str, words: tuple[str, ...]) -> str:
    """Returns the word that a template knows for an effort; only "none" means none."""
    if effort in words:
        return effort
    place = EFFORTS.index(effort)
    some = [word for word in words if word != "none"] or list(words)
    return min(some, key=lambda word: (abs(EFFORTS.index(word) - place), -EFFORTS.index(word)))


@functools.lru_cache(maxsize=8)
def _words_of(template: str) -> tuple[str, ...]:
    """Returns the words with which a template compares the effort, or the usual ones."""
    try:
        tree = parse_template(template)
    except TemplateSyntaxError:
        return _USUAL
    names = {_EFFORT}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _reads(assignment.node, names):
            names.add(assignment.target.name)
    words = {
        word
        for node in tree.find_all((nodes.Compare, nodes.Getitem))
        if _reads(node, names)
        for word in _texts(node)
    }
    return tuple(word for word in EFFORTS if word in words) or _USUAL


def _reads(node: nodes.Node, names: set[str]) -> bool:
    inside = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
    return any(name.name in names for name in inside)


def _texts(node: nodes.Node) -> Iterator[str]:
    yield from (each.value for each in node.find_all(nodes.Const) if isinstance(each.value, str))
