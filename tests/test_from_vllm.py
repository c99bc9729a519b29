"""Names of vLLM's Python interface and of its dashboard: each is there, asks for nothing, or has
one answer.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from jaxpage import BeamSearchParams, EngineConfig, SamplingParams
from jaxpage.cli.parsers import make_parser
from jaxpage.errors import ConfigError
from jaxpage.serving.metrics.metric_texts import HELP
from jaxpage.settings.engine_settings import engine_config
from jaxpage.settings.from_vllm import answer_for_keyword, answers

# The keywords of vLLM's `LLM`, some of older versions, and the fields of its `EngineArgs`, with
# their defaults where these are constants.
LLM_KEYWORDS: dict[str, Any] = {
    **{"task": "auto", "runner": "auto", "convert": "auto", "tokenizer": None},
    **{"tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": False},
    **{"allowed_local_media_path": "", "allowed_media_domains": None, "tensor_parallel_size": 1},
    **{"dtype": "auto", "quantization": None, "revision": None, "tokenizer_revision": None},
    **{"chat_template": None, "seed": 0, "gpu_memory_utilization": 0.9, "cpu_offload_gb": 0},
    **{"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1},
    **{"offload_params": None, "enforce_eager": False, "enable_return_routed_experts": False},
    **{"max_seq_len_to_capture": 8192, "disable_custom_all_reduce": False, "hf_token": None},
    **{"disable_async_output_proc": False, "hf_overrides": None, "mm_processor_kwargs": None},
    **{"pooler_config": None, "override_pooler_config": None, "structured_outputs_config": None},
    **{"profiler_config": None, "attention_config": None, "kv_cache_memory_bytes": None},
    **{"compilation_config": None, "logits_processors": None, "quantization_config": None},
}
ENGINE_ARGS = """
model served_model_name tokenizer hf_config_path runner convert task skip_tokenizer_init
enable_prompt_embeds tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains
download_dir safetensors_load_strategy load_format config_format dtype kv_cache_dtype seed
max_model_len cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size
distributed_executor_backend pipeline_parallel_size tensor_parallel_size
decode_context_parallel_size data_parallel_size data_parallel_rank data_parallel_start_rank
data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
data_parallel_backend enable_expert_parallel all2all_backend enable_dbo dbo_decode_token_threshold
dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
expert_placement_strategy num_redundant_experts eplb_window_size eplb_step_interval
eplb_log_balancedness max_parallel_loading_workers block_size enable_prefix_caching
prefix_caching_hash_algo disable_sliding_window disable_cascade_attn swap_space cpu_offload_gb
gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_partial_prefills
max_long_partial_prefills long_prefill_token_threshold max_num_seqs max_logprobs logprobs_mode
disable_log_stats aggregate_engine_logging revision code_revision rope_scaling rope_theta hf_token
hf_overrides tokenizer_revision quantization enforce_eager disable_custom_all_reduce
limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
disable_mm_preprocessor_cache mm_processor_cache_gb mm_processor_cache_type
mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend io_processor_plugin
skip_mm_profiling video_pruning_rate enable_lora max_loras max_lora_rank default_mm_loras
fully_sharded_loras max_cpu_loras lora_dtype lora_extra_vocab_size enable_lora_bias
ray_workers_use_nsight num_gpu_blocks_override num_lookahead_slots model_loader_extra_config
ignore_patterns enable_chunked_prefill disable_chunked_mm_input disable_hybrid_kv_cache_manager
structured_outputs_config reasoning_parser reasoning_parser_plugin guided_decoding_backend
guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
guided_decoding_disable_additional_properties logits_processor_pattern speculative_config
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces scheduling_policy
scheduler_cls external_parameters pooler_config override_pooler_config compilation_config worker_cls
worker_extension_cls kv_transfer_config kv_events_config generation_config enable_sleep_mode
override_generation_config model_impl override_attention_dtype calculate_kv_scales mamba_cache_dtype
mamba_ssm_cache_dtype mamba_block_size additional_config use_tqdm_on_load pt_load_map_location
enable_multimodal_encoder_data_parallel logits_processors async_scheduling kv_sharing_fast_prefill
use_v2_block_manager tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config
disable_async_output_proc max_seq_len_to_capture disable_log_requests
"""
# vLLM's `SamplingParams`, and fields that older versions had.
SAMPLING: dict[str, Any] = {
    **{"n": 1, "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False, "max_tokens": 16},
    **{"min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None},
    **{"prompt_logprob_token_ids": None, "prompt_logprob_start": None, "flat_logprobs": False},
    **{"detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"include_stop_str_in_output": False, "output_kind": None, "stream_interval": None},
    **{"skip_clone": False, "output_text_buffer_length": 0, "structured_outputs": None},
    **{"logit_bias": None, "allowed_token_ids": None, "extra_args": None, "bad_words": None},
    **{"skip_reading_prefix_cache": None, "thinking_token_budget": None},
    **{"repetition_detection": None, "routed_experts_prompt_start": 0},
    **{"trace_decode_token_ids": None, "guided_decoding": None, "logits_processors": None},
    **{"truncate_prompt_tokens": None, "use_beam_search": False, "length_penalty": 1.0},
    "early_stopping": False,
}
# What the panels of vLLM's dashboards for Grafana ask for.
DASHBOARD = """
e2e_request_latency_seconds prompt_tokens_total generation_tokens_total
time_per_output_token_seconds inter_token_latency_seconds num_requests_running num_requests_waiting
num_requests_swapped time_to_first_token_seconds gpu_cache_usage_perc cpu_cache_usage_perc
kv_cache_usage_perc request_prompt_tokens request_generation_tokens request_success_total
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_inference_time_seconds request_max_num_generation_tokens request_params_n
request_params_max_tokens num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total
iteration_tokens_total spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
request_time_per_output_token_seconds lora_requests_info engine_sleep_state
"""


@pytest.mark.parametrize("name", sorted({*LLM_KEYWORDS, *ENGINE_ARGS.split()}))
def test_every_keyword_of_an_llm_is_a_setting_or_has_an_answer(name):
    settings: Any = {name: object()}
    if name in EngineConfig.model_fields:
        return
    with pytest.raises(ConfigError) as caught:
        engine_config("demo", settings)
    answer = answer_for_keyword("settings", name)
    assert answer is not None and str(caught.value) == f"{name}: unknown setting; {answer.text}"
    assert "\n" not in str(caught.value)
    assert engine_config("demo", {name: None}) == EngineConfig(model="demo")  # type: ignore[misc]


def test_the_defaults_of_an_llm_are_taken():
    defaults: Any = {**LLM_KEYWORDS}
    assert engine_config("demo", defaults).replace() == EngineConfig(
        **{name: value for name, value in defaults.items() if name in EngineConfig.model_fields}
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"enforce_eager": True}, "every step is an executable"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"swap_space": 4}, "use swap_space_blocks N"),
        ({"enable_chunked_prefill": False},
         "prompts are computed in chunks of max_num_batched_tokens"),
        ({"cpu_offload_gb": 10}, "swap_space_blocks"),
        ({"pipeline_parallel_size": 2}, "use tensor_parallel_size N"),
        ({"served_model_name": "x"}, "jaxpage serve --served-model-name"),
        ({"num_gpu_blocks_override": 9}, "use num_blocks N"),
        ({"tokenizer_mode": "mistral"}, "the fast tokenizer of the model is used"),
        ({"max_sequences": 4}, "did you mean"),
    ],
)  # fmt: skip
def test_other_values_are_refused_with_what_to_use(settings, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        engine_config("demo", settings)


def test_fp8_has_vllms_name_too():
    assert engine_config("demo", {"kv_cache_dtype": "fp8_e4m3"}).kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="there is no fp8_e5m2"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_parameter_is_there_or_has_an_answer(name):
    if name in inspect.signature(SamplingParams).parameters:
        return
    other: Any = {name: object()}
    with pytest.raises(TypeError) as caught:
        SamplingParams(**other)
    answer = answer_for_keyword("sampling", name)
    assert answer is not None
    assert str(caught.value) == f"SamplingParams has no parameter {name!r}; {answer.text}"


def test_the_defaults_of_sampling_are_taken():
    assert SamplingParams(**SAMPLING) == SamplingParams()
    assert BeamSearchParams(2, detokenize=True) == BeamSearchParams(2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no parameter 'temperature'; parameters are"):
        BeamSearchParams(2, temperature=1.0)  # type: ignore[call-arg]
    for wrong in ({"detokenize": False}, {"guided_decoding": {}, "detokenize": 1}):
        with pytest.raises(TypeError, match="'detokenize'; the output has token_ids"):
            SamplingParams(**wrong)
    with pytest.raises(TypeError, match="use structured_outputs"):
        SamplingParams(guided_decoding={"regex": "a"})  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "words",
    [
        ["a.jsonl", "b.jsonl"],
        ["-i", "a.jsonl", "-o", "b.jsonl"],
        ["--input-file", "a.jsonl", "--output-file", "b.jsonl"],
        ["-o", "b.jsonl", "a.jsonl"],
    ],
)
def test_files_of_a_batch_are_given_as_to_vllm(words):
    arguments = make_parser().parse_args(["run-batch", *words, "-tp", "2", "--model", "demo"])
    assert (arguments.input, arguments.output, arguments.tensor_parallel_size) == (
        "a.jsonl",
        "b.jsonl",
        2,
    )


@pytest.mark.parametrize("words", [["a"], ["-i", "a"], ["a", "b", "-i", "c"], []])
def test_a_batch_needs_both_files_once(words, capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["run-batch", *words])
    assert caught.value.code == 2 and "-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "text"),
    [("-pp", "--tensor-parallel-size"), ("-dp", "router"), ("-q", "--quantization"),
     ("-O3", "executable"), ("-cc", "--max-num-seqs")],
)  # fmt: skip
def test_short_flags_have_answers(word, text, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", word, "2"])
    assert text in capsys.readouterr().err


def test_vllms_dashboard_has_its_metrics():
    known = answers("metrics")
    assert set(DASHBOARD.split()) <= known.keys()
    same = {name for name, answer in known.items() if answer.kind == "same"}
    assert same <= HELP.keys()
    named = {
        name for answer in known.values() for name in re.findall(r"jaxpage_(\w+)", answer.text)
    }
    assert named <= HELP.keys()
