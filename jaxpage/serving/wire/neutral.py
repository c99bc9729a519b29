"""Lists the values with which a field asks for nothing, for each kind of request.

Clients and routers send their own defaults along. A field with such a value counts as left out, and
so does a field that is null. With any other value a field of the endpoint is read as usual, and a
field that the endpoint does not honour is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from jaxpage.serving.wire.request_fields import (
    AssistantMessage,
    CalledFunction,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    ToolCall,
)
from jaxpage.serving.wire.translated_fields import (
    CountTokensRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaShowRequest,
    ResponsesMessage,
    ResponsesPart,
    ResponsesReasoning,
    ResponsesRequest,
    TextBlock,
)

Values = tuple[Any, ...]  # JSON values; if the tuple is empty, only null asks for nothing

_NOWHERE_HONOURED: dict[str, Values] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "ec_transfer_params": (),
    "escape_special_tokens": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "sampling_seed": (),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "session_params": (),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
_OF_CHATS: dict[str, Values] = {"reasoning_effort": (), "store": (False,), "verbosity": ()}
_NOT_OF_CHATS: dict[str, Values] = {**_NOWHERE_HONOURED, **_OF_CHATS}
_OF_GENERATION: dict[str, Values] = {
    **_NOWHERE_HONOURED,
    "best_of": (1,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "top_logprobs": (0,),
}
_OF_MESSAGES: dict[str, Values] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"},),
    "tools": ([],),
}
_OF_OLLAMA: dict[str, Values] = {
    "format": ("",),
    "images": ([],),
    "logprobs": (False,),
    "options": ({},),
    "shift": (False,),
    "tools": ([],),
    "top_logprobs": (0,),
    # An input that is too long is refused, whatever this says.
    "truncate": (False, True),
}
NEUTRAL: dict[type[BaseModel], Mapping[str, Values]] = {
    CompletionRequest: {
        **_OF_GENERATION,
        **_OF_CHATS,
        "add_generation_prompt": (False,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "logprobs": (False,),
        "max_completion_tokens": (),
        "messages": (),
        "parallel_tool_calls": (True, False),
        "tool_choice": ("none",),
        "tools": ([],),
    },
    ChatCompletionRequest: {
        **_OF_GENERATION,
        "echo": (False,),
        "prompt": (),
        "store": (False,),
    },
    EmbeddingRequest: _NOT_OF_CHATS,
    ScoreRequest: _NOT_OF_CHATS,
    RerankRequest: {
        **_NOT_OF_CHATS,
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "priority": (0,),
        "rank_fields": (["text"],),
        "truncate": (),
        "truncate_prompt_tokens": (),
        "truncation": (False,),
    },
    TokenizeRequest: _NOT_OF_CHATS,
    TokenizeChatRequest: {**_NOWHERE_HONOURED, "store": (False,)},
    DetokenizeRequest: _NOT_OF_CHATS,
    AssistantMessage: {"annotations": ([],)},
    ResponsesRequest: {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "store": (False, True),  # routers send true; the response answers false
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    MessagesRequest: _OF_MESSAGES,
    CountTokensRequest: _OF_MESSAGES,
    OllamaShowRequest: {"options": ({},), "system": ("",), "template": ("",)},
    OllamaChatRequest: _OF_OLLAMA,
    OllamaEmbedRequest: {"truncate": (False, True)},
    OllamaEmbeddingsRequest: {},
    OllamaGenerateRequest: {
        **_OF_OLLAMA,
        "context": ([],),
        "height": (),
        "raw": (False,),
        "steps": (),
        "suffix": ("",),
        "system": ("",),
        "template": ("",),
        "width": (),
    },
    OllamaOptions: {
        "logits_all": (False,),
        "embedding_only": (False,),
        "mirostat": (0,),
        # Ollama's own defaults, which matter only with mirostat.
        "mirostat_eta": (0.1,),
        "mirostat_tau": (5,),
        "penalize_newline": (True,),
        "tfs_z": (1,),
        "typical_p": (1,),
        "vocab_only": (False,),
    },
}
# These fields ask for nothing, whatever their value is: labels of a request, and the fields that
# clients add to an answer before they send it back.
LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "session_id"})
ADDED: dict[type[BaseModel], frozenset[str]] = {
    AssistantMessage: frozenset({"parsed"}),
    ToolCall: frozenset({"index"}),
    CalledFunction: frozenset({"parsed_arguments"}),
    ResponsesMessage: frozenset({"id", "phase", "status"}),
    ResponsesPart: frozenset({"annotations", "logprobs", "parsed"}),
    ResponsesReasoning: frozenset({"encrypted_content", "id", "status", "summary"}),
    TextBlock: frozenset({"citations", "parsed_output"}),
    OllamaMessage: frozenset({"tool_name"}),
}


def is_neutral(model: type[BaseModel], name: str, value: Any) -> bool:
    """Returns whether a field of a request, or of a part of one, asks for nothing.

    A number is not a truth value here: 0 is not false.

    Args:
        model: The model that reads the request or the part.
        name: The name of the field.
        value: The value that the client sent.
    """
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(model, {}).get(name, ())
    )
