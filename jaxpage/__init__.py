"""jaxpage: a compiler-style LLM inference engine in JAX with paged attention.

The names below are loaded at first use, so that `import jaxpage` neither imports JAX nor touches a
device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpage.answer_forms import chat_format
    from jaxpage.async_llm import AsyncLLM
    from jaxpage.llm import LLM
    from jaxpage.memory import MemoryReport
    from jaxpage.models import register_model
    from jaxpage.outputs import CompletionOutput, RequestOutput
    from jaxpage.settings.engine_config import EngineConfig
    from jaxpage.settings.lora_request import LoRARequest
    from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "MemoryReport",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "chat_format",
    "register_model",
]

_HOMES = {
    "LLM": "jaxpage.llm",
    "AsyncLLM": "jaxpage.async_llm",
    "EngineConfig": "jaxpage.settings.engine_config",
    "LoRARequest": "jaxpage.settings.lora_request",
    "MemoryReport": "jaxpage.memory",
    "SamplingParams": "jaxpage.settings.sampling_params",
    "BeamSearchParams": "jaxpage.settings.sampling_params",
    "RequestOutput": "jaxpage.outputs",
    "CompletionOutput": "jaxpage.outputs",
    "chat_format": "jaxpage.answer_forms",
    "register_model": "jaxpage.models",
}


def __dir__() -> list[str]:
    # Completion at a prompt must show names that nothing has loaded yet.
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpage' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
