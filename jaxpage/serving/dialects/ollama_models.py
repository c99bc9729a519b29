"""Describes models as Ollama's API does: in lists of them, and each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpage.serving.dialects.dialect import ListedModel
from jaxpage.serving.dialects.ollama_answers import ollama_time
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.model_card import ModelCard
from jaxpage.serving.wire.templates import template_of


def about_ollama(context: ModelContext) -> dict[str, Any]:
    """Returns what /api/show says about a model, without its name."""
    card = context.card
    kind = card.family
    has_template = _has_template(context)
    return {
        "details": details_of(card),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": card.num_parameters,
            f"{kind}.context_length": context.max_model_len,
        },
        "capabilities": capabilities_of(context),
        # LiteLLM looks in it for the tools.
        "template": template_of(context, []) if has_template else "",
        "modified_at": ollama_time(card.modified_at),
    }


def capabilities_of(context: ModelContext) -> list[str]:
    """Returns what a model can do, in Ollama's words.

    Every model has vectors of texts; "embedding" is only said of encoders and of those whose files
    are about it, because clients leave such models out of the lists for chats.
    """
    is_able = {
        "completion": context.generates,
        "tools": _takes_tools(context),
        "thinking": context.chat_format.reasoning is not None,
        "vision": context.takes_pictures,
        "embedding": context.embedding.files.is_stated or not context.generates,
    }
    return [name for name, value in is_able.items() if value]


def _takes_tools(context: ModelContext) -> bool:
    """Returns whether the prompt shows tools to the model, and its calls are read."""
    if context.chat_format.tool_form is None or not _has_template(context):
        return False
    return "tools" in template_of(context, [{}])


def _has_template(context: ModelContext) -> bool:
    return bool(getattr(context.tokenizer, "chat_template", None))


def write_tags(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Returns the list of models, without paths: clients see none of this machine."""
    return {
        "models": [
            {**_card(model), "modified_at": ollama_time(model.card.modified_at or model.created)}
            for model in models
        ]
    }


def write_loaded(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Returns the list of the models in memory, with the times at which they go."""
    return {"models": [_write_in_memory(model) for model in models]}


def _write_in_memory(model: ListedModel) -> dict[str, Any]:
    entry = {**_card(model), "context_length": model.context_length}
    if model.num_bytes is None:
        return entry
    return {
        **entry,
        "size": model.num_bytes,
        "size_vram": model.device_bytes,
        "expires_at": ollama_time(model.until),
    }


def _card(model: ListedModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": model.name,
        "model": model.name,
        "size": card.num_bytes,
        "digest": card.digest,
        "details": details_of(card),
        **({} if model.context is None else {"capabilities": capabilities_of(model.context)}),
    }


def details_of(card: ModelCard) -> dict[str, Any]:
    """Returns the field `details` of an answer about a model."""
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }
