"""Models for the fuzzer of engines: the packaged one, and small random ones of each kind of cache
and of weights.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.engines import GRANITE_4, JAMBA, LFM2, LLAMA, QWEN3_5
from tests.support.gguf_files import write_gguf
from tests.support.model_configs import config_json
from tests.support.random_checkpoints import random_checkpoint, random_tensors

Weights = Mapping[str, Any]  # arrays by their names in the checkpoint

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
_SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
_SUFFIX_TREE = {"method": "suffix", "num_speculative_tokens": 7, "tree": True}


class Model(NamedTuple):
    """Says how a model of the fuzzer is made.

    Attributes:
        config: The config.json of a random checkpoint; None is the packaged model.
        settings: The settings that make it what it is.
        drafting: The ways of drafting that it is tried with.
        gguf: The kind of its matrices if it is a GGUF file.
        sees: The name in `seeing_models` if it takes pictures; then `config` is of its texts.
    """

    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}
    drafting: tuple[Any, ...] = (None, _NGRAM, "auto")
    gguf: str | None = None
    sees: str = ""

    @property
    def has_text(self) -> bool:
        """Returns whether it has a tokenizer."""
        return self.config is None

    @property
    def num_tokens(self) -> int:
        """Returns the size of its vocabulary."""
        return 2048 if self.config is None else int(self.config["vocab_size"])

    def path(self, directory: Path, name: str) -> str:
        """Returns what `LLM` takes for the model, which is written once to a directory."""
        if self.config is None:
            return "demo"
        path = directory / name
        if self.gguf is not None:
            path = path.with_suffix(".gguf")
            if not path.exists():
                write_gguf(path, self.config, random_tensors(dict(self.config)), self.gguf)
        elif self.sees and not path.exists():
            from tests.support import seeing_models  # which needs torch

            seeing_models.save(self.sees, path)
        elif not path.exists():
            random_checkpoint(path, dict(self.config))
        return str(path)


_TREES = (None, _NGRAM, _SUFFIX_TREE)
_WINDOW = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_GEMMA = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16}
_SEEING = {"vocab_size": 250}  # the ids of texts; those of placeholders and markers follow
# The widths of a GGUF file's blocks.
_WIDE = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "rms_norm_eps": 1e-5}

MODELS: dict[str, Model] = {
    "demo": Model(),
    "demo-int8": Model(settings={"quantization": "int8"}),
    "demo-int4": Model(settings={"quantization": "int4"}),
    "llama": Model(LLAMA),
    "qwen3_5": Model(QWEN3_5),
    "granite_4": Model(GRANITE_4),
    "lfm2": Model(LFM2),
    "jamba": Model(JAMBA),
    "windows": Model({**_WINDOW, "sliding_window": 20}, drafting=_TREES),
    "gemma2": Model({**_GEMMA, "sliding_window": 20, "query_pre_attn_scalar": 16}, drafting=_TREES),
    "latent": Model(config_json("deepseek-v3-groups"), drafting=_TREES),
    "latent-dense": Model(config_json("youtu-yarn"), drafting=_TREES),
    "gguf": Model(_WIDE, gguf="Q8_0"),
    "smolvlm": Model(_SEEING, drafting=_TREES, sees="smolvlm"),
    "qwen3-vl": Model(_SEEING, drafting=_TREES, sees="qwen3-vl"),
    "gemma3": Model(_SEEING, drafting=_TREES, sees="gemma3"),
    "gguf-kept": Model(_WIDE, {"quantization": "gguf"}, gguf="Q8_0"),
}


def other_weights(weights: Mapping[str, Any], number: int) -> dict[str, np.ndarray]:
    """Returns a set of weights: 0 is the model's own, and each other differs in every matrix.

    A tensor depends on its name, its own values and the number alone, so two engines of a model get
    the same set.

    Args:
        own: The weights of the checkpoint by name.
        number: The number of the set.
    """
    return {name: _changed(name, np.asarray(value), number) for name, value in weights.items()}


def _changed(name: str, values: np.ndarray, number: int) -> np.ndarray:
    if number == 0 or values.ndim < 2:
        return values.copy()
    changed: np.ndarray = (values * _noise(name, number, values.shape)).astype(values.dtype)
    return changed


@functools.cache
def _noise(name: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([number, zlib.crc32(name.encode())])
    return 1 + 0.3 * random.standard_normal(shape, np.float32)
