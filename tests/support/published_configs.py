"""config.json of models as they are published with code of their own, in the words of their
authors.
"""

from __future__ import annotations

from typing import Any

_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}


def _auto_map(module: str, name: str) -> dict[str, str]:
    code = f"configuration_{module}.{name}Config", f"modeling_{module}.{name}ForCausalLM"
    return dict(zip(("AutoConfig", "AutoModelForCausalLM"), code, strict=True))


_DEEPSEEK: dict[str, Any] = {
    **{
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
    },
    **{
        "eos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "moe_layer_freq": 1,
    },
    **{
        "max_position_embeddings": 163840,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
    },
    **{
        "rope_theta": 10000,
        "seq_aux": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    **{
        "transformers_version": "4.39.3",
        "use_cache": True,
        "v_head_dim": 128,
        "pretraining_tp": 1,
        "ep_size": 1,
    },
}
_PHI: dict[str, Any] = {
    **{
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
    },
    **{
        "auto_map": _auto_map("phi3", "Phi3"),
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
    },
    **{
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "model_type": "phi3",
    },
    **{
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 32000,
    },
    **{
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
    },
    **{
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32064,
    },
}
_FALCON: dict[str, Any] = {
    **{
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
    },
    **{
        "attention_dropout": 0.0,
        "auto_map": _auto_map("falcon", "Falcon"),
        "bias": False,
        "bos_token_id": 11,
    },
    **{
        "eos_token_id": 11,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
    },
    **{
        "model_type": "falcon",
        "multi_query": True,
        "parallel_attn": True,
        "torch_dtype": "bfloat16",
    },
    **{"transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024},
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        **_DEEPSEEK,
        **{
            "architectures": ["DeepseekV3ForCausalLM"],
            "auto_map": _auto_map("deepseek", "DeepseekV3"),
        },
        **{
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
        },
        **{
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
        },
        **{
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
        },
        **{"num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
        **{
            "quantization_config": _FP8,
            "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        **{
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
        },
        "vocab_size": 129280,
    },
    "DeepSeek-V2-Lite": {
        **_DEEPSEEK,
        **{
            "architectures": ["DeepseekV2ForCausalLM"],
            "auto_map": _auto_map("deepseek", "DeepseekV2"),
        },
        **{
            "model_type": "deepseek_v2",
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
        },
        **{
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
        },
        **{
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
        },
        **{
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
        },
        **{"rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "topk_group": 1},
        **{"topk_method": "greedy", "vocab_size": 102400},
    },
    "Phi-3-mini-4k": {
        **_PHI,
        **{"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
    },
    "Phi-3.5-mini": {
        **_PHI,
        **{"max_position_embeddings": 131072, "sliding_window": 262144},
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.05] * 48,
            "long_factor": [2.5] * 48,
        },
    },
    "Phi-4-mini": {
        **_PHI,
        **{
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
        **{
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 24,
        },
        **{
            "num_key_value_heads": 8,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "sliding_window": 262144,
        },
        **{"tie_word_embeddings": True, "vocab_size": 200064},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48},
    },
    "Falcon-7B": {
        **_FALCON,
        **{
            "hidden_size": 4544,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
        },
    },
    "Falcon-40B": {
        **_FALCON,
        **{"hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128},
        **{"num_hidden_layers": 60, "num_kv_heads": 8},
    },
}
# Where the file says DeepseekV3ForCausalLM and a model type that no class of transformers has.
PUBLISHED["Kimi-K2"] = {
    **PUBLISHED["DeepSeek-V3"],
    **{
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
    },
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0},
    **{"routed_scaling_factor": 2.827, "vocab_size": 163840},
}
