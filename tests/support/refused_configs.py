"""Configs of known families that ask for what is not supported, or make no sense."""

from __future__ import annotations

from typing import Any

from jaxpage.errors import CheckpointError, UnsupportedError

_GEMMA4_YARN = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0},
}

# The error, the name in MODELS, what the error says, and the fields that are changed.
REFUSED: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
    (UnsupportedError, "llama-grouped", "hidden_act", {"hidden_act": "xielu"}),
    (UnsupportedError, "gemma-wide", "hidden_activation", {"hidden_activation": "silu"}),
    *(
        (UnsupportedError, name, "later tokens", {"use_bidirectional_attention": True})
        for name in ("gemma-wide", "gemma2-caps", "gemma3-types")
    ),
    (
        UnsupportedError,
        "gemma4-shared",
        "later tokens",
        {"use_bidirectional_attention": "all"},
    ),
    (
        UnsupportedError,
        "gemma4-shared",
        "alike in all layers of a type",
        {"per_layer_config": {"1": {"head_dim": 16}, "4": {"sliding_window": 3}}},
    ),
    (
        UnsupportedError,
        "gemma4-shared",
        "only default and proportional",
        {"rope_parameters": _GEMMA4_YARN},
    ),
    (CheckpointError, "gemma4-shared", "num_kv_shared_layers", {"num_kv_shared_layers": 4}),
    (CheckpointError, "gemma4-shared", "must divide", {"num_key_value_heads": 3}),
    (CheckpointError, "gemma4-shared", "rope_theta", {"rope_parameters": {"rope_theta": 5.0}}),
    (
        CheckpointError,
        "gemma4-shared",
        "must not be less than vocab_size",
        {"vocab_size_per_layer_input": 100},
    ),
    (UnsupportedError, "gemma3-types", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    (UnsupportedError, "opt-plain", "activation_function", {"activation_function": "prelu"}),
    (
        UnsupportedError,
        "llama-grouped",
        "quantization_config",
        {"quantization_config": {"quant_method": "gptq"}},
    ),
    (
        UnsupportedError,
        "qwen2-full",
        "per_layer_config",
        {"per_layer_config": {"0": {"head_dim": 4}}},
    ),
    (UnsupportedError, "gpt2-usual", "add_cross_attention", {"add_cross_attention": True}),
    (UnsupportedError, "gpt2-usual", "pruned_heads", {"pruned_heads": {"0": [1]}}),
    (UnsupportedError, "llama-grouped", "is_causal", {"is_causal": False}),
    (
        UnsupportedError,
        "llama-grouped",
        "'mrope'",
        {"rope_scaling": {"type": "mrope", "mrope_section": []}},
    ),
    (
        UnsupportedError,
        "qwen2-full",
        "mrope_section",
        {"rope_scaling": {"type": "default", "mrope_section": [2, 4]}},
    ),
    (
        UnsupportedError,
        "llama-grouped",
        "'proportional'",
        {"rope_parameters": {"rope_type": "proportional"}},
    ),
    (UnsupportedError, "llama-grouped", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (
        UnsupportedError,
        "llama-linear",
        "partial_rotary",
        {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
    ),
    (
        UnsupportedError,
        "mistral-yarn",
        "rope attn_factor = 0.5 is not supported; attention_factor is",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.5}},
    ),
    (
        UnsupportedError,
        "gemma3n-two-states",
        "truncate = false of a layer type",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    ),
    (
        UnsupportedError,
        "qwen3-grouped",
        "by layer type",
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
    ),
    (
        UnsupportedError,
        "qwen2-full",
        "chunked_attention",
        {"layer_types": ["full_attention", "chunked_attention"]},
    ),
    (
        UnsupportedError,
        "mistral-window",
        "layer_types",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    (
        UnsupportedError,
        "llama-grouped",
        "T5ForConditionalGeneration",
        {"architectures": ["T5ForConditionalGeneration"]},
    ),
    (CheckpointError, "llama-grouped", "architectures", {"architectures": None}),
    (CheckpointError, "llama-grouped", "model_type", {"model_type": "mistral"}),
    (CheckpointError, "llama-grouped", "num_key_value_heads", {"num_key_value_heads": 3}),
    (CheckpointError, "llama-grouped", "num_attention_heads", {"num_attention_heads": 5}),
    (CheckpointError, "llama-grouped", "head_dim 7", {"head_dim": 7}),
    (CheckpointError, "llama-grouped", "hidden_size", {"hidden_size": "48"}),
    (CheckpointError, "llama-grouped", "vocab_size", {"vocab_size": True}),
    (CheckpointError, "llama-grouped", "rms_norm_eps", {"rms_norm_eps": 0}),
    (CheckpointError, "llama-grouped", "attention_bias", {"attention_bias": 1}),
    (CheckpointError, "llama-grouped", "rope_theta", {"rope_theta": None}),
    (CheckpointError, "llama-grouped", "rope_scaling", {"rope_scaling": [4.0]}),
    (CheckpointError, "llama-grouped", "needs factor", {"rope_scaling": {"type": "linear"}}),
    (
        CheckpointError,
        "llama-grouped",
        "factor must",
        {"rope_scaling": {"type": "linear", "factor": "2"}},
    ),
    (
        CheckpointError,
        "llama-grouped",
        "make no sense",
        {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1},
    ),
    (
        CheckpointError,
        "llama-grouped",
        "low_freq_factor",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
    ),
    (
        CheckpointError,
        "llama-longrope",
        "short_factor",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}},
    ),
    (CheckpointError, "llama-linear", "contradict", {"rope_parameters": {"rope_type": "default"}}),
    (
        CheckpointError,
        "gpt2-usual",
        "n_embd = 48 and hidden_size = 44 contradict",
        {"hidden_size": 44},
    ),
    (CheckpointError, "mistral-window", "sliding_window", {"sliding_window": 0}),
    (CheckpointError, "qwen2-layer-types", "layer_types", {"layer_types": ["full_attention"]}),
    (CheckpointError, "qwen2-layer-types", "sliding_attention", {"use_sliding_window": False}),
    (UnsupportedError, "qwen3-5-mixed", "hidden_act", {"hidden_act": "gelu"}),
    (UnsupportedError, "qwen3-next-mixed", "hidden_act", {"hidden_act": "gelu"}),
    (
        UnsupportedError,
        "qwen3-5-mixed",
        "sliding_attention",
        {"layer_types": ["sliding_attention"] * 3},
    ),
    (CheckpointError, "qwen3-5-mixed", "linear_num_key_heads", {"linear_num_key_heads": 3}),
    *(
        (kind, f"granitemoehybrid-{name}", field, {field: value})
        for kind, name, field, value in (
            (UnsupportedError, "mixed", "position_embedding_type", "alibi"),
            (UnsupportedError, "mixed", "layer_types", ["sliding_attention"] * 3),
            (CheckpointError, "mixed", "mamba_n_heads", 7),
            (CheckpointError, "mixed", "mamba_d_head", 5),
            (CheckpointError, "mixed", "mamba_n_groups", 3),
            (CheckpointError, "dense", "time_step_limit", [2.0, 1.0]),
        )
    ),
    (CheckpointError, "bamba-mixed", "attn_layer_indices", {"attn_layer_indices": 1}),
    (CheckpointError, "falcon-h1-plain", "mamba_d_ssm", {"mamba_d_ssm": 0}),
    (CheckpointError, "falcon-h1-plain", "ssm_multipliers", {"ssm_multipliers": [1.0] * 4}),
    *(
        (kind, "nemotron-h-mixed", says, {"hybrid_override_pattern": None, **fields})
        for kind, says, fields in (
            (UnsupportedError, "layers_block_type has layers X,", {"layers_block_type": ["X"]}),
            (CheckpointError, "layers_block_type must name", {"layers_block_type": ["mlp", "moe"]}),
            (
                UnsupportedError,
                r"hybrid_override_pattern = 'MX' has layers X, which",
                {"hybrid_override_pattern": "MX"},
            ),
            *(
                (
                    CheckpointError,
                    "hybrid_override_pattern = .* must",
                    {"hybrid_override_pattern": x},
                )
                for x in (5, "", "--", "EE")
            ),
        )
    ),
    (CheckpointError, "nemotron-h-mixed", "n_groups", {"n_groups": 3}),
    (UnsupportedError, "nemotron-h-experts", "n_shared_experts", {"n_shared_experts": 2}),
    (CheckpointError, "nemotron-h-experts", "n_group", {"n_group": 3}),
    (CheckpointError, "nemotron-h-latent", "moe_latent_size", {"moe_latent_size": 0}),
    (CheckpointError, "jamba-mixed", "attn_layer_offset", {"attn_layer_offset": 3}),
    (CheckpointError, "jamba-mixed", "expert_layer_offset", {"expert_layer_offset": 2}),
    (CheckpointError, "jamba-mixed", "mamba_dt_rank", {"mamba_dt_rank": "half"}),
    (UnsupportedError, "jamba-mixed", "sliding_window", {"sliding_window": 7}),
    *(
        (kind, "zamba2-turns", field, {field: value})
        for kind, field, value in (
            *((CheckpointError, field, 3) for field in ("n_mamba_heads", "mamba_ngroups")),
            *((CheckpointError, "num_attention_heads", 3), (CheckpointError, "adapter_rank", 0)),
            *((CheckpointError, "num_key_value_heads", 2), (UnsupportedError, "head_dim", 12)),
            *((UnsupportedError, "mamba_headdim", 8), (UnsupportedError, "hybrid_layer_ids", [1])),
            *((UnsupportedError, "use_long_context", True),),
            *((UnsupportedError, "use_shared_mlp_adapter", False),),
            *((UnsupportedError, "tie_word_embeddings", False),),
            *((CheckpointError, "time_step_limit", [0.2, 0.1]),),
            (UnsupportedError, "layers_block_type", ["mamba", "hybrid", "full_attention", "mamba"]),
        )
    ),
    (CheckpointError, "mamba2-tied", "num_heads", {"num_heads": 6}),
    (CheckpointError, "mamba-tied", "time_step_rank", {"time_step_rank": "half"}),
    (UnsupportedError, "olmo-hybrid-mixed", "hidden_act", {"hidden_act": "gelu"}),
    (UnsupportedError, "olmo-hybrid-mixed", "sliding", {"layer_types": ["sliding_attention"] * 3}),
    (CheckpointError, "olmo-hybrid-mixed", "linear_num_key_heads", {"linear_num_key_heads": 3}),
    *(
        (kind, "kimi-linear-mixed", field, {field: value})
        for kind, field, value in (
            *((UnsupportedError, "hidden_act", "gelu"), (UnsupportedError, "mla_use_nope", False)),
            *((UnsupportedError, "layer_types", ["sliding_attention"] * 3),),
            *((UnsupportedError, "tie_word_embeddings", True),),
            *((CheckpointError, "linear_attn_config", [1]),),
            (CheckpointError, "linear_attn_config", {"full_attn_layers": [1], "kda_layers": [3]}),
        )
    ),
    (CheckpointError, "lfm2-plain", "conv_L_cache", {"conv_L_cache": 0}),
    (CheckpointError, "lfm2-moe-mixed", "layer_types", {"layer_types": None}),
    (CheckpointError, "lfm2-mixed", "full_attn_idxs", {"full_attn_idxs": 1}),
    (
        UnsupportedError,
        "lfm3-mixed",
        "only default and proportional",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "linear", "factor": 2.0},
            }
        },
    ),
    (CheckpointError, "lfm3-mixed", "object for sliding_", {"rope_parameters": {"rope_theta": 1}}),
    (CheckpointError, "lfm3-mixed", "head_dim = 7", {"head_dim": 7}),
    (UnsupportedError, "deepseek-v2-greedy", "norm_topk_prob", {"norm_topk_prob": True}),
    (UnsupportedError, "deepseek-v2-greedy", "topk_method", {"topk_method": "noaux_tc"}),
    (UnsupportedError, "deepseek-v3-groups", "moe_layer_freq", {"moe_layer_freq": 2}),
    (CheckpointError, "deepseek-v3-groups", "n_group", {"n_group": 3}),
    (CheckpointError, "deepseek-v3-groups", "topk_group", {"topk_group": 1}),
    (CheckpointError, "glm4-moe-lite-mixed", "mlp_layer_types", {"mlp_layer_types": ["dense"]}),
    (CheckpointError, "deepseek-v32-groups", "q_lora_rank", {"q_lora_rank": None}),
    (CheckpointError, "deepseek-v32-groups", "index_topk", {"index_topk": 0}),
    (
        UnsupportedError,
        "deepseek-v32-types",
        "layer_types",
        {"layer_types": ["full_attention"] * 2},
    ),
    (UnsupportedError, "glm-moe-dsa-shared", "rope_interleave", {"rope_interleave": False}),
    (UnsupportedError, "glm-moe-dsa-shared", "num_experts", {"num_experts": 4}),
    (UnsupportedError, "glm-moe-dsa-groups", "scoring_func", {"scoring_func": "softmax"}),
    (UnsupportedError, "glm-moe-dsa-groups", "topk_method", {"topk_method": "greedy"}),
    (CheckpointError, "axk1-types", "mlp_layer_types", {"mlp_layer_types": ["dense", "moe"]}),
    (UnsupportedError, "axk1-groups", "moe_layer_freq", {"moe_layer_freq": 2}),
    (
        CheckpointError,
        "mistral4-growth",
        "partial_rotary_factor",
        {"rope_parameters": {"type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.25}},
    ),
    (UnsupportedError, "solar-open-groups", "use_qk_norm", {"use_qk_norm": True}),
    (UnsupportedError, "exaone-moe-windows", "pattern", {"sliding_window_pattern": "LLG"}),
    (CheckpointError, "exaone-moe-types", "mlp_layer_types", {"mlp_layer_types": ["dense"]}),
    (UnsupportedError, "afmoe-gates", "score_func", {"score_func": "softmax"}),
    *(
        (kind, f"mimo-v2-flash-{name}", field, {field: value})
        for kind, name, field, value in (
            (CheckpointError, "windows", "num_key_value_heads", 4),
            (UnsupportedError, "windows", "v_head_dim", 20),
            (UnsupportedError, "windows", "hybrid_layer_pattern", [0, 1, 0]),
            (UnsupportedError, "wide-values", "rope_theta", 10_000),
        )
    ),
    (UnsupportedError, "mellum-windows", "rope_scaling", {"rope_scaling": {"type": "default"}}),
    *(
        (UnsupportedError, "mpt-scaled", field, {"attn_config": {field: value}})
        for field, value in (("qk_ln", True), ("alibi", False), ("attn_type", "multiquery"))
    ),
    (CheckpointError, "mpt-scaled", "attn_config", {"attn_config": [True]}),
    (UnsupportedError, "mpt-scaled", "logit_scale", {"logit_scale": 0.5}),
    (
        UnsupportedError,
        "bloom-plain",
        "apply_residual",
        {"apply_residual_connection_post_layernorm": True},
    ),
    *(
        (CheckpointError, "gemma3n-shared", field, {field: value})
        for field, value in (
            *(("altup_active_idx", 4), ("activation_sparsity_pattern", [0.5, 1.0, 0, 0, 0])),
            *(("intermediate_size", [80, 72]), ("num_kv_shared_layers", 4)),
        )
    ),
    (
        UnsupportedError,
        "llama4-chunks",
        "sliding_attention",
        {"layer_types": ["sliding_attention"] * 4},
    ),
    *(
        (CheckpointError, "llama4-chunks", field, {field: value})
        for field, value in (
            *(("attention_chunk_size", None), ("moe_layers", 1), ("no_rope_layers", [1])),
            *(("attn_temperature_tuning", "yes"), ("floor_scale", 0), ("attn_scale", -1)),
        )
    ),
    (UnsupportedError, "falcon-grouped", "parallel_attn", {"parallel_attn": False}),
    (CheckpointError, "falcon-grouped", "num_kv_heads", {"num_kv_heads": 3}),
    (CheckpointError, "opt-plain", "hidden_size", {"hidden_size": 33}),
    (UnsupportedError, "gpt-neox-parallel", "rope_theta", {"rope_theta": 500.0}),
    (UnsupportedError, "gpt-neox-parallel", "head_dim", {"head_dim": 8}),
    (
        UnsupportedError,
        "exaone4-windows",
        "sliding_window_pattern",
        {"sliding_window_pattern": "LLG"},
    ),
    (UnsupportedError, "ernie4-5-moe-shared", "moe_norm_min", {"moe_norm_min": 0.5}),
    (CheckpointError, "hunyuan-v1-moe-shared", "moe_topk", {"moe_topk": [1, 2]}),
    (
        CheckpointError,
        "hunyuan-v1-dense-alpha",
        "alpha",
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": "50"}},
    ),
    (UnsupportedError, "helium-interleaved", "head_dim", {"head_dim": 16}),
    (UnsupportedError, "minimax-m2-norms", "scoring_func", {"scoring_func": "softmax"}),
    (UnsupportedError, "phimoe-biases", "num_experts_per_tok", {"num_experts_per_tok": 3}),
    (
        CheckpointError,
        "phimoe-longrope",
        "short_mscale",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    (CheckpointError, "gptj-plain", "rotary_dim", {"rotary_dim": 7}),
    *(
        (CheckpointError, "granite-swa-bases", "layer_rope_theta", {"layer_rope_theta": thetas})
        for thetas in ([500.0], [0, 500.0, -1.0], [0, True, 500.0], 500.0)
    ),
    (UnsupportedError, "gpt-neo-plain", "attention_types", {"attention_types": [[["global"], 5]]}),
]
