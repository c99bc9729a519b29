"""Lists the fields of requests that are no parameters of the engine, one a line.

Clients and routers send their own defaults along. A field with a value that asks for nothing counts
as left out, and so does a field that is null. With any other value a field of the endpoint is read
as usual, and one that the endpoint does not honour is refused by its name. The types of the fields
that are honoured are in request_fields.py, and the parameters in settings/field_table.py.
"""

from __future__ import annotations

from jaxpage.settings.field_table import Field

# Completions and chats refuse these where they do not honour them.
OF_GENERATION = (
    Field("add_generation_prompt", elsewhere=(False,)),
    Field("chat_template_kwargs", neutral=({},)),
    Field("continue_final_message", neutral=(False,)),
    Field("echo", neutral=(False,)),
    Field("max_completion_tokens"),
    Field("messages"),
    Field("parallel_tool_calls", elsewhere=(True, False)),
    Field("prompt"),
    Field("tool_choice", elsewhere=("none",)),
    Field("tools", elsewhere=([],), beams=([],)),
)
# All requests refuse these where they do not honour them.
OF_CHATS = (
    Field("reasoning", neutral=({},)),
    Field("reasoning_effort"),
    Field("receipt", neutral=(False,)),
    Field("store", neutral=(False,)),
    Field("thinking", elsewhere=({"type": "disabled"},)),
    Field("verbosity"),
)
# No request honours these.
REFUSED = (
    Field("audio"),
    Field("chat_template"),
    Field("documents", neutral=([],)),
    Field("ebnf"),
    Field("ec_transfer_params"),
    Field("escape_special_tokens", neutral=(False,)),
    Field("function_call", neutral=("none", "auto")),
    Field("functions", neutral=([],)),
    Field("guided_choice"),
    Field("guided_decoding_backend"),
    Field("guided_grammar"),
    Field("guided_json"),
    Field("guided_regex"),
    Field("guided_whitespace_pattern"),
    Field("include_reasoning", neutral=(True,)),
    Field("json_schema"),
    Field("kv_transfer_params"),
    Field("logits_processors", neutral=([],)),
    Field("logprob_token_ids"),
    Field("lora"),
    Field("lora_path"),
    Field("lora_request"),
    Field("media_io_kwargs", neutral=({},)),
    Field("mm_payload"),
    Field("mm_processor_kwargs", neutral=({},)),
    Field("modalities", neutral=(["text"],)),
    Field("no_stop_trim", neutral=(False,)),
    Field("prediction"),
    Field("prompt_embeds"),
    Field("regex"),
    Field("repetition_detection"),
    Field("return_mm_kwargs", neutral=(False,)),
    Field("return_prompt_text", neutral=(False,)),
    Field("return_token_offsets", neutral=(False,)),
    Field("return_tokens_as_token_ids", neutral=(False,)),
    Field("return_weight_versions", neutral=(False,)),
    Field("routed_experts_prompt_start", neutral=(0,)),
    Field("sampling_seed"),
    Field("separate_reasoning", neutral=(True,)),
    Field("service_tier", neutral=("auto", "default")),
    Field("session_params"),
    Field("spaces_between_special_tokens", neutral=(True,)),
    Field("stream_reasoning", neutral=(True,)),
    Field("suffix", neutral=("",)),
    Field("truncate_prompt_tokens"),
    Field("truncation_side"),
    Field("vllm_xargs", neutral=({},)),
    Field("watermarking", neutral=(False,)),
    Field("web_search_options"),
)
# A request to /v1/generate refuses these.
OF_ROLLOUTS = (
    Field("add_special_tokens", neutral=(False,)),
    Field("features"),
    Field("response_format", neutral=({"type": "text"},)),
    Field("return_token_ids", neutral=(True,)),
    Field("sampling_params"),
    Field("stream", neutral=(False,)),
    Field("stream_options", neutral=({},)),
    Field("token_ids"),
    Field("use_beam_search", neutral=(False,)),
)
OF_RANKINGS = (
    Field("max_chunks_per_doc"),
    Field("max_tokens_per_doc"),
    Field("priority", neutral=(0,)),
    Field("rank_fields", neutral=(["text"],)),
)
# Requests for vectors and for scores of pairs have these names of truncation, too.
OF_TRUNCATION = (
    Field("truncate", neutral=(False,)),
    Field("truncation", neutral=(False,)),
)
# A list in one of these is the token ids of a prompt, or several prompts.
PROMPTS = frozenset({"prompt", "prompt_token_ids", "continuation", "input"})
# A request with one of these may have prompts that are too long, which are cut.
TRUNCATING = frozenset({"truncate_prompt_tokens", "truncate", "truncation"})
# These ask for nothing, whatever their value is.
LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "session_id"})
