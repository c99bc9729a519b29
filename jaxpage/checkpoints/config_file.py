"""Reads config.json and generation_config.json, or the same from a GGUF file, as data only.

Code that a model brings is never run: jaxpage's own class of the architecture takes its place, or
the model is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.checkpoints.files import has_file, infinity_as_object, read_object
from jaxpage.checkpoints.gguf.config import gguf_config, gguf_generation_config
from jaxpage.checkpoints.gguf.header import is_gguf
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.errors import CheckpointError
from jaxpage.models.config import text_part

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 10_000_000
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_WIDTH = 2**24
MAX_LENGTH = 2**31 - 1  # Token ids and positions are int32 on the device.

# The largest value of each field that decides how much is allocated, long before a family reads it.
LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), MAX_LAYERS),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim"), MAX_WIDTH
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), MAX_WIDTH),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        MAX_WIDTH,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAX_EXPERTS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), MAX_WIDTH),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), MAX_LENGTH),
}
# The least value is 1, except for these.
MINIMUM = {"num_local_experts": 0}
DTYPES = ("float32", "bfloat16", "float16")
_DTYPES_OF_TORCH = ("auto", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
MODELOPT = "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
CODE_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the model's config.json, checked for what would do harm before a family reads it.

    Raises:
        CheckpointError: The file is missing, not JSON, not an object, empty, or has NaN, duplicate
            keys, or sizes that are not whole numbers within `LIMITS`. The error lists all of these.
    """
    problems = Problems(Path(directory))
    config = check_config(Path(directory), problems)
    problems.raise_if_any()
    return config


def check_config(directory: Path, problems: Problems) -> dict[str, Any]:
    """Adds to `problems` what `read_config` would raise, and returns the part that is readable."""
    config: dict[str, Any] = {}
    if is_gguf(directory):
        if config := gguf_config(directory, problems):
            check_sizes(config, problems)
        return config
    if not has_file(directory, "config.json") and (
        files := sorted(file.name for file in directory.glob("*.gguf"))
    ):
        problems.add(
            f"there is a GGUF file in it ({', '.join(map(quote, files[:5]))}): name the file "
            "and not the directory"
        )
        return config
    generation: dict[str, Any] = {}
    bring_code = []
    for name in CODE_FILES:
        if name == "config.json" or has_file(directory, name):
            with problems.collect():
                content = read_object(
                    directory, name, MAX_CONFIG_BYTES, constant=infinity_as_object
                )
                if name == "generation_config.json":
                    generation = content
                if name == "config.json":
                    config = text_part(content)
                    vision = content.get("vision_config")
                    if config and isinstance(vision, dict):
                        config["vision_config"] = vision
                    check_sizes(config, problems)
                    _check_dtype(config)
                if content.get("auto_map"):
                    bring_code.append(name)
    if bring_code:
        _warn_of_code(directory, tuple(bring_code))
    with problems.collect():
        # Only its errors count here: the ids are read later.
        _eos_token_ids(generation, config)
    if config:
        with problems.collect():
            _complete_modelopt(directory, config)
    return config


# The warning is given once for each model, which is opened several times.
@functools.lru_cache(maxsize=64)
def _warn_of_code(directory: Path, names: tuple[str, ...]) -> None:
    logger.warning(
        "%s: auto_map in %s names remote code, and remote code is never run: jaxpage's own "
        "classes take its place",
        directory,
        " and ".join(names),
    )


def _complete_modelopt(directory: Path, config: dict[str, Any]) -> None:
    """Puts into `quantization_config` what ModelOpt wrote into a file of its own.

    Its versions write into config.json nothing, or an object without `quant_method`, or all of it.
    Next to the object of another method the file is left over from other weights, and not read.

    Raises:
        CheckpointError: The file is no object, or a field of it differs from that of config.json.
    """
    stated = config.get("quantization_config") or {}
    if not isinstance(stated, dict):
        return
    method = stated.get("quant_method")
    if method not in (None, MODELOPT) or "compression_config" in config:
        return
    written: Any = {}
    if has_file(directory, MODELOPT_FILE):
        written = read_object(directory, MODELOPT_FILE, MAX_CONFIG_BYTES).get("quantization")
        if not isinstance(written, dict):
            raise CheckpointError(
                f"{MODELOPT_FILE}: quantization must be an object, not {written!r}"
            )
    stated = {name: value for name, value in stated.items() if value is not None}
    for name in stated.keys() & written.keys():
        # Both files list the modules that are not quantised, by two names in most versions.
        if name not in ("ignore", "exclude_modules") and written[name] not in (None, stated[name]):
            raise CheckpointError(
                f"config.json: quantization_config.{name} is {quote(stated[name])}, and in "
                f"{MODELOPT_FILE} {quote(written[name])}: the weights can be in one form only"
            )
    if written or method or "quant_algo" in stated:
        config["quantization_config"] = {"quant_method": MODELOPT, **written, **stated}


def _check_dtype(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a dtype that torch does not have.

    The type of the weights is read from them, whatever the config says.
    """
    for name in ("dtype", "torch_dtype"):
        dtype = config.get(name)
        if dtype is not None and str(dtype).removeprefix("torch.") not in (
            *DTYPES,
            *_DTYPES_OF_TORCH,
        ):
            raise CheckpointError(
                f"config.json: {name} {quote(dtype)} is not one of {', '.join(DTYPES)}"
            )


def read_dtype(config: dict[str, Any]) -> str:
    """Returns the dtype that config.json says the weights have.

    Where config.json says nothing, it is float32, and bfloat16 next to quantised weights, as in the
    files of gpt-oss.

    Raises:
        CheckpointError: Weights cannot have this dtype here.
    """
    unstated = "bfloat16" if config.get("quantization_config") else "float32"
    dtype = config.get("dtype") or config.get("torch_dtype") or unstated
    if dtype not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype {quote(dtype)} is not one of {', '.join(DTYPES)}"
        )
    return str(dtype)


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Returns generation_config.json, or {} where there is none.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    if is_gguf(directory):
        return gguf_generation_config(directory)
    if not has_file(Path(directory), "generation_config.json"):
        return {}
    return read_object(Path(directory), "generation_config.json", MAX_CONFIG_BYTES)


def eos_token_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """Returns the ids that end a text: those of generation_config.json, else those of config.json.

    There are none if neither file has any.

    Raises:
        CheckpointError: They are not token ids.
    """
    return _eos_token_ids(read_generation_config(directory), config)


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    stated = []
    for source, fields in (("generation_config.json", generation), ("config.json", config)):
        ids = fields.get("eos_token_id")
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        for token_id in listed:
            # Not `isinstance`, for which true is an int.
            if type(token_id) is not int or not 0 <= token_id <= MAX_LENGTH:
                raise CheckpointError(f"{source}: eos_token_id {quote(token_id)} is not a token id")
        if ids is not None:
            stated.append(frozenset(listed))
    return stated[0] if stated else frozenset()


def check_sizes(config: dict[str, Any], problems: Problems) -> None:
    """Adds to `problems` the fields that decide how much is allocated and exceed `LIMITS`."""
    if not config:
        problems.add("config.json is an empty object")
    for key in out_of_bounds(config):
        problems.add(
            f"config.json: {key} is {quote(config[key])}, not a whole number from "
            f"{MINIMUM.get(key, 1)} to {LIMITS[key]}"
        )


def out_of_bounds(config: Mapping[str, Any]) -> list[str]:
    """Returns the fields that are not within `LIMITS`; a width may be a list of those of layers."""
    limited = {key: config[key] for key in LIMITS if config.get(key) is not None}
    values = {
        key: value if key == "intermediate_size" and isinstance(value, list) else [value]
        for key, value in limited.items()
    }
    return [
        key
        for key, each in values.items()
        if any(
            type(number) is not int or not MINIMUM.get(key, 1) <= number <= LIMITS[key]
            for number in each
        )
    ]
