"""Configs of small models, by family: with the registry they make entries of
`model_configs.MODELS`.

A family costs its file, its line in the registry, and a line here if one config of the usual sizes
does not show all that its config.json can ask for.
"""

from __future__ import annotations

from typing import Any

from tests.support.family_names import FAMILY_OF

Fields = dict[str, Any]

# Sizes, for families whose fields do not have the names of Llama's. Heads of 16 compile fastest.
_LAYERS = {"vocab_size": 131, "num_hidden_layers": 2, "max_position_embeddings": 128}
_GPT2 = {"vocab_size": 131, "n_layer": 2, "n_positions": 128}
_GPT = {**_GPT2, "n_embd": 64, "n_head": 4}
_GPTJ = {**_GPT, "rotary_dim": 8}
_MAMBA = {"vocab_size": 131, "num_hidden_layers": 2}
SIZES: dict[str, Fields] = {
    **{"opt": _LAYERS, "gpt2": _GPT2, "falcon": _LAYERS},
    **{"mamba": _MAMBA, "mamba2": _MAMBA, "falcon_mamba": _MAMBA},
    "zamba2": {
        **{**_LAYERS, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 8},
        **{"n_mamba_heads": 8, "mamba_d_state": 12, "adapter_rank": 6},
    },
    **{"gptj": _GPTJ, "codegen": _GPTJ, "gpt_bigcode": _GPT},
    "gpt_neo": {
        **{"vocab_size": 131, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
        **{"max_position_embeddings": 128, "window_size": 7},
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**_LAYERS, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4},
    "bloom": {"vocab_size": 131, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 128},
    "mpt": {"vocab_size": 131, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "xglm": {
        **{"vocab_size": 131, "d_model": 64, "ffn_dim": 80, "num_layers": 2},
        **{"attention_heads": 4, "max_position_embeddings": 128},
    },
}
_CORRECTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 20},
}
# The heads of an indexer turn as wide a part as those of attention.
_INDEXER = {"index_topk": 64, "index_head_dim": 20, "index_n_heads": 2}
_YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    **{"rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.3},
}

_BY_TYPE = {
    "full_attention": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_HALVES = {kind: {**rope, "partial_rotary_factor": 0.5} for kind, rope in _BY_TYPE.items()}

# What config.json says beyond the sizes, by the module of a family and the name of the form.
FORMS: dict[str, dict[str, Fields]] = {
    "glm4_moe": {
        "norms": {**_CORRECTED, "use_qk_norm": True, "num_hidden_layers": 3},
        "groups": {
            **{**_CORRECTED, "n_group": 4, "topk_group": 2, "attention_bias": True},
            **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "n_shared_experts": 2},
        },
    },
    "dots1": {
        "windows": {
            **{**_CORRECTED, "sliding_window": 7, "max_window_layers": 1, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True},
        }
    },
    "solar_open": {
        "groups": {
            **{**_CORRECTED, "head_dim": 16, "n_group": 4, "topk_group": 2, "attention_bias": True},
            **{"routed_scaling_factor": 2.5, "n_shared_experts": 2, "rope_theta": 500.0},
        }
    },
    "exaone_moe": {
        "windows": {
            **{"head_dim": 16, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "sliding_window": 7, "sliding_window_pattern": 3},
            **{"n_group": 4, "topk_group": 2},
        },
        "types": {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"mlp_layer_types": ["sparse", "dense"], "num_shared_experts": 2},
            **{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
            **{"norm_topk_prob": False, "tie_word_embeddings": True},
        },
    },
    "afmoe": {
        "gates": {
            **{"head_dim": 16, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "sliding_window": 7, "global_attn_every_n_layers": 3},
            **{"attention_bias": True, "mup_enabled": True, "route_scale": 2.5},
        }
    },
    "mimo_v2_flash": {
        "windows": {
            **{**_CORRECTED, "head_dim": 16, "v_head_dim": 12, "num_hidden_layers": 3},
            **{"sliding_window": 7, "attention_bias": True, "rope_parameters": _HALVES},
        },
        "wide-values": {
            **{**_CORRECTED, "head_dim": 24, "v_head_dim": 24, "sliding_window_size": 6},
            **{"attention_value_scale": None, "routed_scaling_factor": None, "n_group": 4},
            **{"topk_group": 2, "mlp_layer_types": ["sparse", "dense"], "norm_topk_prob": False},
        },
    },
    "mellum": {
        "windows": {
            **{"head_dim": 16, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "sliding_window": 7, "rope_parameters": _BY_TYPE},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        }
    },
    "ernie4_5": {"interleaved": {"head_dim": 16}, "biases": {"head_dim": 12, "use_bias": True}},
    "ernie4_5_moe": {
        "shared": {
            **{"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24},
            **{"num_hidden_layers": 3, "tie_word_embeddings": False},
        },
        "biases": {
            **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
            **{"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        },
    },
    "hunyuan_v1_dense": {
        "norms": {"head_dim": 12},
        "alpha": {
            "head_dim": 16,
            "attention_bias": True,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    },
    "hunyuan_v1_moe": {
        "shared": {
            **{"num_experts": 8, "moe_topk": 2, "head_dim": 16},
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        }
    },
    "minimax_m2": {
        "norms": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    },
    "granitemoe": {
        "factors": {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.6, "logits_scaling": 2.0, "num_local_experts": 4},
        }
    },
    "granitemoeshared": {
        "shared": {
            **{"hidden_size": 64, "num_local_experts": 4, "shared_intermediate_size": 24},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.6, "logits_scaling": 2.0},
        },
        "routed": {"num_local_experts": 4, "attention_bias": True, "tie_word_embeddings": True},
    },
    "flex_olmo": {
        "norms": {
            **{"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3},
            **{"attention_bias": True, "norm_topk_prob": True},
        }
    },
    "phi": {
        "parallel": {},
        "norms": {"qk_layernorm": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    },
    "phimoe": {
        "biases": {
            **{"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True},
            **{"router_jitter_noise": 0.2, "sliding_window": 7},
        },
        "longrope": {
            "num_local_experts": 4,
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0]},
                **{"long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0], "short_mscale": 1.2},
                **{"long_mscale": 1.4, "original_max_position_embeddings": 64},
            },
        },
    },
    "apertus": {"learned": {}, "plain": {"hidden_act": "relu2", "attention_bias": True}},
    "seed_oss": {
        "grouped": {"head_dim": 16},
        "biases": {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    },
    "exaone4": {
        "windows": {"sliding_window": 7, "num_hidden_layers": 3, "sliding_window_pattern": 3},
        "full": {
            "sliding_window": None,
            "layer_types": ["full_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    },
    "helium": {"interleaved": {"head_dim": 12}},
    "gpt_neox": {
        "parallel": {"rotary_pct": 0.5},
        "in-sequence": {
            **{"use_parallel_residual": False, "attention_bias": False},
            **{"tie_word_embeddings": True, "rotary_pct": 1.0},
        },
    },
    "mpt": {
        "scaled": {"attn_config": {"softmax_scale": 0.4, "clip_qkv": 1.5}},
        "six-heads": {"d_model": 96, "n_heads": 6, "tie_word_embeddings": False},
    },
    "zamba2": {
        "turns": {
            **{
                "num_hidden_layers": 4,
                "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            },
            **{"num_mem_blocks": 2, "use_shared_attention_adapter": True, "rms_norm_eps": 1e-2},
            **{"use_mem_rope": True, "rope_theta": 500.0},
        },
        "biases": {
            **{"num_hidden_layers": 3, "hidden_act": "silu", "num_key_value_heads": 4},
            "rms_norm_eps": 1e-2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            **{"add_bias_linear": True, "time_step_limit": [0.3, 50.0], "mamba_ngroups": 2},
        },
    },
    "jamba": {
        "mixed": {
            **{"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
            **{"num_experts": 4, "mamba_d_state": 12},
        },
        "dense": {
            **{"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 0},
            **{"num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 5, "mamba_proj_bias": True},
            **{"mamba_conv_bias": False, "mamba_d_conv": 2, "hidden_act": "gelu"},
            "tie_word_embeddings": True,
        },
    },
    "mamba": {
        "tied": {"hidden_size": 64, "state_size": 12},
        "biases": {
            **{"hidden_size": 48, "state_size": 8, "use_bias": True, "use_conv_bias": False},
            **{"conv_kernel": 3, "time_step_rank": 5, "hidden_act": "gelu", "expand": 3},
            **{"layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
        },
    },
    "falcon_mamba": {
        "norms": {"hidden_size": 64, "state_size": 12, "time_step_rank": 5, "mixer_rms_eps": 1e-2}
    },
    "lfm2_moe": {
        "mixed": {
            **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            **{"hidden_size": 64, "num_dense_layers": 1, "moe_intermediate_size": 24},
            **{"num_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5},
        },
        "uncorrected": {
            **{"layer_types": ["full_attention", "conv"], "num_dense_layers": 0, "conv_bias": True},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False},
        },
    },
    "deepseek_v32": {
        "groups": {
            **{**_LATENT, **_CORRECTED, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3},
            **{**_INDEXER, "first_k_dense_replace": 1, "rope_parameters": _YARN},
        },
        "types": {
            **{**_LATENT, **_CORRECTED, **_INDEXER, "n_group": 1, "topk_group": 1},
            **{"mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2},
            **{"attention_bias": True, "norm_topk_prob": False, "hidden_act": "gelu"},
        },
    },
    "glm_moe_dsa": {
        "shared": {
            **{**_LATENT, **_CORRECTED, **_INDEXER, "num_hidden_layers": 3},
            **{"first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
        },
        "groups": {
            **{**_LATENT, **_CORRECTED, **_INDEXER, "n_group": 4, "topk_group": 2},
            **{"mlp_layer_types": ["sparse", "dense"], "attention_bias": True},
            **{"rope_parameters": _YARN, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        },
    },
    "youtu": {
        "yarn": {**_LATENT, "rope_parameters": _YARN},
        "halves": {
            **{**_LATENT, "q_lora_rank": None, "rope_interleave": False},
            **{"attention_bias": True, "tie_word_embeddings": False},
        },
    },
    "axk1": {
        "groups": {
            **{**_LATENT, **_CORRECTED, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3},
            **{"rms_norm_eps": 1e-3, "first_k_dense_replace": 1},
        },
        "types": {
            **{**_LATENT, **_CORRECTED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
            **{"mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2},
            **{"attention_bias": True, "rope_interleave": False, "hidden_act": "gelu"},
        },
    },
    "mistral4": {
        "growth": {
            **{**_LATENT, **_CORRECTED, "qk_nope_head_dim": 16, "n_group": 4, "topk_group": 2},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
                **{"rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.3, "beta_fast": 4.0},
                "llama_4_scaling_beta": 0.4,
            },
        },
        "plain": {
            **{**_LATENT, **_CORRECTED, "q_lora_rank": None, "first_k_dense_replace": 1},
            **{"norm_topk_prob": False, "n_shared_experts": 2, "attention_bias": True},
            **{"rope_interleave": False, "routed_scaling_factor": 1.5},
        },
    },
    "kimi_linear": {
        "mixed": {
            **{**_LATENT, "q_lora_rank": None, "num_hidden_layers": 3, "hidden_size": 64},
            "linear_attn_config": {
                **{"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4},
                **{"full_attn_layers": [2], "kda_layers": [1, 3]},
            },
            **{"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 24},
            "rms_norm_eps": 1e-3,
        },
        "groups": {
            **{**_LATENT, "layer_types": ["full_attention", "linear_attention"]},
            **{"mlp_layer_types": ["sparse", "sparse"], "num_local_experts": 8, "n_group": 4},
            **{"topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"norm_topk_prob": False, "n_shared_experts": 2, "attention_bias": True},
            **{"linear_head_dim": 12, "linear_num_heads": 4, "linear_conv_kernel_dim": 2},
        },
    },
    "olmo_hybrid": {
        "mixed": {
            **{"num_hidden_layers": 3, "hidden_size": 64, "rope_theta": 500.0},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
            **{"linear_key_head_dim": 12, "linear_value_head_dim": 20},
        },
        "plain": {
            **{"hidden_size": 64, "rope_parameters": {"rope_theta": None}, "rms_norm_eps": 1e-2},
            **{"layer_types": ["linear_attention", "full_attention"], "attention_bias": True},
            **{"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 2},
            **{"num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    },
    "lfm3": {
        "mixed": {
            **{"num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16, "sliding_window": 7},
            "layer_types": ["sliding_attention", "conv", "full_attention"],
        },
        "plain": {
            **{"layer_types": ["full_attention", "conv"], "hidden_size": 64, "head_dim": 16},
            **{"use_attention_gate": False, "use_sandwich_norm": False, "norm_eps": 1e-3},
            **{"attention_bias": True, "conv_bias": True, "conv_L_cache": 2},
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 500.0}
            },
            "tie_word_embeddings": False,
        },
    },
    "granite_swa": {
        "bases": {
            **{"num_hidden_layers": 3, "layer_rope_theta": [0, 300.0, 10_000], "hidden_size": 64},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "sliding_window": 7},
            **{"residual_multiplier": 0.6, "logits_scaling": 2.0},
        },
        "biases": {
            **{"layer_types": ["sliding_attention", "full_attention"], "hidden_size": 64},
            **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            **{"sliding_window": 7, "layer_rope_theta": [500.0, 500.0]},
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
        },
    },
    "granitemoe_swa": {
        "shared": {
            **{"num_local_experts": 4, "shared_intermediate_size": 24, "intermediate_size": 40},
            **{"attention_multiplier": 0.2, "residual_multiplier": 0.6, "hidden_size": 64},
            **{"sliding_window": 7, "layer_rope_theta": [0, 300.0]},
        },
        "plain": {"num_local_experts": 4, "sliding_window": 7, "rope_theta": 500.0},
    },
    "vaultgemma": {
        "caps": {
            **{"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 12},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
        }
    },
    "jais2": {
        "biases": {"head_dim": 16},
        "plain": {
            **{"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu"},
            **{"layer_norm_eps": 1e-2, "tie_word_embeddings": True},
        },
    },
    "nanochat": {
        "backwards": {"hidden_size": 64, "final_logit_softcapping": 8.0},
        "uncapped": {
            **{"hidden_size": 64, "final_logit_softcapping": None, "attention_bias": True},
            **{"tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
        },
    },
    "gpt_bigcode": {
        "multi-query": {},
        "heads": {"multi_query": False, "n_inner": 72, "scale_attn_weights": False},
    },
}


def forms_of_registry(known: dict[str, tuple[str, Fields]]) -> dict[str, tuple[str, Fields]]:
    """Returns an entry for each form; a family that has no form and is not known gets "plain"."""
    registered = {}
    seen = {model_type.removesuffix("_text") for model_type, _ in known.values()}
    for module in dict.fromkeys(FAMILY_OF.values()):
        forms = FORMS.get(module, {} if module in seen else {"plain": {}})
        for form, fields in forms.items():
            registered[f"{module.replace('_', '-')}-{form}"] = module, fields
    return registered
