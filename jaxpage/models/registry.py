"""Finds the module of a family by the architecture in config.json, and imports it only then."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models.base import Family
from jaxpage.models.multimodal import MULTIMODAL, text_family, text_module

FAMILIES = {
    "LlamaForCausalLM": "llama:Llama",
    "DeciLMForCausalLM": "nemotron:DeciLM",
    "Llama4ForCausalLM": "llama:Llama4",
    "Llama4ForConditionalGeneration": "llama:Llama4",
    "MistralForCausalLM": "mistral:Mistral",
    "Qwen2ForCausalLM": "qwen:Qwen2",
    "Qwen3ForCausalLM": "qwen:Qwen3",
    "Qwen3_5ForCausalLM": "qwen:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen:Qwen3_5",
    "Qwen2VLForConditionalGeneration": "qwen:Qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen:Qwen2",
    "Qwen3VLForConditionalGeneration": "qwen:Qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen:Qwen3VLMoeText",
    "Mistral3ForConditionalGeneration": "mistral:Mistral",
    "SmolVLMForConditionalGeneration": "llama:Llama",
    "Idefics3ForConditionalGeneration": "llama:Llama",
    "Gemma3ForConditionalGeneration": "gemma:Gemma3",
    "Qwen3_5MoeForCausalLM": "qwen:Qwen3_5Moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen:Qwen3_5Moe",
    "Qwen3NextForCausalLM": "qwen:Qwen3Next",
    "Qwen2MoeForCausalLM": "qwen:Qwen2Moe",
    "Qwen3MoeForCausalLM": "qwen:Qwen3Moe",
    "MixtralForCausalLM": "mistral:Mixtral",
    "OlmoeForCausalLM": "olmo:Olmoe",
    "FlexOlmoForCausalLM": "olmo:FlexOlmo",
    "GptOssForCausalLM": "gpt_oss:GptOss",
    "DeepseekV2ForCausalLM": "deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "deepseek:DeepseekV3",
    "DeepseekV32ForCausalLM": "deepseek:DeepseekV32",
    "YoutuForCausalLM": "deepseek:Youtu",
    "KimiLinearForCausalLM": "kimi:KimiLinear",
    "AXK1ForCausalLM": "deepseek:AXK1",
    "Mistral4ForCausalLM": "mistral:Mistral4",
    "Glm4MoeLiteForCausalLM": "glm:Glm4MoeLite",
    "GlmMoeDsaForCausalLM": "glm:GlmMoeDsa",
    "Glm4MoeForCausalLM": "glm:Glm4Moe",
    "Dots1ForCausalLM": "deepseek:Dots1",
    "SolarOpenForCausalLM": "deepseek:SolarOpen",
    "ExaoneMoeForCausalLM": "exaone:ExaoneMoe",
    "AfmoeForCausalLM": "arcee:Afmoe",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash:MiMoV2Flash",
    "MellumForCausalLM": "qwen:Mellum",
    "Ernie4_5_MoeForCausalLM": "ernie:Ernie4_5Moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan:HunYuanMoe",
    "MiniMaxM2ForCausalLM": "qwen:MiniMaxM2",
    "GraniteMoeForCausalLM": "granite:GraniteMoe",
    "GraniteMoeSWAForCausalLM": "granite:GraniteMoeSWA",
    "GraniteMoeSharedForCausalLM": "granite:GraniteMoeShared",
    "PhimoeForCausalLM": "phi:Phimoe",
    "PhiForCausalLM": "phi:Phi",
    "Phi3ForCausalLM": "phi:Phi3",
    "SmolLM3ForCausalLM": "llama:SmolLM3",
    "GemmaForCausalLM": "gemma:Gemma",
    "Gemma2ForCausalLM": "gemma:Gemma2",
    "VaultGemmaForCausalLM": "gemma:VaultGemma",
    "Gemma3ForCausalLM": "gemma:Gemma3",
    "Gemma3nForCausalLM": "gemma3n:Gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n:Gemma3n",
    "Gemma4ForCausalLM": "gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4",
    "GraniteForCausalLM": "granite:Granite",
    "GraniteSWAForCausalLM": "granite:GraniteSWA",
    "SeedOssForCausalLM": "llama:SeedOss",
    "Exaone4ForCausalLM": "exaone:Exaone4",
    "Exaone4_5_ForConditionalGeneration": "exaone:Exaone4",
    "Ernie4_5ForCausalLM": "ernie:Ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan:HunYuanDense",
    "ApertusForCausalLM": "llama:Apertus",
    "HeliumForCausalLM": "llama:Helium",
    "NemotronForCausalLM": "nemotron:Nemotron",
    "Jais2ForCausalLM": "nemotron:Jais2",
    "GraniteMoeHybridForCausalLM": "granite:GraniteMoeHybrid",
    "FalconH1ForCausalLM": "falcon:FalconH1",
    "BambaForCausalLM": "mamba:Bamba",
    "NemotronHForCausalLM": "nemotron:NemotronH",
    "MambaForCausalLM": "mamba:Mamba",
    "FalconMambaForCausalLM": "mamba:FalconMamba",
    "Mamba2ForCausalLM": "mamba:Mamba2Decoder",
    "Zamba2ForCausalLM": "zamba2:Zamba2",
    "JambaForCausalLM": "mamba:Jamba",
    "Lfm2ForCausalLM": "lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
    "Lfm3ForCausalLM": "lfm2:Lfm3",
    "ArceeForCausalLM": "arcee:Arcee",
    "NanoChatForCausalLM": "llama:NanoChat",
    "Starcoder2ForCausalLM": "gpt2:Starcoder2",
    "StableLmForCausalLM": "gpt_neox:StableLm",
    "OlmoForCausalLM": "olmo:Olmo",
    "Olmo2ForCausalLM": "olmo:Olmo2",
    "Olmo3ForCausalLM": "olmo:Olmo3",
    "OlmoHybridForCausalLM": "olmo:OlmoHybrid",
    "Ministral3ForCausalLM": "mistral:Ministral3",
    "GlmForCausalLM": "glm:Glm",
    "Glm4ForCausalLM": "glm:Glm4",
    "CohereForCausalLM": "cohere:Cohere",
    "Cohere2ForCausalLM": "cohere:Cohere2",
    "FalconForCausalLM": "falcon:Falcon",
    "OPTForCausalLM": "opt:OPT",
    "GPT2LMHeadModel": "gpt2:GPT2",
    "GPTBigCodeForCausalLM": "gpt2:GPTBigCode",
    "GPTNeoForCausalLM": "gpt_neox:GPTNeo",
    "GPTNeoXForCausalLM": "gpt_neox:GPTNeoX",
    "GPTJForCausalLM": "gpt_neox:GPTJ",
    "CodeGenForCausalLM": "gpt_neox:CodeGen",
    "XGLMForCausalLM": "opt:XGLM",
    "BloomForCausalLM": "bloom:Bloom",
    "MptForCausalLM": "bloom:Mpt",
}

# Encoders, which embed texts or score pairs of them, and generate nothing.
ENCODERS = {
    "BertModel": "bert:Bert",
    "BertForMaskedLM": "bert:Bert",
    "BertForSequenceClassification": "bert:Bert",
    "RobertaModel": "bert:Roberta",
    "RobertaForMaskedLM": "bert:Roberta",
    "RobertaForSequenceClassification": "bert:Roberta",
    "XLMRobertaModel": "bert:XLMRoberta",
    "XLMRobertaForMaskedLM": "bert:XLMRoberta",
    "XLMRobertaForSequenceClassification": "bert:XLMRoberta",
    "ModernBertModel": "bert:ModernBert",
    "ModernBertForMaskedLM": "bert:ModernBert",
    "ModernBertForSequenceClassification": "bert:ModernBert",
    "NomicBertModel": "bert:NomicBert",
    "MPNetModel": "bert:MPNet",
    "MPNetForMaskedLM": "bert:MPNet",
    "MPNetForSequenceClassification": "bert:MPNet",
}

# Names that published files have for architectures of which transformers writes the name otherwise,
# or that it does not have, because their layers are those of another.
OTHER_NAMES = {
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}

# Packages that bring a family have entries `architecture = "module"` in this group.
ENTRY_POINTS = "jaxpage.models"

_registered: dict[str, Family] = {}


def register_model(architecture: str, module: Any) -> None:
    """Makes a family of your own known, so that `architectures` of a config.json may name it.

    A family of jaxpage's own with the same name is replaced.

    Args:
        architecture: The name, as config.json has it.
        module: A class that derives from `Decoder`, or a module or an object with `Spec`, `Model`,
            `prefix` and `ignored` (see CONTRIBUTING.md, "A model family").

    Raises:
        TypeError: The module lacks one of them.
    """
    if lacking := [
        name for name in ("Spec", "Model", "prefix", "ignored") if not hasattr(module, name)
    ]:
        raise TypeError(f"a model family needs {', '.join(lacking)}; {module!r:.80} has none")
    _registered[architecture] = module


def load_family(config: Mapping[str, Any]) -> Family:
    """Returns the family module for `config["architectures"][0]`.

    Raises:
        CheckpointError: config.json names no architecture.
        UnsupportedError: The architecture is in neither `FAMILIES` nor `ENCODERS`, was not
            registered, and no installed package has it.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json must name the model in architectures, not {names!r}; `jaxpage "
            "doctor` lists those that are known"
        )
    name = OTHER_NAMES.get(names[0], names[0])
    if name in FAMILIES and name not in _registered:
        if name in MULTIMODAL:
            return _text_family(name, text_module(name, config))
        return load_page(FAMILIES[name])
    if name in ENCODERS and name not in _registered:
        return load_page(ENCODERS[name])
    if name not in _registered:
        _register_installed(name, brings_code=bool(config.get("auto_map")))
    return _registered[name]


def load_page(name: str) -> Family:
    """Returns the family of a class of a page, `module:class`."""
    return cast(Family, _load_class(name))


def _load_class(name: str) -> Any:
    module, family = name.split(":")
    return getattr(importlib.import_module(f"jaxpage.models.{module}"), family)


# Families are compared by identity, so that each is made once.
@functools.cache
def _text_family(architecture: str, module: str) -> Family:
    vision = MULTIMODAL[architecture].vision
    return text_family(architecture, load_page(module), _load_class(vision) if vision else None)


def _list_known() -> set[str]:
    return {*FAMILIES, *ENCODERS, *_registered, *entry_points(group=ENTRY_POINTS).names}


def _register_installed(architecture: str, *, brings_code: bool) -> None:
    """Registers a family of an installed package.

    Raises:
        UnsupportedError: No package has it, several have it, or it cannot be imported.
    """
    installed = entry_points(group=ENTRY_POINTS, name=architecture)
    if not installed:
        code = (
            " (its auto_map names remote code, and remote code is never run)" if brings_code else ""
        )
        raise UnsupportedError(
            f"config.json: architecture {architecture!r} is not one of the "
            f"{len(_list_known())} that `jaxpage doctor` lists{code}; "
            "register_model adds one of your own"
        )
    packages = ", ".join(
        sorted(entry.dist.name if entry.dist else entry.value for entry in installed)
    )
    if len(installed) > 1:
        raise UnsupportedError(
            f"config.json: several packages have architecture {architecture!r}: {packages}; "
            "keep one"
        )
    try:
        register_model(architecture, next(iter(installed)).load())
    except Exception as error:
        raise UnsupportedError(
            f"config.json: {architecture!r} of the package {packages} cannot be used: {error}"
        ) from error
