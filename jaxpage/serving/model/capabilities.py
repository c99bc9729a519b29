"""Describes a server for `/v1/capabilities`: its model, its limits, and the fields it honours."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxpage import __version__
from jaxpage.assembly import Built, chat_defaults
from jaxpage.serving.requests.generating import MAX_PROMPT_LOGPROBS
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.context import RequestLimits
from jaxpage.serving.wire.derived_forms import choose_form, derive_form
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.support import support_matrix


def capabilities(
    built: Built, engine: EngineConfig, server: ServerConfig, limits: RequestLimits
) -> dict[str, Any]:
    """Returns the answer of `/v1/capabilities`, a JSON object.

    Its `parameters` are the table of docs/reference/support-matrix.md; the rest describes this
    server.

    Args:
        built: The engine with its tokenizer, memory and sampling defaults.
        engine: The settings of the engine.
        server: The settings of the server.
        limits: The limits of the fields of a request.
    """
    tokenizer = built.tokenizer
    form = choose_form(derive_form(tokenizer).form, server.tool_parser, server.reasoning_parser)
    return {
        "version": __version__,
        "model": {
            "max_model_len": built.max_model_len,
            "vocab_size": built.engine.vocab_size,
            "generates": built.generates,
            "takes_pictures": built.pictures is not None,
            "has_tokenizer": tokenizer is not None,
            "has_chat_template": bool(getattr(tokenizer, "chat_template", None)),
            "sampling_defaults": built.sampling_defaults,
            # The page uses these where the model has no defaults of its own.
            "chat_defaults": chat_defaults(built.sampling_defaults),
        },
        "tools": form.tool_form,
        "reasoning": form.reasoning_form,
        "structured_outputs": tokenizer is not None,
        "speculation": _speculation(engine),
        # What requests to /v1/generate may ask for.
        "returns": {
            "sampling_mask": engine.enable_return_sampling_mask,
            "routed_experts": engine.enable_return_routed_experts,
            "hidden_states": engine.enable_return_hidden_states,
        },
        "prefix_caching": engine.enable_prefix_caching,
        "scheduling_policy": engine.scheduling_policy,
        "unknown_fields": "refused"
        if server.strict_requests
        else "ignored, and named in x-jaxpage-ignored-fields",
        "limits": {
            "max_body_bytes": server.max_body_bytes,
            "max_queued_requests": server.max_queued_requests,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "request_timeout_seconds": server.request_timeout_seconds,
            **asdict(limits),
            "max_prompt_logprobs": MAX_PROMPT_LOGPROBS,
        },
        "parameters": support_matrix(),
    }


def _speculation(engine: EngineConfig) -> dict[str, Any] | None:
    """Returns the settings of speculation without the drafter's path, which clients may not see."""
    config = engine.speculative_config
    return None if config is None else config.model_dump(exclude_none=True, exclude={"model"})
