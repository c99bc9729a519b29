"""Makes config.json and generation_config.json of the metadata of a GGUF file.

The model's family reads them as any other config. A key of the architecture that is not understood
is refused, because it might change the mathematics.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from jaxpage.checkpoints.gguf.header import GGUFFile, as_number, read_gguf
from jaxpage.checkpoints.gguf.rope import rope_parameters
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.settings.field_table import PARAMETERS

logger = logging.getLogger(__name__)

# The keys are GGUF's names of the architectures whose files have the tensors and the mathematics of
# Hugging Face's class of that name.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}  # The model type in config.json, where it is another.
_GEMMA = {"attention.sliding_window": "sliding_window"}
# The keys that only one architecture has, and their names in config.json.
_KEYS_BY_ARCHITECTURE = {
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": _GEMMA,
}
# In the models with this number of layers, scores are scaled by the model's width over its heads,
# and not by the width of a head. Files do not say so.
_SCALED_BY_SHARE = {"gemma2": 46, "gemma3": 62}
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
}
# These keys may be there with this value only: another would ask for what is not computed.
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "pooling_type": 0,
    "tensor_data_layout": "Meta AI original pth",
}
_SAMPLING = {field.gguf: field.name for field in PARAMETERS if field.gguf}
_ENDS = ("eos", "eot", "eom")


def gguf_config(path: Path, problems: Problems) -> dict[str, Any]:
    """Returns config.json; {} if something is wrong with the metadata, which is in `problems`.

    A family would find errors in it that are not true.
    """
    file = read_gguf(path)
    for line in file.metadata_problems:
        problems.add(line)
    config: dict[str, Any] = {}
    if not file.metadata_problems:
        with problems.collect():
            _check_kind(file)
            _check_others(file, problems)
            _add_sizes(file, config, problems)
            if not problems:
                _add_heads(file, config)
                config["rope_parameters"] = rope_parameters(file, config["head_dim"])
                _add_others(file, config)
    return {} if problems else config


def gguf_generation_config(path: Path) -> dict[str, Any]:
    """Returns generation_config.json: the ids that end a text, and how to sample.

    Parameters of sampling are left out if the file has none.
    """
    metadata = read_gguf(path).metadata
    ids = [metadata[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}_token_id") in metadata]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ids))} if ids else {}
    prefix = "general.sampling."
    requested = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    if left_out := [
        f"{prefix}{key}={value!r:.80}" for key, value in requested.items() if key not in _SAMPLING
    ]:
        logger.warning("%s asks for %s, which is left out", path.name, ", ".join(left_out))
    return config | {
        _SAMPLING[key]: as_number(value) for key, value in requested.items() if key in _SAMPLING
    }


def _check_kind(file: GGUFFile) -> None:
    if file.metadata.get("general.type", "model") != "model":
        raise UnsupportedError(
            f"general.type is {quote(file.metadata['general.type'])}, and not a model"
        )
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"general.architecture is {quote(file.metadata.get('general.architecture'))}; "
            f"for GGUF files those of {', '.join(ARCHITECTURES)} are read, of other models a "
            "Hugging Face directory"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            f"this is a part of {quote(file.metadata['split.count'])} files; join them with "
            "`llama-gguf-split --merge` first"
        )


def _add_sizes(file: GGUFFile, config: dict[str, Any], problems: Problems) -> None:
    for key, name in _SIZES.items():
        value = file.of_model(key)
        if type(value) is not int or value < 1:
            problems.add(
                f"{file.architecture}.{key} is {quote(value)}, not a whole number above zero"
            )
        else:
            config[name] = value
    epsilon = file.of_model("attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float) or not 0 < epsilon < math.inf:
        problems.add(
            f"{file.architecture}.attention.layer_norm_rms_epsilon is {quote(epsilon)}, not "
            "a positive number"
        )
    else:
        config["rms_norm_eps"] = as_number(epsilon)
    table = file.tensors.get("token_embd.weight")
    # Older files have no vocab_size; the token table has a row for each token.
    config["vocab_size"] = file.of_model("vocab_size") or (table.shape[0] if table else None)


def _add_heads(file: GGUFFile, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    config["num_key_value_heads"] = _count(file, "attention.head_count_kv", heads)
    head_dim = _count(file, "attention.key_length", width // heads)
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"heads are {head_dim} wide, and the rotary embedding turns pairs")
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.of_model(key) not in (None, head_dim):
            raise UnsupportedError(
                f"{file.architecture}.{key} is {quote(file.of_model(key))}, and heads are "
                f"{head_dim} wide: only the same is supported"
            )
    config["head_dim"] = head_dim


def _add_others(file: GGUFFile, config: dict[str, Any]) -> None:
    config |= {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": _MODEL_TYPES.get(file.architecture, file.architecture),
    }
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["dtype"] = _dtype(file)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    fields = _KEYS_BY_ARCHITECTURE.get(file.architecture, {})
    config |= {
        name: as_number(value)
        for key, name in fields.items()
        if (value := file.of_model(key)) is not None
    }
    if file.architecture in _SCALED_BY_SHARE and "head_dim" in config:
        is_share = config["num_hidden_layers"] == _SCALED_BY_SHARE[file.architecture]
        share = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = share if is_share else config["head_dim"]
    if file.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")


def _check_others(file: GGUFFile, problems: Problems) -> None:
    """Adds keys of the architecture that ask for something that is not supported."""
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        known = name in {
            *_SIZES,
            *_OPTIONAL,
            *_KEYS_BY_ARCHITECTURE.get(file.architecture, {}),
            "attention.value_length",
        }
        known = known or name.startswith("rope.")
        if (
            key.startswith(prefix)
            and not known
            and (name not in _NEUTRAL or value != _NEUTRAL[name])
        ):
            problems.add(f"{key} = {quote(value)} is not supported")


def _dtype(file: GGUFFile) -> str:
    """Returns the type that most numbers have, as `LoadPlan.most_common_dtype` does."""
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.counts_as] = counts.get(tensor.counts_as, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda name: counts[name], default="float32")


def _count(file: GGUFFile, key: str, default: int) -> int:
    value = file.of_model(key)
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(
            f"{file.architecture}.{key} is {quote(value)}, not a whole number above zero"
        )
    return default if value is None else int(value)
