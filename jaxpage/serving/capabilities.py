"""`/v1/capabilities`: what this server honours, field by field, and what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxpage import __version__
from jaxpage.assembly import Built, chat_defaults
from jaxpage.serving.config import ServerConfig
from jaxpage.serving.generating import MAX_PROMPT_LOGPROBS
from jaxpage.serving.wire.context import RequestLimits
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.support import support_matrix


def capabilities(
    built: Built, engine: EngineConfig, server: ServerConfig, limits: RequestLimits
) -> dict[str, Any]:
    """A JSON object. `parameters` is the table of docs/reference/support-matrix.md; the rest describes this server."""
    tokenizer = built.tokenizer
    return {
        "version": __version__,
        "model": {
            "max_model_len": built.memory.max_model_len,
            "vocab_size": built.engine.builder.vocab_size,
            "has_tokenizer": tokenizer is not None,
            "has_chat_template": bool(getattr(tokenizer, "chat_template", None)),
            "sampling_defaults": built.sampling_defaults,
            # of the page, where those above are silent
            "chat_defaults": chat_defaults(built.sampling_defaults),
        },
        "tools": server.tool_parser,
        "reasoning": server.reasoning_parser,
        "structured_outputs": tokenizer is not None,
        "speculation": _speculation(engine),
        "prefix_caching": engine.enable_prefix_caching,
        "scheduling_policy": engine.scheduling_policy,
        "unknown_fields": "refused"
        if server.strict_requests
        else "ignored, and named in x-jaxpage-ignored-fields",
        "limits": {
            "max_body_bytes": server.max_body_bytes,
            "max_queued_requests": server.max_queued_requests,
            "max_num_seqs": engine.max_num_seqs,
            "request_timeout_seconds": server.request_timeout_seconds,
            **asdict(limits),
            "max_prompt_logprobs": MAX_PROMPT_LOGPROBS,
        },
        "parameters": support_matrix(),
    }


def _speculation(engine: EngineConfig) -> dict[str, Any] | None:
    """Without the place of a drafter's files: clients see no path of this machine."""
    config = engine.speculative_config
    return None if config is None else config.model_dump(exclude_none=True, exclude={"model"})
