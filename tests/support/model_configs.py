"""Says what config.json says of small models, several shapes per family: of those that transformers
makes for tests, and of random ones.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxpage.models.multimodal import MULTIMODAL
from tests.support.family_names import FAMILY_OF
from tests.support.model_forms import SIZES, forms_of_registry

_DIMENSIONS = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}
_LONG = {
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}
_BY_TYPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **_YARN},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_LATENT = {
    **{
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
    },
    **{
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
    },
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 20},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2}
_INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
_VISION = {
    **{
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "head_dim": 16,
        "embed_dim": 32,
        "deepstack_visual_indexes": [0],
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "patch_size": 4,
        "out_hidden_size": 48,
    },
    **{"num_position_embeddings": 16},
}
_FALCON = {"hidden_size": 48, "num_attention_heads": 4}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 7}

_GEMMA4 = {
    **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5},
    **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "tie_word_embeddings": True},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 140},
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention"),
    ],
}

_GEMMA3N = {
    **{"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5, "num_kv_shared_layers": 2},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 100, "laurel_rank": 8},
    "layer_types": _GEMMA4["layer_types"],
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.3, 0.0],
    "intermediate_size": [80, 72, 64, 80, 72],
}

# name: (model type, what config.json says beyond _DIMENSIONS or the entry of SIZES). More:
# `model_forms`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("llama", {}),
    "llama-tied-bias": (
        "llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "llama-wide-heads": (
        "llama",
        {
            "head_dim": 20,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
            "vocab_size": 97,
        },
    ),
    "llama-llama3": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}, "rope_theta": 500.0},
    ),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}},
    ),
    "llama-longrope": (
        "llama",
        {
            "rope_scaling": {"rope_type": "longrope", **_LONG},
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 16, "num_hidden_layers": 3}),
    "mistral-yarn": (
        "mistral",
        {"sliding_window": 12, "rope_parameters": {"rope_type": "yarn", **_YARN}},
    ),
    "qwen2-full": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-upper-windows": (
        "qwen2",
        {**_QWEN_WINDOWS, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {**_QWEN_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2-yarn": ("qwen2", {"rope_scaling": {"type": "yarn", **_YARN}, "rope_theta": 1000.0}),
    "qwen3-grouped": ("qwen3", {"head_dim": 20, "rope_theta": 1000000}),
    "qwen3-tied-bias": (
        "qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-windows": (
        "qwen3",
        {
            "head_dim": 12,
            **_QWEN_WINDOWS,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-5-mixed": (
        "qwen3_5_text",
        {
            **{
                "head_dim": 24,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            **{
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 12,
                "linear_value_head_dim": 20,
            },
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                **{"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            },
        },
    ),
    "qwen3-5-short": (
        "qwen3_5_text",
        {
            **{
                "head_dim": 16,
                "full_attention_interval": 2,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            **{
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 3,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 8,
            },
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {
            **{
                "head_dim": 16,
                "full_attention_interval": 2,
                "num_experts": 6,
                "num_experts_per_tok": 2,
            },
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, **_DELTA},
        },
    ),
    "qwen3-5-images": (
        "qwen3_5",
        {**{"head_dim": 16, "full_attention_interval": 2, "tie_word_embeddings": True}, **_DELTA},
    ),
    "qwen3-5-moe-images": (
        "qwen3_5_moe",
        {
            **{
                "head_dim": 16,
                "full_attention_interval": 2,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, **_DELTA},
        },
    ),
    "qwen3-next-mixed": (
        "qwen3_next",
        {
            **{
                "head_dim": 16,
                "full_attention_interval": 3,
                "num_experts": 6,
                "num_experts_per_tok": 2,
            },
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, **_DELTA},
            **{"num_hidden_layers": 3, "mlp_only_layers": [1]},
        },
    ),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": None}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                **_LONG,
                "original_max_position_embeddings": 64,
            },
            "sliding_window": 9,
        },
    ),
    "smollm3-nope": ("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3}),
    "granite-factors": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoehybrid-mixed": (
        "granitemoehybrid",
        {
            **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], **_MAMBA},
            "hidden_size": 64,
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0},
            **{"residual_multiplier": 0.6, "position_embedding_type": "nope"},
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **{"layer_types": ["linear_attention", "full_attention"], **_MAMBA},
            **{"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2},
            **{"mamba_n_groups": 1, "time_step_limit": [0.1, 1.5], "tie_word_embeddings": True},
            **{"num_local_experts": 0, "shared_intermediate_size": 72},
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1-factors": (
        "falcon_h1",
        {
            **{"hidden_size": 64, "mamba_d_ssm": 96, "projectors_bias": True, **_MAMBA},
            **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "key_multiplier": 0.7},
            **{"mlp_multipliers": [0.8, 1.2], "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.7]},
            **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9},
            **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.6},
        },
    ),
    "falcon-h1-first": (
        "falcon_h1",
        {**{"mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_proj_bias": True}, **_MAMBA},
    ),
    "falcon-h1-plain": ("falcon_h1", {"num_hidden_layers": 1, "mamba_d_ssm": 96, **_MAMBA}),
    "nemotron-h-latent": (
        "nemotron_h",
        {
            "layers_block_type": ["moe", "full_attention", "linear_attention", "mlp"],
            **{"num_hidden_layers": 4, "hidden_size": 64, "mlp_bias": True},
            **{"use_bias": True, "head_dim": 16},
            **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12},
            **{"num_local_experts": 6, "moe_latent_size": 32, "norm_topk_prob": False},
            **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
        },
    ),
    "nemotron-h-mixed": (
        "nemotron_h",
        {
            **{"hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5, "hidden_size": 64},
            **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12},
            **{"head_dim": 16, "use_bias": True, "mlp_bias": True, "time_step_min": 0.3},
        },
    ),
    "nemotron-h-experts": (
        "nemotron_h",
        {
            **{"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "hidden_size": 64},
            **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12},
            **{"head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
            **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
            **{"routed_scaling_factor": 2.5, "num_experts_per_tok": 3},
        },
    ),
    "mamba2-tied": (
        "mamba2",
        {
            **{"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "hidden_size": 64},
            **{"use_bias": True, "time_step_limit": [0.1, 1.5], "tie_word_embeddings": True},
        },
    ),
    "bamba-mixed": (
        "bamba",
        {
            **{"num_hidden_layers": 3, "attn_layer_indices": [1], "hidden_size": 64, **_MAMBA},
            **{"mlp_bias": True, "attention_bias": True, "rope_theta": 500.0},
        },
    ),
    "lfm2-mixed": (
        "lfm2",
        {
            **{"num_hidden_layers": 3, "full_attn_idxs": [1], "conv_bias": True, "hidden_size": 64},
            **{"block_multiple_of": 12, "block_ffn_dim_multiplier": 1.5, "block_ff_dim": 90},
        },
    ),
    "lfm2-plain": (
        "lfm2",
        {
            **{"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False},
            **{"conv_L_cache": 2, "tie_embedding": False, "rope_theta": 500.0},
        },
    ),
    "arcee-grouped": ("arcee", {}),
    "arcee-biases": (
        "arcee",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "hidden_act": "gelu",
        },
    ),
    "starcoder2-window": ("starcoder2", {"sliding_window": 7}),
    "starcoder2-plain": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "norm_epsilon": 1e-3},
    ),
    "stablelm-parallel": (
        "stablelm",
        {
            "hidden_size": 64,
            "partial_rotary_factor": 0.5,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm-quarter": ("stablelm", {"hidden_size": 64, "use_qkv_bias": True}),
    "olmo-plain-norms": ("olmo", {"num_hidden_layers": 3}),
    "olmo-limits": ("olmo", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2-grouped": ("olmo2", {"num_hidden_layers": 3}),
    "olmo3-windows": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 7, "rope_parameters": _BY_TYPE},
    ),
    "olmo3-old-rope": (
        "olmo3",
        {
            "rope_theta": 500.0,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3-growth": (
        "ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "llama_4_scaling_beta": 0.4,
                "rope_theta": 500.0,
                **_YARN,
            },
        },
    ),
    "ministral3-old-rope": (
        "ministral3",
        {"head_dim": 12, "rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.4, **_YARN}},
    ),
    "ministral3-no-rope": ("ministral3", {"head_dim": 12}),
    "glm-interleaved": ("glm", {"head_dim": 16}),
    "glm-no-bias": ("glm", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4-interleaved": ("glm4", {"head_dim": 16}),
    "cohere-norms": (
        "cohere",
        {
            "logit_scale": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 3,
        },
    ),
    "cohere-parallel": ("cohere", {"logit_scale": 0.5}),
    "cohere2-parallel": (
        "cohere2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "logit_scale": 0.5,
        },
    ),
    "gemma-wide": ("gemma", {"head_dim": 20}),
    "gemma-old-gelu": (
        "gemma",
        {"hidden_act": "gelu", "hidden_activation": None, "num_hidden_layers": 1},
    ),
    "gemma-silu": ("gemma", {"hidden_act": "silu", "num_hidden_layers": 1}),
    "gemma2-caps": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3-types": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma3-old-rope": (
        "gemma3_text",
        {"head_dim": 16, "rope_theta": 500.0, "sliding_window_pattern": 2},
    ),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            **{
                "head_dim": 12,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            **{"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        },
    ),
    "qwen2-moe-shared": (
        "qwen2_moe",
        {
            **{"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"shared_expert_intermediate_size": 40, "use_sliding_window": False},
        },
    ),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "olmoe-many": ("olmoe", {"num_experts": 16, "num_experts_per_tok": 4, "clip_qkv": 0.7}),
    "gpt-oss-windows": (
        "gpt_oss",
        {
            **{
                "head_dim": 16,
                "num_hidden_layers": 3,
                "sliding_window": 7,
                "swiglu_limit": 1.5,
                "intermediate_size": 64,
            },
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "hidden_size": 64},
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "truncate": False,
                **_YARN,
            },
        },
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            **{
                **_LATENT,
                "q_lora_rank": None,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 4,
            },
            **{
                "topk_group": 2,
                "topk_method": "group_limited_greedy",
                "routed_scaling_factor": 3.0,
            },
            "rope_scaling": {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3, **_YARN},
        },
    ),
    "deepseek-v2-greedy": (
        "deepseek_v2",
        {
            **_LATENT,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek-v3-groups": (
        "deepseek_v3",
        {
            **{
                **_LATENT,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
            },
            "rope_parameters": {
                "rope_type": "yarn",
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "rope_theta": 500.0,
                **_YARN,
            },
        },
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {
            **{
                **_LATENT,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
            },
            **{"rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 2},
        },
    ),
    "glm4-moe-lite-mixed": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
            **{
                "n_routed_experts": 5,
                "num_experts_per_tok": 2,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            },
        },
    ),
    "falcon-grouped": (
        "falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_hidden_layers": 3,
            "bias": True,
        },
    ),
    "falcon-multi-query": ("falcon", {**_FALCON, "ffn_hidden_size": 80}),
    "falcon-one-norm": (
        "falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "falcon-in-sequence": (
        "falcon",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    "falcon-alibi": (
        "falcon",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "opt-norm-first": (
        "opt",
        {"hidden_size": 48, "ffn_dim": 96, "num_attention_heads": 4, "vocab_size": 131},
    ),
    "opt-350m-form": (
        "opt",
        {
            "hidden_size": 48,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "ffn_dim": 64,
            "num_attention_heads": 3,
            "vocab_size": 101,
        },
    ),
    "opt-plain": (
        "opt",
        {
            "hidden_size": 32,
            "ffn_dim": 128,
            "num_attention_heads": 2,
            "vocab_size": 131,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "opt-no-final-norm": (
        "opt",
        {
            "hidden_size": 40,
            "ffn_dim": 64,
            "num_attention_heads": 5,
            "vocab_size": 131,
            "_remove_final_layer_norm": True,
        },
    ),
    "gpt2-usual": ("gpt2", {"n_embd": 48, "n_head": 4}),
    "gpt2-layer-scales": (
        "gpt2",
        {
            "n_embd": 32,
            "n_head": 2,
            "n_layer": 3,
            "n_inner": 72,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gpt2-unscaled": (
        "gpt2",
        {
            "n_embd": 40,
            "n_head": 5,
            "scale_attn_weights": False,
            "reorder_and_upcast_attn": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "llama4-chunks": (
        "llama4_text",
        {
            **{"head_dim": 16, "intermediate_size_mlp": 72, "num_local_experts": 8},
            **{"num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "num_hidden_layers": 4},
            **{"attention_chunk_size": 7, "floor_scale": 12, "attn_scale": 0.4},
            "rope_scaling": {"rope_type": "llama3", **_LLAMA3},
        },
    ),
    "llama4-plain": (
        "llama4_text",
        {
            **{"head_dim": 12, "intermediate_size_mlp": 72, "num_local_experts": 4},
            **{"moe_layers": [0], "use_qk_norm": False, "attention_bias": True},
            **{"attn_temperature_tuning": False, "no_rope_layers": [0, 1]},
            **{"attention_chunk_size": 16, "tie_word_embeddings": True},
        },
    ),
    "gemma3n-shared": ("gemma3n_text", _GEMMA3N),
    "gemma3n-two-states": (
        "gemma3n_text",
        {
            **{"head_dim": 12, "num_kv_shared_layers": 0, "sliding_window": 7},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 140},
            **{"altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False},
            **{"attention_bias": True, "final_logit_softcapping": 20.0, "laurel_rank": 6},
            **{
                "tie_word_embeddings": False,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        },
    ),
    # The text models of checkpoints that take images; sections of a rotation turn by other axes.
    "qwen2-vl": ("qwen2_vl", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}),
    "qwen2-5-vl": (
        "qwen2_5_vl",
        {
            **{**_QWEN_WINDOWS, "max_window_layers": 1, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "yarn", "mrope_section": [2, 2, 2], **_YARN},
        },
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"head_dim": 16, "rope_parameters": {**_INTERLEAVED, "rope_type": "default"}},
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            **{"head_dim": 16, "rope_parameters": {**_INTERLEAVED, "rope_theta": 1000.0}},
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
            "mlp_only_layers": [0],
        },
    ),
    "gemma3-images": (
        "gemma3",
        {
            **{"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2},
            **{"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma4-shared": ("gemma4_text", _GEMMA4),
    "gemma4-keys-are-values": (
        "gemma4_text",
        {
            **{"head_dim": 8, "global_head_dim": 20, "sliding_window": 7},
            **{"num_kv_shared_layers": 0, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            **{"moe_intermediate_size": 24, "final_logit_softcapping": 20.0},
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma3n-images": ("gemma3n", {**_GEMMA3N, "tie_word_embeddings": True}),
    "gemma4-images": ("gemma4", {**_GEMMA4, "attention_bias": True, "pad_token_id": 0}),
    "llama4-images": (
        "llama4",
        {
            **{"head_dim": 16, "intermediate_size_mlp": 72, "num_local_experts": 4},
            **{"attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 12},
        },
    ),
    "exaone4-5-images": (
        "exaone4_5",
        {
            **{"model_type": "exaone4", "head_dim": 16, "sliding_window": 7},
            **{"num_hidden_layers": 3, "sliding_window_pattern": 3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **_LLAMA3},
        },
    ),
    "smolvlm-images": ("smolvlm", {"model_type": "llama", "head_dim": 16}),
    "idefics3-images": ("idefics3", {"model_type": "llama", "tie_word_embeddings": True}),
    "mistral3-images": ("mistral3", {"model_type": "mistral", "head_dim": 16}),
    "mistral3-latents": (
        "mistral3",
        {
            **{**_LATENT, "model_type": "mistral4", "qk_nope_head_dim": 16},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "yarn", **_YARN, "llama_4_scaling_beta": 0.3},
        },
    ),
    "mistral3-growth": (
        "mistral3",
        {
            **{"model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "yarn", **_YARN, "llama_4_scaling_beta": 0.3},
        },
    ),
}

MODELS |= forms_of_registry(MODELS)

_ARCHITECTURES = {
    **{
        module: architecture
        for architecture, module in FAMILY_OF.items()
        if architecture not in MULTIMODAL
    },
    # Families whose model type is not the name of their module.
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
}


# Ids for classes that take no null: only the one of the end could change a text, and no vocabulary
# has it.
_IDS = {"bos_token_id": 0, "eos_token_id": 1_000_000, "pad_token_id": 0}


@functools.cache
def no_special_tokens(model_type: str) -> dict[str, int | None]:
    """Returns special tokens that no text has: null, as far as the config class takes it."""
    fields = getattr(CONFIG_MAPPING[model_type], "__dataclass_fields__", {})
    strict = {name for name in _IDS if name in fields and fields[name].type in (int, "int")}
    return {name: each if name in strict else None for name, each in _IDS.items()}


def config_json(name: str, **overrides: Any) -> dict[str, Any]:
    """Returns what a config.json of the named model may say; it has no special tokens, so that
    nothing stops early.

    A copy all through: classes of transformers write into the objects that they are given.
    """
    family, fields = copy.deepcopy(MODELS[name])
    tokens = no_special_tokens(family)
    shared = SIZES.get(family, _DIMENSIONS)
    if _ARCHITECTURES[family] in MULTIMODAL:
        text = {**shared, **tokens, **fields, **overrides}
        return {
            **{
                "architectures": [_ARCHITECTURES[family]],
                "model_type": family,
                "vision_config": _VISION,
            },
            **{"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)},
        }
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        **shared,
        **tokens,
        **fields,
        **overrides,
    }
