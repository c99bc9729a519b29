"""Ten published models for `jaxpage plan`: the sizes in their config.json, and what follows from
these by hand.

What changes no size is left out, but for what jaxpage must read. A count of parameters is a sum
that a reader can follow from the description of the model, and shares no code with jaxpage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.published_configs import PUBLISHED


@dataclass(frozen=True)
class Planned:
    """A model with its sizes.

    Attributes:
        config: The content of config.json.
        published: Billions of parameters of the text model, as published.
        num_parameters: The exact count.
        bytes_per_token: Of keys and values in bfloat16, in all layers.
        num_quantized: The parameters that are stored quantised, and `bits` of each.
    """

    config: dict[str, Any]
    published: float
    num_parameters: int
    bytes_per_token: int
    num_quantized: int = 0
    bits: float = 16


def _attention(width: int, heads: int, kv_heads: int, head: int) -> int:
    """Returns the weights of queries and the output, and those of keys and values."""
    return width * head * (2 * heads + 2 * kv_heads)


def _sizes(width: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    """Returns the fields that have one name in all these families."""
    shape = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {**shape, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _config(name: str, kind: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [name], "model_type": kind, "dtype": "bfloat16"}
    for part in parts:
        config |= part
    return config | {"tie_word_embeddings": False} | fields


def _layers(count: int, every: int, others: str = "sliding_attention") -> list[str]:
    """Returns one full layer in so many, the last of them."""
    return ["full_attention" if (i + 1) % every == 0 else others for i in range(count)]


_FP8_LINEAR = 40 * (_attention(5120, 32, 8, 128) + 3 * 5120 * 32768)
_EXPERTS_OF_GPT_OSS = 24 * 32 * 3 * 2880 * 2880
_BIASES_OF_GPT_OSS = 24 * (80 * 64 + 2880 + 32 + 32 * 3 * 2880)
_MIXTURE_OF_GLM = 129 * 3 * 4096 * 1408 + 128 * 4096 + 128
_LATENT = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 16384 * 7168
_DELTA = 5120 * (2 * 2048 + 2 * 6144 + 2 * 48) + 4 * 10240 + 2 * 48 + 128 + 6144 * 5120
_GATED_ATTENTION = _attention(5120, 24, 4, 256) + 5120 * 6144 + 2 * 256
_EVEN = {"beta_fast": 32.0, "beta_slow": 1.0, "rope_type": "yarn"}

MODELS = {
    "Llama 3.1 8B": Planned(
        _config(
            *("LlamaForCausalLM", "llama", _sizes(4096, 32, 32, 8, 128256)),
            intermediate_size=14336,
            max_position_embeddings=131072,
        ),
        8.0,
        2 * 128256 * 4096
        + 32 * (_attention(4096, 32, 8, 128) + 3 * 4096 * 14336 + 2 * 4096)
        + 4096,
        32 * 2 * 8 * 128 * 2,
    ),
    "Qwen3 8B": Planned(
        _config(
            *("Qwen3ForCausalLM", "qwen3", _sizes(4096, 36, 32, 8, 151936)),
            intermediate_size=12288,
            max_position_embeddings=40960,
        ),
        8.2,
        2 * 151936 * 4096
        + 36 * (_attention(4096, 32, 8, 128) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
        + 4096,
        36 * 2 * 8 * 128 * 2,
    ),
    "Qwen3-30B-A3B": Planned(
        _config(
            *("Qwen3MoeForCausalLM", "qwen3_moe", _sizes(2048, 48, 32, 4, 151936)),
            **{"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
            max_position_embeddings=40960,
        ),
        30.5,
        2 * 151936 * 2048
        + 48 * (_attention(2048, 32, 4, 128) + 128 * 3 * 2048 * 768 + 128 * 2048)
        + 48 * (2 * 2048 + 2 * 128)
        + 2048,
        48 * 2 * 4 * 128 * 2,
    ),
    "Qwen3.5 27B": Planned(
        _config(
            *("Qwen3_5ForConditionalGeneration", "qwen3_5"),
            text_config={
                **_sizes(5120, 64, 24, 4, 248320),
                **{"model_type": "qwen3_5_text", "head_dim": 256, "intermediate_size": 17408},
                **{"linear_key_head_dim": 128, "linear_num_key_heads": 16},
                **{"linear_value_head_dim": 128, "linear_num_value_heads": 48},
                **{"linear_conv_kernel_dim": 4, "max_position_embeddings": 262144},
                "layer_types": _layers(64, 4, "linear_attention"),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
            },
        ),
        27,
        2 * 248320 * 5120
        + 64 * (3 * 5120 * 17408 + 2 * 5120)
        + 16 * _GATED_ATTENTION
        + 48 * _DELTA
        + 5120,
        16 * 2 * 4 * 256 * 2,
    ),
    "gpt-oss-20b": Planned(
        {
            **_sizes(2880, 24, 64, 8, 201088),
            **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
            **{"head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32},
            **{"attention_bias": True, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
            **{"sliding_window": 128, "layer_types": _layers(24, 2)},
            **{"max_position_embeddings": 131072, "tie_word_embeddings": False},
            "quantization_config": {"quant_method": "mxfp4"},
            "rope_scaling": {**_EVEN, "factor": 32.0, "original_max_position_embeddings": 4096},
        },
        20.9,
        2 * 201088 * 2880
        + _EXPERTS_OF_GPT_OSS
        + 24 * (_attention(2880, 64, 8, 64) + 64 + 32 * 2880 + 2 * 2880)
        + _BIASES_OF_GPT_OSS
        + 2880,
        24 * 2 * 8 * 64 * 2,
        _EXPERTS_OF_GPT_OSS,
        4.5,  # a scale of two bytes for 32 codes; in the file it has one
    ),
    "Devstral Small 2 24B": Planned(
        _config(
            *("Mistral3ForConditionalGeneration", "mistral3"),
            quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
            text_config={
                **_sizes(5120, 40, 32, 8, 131072),
                **{"model_type": "ministral3", "head_dim": 128, "intermediate_size": 32768},
                "max_position_embeddings": 393216,
                "rope_parameters": {
                    **{**_EVEN, "factor": 48.0, "original_max_position_embeddings": 8192},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e8},
                    "llama_4_scaling_beta": 0.1,
                },
            },
        ),
        23.6,
        2 * 131072 * 5120 + _FP8_LINEAR + (40 * 2 + 1) * 5120,
        40 * 2 * 8 * 128 * 2,
        _FP8_LINEAR,
        8,
    ),
    "Gemma 3 27B": Planned(
        _config(
            *("Gemma3ForConditionalGeneration", "gemma3"),
            tie_word_embeddings=True,
            text_config={
                **{"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504},
                **{"num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16},
                **{"head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        ),
        27,
        262208 * 5376
        + 62 * (_attention(5376, 32, 16, 128) + 3 * 5376 * 21504 + 4 * 5376 + 2 * 128)
        + 5376,
        62 * 2 * 16 * 128 * 2,
    ),
    "Gemma 4 E4B": Planned(
        _config(
            *("Gemma4ForConditionalGeneration", "gemma4"),
            tie_word_embeddings=True,
            text_config={
                **_sizes(2560, 42, 8, 2, 262144),
                **{"model_type": "gemma4_text", "intermediate_size": 10240, "head_dim": 256},
                **{"global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 18},
                **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
                **{"max_position_embeddings": 131072, "layer_types": _layers(42, 6)},
            },
        ),
        7.5,
        # Token table, and a table for each layer with its projection and norm.
        262144 * 2560
        + 42 * 256 * (262144 + 2560)
        + 256
        # The last 18 layers (3 of them full) have no keys and values of their own.
        + (35 * 8 * 256 + 7 * 8 * 512) * 2560 * 2
        + (20 * 256 + 4 * 512) * 2 * 2560 * 2
        + (35 + 20) * 256
        + (7 + 4) * 512
        + 42 * (3 * 2560 * 10240 + 4 * 2560 + 2 * 256 * 2560 + 2560 + 1)
        + 2560,
        (20 * 256 + 4 * 512) * 2 * 2 * 2,
    ),
    "GLM-4.5-Air": Planned(
        _config(
            *("Glm4MoeForCausalLM", "glm4_moe", _sizes(4096, 46, 96, 8, 151552)),
            **{"head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False},
            max_position_embeddings=131072,
        ),
        106,
        2 * 151552 * 4096
        + 46 * (_attention(4096, 96, 8, 128) + (96 + 16) * 128 + 2 * 4096)
        + 3 * 4096 * 10944
        + 45 * _MIXTURE_OF_GLM
        + 4096,
        46 * 2 * 8 * 128 * 2,
    ),
    "DeepSeek-V3": Planned(
        PUBLISHED["DeepSeek-V3"],
        671,
        2 * 129280 * 7168
        + 61 * (_LATENT + 2 * 7168)
        + 3 * 3 * 7168 * 18432
        + 58 * (257 * 3 * 7168 * 2048 + 256 * 7168 + 256)
        + 7168,
        61 * 576 * 2,
        61 * (_LATENT - 1536 - 512) + 3 * 3 * 7168 * 18432 + 58 * 257 * 3 * 7168 * 2048,
        8,
    ),
}
