"""Reads and writes a LoRA adapter in PEFT's layout, or lists all that is wrong with it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.checkpoints.files import file_in, read_object
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_files import map_array, write_file
from jaxpage.checkpoints.safetensors_header import TensorInfo, read_header
from jaxpage.models.parameters import LoRASpec, LoRATarget
from jaxpage.models.parameters import Path as LayerPath

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
    layers: Mapping[LayerPath, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class AdapterModule:
    """Holds what an adapter has for a module of the checkpoint.

    Attributes:
        name: The name of the module.
        target: The rows of a linear layer that the module is.
        a: The header of A [rank, in].
        b: The header of B [out, rank].
        factor: What the product is multiplied by.
    """

    name: str
    target: LoRATarget
    a: TensorInfo
    b: TensorInfo
    factor: float


def read_adapter(directory: Path, spec: LoRASpec) -> Adapter:
    """Reads the adapter of a directory.

    Raises:
        CheckpointError: The adapter has features that are not supported, or modules, shapes, ranks
            or numbers that do not fit. The error lists all of them.
    """
    problems = Problems(directory, "adapter")
    modules = fit_adapter(*open_adapter(directory, problems), spec, problems)
    return make_adapter(modules, map_array, spec, problems)


def open_adapter(
    directory: Path, problems: Problems
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Returns the configuration of an adapter, and the headers of its tensors by name."""
    config: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    with problems.collect():
        config = read_object(directory, CONFIG)
        check_config(config, problems)
    with problems.collect():
        tensors = read_header(file_in(directory, TENSORS), TENSORS, problems)
    return config, tensors


def fit_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    spec: LoRASpec,
    problems: Problems,
) -> list[AdapterModule]:
    """Returns the modules of an adapter, and adds to `problems` what does not fit the model.

    Args:
        config: The content of adapter_config.json.
        tensors: The headers of its tensors by name.
        spec: The layers that take adapters.
        problems: What is wrong with the adapter so far. If anything is, the error is raised here.
    """
    can_be_read = not problems
    pairs = _pairs(tensors, spec.targets, problems)
    if not can_be_read:
        rank = config.get("r")
        if isinstance(rank, int) and rank > spec.rank:
            problems.add(f"{CONFIG}: r = {rank} is above max_lora_rank, which is {spec.rank}")
        problems.raise_if_any()
    modules = []
    filled: set[tuple[Any, int]] = set()
    for module, (a_info, b_info) in sorted(pairs.items()):
        target = spec.targets[module]
        if text := _misfit(a_info, b_info, target, _rank(config, module), spec.rank):
            problems.add(f"{quote(module)} {text}")
            continue
        if twice := filled & {(target.path, part) for part in target.parts}:
            problems.add(
                f"{quote(module)} changes what another module changes ({len(twice)} products)"
            )
        filled |= {(target.path, part) for part in target.parts}
        modules.append(AdapterModule(module, target, a_info, b_info, _factor(config, module)))
    return modules


def make_adapter(
    modules: Sequence[AdapterModule],
    read: Callable[[TensorInfo], np.ndarray],
    spec: LoRASpec,
    problems: Problems,
) -> Adapter:
    """Returns the adapter of modules that fit.

    Raises:
        CheckpointError: There are problems, or numbers that are NaN or infinite.
    """
    matrices = []
    for module in modules:
        # Numbers that become infinite are reported below.
        with np.errstate(over="ignore"):
            a_RI, b_OR = scale_matrices(module, read(module.a), read(module.b))
        for info, array in ((module.a, a_RI), (module.b, b_OR)):
            if not np.isfinite(array).all():
                problems.add(f"{info.described} has NaN or infinite numbers")
        matrices.append((a_RI, b_OR))
    problems.raise_if_any()
    layers = join_matrices(modules, matrices, spec.rank)
    return Adapter(_digest(layers), layers)


def scale_matrices(module: AdapterModule, a_RI: Any, b_OR: Any) -> tuple[Any, Any]:
    """Returns A and B of a module in float32, with its factor in B."""
    return a_RI.astype(np.float32), b_OR.astype(np.float32) * np.float32(module.factor)


def join_matrices(
    modules: Sequence[AdapterModule], matrices: Sequence[tuple[Any, Any]], rank: int, xp: Any = np
) -> dict[LayerPath, tuple[Any, Any]]:
    """Returns A [parts * rank, in] and B [out, rank] of each linear layer, by its path.

    Args:
        modules: The modules.
        matrices: A and B of each, from `scale_matrices`.
        rank: The rank to which they are padded with zeros.
        xp: The library of the arrays, `numpy` or `jax.numpy`.
    """
    of_layers: dict[LayerPath, list[tuple[LoRATarget, Any, Any]]] = {}
    for module, (a_RI, b_OR) in zip(modules, matrices, strict=True):
        a_RI = xp.pad(a_RI, ((0, rank - a_RI.shape[0]), (0, 0)))
        b_OR = xp.pad(b_OR, ((0, 0), (0, rank - b_OR.shape[1])))
        of_layers.setdefault(module.target.path, []).append((module.target, a_RI, b_OR))
    layers = {}
    for path, targets in of_layers.items():
        layer = targets[0][0]
        a_parts = [xp.zeros((rank, layer.num_in), np.float32)] * layer.num_layer_parts
        b_parts = []
        row = 0
        for target, a_RI, b_OR in sorted(targets, key=lambda entry: entry[0].first_row):
            for part in target.parts:
                a_parts[part] = a_RI
            b_parts += [xp.zeros((target.first_row - row, rank), np.float32), b_OR]
            row = target.first_row + target.num_rows
        b_parts.append(xp.zeros((layer.num_layer_rows - row, rank), np.float32))
        layers[path] = xp.concatenate(a_parts), xp.concatenate(b_parts)
    return layers


def write_adapter(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes an adapter in PEFT's layout. A reader sees the old files or the new ones, each whole.

    Args:
        directory: The directory, which is made if it is not there.
        config: The content of adapter_config.json.
        tensors: The tensors by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    headers = [(name, array.dtype, array.shape) for name, array in tensors.items()]
    new = {name: directory / f".{name}.new" for name in (CONFIG, TENSORS)}
    new[CONFIG].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_file(new[TENSORS], headers, iter(tensors.values()))
    for name, file in new.items():
        file.replace(directory / name)


def check_config(config: Mapping[str, Any], problems: Problems) -> None:
    """Adds to `problems` the fields of adapter_config.json that are not supported."""

    def add(name: str, why: str) -> None:
        problems.add(f"{CONFIG}: {name} = {quote(config.get(name))} {why}")

    if config.get("peft_type") != "LORA":
        add("peft_type", "is not supported; only 'LORA' is")
    for name, reason in REFUSED.items():
        if config.get(name):
            add(name, f"is not supported ({reason})")
    if config.get("bias", "none") != "none":
        add("bias", "is not supported (biases of the model that are trained)")
    if config.get("init_lora_weights", True) not in INITS:
        add(
            "init_lora_weights",
            "is not supported: it changes the weights of the model; save the adapter as plain LoRA",
        )
    for name in sorted(config.keys() - REFUSED.keys() - KNOWN):
        # PEFT writes all fields of its version; one that is null, false or empty is not in use.
        if config[name]:
            setting = f"{quote(name)} = {quote(config[name])}"
            problems.add(
                f"{CONFIG}: {setting} is not known, and may change what the adapter computes"
            )
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
    # Rank-stabilised LoRA (Kalajdzievski, 2023) divides by the root of the rank.
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
    # This refuses NaN, too, and keeps the factor within float32.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 20


def _digest(layers: Mapping[Any, tuple[np.ndarray, np.ndarray]]) -> str:
    state = hashlib.blake2b(digest_size=32)
    # Paths have names and numbers, which have no order among each other.
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
