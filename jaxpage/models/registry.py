"""From the architecture that config.json names to the module of its family, which is imported only then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models.base import Family

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Ministral3ForCausalLM": "ministral3",
    "Glm4ForCausalLM": "glm4",
    "Cohere2ForCausalLM": "cohere2",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
}


def load_family(config: Mapping[str, Any]) -> Family:
    """The family module for `config["architectures"][0]`.

    Raises CheckpointError if config.json names no architecture, UnsupportedError if it is not one of `FAMILIES`.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"config.json must name the model in architectures, not {names!r}")
    if names[0] not in FAMILIES:
        raise UnsupportedError(f"config.json: architecture {names[0]!r} is not one of {', '.join(FAMILIES)}")
    return cast(Family, importlib.import_module(f"jaxpage.models.{FAMILIES[names[0]]}"))
