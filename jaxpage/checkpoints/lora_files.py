"""Reads a LoRA adapter in PEFT's layout, or lists all that is wrong with it."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.checkpoints.files import file_in, read_object
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_files import map_array
from jaxpage.checkpoints.safetensors_header import TensorInfo, read_header
from jaxpage.models.parameters import LoRASpec, LoRATarget

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
DTYPES = ("F32", "BF16", "F16")
# These fields of adapter_config.json change an adapter in a way that is not supported here.
REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of B",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layers that are replicated",
    "modules_to_save": "modules that are trained whole",
    "trainable_token_indices": "tokens that are trained",
    "target_parameters": "parameters of no linear layer",
    "use_qalora": "QA-LoRA",
}
# These fields change nothing here: they say where the adapter comes from or how it was trained, or
# they are read below.
KNOWN = frozenset(
    {
        *(
            "alpha_pattern",
            "auto_mapping",
            "base_model_name_or_path",
            "bias",
            "corda_config",
            "eva_config",
        ),
        *(
            "ensure_weight_tying",
            "exclude_modules",
            "fan_in_fan_out",
            "inference_mode",
            "init_lora_weights",
        ),
        *(
            "layers_pattern",
            "layers_to_transform",
            "loftq_config",
            "lora_alpha",
            "lora_dropout",
            "lora_ga_config",
        ),
        *(
            "megatron_config",
            "megatron_core",
            "peft_type",
            "peft_version",
            "qalora_group_size",
            "r",
            "rank_pattern",
        ),
        *("revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
    }
)
INITS = (True, False, "gaussian", "eva", "orthogonal")  # They leave the base weights as they are.
AdapterVersion = tuple[tuple[int, int], ...]  # each file's modification time and size
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PATTERN = re.compile(r"\^?[\w.]+")


@dataclass(frozen=True, eq=False)
class Adapter:
    """Holds the matrices of an adapter.

    Attributes:
        digest: The digest of all numbers that it adds.
        layers: A and B of each linear layer that it changes, by path. They are padded to the
            largest rank, and B has its factor in it.
    """

    digest: str
    layers: Mapping[tuple[str | int, ...], tuple[np.ndarray, np.ndarray]]


def read_adapter(directory: Path, spec: LoRASpec) -> Adapter:
    """Reads the adapter of a directory.

    Raises:
        CheckpointError: The adapter has features that are not supported, or modules, shapes, ranks
            or numbers that do not fit. The error lists all of them.
    """
    problems = Problems(directory, "adapter")
    config = {}
    tensors = {}
    with problems.collect():
        config = read_object(directory, CONFIG)
        _check_config(config, problems)
    with problems.collect():
        tensors = read_header(file_in(directory, TENSORS), TENSORS, problems)
    can_be_read = not problems
    pairs = _pairs(tensors, spec.targets, problems)
    if not can_be_read:
        rank = config.get("r")
        if isinstance(rank, int) and rank > spec.rank:
            problems.add(f"{CONFIG}: r = {rank} is above max_lora_rank, which is {spec.rank}")
        problems.raise_if_any()
    layers: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
    filled: set[tuple[Any, int]] = set()
    for module, (a_info, b_info) in sorted(pairs.items()):
        target = spec.targets[module]
        if text := _misfit(a_info, b_info, target, _rank(config, module), spec.rank):
            problems.add(f"{quote(module)} {text}")
            continue
        a_RI, b_OR = (np.asarray(map_array(info), np.float32) for info in (a_info, b_info))
        with np.errstate(over="ignore"):
            b_OR = b_OR * np.float32(_factor(config, module))
        for info, array in ((a_info, a_RI), (b_info, b_OR)):
            if not np.isfinite(array).all():
                problems.add(f"{info.described} has NaN or infinite numbers")
        if twice := filled & {(target.path, part) for part in target.parts}:
            problems.add(
                f"{quote(module)} changes what another module changes ({len(twice)} products)"
            )
        filled |= {(target.path, part) for part in target.parts}
        if target.path not in layers:
            shapes = (
                (target.num_layer_parts * spec.rank, target.num_in),
                (target.num_layer_rows, spec.rank),
            )
            layers[target.path] = np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)
        a, b = layers[target.path]
        rank = len(a_RI)
        for part in target.parts:
            a[part * spec.rank : part * spec.rank + rank] = a_RI
        b[target.first_row : target.first_row + target.num_rows, :rank] = b_OR
    problems.raise_if_any()
    return Adapter(_digest(layers), layers)


def _check_config(config: Mapping[str, Any], problems: Problems) -> None:
    def add(name: str, why: str) -> None:
        problems.add(f"{CONFIG}: {name} = {quote(config.get(name))} {why}")

    if config.get("peft_type") != "LORA":
        add("peft_type", "is not supported; only 'LORA' is")
    for name, what in REFUSED.items():
        if config.get(name):
            add(name, f"is not supported ({what})")
    if config.get("bias", "none") != "none":
        add("bias", "is not supported (biases of the model that are trained)")
    if config.get("init_lora_weights", True) not in INITS:
        add(
            "init_lora_weights",
            "is not supported: it changes the weights of the model; save the adapter as plain LoRA",
        )
    for name in sorted(config.keys() - REFUSED.keys() - KNOWN):
        if config[name]:
            what = f"{quote(name)} = {quote(config[name])}"
            problems.add(f"{CONFIG}: {what} is not known, and may change what the adapter computes")
    if not _is_count(config.get("r")):
        add("r", "must be an integer of at least 1")
    if not _is_number(config.get("lora_alpha")):
        add("lora_alpha", "must be a finite number")
    if not isinstance(config.get("use_rslora", False), bool):
        add("use_rslora", "must be true or false")
    for name, is_right in (("rank_pattern", _is_count), ("alpha_pattern", _is_number)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(is_right, pattern.values())):
            add(name, "must be an object of numbers")
        elif wrong := [key for key in pattern if not _PATTERN.fullmatch(key)]:
            add(
                name,
                f"has {quote(wrong[0])}: only names of modules are supported, no other patterns",
            )


def _pairs(
    tensors: Mapping[str, TensorInfo], targets: Mapping[str, LoRATarget], problems: Problems
) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Returns A and B by module."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if not (match := _NAME.fullmatch(name)):
            problems.add(
                f"{info.described} is not one of LoRA's: base_model.model.MODULE.lora_A.weight or "
                ".lora_B."
            )
        elif match[1] not in targets:
            problems.add(
                f"{info.described} is for a module that the model has not, or that takes no adapter"
            )
        elif info.dtype not in DTYPES:
            problems.add(f"{info.described} is {info.dtype}; it must be one of {', '.join(DTYPES)}")
        else:
            pairs.setdefault(match[1], {})[match[2]] = info
    if not tensors and not problems:
        problems.add(f"{TENSORS} has no tensors")
    for module, pair in pairs.items():
        for missing in {"A", "B"} - pair.keys():
            problems.add(f"{quote(module)} has no lora_{missing}.weight")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items() if len(pair) == 2}


def _misfit(
    a: TensorInfo, b: TensorInfo, target: LoRATarget, rank: int, max_rank: int
) -> str | None:
    expected = (rank, target.num_in), (target.num_rows, rank)
    if (a.shape, b.shape) != expected:
        return (
            f"has A {list(a.shape)} and B {list(b.shape)}; with rank {rank} the model needs "
            f"{list(expected[0])} and {list(expected[1])}"
        )
    return f"has rank {rank}, above max_lora_rank, which is {max_rank}" if rank > max_rank else None


def _rank(config: Mapping[str, Any], module: str) -> int:
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def _factor(config: Mapping[str, Any], module: str) -> float:
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    rank = _rank(config, module)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Returns the value of the first key that is the module's name, or the end of it after a dot.

    A key that begins with ^ must be the whole name.
    """
    for key, value in (pattern or {}).items():
        if module == key.removeprefix("^") or (
            not key.startswith("^") and module.endswith(f".{key}")
        ):
            return value
    return default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 20


def _digest(layers: Mapping[Any, tuple[np.ndarray, np.ndarray]]) -> str:
    state = hashlib.blake2b(digest_size=32)
    for path in sorted(layers, key=str):
        state.update(repr(path).encode())
        for array in layers[path]:
            state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def adapter_version(directory: Path) -> AdapterVersion:
    """Returns what changes when the files of an adapter are written again."""
    stats = [
        os.stat(file_in(directory, name))
        for name in (CONFIG, TENSORS)
        if (directory / name).exists()
    ]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
