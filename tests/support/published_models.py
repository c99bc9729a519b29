"""The page "Is my model there?" in docs/reference/: models by the names that they are published
with.

An entry has the name, how many billions of parameters each size has, the architecture that its
config.json names, and what is to be known. Tests find each architecture in the registry, and each
architecture of the registry in an entry.
"""

from __future__ import annotations

from collections.abc import Iterator

Entry = tuple[str, str, str, str]

_TEXT = "the text model; images are refused"
_SEES = "text and images; videos are refused"
_STATES = "a state for each sequence: no trees of drafts, no `kv_cache_dtype`"
_ONE_DEVICE = f"{_STATES}; one device"
_LATENT = "one latent for each token and layer"
_INDEXED = "positions end at 2,048 (`index_topk`)"
_LONGROPE = "positions end at 4,096 (LongRoPE)"
_ALIBI = 'ALiBi: on a GPU `attention_backend="scan"` alone'

ENTRIES: dict[str, tuple[Entry, ...]] = {
    "Meta and models in Llama's form": (
        ("Llama 2, Llama 2 Chat", "7, 13, 70", "LlamaForCausalLM", ""),
        ("Code Llama", "7, 13, 34, 70", "LlamaForCausalLM", ""),
        ("Llama 3, Llama 3 Instruct", "8, 70", "LlamaForCausalLM", ""),
        ("Llama 3.1, Llama 3.1 Instruct", "8, 70, 405", "LlamaForCausalLM", ""),
        ("Llama 3.2 1B, Llama 3.2 1B Instruct", "1.2", "LlamaForCausalLM", ""),
        ("Llama 3.2 3B, Llama 3.2 3B Instruct", "3.2", "LlamaForCausalLM", ""),
        ("Llama 3.3 70B Instruct", "70", "LlamaForCausalLM", ""),
        (
            "Llama 4 Scout, Maverick",
            "109, 402",
            "Llama4ForConditionalGeneration",
            f'{_TEXT}; experts; on a GPU up to 8,192 positions, or `attention_backend="scan"`',
        ),
        (
            "Llama 4, the text model alone",
            "109, 402",
            "Llama4ForCausalLM",
            'experts; on a GPU up to 8,192 positions, or `attention_backend="scan"`',
        ),
        ("DeepSeek-R1-Distill-Llama", "8, 70", "LlamaForCausalLM", ""),
        ("DeepSeek LLM, DeepSeek Coder", "1.3, 6.7, 7, 33, 67", "LlamaForCausalLM", ""),
        ("TinyLlama 1.1B Chat", "1.1", "LlamaForCausalLM", ""),
        ("SmolLM2 Instruct", "0.14, 0.36, 1.7", "LlamaForCausalLM", "`jaxpage fetch smollm2`"),
        ("SmolVLM Instruct", "0.26, 0.51, 2.2", "Idefics3ForConditionalGeneration", _SEES),
        (
            "SmolVLM2 Instruct",
            "0.26, 0.51, 2.2",
            "SmolVLMForConditionalGeneration",
            _SEES,
        ),
        ("Idefics 3 8B", "8.5", "Idefics3ForConditionalGeneration", _SEES),
        ("Falcon 3", "1.7, 3.2, 7.5, 10", "LlamaForCausalLM", ""),
        ("Yi, Yi 1.5", "6, 9, 34", "LlamaForCausalLM", ""),
        ("Vicuna v1.5", "7, 13", "LlamaForCausalLM", ""),
    ),
    "Qwen": (
        ("Qwen1.5", "0.5, 1.8, 4, 7, 14, 32, 72, 110", "Qwen2ForCausalLM", ""),
        ("Qwen2, Qwen2 Instruct", "0.5, 1.5, 7.6, 72", "Qwen2ForCausalLM", ""),
        ("Qwen2.5, Qwen2.5 Instruct", "0.5, 1.5, 3, 7.6, 14, 32, 72", "Qwen2ForCausalLM", ""),
        ("Qwen2.5 Coder, Qwen2.5 Math", "0.5, 1.5, 3, 7.6, 14, 32, 72", "Qwen2ForCausalLM", ""),
        ("QwQ 32B", "32", "Qwen2ForCausalLM", ""),
        ("DeepSeek-R1-Distill-Qwen", "1.5, 7.6, 14, 32", "Qwen2ForCausalLM", ""),
        ("Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B", "0.6, 1.7, 4, 8, 14, 32", "Qwen3ForCausalLM", ""),
        ("Qwen3 4B Instruct 2507, Qwen3 4B Thinking 2507", "4", "Qwen3ForCausalLM", ""),
        ("Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "14, 57", "Qwen2MoeForCausalLM", "experts"),
        ("Qwen3-30B-A3B, Qwen3-235B-A22B", "30, 235", "Qwen3MoeForCausalLM", "experts"),
        ("Qwen3-Coder-30B-A3B, Qwen3-Coder-480B-A35B", "30, 480", "Qwen3MoeForCausalLM", "experts"),
        ("Qwen3-Next-80B-A3B", "80", "Qwen3NextForCausalLM", _STATES),
        (
            "Qwen3.5 9B, Qwen3.5 27B, Qwen3.6 27B",
            "9, 27",
            "Qwen3_5ForConditionalGeneration",
            f"{_SEES}; {_STATES}",
        ),
        (
            "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, Qwen3.5-397B-A17B",
            "35, 397",
            "Qwen3_5MoeForConditionalGeneration",
            f"{_SEES}; {_STATES}",
        ),
        ("Qwen3.5, dense, the text model alone", "9, 27", "Qwen3_5ForCausalLM", _STATES),
        ("Qwen3.5, experts, the text model alone", "35", "Qwen3_5MoeForCausalLM", _STATES),
        ("Qwen2-VL", "2, 7, 72", "Qwen2VLForConditionalGeneration", _SEES),
        ("Qwen2.5-VL", "3, 7, 32, 72", "Qwen2_5_VLForConditionalGeneration", _SEES),
        ("Qwen3-VL", "2, 4, 8, 32", "Qwen3VLForConditionalGeneration", _SEES),
        (
            "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
            "30, 235",
            "Qwen3VLMoeForConditionalGeneration",
            _SEES,
        ),
    ),
    "Google": (
        ("Gemma 2B, 7B, CodeGemma", "2.5, 8.5", "GemmaForCausalLM", ""),
        ("Gemma 2", "2.6, 9, 27", "Gemma2ForCausalLM", ""),
        ("VaultGemma 1B", "1", "VaultGemmaForCausalLM", ""),
        ("Gemma 3 270M, Gemma 3 1B", "0.27, 1", "Gemma3ForCausalLM", ""),
        ("Gemma 3 4B, 12B, 27B", "4, 12, 27", "Gemma3ForConditionalGeneration", _SEES),
        ("MedGemma 4B, 27B (files with images)", "4, 27", "Gemma3ForConditionalGeneration", _SEES),
        ("Gemma 3n, the text model alone", "5, 7", "Gemma3nForCausalLM", ""),
        ("Gemma 4, the text model alone", "5, 8", "Gemma4ForCausalLM", ""),
        ("Gemma 3n E2B, E4B", "5, 7", "Gemma3nForConditionalGeneration", _TEXT),
        ("Gemma 4 E2B, E4B", "5, 8", "Gemma4ForConditionalGeneration", _SEES),
        (
            "Gemma 4 26B-A4B, 31B",
            "26, 31",
            "Gemma4ForConditionalGeneration",
            f"{_SEES}; one device",
        ),
    ),
    "OpenAI": (
        (
            "gpt-oss-20b, gpt-oss-120b",
            "21, 117",
            "GptOssForCausalLM",
            "published in MXFP4: a quarter of this",
        ),
        (
            "GPT-2 (small, medium, large, XL), DistilGPT2",
            "0.12, 0.35, 0.77, 1.6",
            "GPT2LMHeadModel",
            "",
        ),
    ),
    "Mistral AI": (
        ("Mistral 7B, Mistral 7B Instruct v0.1 to v0.3", "7.2", "MistralForCausalLM", ""),
        ("Mistral Nemo 12B, Mistral Small 24B (2501)", "12, 24", "MistralForCausalLM", ""),
        ("Codestral 22B, Mistral Large 123B", "22, 123", "MistralForCausalLM", ""),
        ("Devstral Small 1.0, 1.1, Magistral Small 1.0, 1.1", "24", "MistralForCausalLM", ""),
        ("Zephyr 7B", "7.2", "MistralForCausalLM", ""),
        ("Mixtral 8x7B, 8x22B", "47, 141", "MixtralForCausalLM", "experts"),
        ("Mistral Small 3.1, 3.2", "24", "Mistral3ForConditionalGeneration", _SEES),
        (
            "Devstral Small 2 24B",
            "24",
            "Mistral3ForConditionalGeneration",
            f"{_SEES}; published in fp8: half of this",
        ),
        ("Ministral 3 3B, 8B, 14B", "4, 9, 14", "Mistral3ForConditionalGeneration", _SEES),
        ("Devstral 2 123B", "123", "Ministral3ForCausalLM", "published in fp8: half of this"),
        ("Ministral 3, the text model alone", "3, 8, 14", "Ministral3ForCausalLM", ""),
        (
            "Mistral Small 4, the text model alone",
            "119",
            "Mistral4ForCausalLM",
            f"experts; {_LATENT}",
        ),
        ("Mamba-Codestral-7B", "7.3", "Mamba2ForCausalLM", _ONE_DEVICE),
    ),
    "DeepSeek": (
        ("DeepSeek-V2, V2.5, Coder-V2", "16, 236", "DeepseekV2ForCausalLM", _LATENT),
        (
            "DeepSeek-V3, DeepSeek-V3.1, DeepSeek-R1",
            "671",
            "DeepseekV3ForCausalLM",
            f"{_LATENT}; published in fp8: half of this",
        ),
        (
            "DeepSeek-V3.2",
            "671",
            "DeepseekV32ForCausalLM",
            f"{_LATENT}; {_INDEXED}; published in fp8: half of this",
        ),
        (
            "Kimi K2 (Moonshot AI)",
            "1,026",
            "DeepseekV3ForCausalLM",
            "published in fp8: half of this; its tokenizer is code, which is not run",
        ),
    ),
    "Microsoft": (
        ("Phi-1, Phi-1.5, Phi-2", "1.3, 1.3, 2.7", "PhiForCausalLM", ""),
        ("Phi-3-mini-4k-instruct, Phi-3-medium-4k-instruct", "3.8, 14", "Phi3ForCausalLM", ""),
        ("Phi-3-mini-128k-instruct, Phi-3.5-mini-instruct", "3.8", "Phi3ForCausalLM", _LONGROPE),
        ("Phi-4, Phi-4-reasoning", "14", "Phi3ForCausalLM", ""),
        ("Phi-4-mini-instruct, Phi-4-mini-reasoning", "3.8", "Phi3ForCausalLM", _LONGROPE),
        ("Phi-3.5-MoE-instruct", "42", "PhiMoEForCausalLM", f"experts; {_LONGROPE}"),
    ),
    "Z.ai": (
        ("GLM-4-9B Chat, GLM-Edge (files for transformers)", "1.5, 4, 9", "GlmForCausalLM", ""),
        ("GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1", "9, 32", "Glm4ForCausalLM", ""),
        ("GLM-4.5-Air, GLM-4.5, GLM-4.6, GLM-4.7", "106, 355", "Glm4MoeForCausalLM", "experts"),
        ("GLM-4.7-Flash", "30", "Glm4MoeLiteForCausalLM", _LATENT),
        ("GLM-5, GLM-5.1, GLM-5.2", "744", "GlmMoeDsaForCausalLM", f"{_LATENT}; {_INDEXED}"),
    ),
    "IBM": (
        ("Granite 3.0 to 3.3 2B, 8B", "2.5, 8.2", "GraniteForCausalLM", ""),
        ("Granite 3.0, 3.1 1B-A400M, 3B-A800M", "1.3, 3.3", "GraniteMoeForCausalLM", "experts"),
        (
            *("moe-7b-1b-active-shared-experts", "7", "GraniteMoeSharedForCausalLM"),
            "experts",
        ),
        (
            "Granite 4.0 Micro, H Micro, H Tiny, H Small",
            "3, 3, 7, 32",
            "GraniteMoeHybridForCausalLM",
            _ONE_DEVICE,
        ),
        ("Granite Swash 2B", "2", "GraniteSWAForCausalLM", ""),
        ("Granite Swash 3B-A600M", "3", "GraniteMoeSWAForCausalLM", "experts"),
        ("Bamba 9B", "9.8", "BambaForCausalLM", _ONE_DEVICE),
    ),
    "NVIDIA": (
        ("Minitron 4B, 8B, Nemotron-4 Mini", "4, 8", "NemotronForCausalLM", ""),
        ("Llama 3.3 Nemotron Super 49B, 3.1 Ultra 253B", "50, 253", "DeciLMForCausalLM", ""),
        (
            "Nemotron-H, NVIDIA-Nemotron-Nano-9B-v2",
            "8, 9, 47, 56",
            "NemotronHForCausalLM",
            _ONE_DEVICE,
        ),
        (
            "Nemotron 3 Nano 30B-A3B, Nemotron 3 Super 120B-A12B",
            "32, 120",
            "NemotronHForCausalLM",
            f"experts; {_ONE_DEVICE}",
        ),
    ),
    "Ai2": (
        ("OLMo 1B, 7B (files with -hf)", "1.2, 6.9", "OlmoForCausalLM", ""),
        ("OLMo 2", "1.5, 7, 13, 32", "Olmo2ForCausalLM", ""),
        ("OLMo 3 7B, OLMo 3 32B, OLMo 3.1 32B", "7, 32", "Olmo3ForCausalLM", ""),
        ("Olmo Hybrid 7B", "7", "OlmoHybridForCausalLM", _STATES),
        ("OLMoE 1B-7B", "6.9", "OlmoeForCausalLM", "experts"),
        ("FlexOlmo 7x7B", "33", "FlexOlmoForCausalLM", "experts"),
    ),
    "TII": (
        ("Falcon 7B, 11B, 40B, 180B", "7, 11, 40, 180", "FalconForCausalLM", ""),
        ("Falcon RW 1B, 7B", "1.3, 7", "FalconForCausalLM", _ALIBI),
        ("Falcon-H1", "0.5, 1.5, 3, 7, 34", "FalconH1ForCausalLM", _ONE_DEVICE),
    ),
    "BigScience, BigCode, MosaicML": (
        ("BLOOM, BLOOMZ", "0.56, 1.1, 1.7, 3, 7.1, 176", "BloomForCausalLM", _ALIBI),
        ("MPT-7B, MPT-30B, their Instruct and Chat", "6.7, 30", "MPTForCausalLM", _ALIBI),
        ("StarCoder, StarCoderBase, SantaCoder", "1.1, 3, 7, 15", "GPTBigCodeForCausalLM", ""),
        ("StarCoder2", "3, 7, 15", "Starcoder2ForCausalLM", ""),
    ),
    "EleutherAI": (
        ("Pythia, GPT-NeoX-20B", "0.07 to 12, 20", "GPTNeoXForCausalLM", ""),
        ("GPT-J-6B", "6", "GPTJForCausalLM", ""),
        ("GPT-Neo", "0.13, 1.3, 2.7", "GPTNeoForCausalLM", ""),
    ),
    "Others": (
        ("SmolLM3 3B", "3", "SmolLM3ForCausalLM", ""),
        ("Mamba", "0.13, 0.37, 0.79, 1.4, 2.8", "MambaForCausalLM", _ONE_DEVICE),
        ("Zamba2", "1.2, 2.7, 7.4", "Zamba2ForCausalLM", _ONE_DEVICE),
        ("Jamba v0.1, Jamba 1.5 to 1.7", "52, 398", "JambaForCausalLM", f"experts; {_ONE_DEVICE}"),
        ("Jamba Reasoning 3B", "3", "JambaForCausalLM", _ONE_DEVICE),
        ("Command R, R+, Aya", "8, 32, 35, 104", "CohereForCausalLM", ""),
        ("Command R7B, Command A", "8, 111", "Cohere2ForCausalLM", ""),
        ("Falcon Mamba", "7", "FalconMambaForCausalLM", _ONE_DEVICE),
        ("LFM2", "0.35, 0.7, 1.2, 2.6", "Lfm2ForCausalLM", "one device; no `kv_cache_dtype`"),
        (
            *("LFM2 8B-A1B", "8", "Lfm2MoeForCausalLM"),
            "experts; one device; no `kv_cache_dtype`",
        ),
        (
            "Kimi Linear 48B-A3B (Moonshot AI)",
            "48",
            "KimiLinearForCausalLM",
            f"experts; {_STATES}; its tokenizer is code, which is not run",
        ),
        ("Youtu-LLM-2B", "2", "YoutuForCausalLM", _LATENT),
        ("A.X K1", "519", "AXK1ForCausalLM", f"experts; {_LATENT}"),
        ("LFM3 1.7B", "1.7", "Lfm3ForCausalLM", "one device; no `kv_cache_dtype`"),
        ("Seed-OSS-36B", "36", "SeedOssForCausalLM", ""),
        ("EXAONE 4.0", "1.2, 32", "Exaone4ForCausalLM", ""),
        ("EXAONE 4.5 33B", "33", "Exaone4_5_ForConditionalGeneration", _TEXT),
        ("K-EXAONE 236B-A23B", "236", "ExaoneMoEForCausalLM", "experts"),
        ("Solar Open 100B", "102", "SolarOpenForCausalLM", "experts"),
        ("Trinity Nano Preview, Trinity Mini", "6, 26", "AfmoeForCausalLM", "experts"),
        ("MiMo-7B Base, SFT, RL", "7.8", "MiMoForCausalLM", ""),
        (
            *("MiMo-V2-Flash", "309", "MiMoV2FlashForCausalLM"),
            "experts; one device; published in fp8: half of this",
        ),
        ("Mellum 2 12B-A2.5B", "12", "MellumForCausalLM", "experts"),
        ("ERNIE 4.5 0.3B", "0.36", "Ernie4_5ForCausalLM", ""),
        ("ERNIE 4.5 21B-A3B, 300B-A47B", "21, 300", "Ernie4_5_MoeForCausalLM", "experts"),
        ("Hunyuan 0.5B, 1.8B, 4B, 7B", "0.5, 1.8, 4, 7", "HunYuanDenseV1ForCausalLM", ""),
        ("Hunyuan-A13B", "80", "HunYuanMoEV1ForCausalLM", "experts"),
        ("MiniMax-M2", "230", "MiniMaxM2ForCausalLM", "experts"),
        ("dots.llm1", "143", "Dots1ForCausalLM", "experts"),
        ("Jais 2 8B, 70B", "8, 70", "Jais2ForCausalLM", ""),
        ("Apertus 8B, 70B", "8, 70", "ApertusForCausalLM", ""),
        ("Helium 1 2B", "2", "HeliumForCausalLM", ""),
        ("nanochat d32 (files for transformers)", "1.9", "NanoChatForCausalLM", ""),
        ("AFM-4.5B", "4.6", "ArceeForCausalLM", ""),
        ("StableLM 3B, StableLM 2", "1.6, 2.8, 12", "StableLmForCausalLM", ""),
        ("OPT", "0.13 to 66", "OPTForCausalLM", ""),
        ("CodeGen", "0.35, 2, 6, 16", "CodeGenForCausalLM", ""),
        ("XGLM", "0.56 to 7.5", "XGLMForCausalLM", ""),
    ),
}

# Models that people look for and that do not load: the name, the architecture and the reason.
NOT_THERE = (
    ("CWM (Code World Model)", "CwmForCausalLM", "the example of a family that a package brings"),
    ("DBRX", "DbrxForCausalLM", "experts in a layout of their own"),
    ("Zamba 7B, of 2024", "ZambaForCausalLM", "Mamba with heads, and a block that layers share"),
    ("Baichuan 2", "BaichuanForCausalLM", "only published as code, which is not run"),
    ("InternLM 2", "InternLM2ForCausalLM", "only published as code, which is not run"),
    ("Qwen, of 2023", "QWenLMHeadModel", "only published as code, which is not run"),
)

INTRODUCTION = """\
Look for the name under which a model is published, such as Llama 3.2 1B Instruct, Qwen3 4B or
Phi-4-mini. Fine-tuned models have the architecture of the model that they came from. What decides is
`architectures` in config.json: each of those in the [list of architectures](models.md) loads, whoever
published the model.

Sizes are in billions of parameters, all experts included. In bfloat16 a billion takes 2 GB, in
[int8](../guides/quantization.md) 1 GB and in four bits about half a GB; the KV cache comes on top.
`jaxpage plan NAME` reads the config and the headers of the files, and says what fits on your machine.
This page was written from what is known of published files. Tests compare each architecture with
transformers on small random weights, not these models."""


def tables() -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yields each publisher, with the header and the rows of its table."""
    for publisher, entries in ENTRIES.items():
        rows = [(name, sizes, f"`{kind}`", note) for name, sizes, kind, note in entries]
        yield publisher, ("model", "billions of parameters", "architecture", "to know"), rows
    missing = [(name, f"`{kind}`", reason) for name, kind, reason in NOT_THERE]
    yield "Not there", ("model", "architecture", "reason"), missing
